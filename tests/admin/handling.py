"""Helpers that handle, reject, read and search all messages of a queue."""

from transition import run_transition


def handle_all(queue):
    """Receive and ack until nothing can be claimed; return the bodies."""
    bodies, jobs = [], [None]
    while jobs:
        with queue.receive(limit=500) as jobs:
            bodies += [job.body for job in jobs]
    return bodies


def bury_all(queue, error="bad card"):
    """Receive and reject until nothing can be claimed; each message becomes a dead letter."""
    jobs = [None]
    while jobs:
        with queue.receive(limit=500) as jobs:
            for job in jobs:
                job.reject(reason=error)
        run_transition(queue, "collect", [job.id for job in jobs], dead_letter_limit=1000, letters_ms=10**9)


def raised(error):
    """Call the function; return its error with the line that raised it."""
    try:
        raise error
    except Exception as caught:
        return caught


def pages(admin, state, limit, between=lambda: None):
    """Read queue `q` page by page; return the messages of each page."""
    page = admin.page("q", state, limit=limit)
    found = [page.items]
    while page.after is not None:
        between()
        page = admin.page("q", state, after=page.after, limit=limit)
        found.append(page.items)
    return found


def searches(admin, state, where, **options):
    """Search queue `q` until there are no more results; return the results."""
    found = []
    while not found or found[-1].after is not None:
        after = found[-1].after if found else None
        found.append(admin.page("q", state, where, after=after, **options))
    return found


def lasting(client):
    """Return the Redis keys of queue `q` and its shards that do not expire by themselves."""
    return {key for key in client.scan_iter("{reliq:q[#}]*") if client.pttl(key) < 0}
