"""
What the modules of all peers share: bodies, clocks, the timed handler, and how a worker's processes are started.

Each module has the same steps, as far as its queue can do them; `benchmarks.peers` does one of them:

    one COUNT, bulk COUNT         publish that many for `handle`; return the seconds
    late RATE SECONDS LEAD        publish messages for `note` that come due at that rate, the first in LEAD seconds
    slow COUNT                    publish for `note` one at a time
    work PROCESSES                be the worker, with SLOTS handlers at once in each process
"""

import asyncio
import os
import subprocess
import sys
import time

URL = os.environ.get("BENCH_URL", "redis://127.0.0.1:1/0")
SLOTS = int(os.environ.get("BENCH_SLOTS", "16"))
#: About 100 bytes as JSON.
BODY = {"sent": 0, "text": "x" * 80}
BULK = 500
PAUSE_SECONDS = 0.03

_log = os.open(os.environ.get("BENCH_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(body):
    """Write how many seconds ago the message was due, or published; the runner reads the file."""
    os.write(_log, b"%.6f\n" % (time.time() - body["sent"]))


def one(publish, count):
    """Publish one by one; return the seconds. The first message, which connects, is not counted."""
    publish(BODY)
    began = time.perf_counter()
    for _ in range(count):
        publish(BODY)
    return time.perf_counter() - began


async def aone(publish, count):
    """Publish one by one in async code; return the seconds."""
    await publish(BODY)
    began = time.perf_counter()
    for _ in range(count):
        await publish(BODY)
    return time.perf_counter() - began


def due_bodies(rate, seconds, lead):
    """Return bodies with due times (unix seconds), `rate` a second, the first `lead` seconds from now."""
    first = time.time() + lead
    return [{**BODY, "sent": first + number / rate} for number in range(round(rate * seconds))]


def slowly(publish, count):
    """Publish one message after another, each after a pause and with the time in its body."""
    for _ in range(count):
        time.sleep(PAUSE_SECONDS)
        publish({**BODY, "sent": time.time()})


async def aslowly(publish, count):
    """Publish as `slowly`, in async code."""
    for _ in range(count):
        await asyncio.sleep(PAUSE_SECONDS)
        await publish({**BODY, "sent": time.time()})


def run(*command, processes=1):
    """Run `python …` in so many processes until they end."""
    started = [subprocess.Popen([sys.executable, *command]) for _ in range(processes)]
    for process in started:
        process.wait()
