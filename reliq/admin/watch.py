"""Queues over time: the minutes that workers have noted, and looks that follow one another."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.admin.crons import crons_of
from reliq.admin.queues import chosen, overview
from reliq.admin.rates import MinuteStats, histories_of
from reliq.admin.session import AdminBase, ask_each
from reliq.admin.show import last_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reliq.admin.messages import MessageEvent
    from reliq.admin.queues import Overview
    from reliq.keys import Keys
    from reliq.metrics.crons import CronState
    from reliq.metrics.snapshot import Rates, Selection, ShardMaps
    from reliq.redis.session import Session

#: A trend has the rates of this many looks.
TREND_LOOKS = 120
#: It begins with this many minutes that workers have noted.
NOTED_MINUTES = 60
#: From a queue this many ends are read, and as many errors of messages that are to be delivered again.
SAMPLE = 40


@dataclass(frozen=True, slots=True)
class Failure:
    """
    One kind of failure in a queue.

    Attributes:
        ended: how a message ended, or None for an error of messages that are alive.
        reason, error: of the last failure.
        count, sampled: how many of a sample of such messages have it, and how many were looked at.
        raised: class and place of the exception, of messages that are alive; empty when nothing was raised.
    """

    queue: str
    ended: MessageEvent | None
    reason: str
    error: str
    count: int = 1
    sampled: int = 1
    raised: str = ""


@dataclass(frozen=True, slots=True)
class QueueSample:
    """
    One look.

    Attributes:
        trends: queue -> the rates of the minutes before the first look, then those of each look.
        ends: the newest abnormal ends first.
        errors: what living messages failed with, from a sample of each queue, the most frequent first.
        crons: periodic entries, those first that tick next.
    """

    overview: Overview
    trends: Mapping[str, Sequence[Rates]]
    ends: Sequence[Failure]
    errors: Sequence[Failure]
    crons: Sequence[CronState] = ()


class HistoryReads(AdminBase):
    """Queues over time."""

    def history(self, queue: str, *, minutes: int = 60) -> list[MinuteStats]:
        """Return the last minutes of a queue, up to 180, the oldest first, as its workers noted them."""
        session = self._redis.queue(queue)
        return histories_of(session, [session.keys], minutes, self._maps())[session.keys]

    def histories(self, names: Sequence[str] = (), *, minutes: int = 60) -> dict[str, list[MinuteStats]]:
        """Return the last minutes of the queues named, or of all in the registry, by the queue's name."""
        session = self._redis.session()
        queues = chosen(session, [self.redis_keys(name) for name in names]).queues
        histories = histories_of(session, queues, minutes, self._maps())
        return {keys.name: history for keys, history in histories.items()}

    def watch(self, names: Sequence[str] = ()) -> Watcher:
        """Return a watcher of the queues named, or of all in the registry."""
        named = self._named(names)
        session = self._redis.session()
        return Watcher(session, lambda: chosen(session, named), self._maps())


class Watcher:
    """
    Makes an overview at each `look`, all of them in one thread: `ReadOnlyAdmin.overview` is for several.

    Args:
        queues: says which; asked anew for each look.
        maps: how many shards they have.
    """

    def __init__(self, session: Session, queues: Callable[[], Selection], maps: ShardMaps) -> None:
        self._session = session
        self._queues = queues
        self._maps = maps
        self._last: Overview | None = None
        self._rates: dict[str, deque[Rates]] = {}

    def look(self) -> QueueSample:
        """
        Return the queues as they are now; rates are those since the last look, and the first look has none.

        Raises:
            RedisUnavailableError, RedisRefusedError: Redis does not answer, or refuses.
        """
        selection = self._queues()
        queues = selection.queues
        is_first = self._last is None
        self._last = now = overview(self._session, selection, self._maps, since=self._last)
        if is_first:
            self._rates = _noted(self._session, queues, self._maps)
        for view in now.queues:
            if view.rates is not None:
                self._rates.setdefault(view.queue, deque(maxlen=TREND_LOOKS)).append(view.rates)
        return QueueSample(
            now,
            {queue: tuple(rates) for queue, rates in self._rates.items()},
            [
                Failure(keys.name, end, end.reason, end.error)
                for keys, end in last_ends(self._session, queues, SAMPLE, self._maps)
            ],
            self._errors(queues),
            sorted(crons_of(self._session, queues), key=lambda one: one.next or 0),
        )

    def _errors(self, queues: Sequence[Keys]) -> list[Failure]:
        """Return the last errors of a sample of messages that are alive, equal errors counted together."""
        answers, _ = ask_each(self._session, queues, lambda keys: calls.failure_sample(keys, SAMPLE), self._maps)
        samples = [[note for part in parts if isinstance(part, list) for note in part] for parts in answers]
        failures = [
            Failure(keys.name, None, reason, error, count, len(notes), raised)
            for keys, notes in zip(queues, samples, strict=True)
            for (reason, error, raised), count in Counter(
                (note.reason, note.error, note.raised) for note in notes
            ).most_common()
        ]
        return sorted(failures, key=lambda one: -one.count)


def _noted(session: Session, queues: Sequence[Keys], maps: ShardMaps) -> dict[str, deque[Rates]]:
    """Return the rates of the minutes that workers have noted, so that a first look has a past."""
    return {
        keys.name: deque((minute.rates for minute in minutes), maxlen=TREND_LOOKS)
        for keys, minutes in histories_of(session, queues, NOTED_MINUTES, maps).items()
        if minutes
    }
