"""
One worker process, a file for each part.

fetcher claims messages (claims: how many of which queue; turns: of which shards) and reads their bodies (bodies). served
says which shards there are, and tokens waits for word from those that lie apart. inflight holds every delivery
until it is settled, slots says what may start, and quick_calls which thread makes those that are quick. runner calls plain handlers
on threads, event_loop coroutines; failures reports errors. settler sends outcomes to Redis. Beside them renewer extends leases and enforces timeouts,
watchdog watches the event loop, scheduler promotes and reclaims, janitor collects dead letters, heartbeat writes the
process' record. loop makes a thread of each part, delivery has the values that they share, lifespan and drained serve
the start and the end, engine puts all together.
"""
