"""
What every limiter's module shares: bodies with keys, and what their handlers write down.

Each module has the steps that its queue has a limiter for; `benchmarks.peers` does one of them:

    fill_rate COUNT, fill_keys COUNT          publish that many; return the seconds
    work_rate PROCESSES, work_keys PROCESSES  be the worker
"""

import os
import random
import time

from benchmarks.peers import kit

RATE = int(os.environ.get("BENCH_RATE", "500"))
#: What a handler of a keyed message takes.
WORK_SECONDS = 0.005
KEYS = 100

_log: int | None = None


def bodies(count):
    """Yield so many bodies of 100 bytes; their keys come in the same order everywhere, their numbers count up in each key."""
    dealt = random.Random(16)
    numbers = [0] * KEYS
    for _ in range(count):
        key = dealt.randrange(KEYS)
        numbers[key] += 1
        yield {"key": key, "number": numbers[key], "text": "x" * 64}


def started(body):
    """Write that the handler of a message has started."""
    _write(f"{body['key']} {body['number']} {time.time():.6f} 0\n")


def worked(body):
    """Do the work of a keyed message, and write when it began and ended."""
    began = time.time()
    time.sleep(WORK_SECONDS)
    _write(f"{body['key']} {body['number']} {began:.6f} {time.time():.6f}\n")


def refused():
    """Write that a message was taken, and its limit did not let it start."""
    _write("refused\n")


def _write(line):
    global _log  # noqa: PLW0603  opened by the first message of each process
    if _log is None:
        _log = os.open(kit.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_log, line.encode())
