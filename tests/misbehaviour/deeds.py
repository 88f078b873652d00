"""Handlers that do one bad thing each, and good ones beside them."""

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
from reliq.transport.connection import default_url

HELD = Queue("held", str, retries=0)
LIMITED = Queue("limited", str, retries=0)
HANGING = Queue("hanging", str, retries=0)
WAITING = Queue("waiting", str, retries=3)
GOOD = Queue("good", int, retries=5)
AGOOD = Queue("agood", int, retries=5)
PLAIN = Queue("plain", str, retries=0)
ASYNC = Queue("async", str, retries=0)
DEADLY = Queue("deadly", str, retries=0)
QUEUES = (HELD, LIMITED, HANGING, WAITING, GOOD, AGOOD, PLAIN, ASYNC, DEADLY)

consumer = Consumer()
_local = threading.local()


def notes() -> redis.Redis:
    """Where handlers write down what they did, for the test to read."""
    if not hasattr(_local, "client"):
        _local.client = redis.Redis.from_url(default_url(), socket_timeout=None)
    return _local.client


def hold_the_interpreter(how: str) -> None:
    """Let no other thread of this process run: in `re`, or asleep in C, for ever; or for so many seconds."""
    if how == "re":
        re.match(r"(a+)+$", "a" * 64 + "b")
    seconds = 10**6 if how == "asleep" else int(how)
    ctypes.PyDLL(None).sleep(seconds)


@consumer.handler(HELD, lease=1, timeout=600)
def held(how: str, job: Job[str]) -> None:
    if how.startswith("with a child "):
        how = how.removeprefix("with a child ")
        notes().rpush("children", subprocess.Popen(["sleep", "1000"]).pid)
    notes().hincrby("started", job.id)
    hold_the_interpreter(how)


@consumer.handler(LIMITED, lease=1, timeout=2)
def limited(how: str, job: Job[str]) -> None:
    notes().hincrby("started", job.id)
    hold_the_interpreter(how)


@consumer.handler(HANGING, lease=3, timeout=1)
def hanging(_: str, job: Job[str]) -> None:
    """Never end, and let others run."""
    notes().hincrby("started", job.id)
    threading.Event().wait()


@consumer.handler(WAITING, lease=1, timeout=600)
def waiting(key: str, job: Job[str]) -> None:
    """Wait for the test, as for a slow server."""
    notes().hincrby("started", job.id)
    notes().blpop([key], 500)
    notes().hset("pid", job.id, os.getpid())


@consumer.handler(GOOD, lease=1, backoff=wait_fixed(0.1))
def good(number: int) -> None:
    time.sleep(0.001)


@consumer.handler(AGOOD, lease=1, backoff=wait_fixed(0.1))
async def agood(number: int) -> None:
    pass


@consumer.handler(PLAIN, lease=1, timeout=10)
def plain(name: str, job: Job[str]) -> Any:
    return table.PLAIN[name].do()


@consumer.handler(ASYNC, lease=1, timeout=4)
async def coroutine(name: str, job: Job[str]) -> Any:
    return await table.ASYNC[name].do()


@consumer.handler(DEADLY, lease=1, timeout=600, concurrency=1)
def deadly(name: str, job: Job[str]) -> Any:
    return table.DEADLY[name].do()
