"""Which thread runs quick handlers: one does as much as many, which only take the interpreter from each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq.worker.line import STUCK_SECONDS

if TYPE_CHECKING:
    import threading

    from reliq.worker.lines import Lines
    from reliq.worker.run import Run

#: Of quick work: one thread runs it, and one looks on.
QUICK_THREADS = 2


class Lookout:
    """
    Knows which thread leads: the one that began the latest run goes on with what waits.

    While what it runs is quick another looks on, and goes on itself when the leader is stuck; the others sleep until
    they are told. Every method is called under the lock of `work`.

    Attributes:
        looked_on: a thread looks on.
    """

    def __init__(self, lines: Lines, work: threading.Condition) -> None:
        self._lines, self._work = lines, work
        self._latest: Run | None = None
        self.looked_on = False

    def threads(self, most: int) -> int:
        """Return how many threads, `most` of them, are of use for the plain work that waits."""
        quick = all(line.is_quick for line in self._lines if line.waiting and not line.is_async)
        return min(QUICK_THREADS, most) if quick else most

    def leads(self, done: Run | None) -> bool:
        """Say whether the thread that has `done` a run goes on."""
        return done is not None and done is self._latest

    def began(self, run: Run, *, leads: bool) -> None:
        """Know of a new latest run, by a thread that `leads` already or does from now on."""
        self._latest = run
        if not (leads and self._is_quick(run)):
            self._work.notify()

    def rested(self) -> None:
        """Know that the leader found nothing to do."""
        self._latest = None

    def is_led(self, now: float) -> bool:
        """Say whether a thread is at quick work, and not stuck."""
        latest = self._latest
        return latest is not None and now - latest.started_at <= STUCK_SECONDS and self._is_quick(latest)

    def look_on(self) -> None:
        """Wait for as long as a quick handler takes at most; one thread at a time, the others until they are told."""
        if self.looked_on:
            self._work.wait()
            return
        self.looked_on = True
        self._work.wait(STUCK_SECONDS)
        self.looked_on = False

    def _is_quick(self, run: Run) -> bool:
        return self._lines[run.flights[0].queue].is_quick
