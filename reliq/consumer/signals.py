"""Signals to this process: a handler only notes them, and the main thread reads the notes."""

from __future__ import annotations

import os
import queue
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

#: The signals that end a worker in peace.
STOPS = (signal.SIGTERM, signal.SIGINT)
EXIT_SECOND_SIGNAL = 130


class SignalNotes:
    """
    The signals that came, in their order.

    A signal handler may interrupt any code, a wait for its own notes and itself included. It must take no lock that
    the interrupted code may hold, as `threading.Event.set` does; `SimpleQueue.put` may be entered again.

    Attributes:
        numbers: every signal so far, oldest first; code that has dealt with one may remove it.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Note a signal; this is a handler for `signal.signal`."""
        self.numbers.append(number)
        self._came.put(None)

    def wait(self, seconds_at_most: float | None = None) -> bool:
        """Wait for a signal that no wait has seen yet, without a limit for None; say whether one came."""
        seen = False
        with suppress(queue.Empty):
            self._came.get(timeout=seconds_at_most)
            seen = True
            for _ in range(self._came.qsize()):  # one wait sees all there are
                self._came.get_nowait()
        return seen


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
    """Have `handler` called at a signal, but not in processes forked from this one; return the handler before."""
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
