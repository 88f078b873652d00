"""
One worker process, part by part.

fetcher claims; executors run; outcome decides; settler answers Redis; renewer keeps leases alive;
scheduler promotes and reclaims at the right moment; janitor collects what has ended; inflight is
what they share; loop turns the step of each into a thread; engine puts them together.
"""
