"""Handle the messages of a queue without a worker."""


def handle_all(queue):
    """Receive and ack until nothing can be claimed; return the bodies."""
    bodies, jobs = [], [None]
    while jobs:
        with queue.receive(limit=500) as jobs:
            bodies += [job.body for job in jobs]
    return bodies
