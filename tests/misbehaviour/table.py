"""The table of misbehaviours of handlers, and the outcome of each message."""

import asyncio
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from reliq import Nack, Reject

FORK = multiprocessing.get_context("fork")


class Deed(NamedTuple):
    """
    One misbehaviour of a handler.

    Attributes:
        ends: `acked`, or the possible reasons of its dead letter.
        says: text of the log line about its dead letter, besides the id.
    """

    do: Callable[[], Any]
    ends: tuple[str, ...]
    says: str = ""


HELD = "a handler has held the GIL"
ACKED, FAILED, REJECTED, LEASE = ("acked",), ("failed",), ("rejected",), ("lease",)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Base(BaseException):
    pass


def throw(error: BaseException) -> None:
    raise error


def fork_a_pool() -> None:
    for _ in range(3):
        with FORK.Pool(2) as pool:
            assert pool.map(abs, [-1, 2]) == [1, 2]


def end_a_process() -> None:
    process = FORK.Process(target=time.sleep, args=(1000,))
    process.start()
    process.terminate()
    process.join(20)
    while process.exitcode is None:  # the thread that starts one reports its end
        time.sleep(0.01)
    assert process.exitcode == -signal.SIGTERM


def end_a_program() -> None:
    program = subprocess.Popen(["sleep", "1000"])
    program.send_signal(signal.SIGINT)
    assert program.wait(20) == -signal.SIGINT


def write_to_nobody() -> None:
    """Write to a closed pipe, which fails unless another fork holds the other end."""
    read, write = os.pipe()
    os.close(read)
    try:
        os.write(write, b"x")
    finally:
        os.close(write)


def print_to_nobody() -> None:
    sys.stdout.close()
    print("nobody reads this")


def fall() -> None:
    fall()


def take_all_memory() -> None:
    """Allocate memory until the limit, 300 MB above the current size."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + 300 * 2**20, before[1]))
    try:
        taken = []
        while True:
            taken.append(bytearray(10 * 2**20))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    ctypes.string_at(0)


#: Quick misbehaviours that the process survives.
PLAIN = {
    "forks a pool": Deed(fork_a_pool, ACKED),
    "ends a process": Deed(end_a_process, ACKED),
    "ends a program by Ctrl-C": Deed(end_a_program, ACKED),
    "forks, and both return": Deed(os.fork, ACKED),
    "leaves a program behind": Deed(lambda: subprocess.Popen(["sleep", "1000"]), ACKED),
    "leaves a thread behind": Deed(lambda: threading.Thread(target=time.sleep, args=(1000,)).start(), ACKED),
    "raises SystemExit": Deed(lambda: sys.exit(3), FAILED),
    "raises KeyboardInterrupt": Deed(lambda: throw(KeyboardInterrupt()), FAILED),
    "raises a BaseException": Deed(lambda: throw(Base()), FAILED),
    "raises GeneratorExit": Deed(lambda: throw(GeneratorExit()), FAILED),
    "raises what cannot be printed": Deed(lambda: throw(UnprintableError()), FAILED),
    "falls for ever": Deed(fall, FAILED),
    "returns nonsense": Deed(object, ACKED),
    "returns a coroutine": Deed(lambda: asyncio.sleep(0), FAILED),
    "asks for a delay that is no number": Deed(lambda: Nack(delay=float("nan")), FAILED),
    "rejects for a reason that is no text": Deed(lambda: Reject(reason=ValueError("x")), REJECTED),
    "takes the signals": Deed(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), FAILED),
    "writes to a pipe that nobody reads": Deed(write_to_nobody, (*FAILED, *ACKED)),
    "prints to a closed standard output": Deed(print_to_nobody, FAILED),
    "switches the collector off": Deed(gc.disable, ACKED),
}


async def swallow() -> None:
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue


async def throw_later(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def run_a_loop() -> None:
    coroutine = asyncio.sleep(0)
    try:
        asyncio.run(coroutine)
    finally:
        coroutine.close()


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.1)


async def close_the_loop() -> None:
    asyncio.get_running_loop().close()


async def cancel_everything() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


async def block_the_loop() -> None:
    time.sleep(4)  # noqa: ASYNC251  it is the deed


ASYNC = {
    "raises SystemExit in a coroutine": Deed(lambda: throw_later(SystemExit(3)), FAILED),
    "raises KeyboardInterrupt in a coroutine": Deed(lambda: throw_later(KeyboardInterrupt()), FAILED),
    "runs a loop in the loop": Deed(run_a_loop, FAILED),
    "stops the loop": Deed(stop_the_loop, ACKED),
}

#: Misbehaviours with effects on later handlers of the process, for example on the programs that they start.
LASTING = {
    "holds back every signal": Deed(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()) and None, ACKED
    ),
    "empties the environment": Deed(os.environ.clear, ACKED),
    "goes to another folder": Deed(lambda: os.chdir("/"), ACKED),
}

#: Slower misbehaviours that the process survives.
SLOW = {
    "blocks the loop": Deed(block_the_loop, ACKED, "the event loop has not run for"),
    "waits for a thread beyond its timeout": Deed(lambda: asyncio.to_thread(time.sleep, 30), FAILED),
}

#: Misbehaviours that end their process, or may.
DEADLY = {
    "ends by a segmentation fault": Deed(segfault, LEASE, "ended with exit code -11"),
    "calls os._exit(0)": Deed(lambda: os._exit(0), LEASE, "ended with exit code 0"),
    "kills its process group": Deed(lambda: os.killpg(0, signal.SIGKILL), LEASE, "ended with exit code -9"),
    # Another thread may receive the signal, so this thread could still finish its job.
    "pauses its process": Deed(lambda: (os.kill(os.getpid(), signal.SIGSTOP), time.sleep(10**6)), LEASE, HELD),
    "holds the interpreter asleep in C": Deed(lambda: ctypes.PyDLL(None).sleep(10**6), LEASE, HELD),
    "takes all memory": Deed(take_all_memory, FAILED),
    "closes every descriptor": Deed(lambda: os.closerange(3, 1000), (*ACKED, *FAILED, *LEASE)),
}
DEADLY_ASYNC = {
    "cancels every task": Deed(cancel_everything, FAILED),
    "closes the loop": Deed(close_the_loop, FAILED),
}
