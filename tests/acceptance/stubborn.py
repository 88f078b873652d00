"""A consumer whose shutdown never finishes: its lifespan hangs on exit."""

import threading
from contextlib import contextmanager

from jobs import ONCE, SLOW, note

from reliq import Consumer


@contextmanager
def hangs_at_its_end():
    yield
    threading.Event().wait()


consumer = Consumer(lifespan=hangs_at_its_end)


@consumer.handler(ONCE)
def once(body: int) -> None:
    note("done", str(body))


@consumer.handler(SLOW)
def slow(body: float) -> None:
    note("started", str(body))
    threading.Event().wait()
