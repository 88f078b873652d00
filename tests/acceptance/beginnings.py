"""A consumer whose startup is slow or fails, as the variable HOW says, and whose shutdown writes a file."""

import asyncio
import atexit
import os
import signal
import subprocess
import threading
import time
from contextlib import asynccontextmanager, contextmanager

from jobs import LASTING, ONCE, SLOW, note

from reliq import Consumer, Job
from reliq.events import Event, WorkerReady

HOW = os.environ.get("HOW", "")


def hang(where: str) -> None:
    note("hangs", where)
    time.sleep(1000)


if HOW == "import":
    hang(HOW)
if HOW == "module thread":
    threading.Thread(target=time.sleep, args=[1000]).start()


@contextmanager
def lifespan():
    if HOW == "lifespan":
        hang(HOW)
    if HOW == "dies":
        raise RuntimeError("no database")
    if HOW in ("takes signals", "is stopped when it is ready"):
        signal.signal(signal.SIGTERM, lambda *_: note("taken", "SIGTERM"))
    yield


@asynccontextmanager
async def async_lifespan():
    note("hangs", HOW)
    await asyncio.sleep(1000)
    yield


def stop_when_ready(event: Event) -> None:
    if HOW == "is stopped when it is ready" and isinstance(event, WorkerReady):
        os.kill(os.getpid(), signal.SIGTERM)


consumer = Consumer(observers=[stop_when_ready], lifespan=async_lifespan if HOW == "async lifespan" else lifespan)
atexit.register(lambda: note("atexit", str(os.getpid())))


@consumer.handler(ONCE)
def once(body: int, job: Job[int]) -> None:
    if HOW == "orphans":
        subprocess.run(["sh", "-c", "true &"], check=True)
    note("done", job.id)


@consumer.handler(SLOW, lease=10)
def slow(seconds: float, job: Job[float]) -> None:
    note("started", f"{job.id} {os.getpid()}")
    while not note_of("go"):
        time.sleep(0.05)
    note("ended", f"{job.id} {os.getpid()}")


@consumer.handler(LASTING, timeout=1)
async def lasting(seconds: float, job: Job[float]) -> None:
    """Run longer than the timeout, then clean up slowly."""
    note("started", job.id)
    if HOW == "thread":
        await asyncio.to_thread(time.sleep, 1000)
    try:
        while True:  # noqa: ASYNC110  it waits to be cancelled
            await asyncio.sleep(0 if HOW == "yields" else 1000)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds)
        note("cleaned up", job.id)
        raise


def note_of(kind: str) -> bool:
    from jobs import notes

    return bool(notes().exists(f"note:{kind}"))
