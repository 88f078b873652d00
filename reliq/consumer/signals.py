"""Signals to this process: a handler only notes them, and the main thread reads the notes."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

#: The signals that end a worker in peace.
STOPS = (signal.SIGINT, signal.SIGTERM)
EXIT_SECOND_SIGNAL = 130
#: A wait looks for a signal this often: one that the system gives to another thread does not interrupt the main thread.
LOOK_SECONDS = 0.5
#: A stop within 1 s may be an echo of the one before: shell and kernel both send SIGHUP at the end of a session, and
#: systemd sends SIGHUP after SIGTERM where SendSIGHUP= is set.
ECHO_SECONDS = 1.0


class SignalNotes:
    """
    The signals that came, in their order.

    A signal handler may interrupt any code, a wait for its own notes and itself included. It must take no lock that
    the interrupted code may hold, as `threading.Event.set` does; `SimpleQueue.put` may be entered again.

    Attributes:
        numbers: every signal so far but for echoes, oldest first; code that has dealt with one may remove it.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._last = (0, 0.0)
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Note a signal; this is a handler for `signal.signal`."""
        now, (last, noted_at) = time.monotonic(), self._last
        may_echo = number == last or (last, number) == (signal.SIGTERM, signal.SIGHUP)
        if number == signal.SIGUSR1 or not may_echo or now >= noted_at + ECHO_SECONDS:
            self._last = number, now
            self.numbers.append(number)
        self._came.put(None)

    def wait(self, seconds_at_most: float | None = None) -> bool:
        """Wait for a signal that no wait has seen yet, without a limit for None; say whether one came."""
        until = None if seconds_at_most is None else time.monotonic() + seconds_at_most
        while True:
            left = LOOK_SECONDS if until is None else min(until - time.monotonic(), LOOK_SECONDS)
            with suppress(queue.Empty):
                self._came.get(timeout=max(left, 0.0))
                for _ in range(self._came.qsize()):  # one wait sees all there are
                    self._came.get_nowait()
                return True
            if until is not None and time.monotonic() >= until and self._came.empty():
                return False


class StoppedEarly(BaseException):
    """A signal to stop has come while a worker was still starting."""


class StopSignals(SignalNotes):
    """
    The handlers of SIGTERM and SIGINT for a worker in the main thread, within a `with` block; then they are as before.

    While the worker starts, a signal ends the start by StoppedEarly. While it works, the first signal is noted, and the
    second ends the process at once, unless a supervisor is to do that.

    Args:
        patient: a second signal changes nothing.
    """

    def __init__(self, *, patient: bool) -> None:
        super().__init__()
        self._patient, self._works = patient, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Take the signals."""
        self._before = {number: take(number, self.take_note) for number in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def works(self) -> None:
        """Only note signals from now on; set the handlers again, for a lifespan may have set its own."""
        self._works = True
        for number in STOPS:
            take(number, self.take_note)

    def take_note(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal, and end the start or the process where that is wanted."""
        self.note(number)
        if not self._works:
            raise StoppedEarly
        if len(self.numbers) > 1 and not self._patient:
            os._exit(EXIT_SECOND_SIGNAL)  # an ordinary exit waits for the threads of asyncio.to_thread


def end_at_once(number: int, _frame: FrameType | None) -> None:
    """End the process, in which nothing has started yet that could end in peace; this is a handler for `take`."""
    os._exit(EXIT_SECOND_SIGNAL if number == signal.SIGINT else 0)


_taken: set[int] = set()


def take(number: int, handler: Callable[[int, FrameType | None], Any]) -> Any:
    """
    Have `handler` called at a signal, but not in processes forked from this one; return the handler before.

    SIGINT and SIGHUP stay ignored where the process was started so: a script does that for `command &`, and nohup.
    """
    if number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) == signal.SIG_IGN:
        return signal.SIG_IGN
    _taken.add(number)
    return signal.signal(number, handler)


_forking = threading.local()


def _hold_signals_back() -> None:
    """Hold the taken signals back while this thread forks: in the child one would be lost before its default is set."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _taken)


def _let_signals_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _give_up_signals() -> None:
    """Give a forked process the default handlers: its parent may end it by a signal."""
    for number in _taken:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _taken.clear()
    _let_signals_come()


os.register_at_fork(before=_hold_signals_back, after_in_parent=_let_signals_come, after_in_child=_give_up_signals)
