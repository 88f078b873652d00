"""A worker's handlers for the tests of least rights: one handler for each kind of answer."""

from reliq import Consumer, Job, Nack, Queue, Reject, Snooze

ERRANDS = Queue("errands", str, retries=2)
consumer = Consumer()
seen: set[str] = set()


@consumer.handler(ERRANDS, lease=5, keep=60)
def run(errand: str, job: Job[str]) -> None:
    """Nack, snooze or reject a message on its first attempt, as its body asks; then ack it."""
    first = errand not in seen
    seen.add(errand)
    job.checkpoint("x" * len(seen) * 64)
    job.progress(0.5)
    if first and errand == "nack":
        raise Nack(delay=0.05)
    if first and errand == "snooze":
        raise Snooze(delay=0.05)
    if errand == "reject":
        raise Reject(reason="on purpose")
