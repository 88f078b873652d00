"""The handlers of the fault tests' worker processes."""

import threading
import time

import redis
from tenacity import wait_fixed

from reliq import Consumer, Job, Queue
from reliq.redis.server import default_url

DEEDS = Queue("deeds", str, retries=5)
COUNTED = Queue("counted", int, retries=50)
#: Like COUNTED, with a lease that outlasts delays of a busy machine.
STEADY = Queue("steady", int, retries=50)
#: Like COUNTED, with a lease that expires while a test pauses its worker, but not on a busy machine.
PAUSED = Queue("paused", int, retries=50)
LONG = Queue("long", float, retries=3)

consumer = Consumer()
_notes = threading.local()


def note(kind: str, what: str) -> None:
    """Record an event in Redis, where it survives this process."""
    if not hasattr(_notes, "client"):
        _notes.client = redis.Redis.from_url(default_url())
    _notes.client.hincrby(f"note:{kind}", what, 1)


@consumer.handler(DEEDS, lease=2, backoff=wait_fixed(0.1))
def deeds(body: str) -> None:
    pass


@consumer.handler(STEADY, lease=30)
@consumer.handler(PAUSED, lease=8)
@consumer.handler(COUNTED, lease=2, backoff=wait_fixed(0.1))
def counted(body: int, job: Job[int]) -> None:
    time.sleep(0.001 * (body % 20))
    note("done", job.id)


@consumer.handler(LONG, lease=10)
def long(seconds: float, job: Job[float]) -> None:
    note("started", f"{job.id} {job.attempt}")
    time.sleep(seconds)
    note("done", job.id)
