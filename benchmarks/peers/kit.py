"""
What every peer's module shares: bodies, clocks, the timed handler, and how a worker's processes are started.

Each module has the same steps, as far as its queue can do them; `benchmarks.peers` does one of them:

    one COUNT, bulk COUNT         publish that many for `handle`; return the seconds
    late RATE SECONDS LEAD        publish messages for `note` that come due at that rate, the first in LEAD seconds
    delayed COUNT                 publish that many for `handle` for an hour from now
    slow COUNT                    publish for `note` one at a time, after one that is not counted
    work PROCESSES                be the worker, with `SETTING`

`handle` calls `do` or awaits `ado`: what that does, and how large bodies are, is in the environment.
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
#: What `handle` does: nothing, wait or compute.
WORK = os.environ.get("BENCH_WORK", "nothing")
#: How the worker is set, such as "32 threads".
SETTING = os.environ.get("BENCH_SETTING") or "16 at once"
BULK = 500
PAUSE_SECONDS = 0.03
WAIT_SECONDS = 0.005
COMPUTE_SECONDS = 0.002

_log: int | None = None


def body_of(work: str) -> dict[str, Any]:
    """Return what is published: 100 bytes as JSON, and 1 KiB for a handler that does something."""
    return {"sent": 0, "text": "x" * (80 if work == "nothing" else 1004)}


def slots_of(setting: str) -> int:
    """Return how many run at once: the number that a setting begins with; one without a number runs one."""
    return int(setting.split(maxsplit=1)[0]) if setting[0].isdigit() else 1


BODY, SLOTS = body_of(WORK), slots_of(SETTING)


def _nothing() -> None:
    pass


def _wait() -> None:
    time.sleep(WAIT_SECONDS)


def compute() -> None:
    """Take that much time of the processor, however busy it is."""
    until = time.thread_time() + COMPUTE_SECONDS
    while time.thread_time() < until:
        sum(range(100))


async def _anothing() -> None:
    pass


async def _await() -> None:
    await asyncio.sleep(WAIT_SECONDS)


async def _acompute() -> None:
    compute()


do = {"nothing": _nothing, "wait": _wait, "compute": compute}[WORK]
ado = {"nothing": _anothing, "wait": _await, "compute": _acompute}[WORK]


def note(sent: float | None) -> None:
    """Write how long ago `sent` was (a due time or the time of a publish); the runner reads it when all is done."""
    global _log  # noqa: PLW0603  opened by the first message of each process
    if sent is None:
        return
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
    """
    Publish one message after another, each after a pause and with the time in its body.

    One without a time goes before: its publisher has yet to connect, and is not what is measured.
    """
    publish({**BODY, "sent": None})
    for _ in range(count):
        time.sleep(PAUSE_SECONDS)
        publish({**BODY, "sent": time.time()})


async def aslowly(publish: Callable[[dict[str, Any]], Awaitable[object]], count: int) -> None:
    """Publish as `slowly`, in async code."""
    await publish({**BODY, "sent": None})
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
