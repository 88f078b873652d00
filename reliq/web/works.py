"""Writes that take a while: each runs in a thread of this process, and says how far it is."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from reliq.errors import ReliqError
from reliq.foreign import printable
from reliq.logs.limiter import WEB_WRITE

logger = logging.getLogger(__name__)

#: Writes and checks that run at once, each counted apart; checks of one visitor; works remembered after their end.
RUNNING_LIMIT, CHECKS_PER_VISITOR, REMEMBERED = 8, 2, 50

#: It is called after each step, with how many ids the step looked at and what became of all so far.
Step = Callable[[int, str], None]


@dataclass(slots=True)
class Work:
    """
    One write that takes a while.

    Attributes:
        title: of what it does.
        by: the name of the visitor who started it.
        started, ended: unix seconds by this process's clock; None while it runs.
        done: how many ids it has looked at.
        total: how many there were when it began; None when that is unknown.
        state: `running`, `finished`, `stopped` by a person between two steps, or `failed`.
        outcome: what became of them so far.
        visitor: the name and the address of the visitor who started it.
        only_reads: whether it is a check, which a visitor without the right to write may start and stop.
    """

    id: str
    title: str
    queue: str
    layout: str
    by: str
    started: float
    total: int | None
    ended: float | None = None
    done: int = 0
    state: str = "running"
    outcome: str = ""
    visitor: str = ""
    only_reads: bool = False


class _Stopped(Exception):  # noqa: N818  it ends a work, and is no error
    """A person stopped the work."""


class Works:
    """The works of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[str, Work] = {}
        self._stops: dict[str, threading.Event] = {}

    def all(self) -> list[Work]:
        """Return every work that runs or is remembered, the newest first."""
        with self._lock:
            return list(reversed(self._works.values()))

    def get(self, id: str) -> Work | None:
        """Return the work of that id; None when it is not remembered."""
        with self._lock:
            return self._works.get(id)

    def start(self, work: Work, run: Callable[[Step], str]) -> bool:
        """Begin a work: `run` gets a step to call, and returns what became of all; False when too many run."""
        stop = threading.Event()
        with self._lock:
            running = [one for one in self._works.values() if one.state == "running"]
            alike = [one for one in running if one.only_reads == work.only_reads]
            own_checks = [one for one in alike if one.only_reads and one.visitor == work.visitor]
            if len(alike) >= RUNNING_LIMIT or len(own_checks) >= CHECKS_PER_VISITOR:
                return False
            ended = [old.id for old in self._works.values() if old.state != "running"]
            for old in ended[: max(0, len(self._works) + 1 - REMEMBERED)]:
                del self._works[old]
            threading.Thread(target=self._run, args=(work, run, stop), name=f"reliq-web-{work.id}", daemon=True).start()
            self._works[work.id], self._stops[work.id] = work, stop
        return True

    def stop(self, id: str) -> bool:
        """Have a work stop after its step; return whether it ran."""
        with self._lock:
            stop = self._stops.get(id)
        if stop is not None:
            stop.set()
        return stop is not None

    def _run(self, work: Work, run: Callable[[Step], str], stop: threading.Event) -> None:
        def step(looked: int, outcome: str) -> None:
            work.done += looked
            work.outcome = outcome
            if stop.is_set():
                raise _Stopped

        state = "failed"
        try:
            work.outcome, state = run(step), "finished"
        except _Stopped:
            state = "stopped"
        except ReliqError as error:
            work.outcome = f"{work.outcome}; {error}" if work.outcome else str(error)
        except Exception:
            logger.exception("a work of the page failed: %s", work.title)
            work.outcome = f"{work.outcome}; it failed, see the log of the page" if work.outcome else "see the log"
        with self._lock:
            work.ended, work.state = time.time(), state
            del self._stops[work.id]
        line = f"{work.title} of {work.queue} by {work.by or 'somebody'} {state}: {work.outcome}"
        told = {"event": WEB_WRITE, "verb": work.title, "queue": work.queue, "who": work.by, "outcome": state}
        logger.info("%s", printable(line), extra={"reliq": told})


def new_id() -> str:
    """Return an id that nobody can guess."""
    return secrets.token_urlsafe(9)
