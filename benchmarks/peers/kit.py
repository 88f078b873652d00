"""
What every peer's module shares: bodies, clocks, the timed handler, and how a worker's processes are started.

Each module has the same steps, as far as its queue can do them; `benchmarks.peers` does one of them:

    one COUNT, bulk COUNT         publish that many; return the seconds
    late RATE SECONDS LEAD        publish messages for `note` that come due at that rate, the first in LEAD seconds
    delayed COUNT                 publish that many for an hour from now
    slow COUNT                    publish for `note` one at a time
    work PROCESSES                be the worker
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

URL = os.environ.get("BENCH_URL", "redis://127.0.0.1:1/0")
#: Where the timed handler writes one line for each message: seconds late.
LOG = os.environ.get("BENCH_LOG", os.devnull)
#: 100 bytes as JSON.
BODY: dict[str, Any] = {"sent": 0, "text": "x" * 80}
BULK = 500
PAUSE_SECONDS = 0.03

_log: int | None = None


def note(sent: float) -> None:
    """Write how long ago `sent` was (a due time or the time of a publish); the runner reads it when all is done."""
    global _log  # noqa: PLW0603  opened by the first message of each process
    late = time.time() - sent
    if _log is None:
        _log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_log, b"%.6f\n" % late)


def pieces(items: Sequence[T], size: int = BULK) -> list[Sequence[T]]:
    """Cut a list into lists of at most `size`."""
    return [items[at : at + size] for at in range(0, len(items), size)]


def dues(rate: float, seconds: float, lead: float) -> list[float]:
    """Return unix times, `rate` a second, the first `lead` seconds from now."""
    first = time.time() + lead
    return [first + number / rate for number in range(round(rate * seconds))]


def timed(function: Callable[[], object]) -> float:
    """Return how many seconds `function` takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


async def atimed(coroutine: Awaitable[object]) -> float:
    """Return how many seconds `coroutine` takes."""
    began = time.perf_counter()
    await coroutine
    return time.perf_counter() - began


def slowly(publish: Callable[[dict[str, Any]], object], count: int) -> None:
    """Publish one message after another, each after a pause and with the time in its body."""
    for _ in range(count):
        time.sleep(PAUSE_SECONDS)
        publish({**BODY, "sent": time.time()})


async def aslowly(publish: Callable[[dict[str, Any]], Awaitable[object]], count: int) -> None:
    """Publish as `slowly`, in async code."""
    for _ in range(count):
        await asyncio.sleep(PAUSE_SECONDS)
        await publish({**BODY, "sent": time.time()})


def become(*command: str) -> None:
    """Replace this process by `python …`."""
    os.execv(sys.executable, [sys.executable, *command])


def processes(number: int, *command: str) -> None:
    """Run `python …` in so many processes until they end; for workers that know one process only."""
    started = [subprocess.Popen([sys.executable, *command]) for _ in range(number)]
    for process in started:
        process.wait()
