"""Signals to this process: noted where next to nothing is safe, read where everything is."""

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

#: What ends a worker in peace.
STOPS = (signal.SIGTERM, signal.SIGINT)
EXIT_SECOND_SIGNAL = 130


class SignalNotes:
    """
    The signals that came, in their order.

    A signal handler may interrupt anything, a wait for its own notes and itself included: it must take no lock that
    the interrupted code may hold, as `threading.Event.set` does. `SimpleQueue.put` is made to be entered again.

    Attributes:
        numbers: every signal so far, oldest first; whoever has dealt with one may remove it.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Take note of a signal: to be given to `signal.signal`."""
        self.numbers.append(number)
        self._came.put(None)

    def wait(self, seconds_at_most: float | None = None) -> bool:
        """Wait for a signal that no wait has seen yet, None for ever; say whether there is one."""
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
    SIGTERM and SIGINT as a worker in the main thread takes them, within a `with` block; after it they are as before.

    While it starts, a signal ends the start by StoppedEarly. Once it works the first is noted and the second ends the
    process at once, unless that is for a supervisor to do.

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
        """Note from now on; take the signals again, for what has been started may have taken them."""
        self._works = True
        for number in STOPS:
            take(number, self.take_note)

    def take_note(self, number: int, _frame: FrameType | None) -> None:
        """Only take note, except where the person wants an end."""
        self.note(number)
        if not self._works:
            raise StoppedEarly
        if len(self.numbers) > 1 and not self._patient:
            os._exit(EXIT_SECOND_SIGNAL)  # an ordinary exit waits for the threads of asyncio.to_thread


def end_at_once(number: int, _frame: FrameType | None) -> None:
    """End the process, in which nothing has been started yet that could end in peace; to be given to `take`."""
    os._exit(EXIT_SECOND_SIGNAL if number == signal.SIGINT else 0)


_taken: set[int] = set()


def take(number: int, handler: Callable[[int, FrameType | None], Any]) -> Any:
    """Have `handler` called at a signal, but not in processes forked from this one; return the one before."""
    _taken.add(number)
    return signal.signal(number, handler)


_forking = threading.local()


def _hold_signals_back() -> None:
    """Hold back what we take while this thread forks: one that came before the child gave it up would be lost there."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _taken)


def _let_signals_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _give_up_signals() -> None:
    """Let a forked process take the signals as any other: who made it may end it by one."""
    for number in _taken:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _taken.clear()
    _let_signals_come()


os.register_at_fork(before=_hold_signals_back, after_in_parent=_let_signals_come, after_in_child=_give_up_signals)
