"""The handlers of the acceptance tests' worker processes."""

import os
import subprocess
import threading
import time

import redis
from tenacity import wait_fixed

from reliq import Consumer, Job, Queue
from reliq.redis.server import default_url

MIXED = Queue("mixed", dict[str, str], retries=5)
DEADLY = Queue("deadly", str, retries=2)
ONCE = Queue("once", int, retries=12)
SLOW = Queue("slow", float, retries=3)
ENDING = Queue("ending", str, retries=1)
STUCK = Queue("stuck", int, retries=0)
LASTING = Queue("lasting", float, retries=3)
GATHERED = Queue("gathered", str)
ORDERED = Queue("ordered", str, retries=3, ordered=True)
KEPT = Queue("kept", str, retries=3, per_key=1)
HELD = Queue("held", str, retries=3)
LIMITED = Queue("limited", int, rate="100/s", burst=5)

consumer = Consumer()


def notes() -> redis.Redis:
    """Return the client with which handlers record their work in Redis; the test reads these records."""
    return redis.Redis.from_url(default_url())


_notes = threading.local()


def note(kind: str, what: str) -> None:
    if not hasattr(_notes, "client"):
        _notes.client = notes()
    _notes.client.sadd(f"note:{kind}", what)


@consumer.handler(MIXED, lease=2, backoff=wait_fixed(0.1))
def mixed(body: dict[str, str], job: Job[dict[str, str]]) -> None:
    if body["mood"] == "fails" or (body["mood"] == "flaky" and (job.attempt or 0) <= 2):
        raise ValueError("not today")


@consumer.handler(DEADLY, lease=1)
def deadly(body: str) -> None:
    if body == "killer":
        os._exit(9)
    if body == "misconfigured":
        os._exit(78)
    note("done", body)


@consumer.handler(ONCE, lease=1)
def once(body: int, job: Job[int]) -> None:
    note("done", job.id)


@consumer.handler(SLOW, lease=10)
def slow(seconds: float, job: Job[float]) -> None:
    note("started", job.id)
    time.sleep(seconds)
    note("done", job.id)


@consumer.handler(LASTING, lease=10)
def lasting(seconds: float, job: Job[float]) -> None:
    """Run until the worker stops, and then for `seconds`."""
    note("started", job.id)
    while not job.stopping:
        time.sleep(0.01)
    note("stopping", job.id)
    time.sleep(seconds)


@consumer.handler(GATHERED, batch=100, linger=60, lease=3600)
def gathered(bodies: list[str]) -> None:
    note("done", str(len(bodies)))


@consumer.handler(STUCK, timeout=1, lease=1)
def stuck(body: int, job: Job[int]) -> None:
    note("started", str(os.getpid()))
    sum(10**8 for _ in iter(int, 1)) if body == 1 else pow(7, 10**9)  # endless; for 2 it holds the GIL


def hold_first(body: str, job: Job[str]) -> None:
    """Block the first attempt of the message `held` forever."""
    note("started", f"{body} {job.attempt}")
    note("pid", str(os.getpid()))
    while body == "held" and job.attempt == 1:
        time.sleep(0.01)
    note("done", body)


consumer.handler(LIMITED)(lambda body: None)
consumer.handler(ORDERED, lease=2)(hold_first)
consumer.handler(KEPT, lease=600)(hold_first)
consumer.handler(HELD, lease=600)(hold_first)


@consumer.handler(ENDING, lease=60, timeout=60)
async def ending(body: str) -> None:
    subprocess.run(["cat"], check=True, timeout=30)  # noqa: ASYNC221  it is what such a handler does
    note("done", body)
