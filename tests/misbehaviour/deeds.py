"""Handlers that misbehave in one way each, and well-behaved handlers beside them."""

import asyncio
import ctypes
import os
import re
import subprocess
import threading
import time
from typing import Any

import redis
import table
from tenacity import wait_fixed

from reliq import Consumer, Job, Queue
from reliq.redis.server import default_url

HELD = Queue("held", str, retries=0)
LIMITED = Queue("limited", str, retries=0)
AHELD = Queue("aheld", str, retries=0)
HANGING = Queue("hanging", str, retries=0)
SWALLOWING = Queue("swallowing", str, retries=0)
WAITING = Queue("waiting", str, retries=3)
GOOD = Queue("good", int, retries=5)
AGOOD = Queue("agood", int, retries=5)
PLAIN = Queue("plain", str, retries=0)
ASYNC = Queue("async", str, retries=0)
SLOW = Queue("slow", str, retries=0)
DEADLY = Queue("deadly", str, retries=0)
DEADLY_ASYNC = Queue("deadly-async", str, retries=0)
QUEUES = [value for value in list(globals().values()) if isinstance(value, Queue)]
#: Duration and number of slots of a good handler. They limit the rate of its queue, so the machine's speed does not matter.
GOOD_SECONDS, GOOD_SLOTS = 0.02, 4

consumer = Consumer()
_local = threading.local()


def notes() -> redis.Redis:
    """Return the client with which handlers record their work in Redis; the test reads these records."""
    if not hasattr(_local, "client"):
        _local.client = redis.Redis.from_url(default_url(), socket_timeout=None)
    return _local.client


def hold_the_interpreter(how: str) -> None:
    """Block all other threads of this process, in `re` or in a C sleep, without an end or for some seconds."""
    if how == "re":
        re.match(r"(a+)+$", "a" * 64 + "b")
    seconds = 10**6 if how == "asleep" else int(how)
    ctypes.PyDLL(None).sleep(seconds)


@consumer.handler(HELD, lease=6, timeout=600)
def held(how: str, job: Job[str]) -> None:
    if how.startswith("with a child "):
        how = how.removeprefix("with a child ")
        notes().rpush("children", subprocess.Popen(["sleep", "1000"]).pid)
    notes().hincrby("started", job.id)
    hold_the_interpreter(how)


async def held_in_a_task(how: str) -> None:
    await asyncio.sleep(0.01)
    hold_the_interpreter(how)


# On a loaded machine, the supervisor may need seconds to return the messages of a killed process.
@consumer.handler(AHELD, lease=10, timeout=600)
async def aheld(how: str, job: Job[str]) -> None:
    """Hold the GIL in a separate task or on cancel; or sleep while another coroutine holds the GIL."""
    await asyncio.to_thread(notes().hincrby, "started", job.id)
    if how == "sleeps":
        await asyncio.sleep(10)
    elif how.startswith("cancelled "):
        async with asyncio.timeout(0.01):
            try:
                await asyncio.sleep(10)
            finally:
                hold_the_interpreter(how.removeprefix("cancelled "))
    else:
        await asyncio.gather(held_in_a_task(how))


@consumer.handler(LIMITED, lease=1, timeout=2)
def limited(how: str, job: Job[str]) -> None:
    notes().hincrby("started", job.id)
    hold_the_interpreter(how)


@consumer.handler(HANGING, lease=3, timeout=1)
def hanging(_: str, job: Job[str]) -> None:
    """Never finish, but let other threads run."""
    notes().hincrby("started", job.id)
    threading.Event().wait()


@consumer.handler(SWALLOWING, lease=3, timeout=1)
async def swallowing(_: str, job: Job[str]) -> None:
    """Never finish and ignore every cancel, but let other tasks run."""
    await asyncio.to_thread(notes().hincrby, "started", job.id)
    await table.swallow()


# On a loaded machine, the supervisor may need seconds to return the messages of a killed process.
@consumer.handler(WAITING, lease=10, timeout=600)
def waiting(key: str, job: Job[str]) -> None:
    """Wait for the test, as for a slow server."""
    notes().hincrby("started", job.id)
    notes().blpop([key], 500)
    notes().hset("pid", job.id, os.getpid())


@consumer.handler(GOOD, lease=10, backoff=wait_fixed(0.1), concurrency=GOOD_SLOTS)
def good(number: int) -> None:
    time.sleep(GOOD_SECONDS)


@consumer.handler(AGOOD, lease=10, backoff=wait_fixed(0.1), concurrency=GOOD_SLOTS)
async def agood(number: int) -> None:
    await asyncio.sleep(GOOD_SECONDS)


def misbehave(queue: Queue[str], deeds: dict[str, table.Deed], **options: Any) -> None:
    """Register the handler whose messages contain the name of the misbehaviour."""

    @consumer.handler(queue, **options)
    def do(name: str) -> Any:
        return deeds[name].do()


def misbehave_async(queue: Queue[str], deeds: dict[str, table.Deed], **options: Any) -> None:
    """Register the coroutine handler whose messages contain the name of the misbehaviour."""

    @consumer.handler(queue, **options)
    async def do(name: str) -> Any:
        return await deeds[name].do()


#: On a busy machine a process may hang for seconds: its messages have one attempt.
PATIENT = {"lease": 20}
misbehave(PLAIN, table.PLAIN | table.LASTING, timeout=60, **PATIENT)
misbehave_async(ASYNC, table.ASYNC, timeout=60, **PATIENT)
misbehave_async(SLOW, table.SLOW, timeout=10, **PATIENT)
misbehave(DEADLY, table.DEADLY, timeout=600, lease=10)
misbehave_async(DEADLY_ASYNC, table.DEADLY_ASYNC, timeout=60, **PATIENT)
