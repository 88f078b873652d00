"""Publishes the messages of periodic entries at their ticks: every process tries, a script decides who was first."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tenacity import wait_exponential

from reliq import commands, transitions
from reliq.chunks import chunked
from reliq.events import Superseded, notify
from reliq.publish.registry import NAMING_SECONDS
from reliq.retry import seconds_after
from reliq.settings import BATCH_LIMIT, milliseconds
from reliq.worker.loop import QueueBackoff

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.call import Call, Command
    from reliq.client.client import Client
    from reliq.handlers.periodic import Periodic
    from reliq.transitions import Tick, TickStatus

logger = logging.getLogger(__name__)

#: A process says at least this often that it is there, and hears of runs that somebody asked for.
TICKER_SECONDS = 5.0
#: One round trip makes at most this many ticks.
TICKS_TOGETHER = 100
#: When a body cannot be made, the next try waits for 1 s, 2 s, 4 s, … and at most a minute.
BODY_BACKOFF = wait_exponential(max=60)


@dataclass(slots=True)
class Seen:
    """
    An entry whose schedule is in force, as a look has seen it.

    Attributes:
        last: the tick up to which all is done, in unix seconds.
        asked: which run somebody asked for; None when nobody did.
    """

    entry: Periodic
    now_ms: int
    last: int
    asked: int | None


class Due(NamedTuple):
    """A tick `at` to be made, or a run that was asked for, of which `at` is None."""

    seen: Seen
    at: int | None
    call: Call[TickStatus]


class Ticker:
    """
    Looks at all entries in one round trip, and makes what is due in the next.

    Nobody leads, and no clock but Redis' counts. A look registers the entries too: the process that started last
    decides their schedules, and in a Redis that has lost its data they are as new.
    """

    def __init__(self, client: Client, entries: Sequence[Periodic]) -> None:
        self._client = client
        self._groups = list(_groups(entries))
        self._started = set[str]()
        self._named_until = 0.0
        self._superseded = set[str]()
        self._looks, self._ticks = (QueueBackoff("ticker", client.observers) for _ in range(2))
        self._next: dict[str, tuple[int, int | None]] = {}
        self._failures: dict[str, tuple[int, float]] = {}

    def step(self) -> float:
        """Make what is due; return the wait for the next look."""
        looked_at = time.monotonic()
        seen = self._look()
        self._make([due for one in seen for due in self._due(one)])
        waits = [self._wait(one) for one in seen]
        if self._looks.until:
            waits.append(self._looks.seconds())
        return max(0.0, min(waits, default=TICKER_SECONDS) - (time.monotonic() - looked_at))

    def _look(self) -> list[Seen]:
        """Register every entry; return those whose schedule is in force."""
        groups = [group for group in self._groups if not self._looks.waits(group[0].queue.keys)]
        answers = self._client.run_all([*map(self._registering, groups), *self._naming()])
        found = []
        for group, answer in zip(groups, answers, strict=False):
            if isinstance(answer, Exception):
                self._looks.note(group[0].queue.keys, answer)
                continue
            self._looks.over(group[0].queue.keys)
            self._started |= {one.name for one in group}
            now_ms, states = answer
            for entry, state in zip(group, states, strict=True):
                self._note_force(entry, is_ours=state is not None)
                if state is not None:
                    found.append(Seen(entry, now_ms, state.last, state.asked))
        return found

    def _registering(self, group: Sequence[Periodic]) -> Call[Any]:
        rows = [(one.name, str(one.schedule)) for one in group]
        return transitions.register(group[0].queue.keys, rows, newest=group[0].name not in self._started)

    def _naming(self) -> list[Command[None]]:
        """Return what names the queues in the registry, once in a minute: no worker need have handlers for them."""
        if time.monotonic() < self._named_until:
            return []
        self._named_until = time.monotonic() + NAMING_SECONDS
        return [commands.register([group[0].queue.keys.entry for group in self._groups], int(time.time()))]

    def _note_force(self, entry: Periodic, *, is_ours: bool) -> None:
        """Tell once that another schedule is in force."""
        if is_ours:
            self._superseded.discard(entry.name)
        elif entry.name not in self._superseded:
            self._superseded.add(entry.name)
            notify(self._client.observers, [Superseded(entry.queue.name, entry.name)])

    def _due(self, seen: Seen) -> Iterator[Due]:
        """Yield what is to be made of an entry now; where its body cannot be made, what comes before."""
        entry = seen.entry
        if self._ticks.waits(entry.queue.keys) or self._failures.get(entry.name, (0, 0.0))[1] > time.monotonic():
            return
        try:
            if (coming := self._next_of(seen)) is not None and coming * 1000 <= seen.now_ms:
                for planned in entry.plan(seen.last, seen.now_ms // 1000):
                    yield Due(seen, planned.at, _call(entry, entry.tick(planned)))
            if seen.asked is not None:
                yield Due(seen, None, _call(entry, entry.run(seen.asked)))
        except BaseException as error:  # a body is the user's code, and one that fails holds up no other entry
            self._note_failure(entry, error)
        else:
            self._failures.pop(entry.name, None)

    def _note_failure(self, entry: Periodic, error: BaseException) -> None:
        failures = self._failures.get(entry.name, (0, 0.0))[0] + 1
        self._failures[entry.name] = (failures, time.monotonic() + seconds_after(BODY_BACKOFF, failures))
        if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            text = "queue %s: the body of %s failed for the %d. time; its tick waits"
            logger.error(text, entry.queue.name, entry, failures, exc_info=error)

    def _make(self, due: Sequence[Due]) -> None:
        """Make the calls; note how far each entry is then."""
        for some in chunked(due, TICKS_TOGETHER):
            answers = self._client.run_all([one.call for one in some])
            for one, answer in zip(some, answers, strict=True):
                keys = one.seen.entry.queue.keys
                if isinstance(answer, Exception):
                    self._ticks.note(keys, answer)
                    continue
                self._ticks.over(keys)
                if one.at is not None and answer not in ("superseded", "unknown"):
                    one.seen.last = one.at

    def _wait(self, seen: Seen) -> float:
        """Return the seconds from the look to the next tick of an entry, or to the next try at one that failed."""
        coming, now = self._next_of(seen), time.monotonic()
        wait = TICKER_SECONDS if coming is None else min(TICKER_SECONDS, coming - seen.now_ms / 1000)
        failed = self._failures.get(seen.entry.name, (0, now))[1] - now
        return max(wait, failed, self._ticks.seconds_of(seen.entry.queue.keys))

    def _next_of(self, seen: Seen) -> int | None:
        """Return the first tick that is not done; None when none comes."""
        known = self._next.get(seen.entry.name)
        if known is None or known[0] != seen.last:
            known = self._next[seen.entry.name] = (seen.last, seen.entry.schedule.next_after(seen.last))
        return known[1]


def _call(entry: Periodic, tick: Tick) -> Call[TickStatus]:
    keys, settings = entry.queue.keys, entry.queue.settings
    return transitions.tick(keys, tick, ttl_ms=milliseconds(settings.ttl), retries=settings.retries)


def _groups(entries: Sequence[Periodic]) -> Iterator[list[Periodic]]:
    """Yield the entries of each queue, in pieces that one call takes."""
    queues: dict[str, list[Periodic]] = {}
    for one in entries:
        queues.setdefault(one.queue.name, []).append(one)
    for group in queues.values():
        yield from chunked(group, BATCH_LIMIT)
