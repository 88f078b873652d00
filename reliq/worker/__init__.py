"""
One worker process, with a module for each part.

    engine    creates, starts and stops all parts
    fetcher   claims messages and reads their bodies
    claims    decides how many messages to claim from each queue and shard
    slots     keeps every delivery until it is settled, and gives slots to handler calls
    runner    runs plain handlers on threads and coroutine handlers on an event loop, and reports errors
    settler   sends outcomes to Redis and renews leases
    upkeep    promotes, reclaims, publishes periodic jobs, collects dead letters, writes history and the worker record
    loop      runs a part in a thread
    health    writes the health data that the supervisor reads
"""
