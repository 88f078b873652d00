"""
The components of a worker process, each in its own module.

    engine    creates, starts and stops all components
    fetcher   claims messages and reads their bodies
    claims    decides how many messages to claim from each queue and shard
    bookings  books the starts of messages in queues with shared limits
    slots     stores every delivery until it is settled, and gives slots to handler calls
    runner    runs plain handlers on threads and coroutine handlers on an event loop, and reports errors
    settler   sends the outcomes of messages to Redis, and renews leases
    planner   publishes the due ticks of the schedules that Redis stores
    upkeep    promotes and reclaims messages, publishes periodic jobs, writes dead letters, history and worker record
    loop      runs a component in a thread
    health    writes the health data that the supervisor reads
"""
