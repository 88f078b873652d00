"""
One worker process, a module for each part.

`fetcher` claims messages and reads their bodies; `claims` decides how many of which queue and shard. `slots` holds every
delivery until it is settled and says which calls may start. `runner` calls plain handlers on threads and coroutines on an event
loop, and reports errors. `settler` sends outcomes to Redis and extends leases. `upkeep` promotes, reclaims and publishes
periodic jobs, collects dead letters, notes history and writes the worker record. `loop` makes a thread of each part, `health`
has the pulse that the supervisor reads, and `engine` puts all together.
"""
