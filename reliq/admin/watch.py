"""Overviews one after another, for a person who watches: the trend of the rates, and the latest failures."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.admin import queries
from reliq.admin.crons import crons_of
from reliq.admin.ends import last_ends
from reliq.admin.history import histories_of
from reliq.admin.parts import ask_each
from reliq.admin.queues import overview
from reliq.snapshot.waits import Waits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reliq.admin.crons import CronView
    from reliq.admin.ends import End
    from reliq.admin.queues import Overview
    from reliq.admin.session import Session
    from reliq.keys import Keys
    from reliq.snapshot.shard_maps import ShardMaps
    from reliq.snapshot.snapshot import Chosen

#: A trend has the rates of this many looks.
TREND_LOOKS = 120
#: It begins with this many minutes that workers have noted.
NOTED_MINUTES = 60
#: From a queue this many ends are read, and as many errors of messages that are to be delivered again.
SAMPLE = 40


@dataclass(frozen=True, slots=True)
class Trend:
    """How many messages a second arrived and were acked: of the minutes before the first look, then of each look."""

    arrived: Sequence[float]
    acked: Sequence[float]


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
    ended: End | None
    reason: str
    error: str
    count: int = 1
    sampled: int = 1
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """
    One look.

    Attributes:
        trends: queue -> how its rates went.
        ends: the newest abnormal ends first.
        errors: what living messages failed with, from a sample of each queue, the most frequent first.
        crons: periodic entries, those first that tick next.
    """

    overview: Overview
    trends: Mapping[str, Trend]
    ends: Sequence[Failure]
    errors: Sequence[Failure]
    crons: Sequence[CronView] = ()


class Watcher:
    """
    Makes an overview at each `look`, all of them in one thread: `Reader.overview` is for several.

    Args:
        queues: says which; asked anew for each look.
        maps: how many shards they have.
    """

    def __init__(self, session: Session, queues: Callable[[], Chosen], maps: ShardMaps) -> None:
        self._session, self._queues, self._maps = session, queues, maps
        self._last: Overview | None = None
        self._waits = Waits()
        self._rates: dict[str, tuple[deque[float], deque[float]]] = {}

    def look(self) -> Moment:
        """
        Return the queues as they are now; rates are those since the last look, and the first look has none.

        Raises:
            RedisUnavailableError, RedisRefusedError: Redis does not answer, or refuses.
        """
        chosen = self._queues()
        queues = chosen.queues
        before = self._last
        self._last = now = overview(self._session, chosen, self._maps, before, self._waits)
        if before is None:
            self._rates = _noted(self._session, queues, self._maps)
        for view in now.queues:
            if view.rates is not None:
                arrived, acked = self._rates.setdefault(
                    view.queue, (deque(maxlen=TREND_LOOKS), deque(maxlen=TREND_LOOKS))
                )
                arrived.append(view.rates.arrived)
                acked.append(view.rates.acked)
        return Moment(
            now,
            {queue: Trend(tuple(arrived), tuple(acked)) for queue, (arrived, acked) in self._rates.items()},
            [
                Failure(keys.name, end, end.reason, end.error)
                for keys, end in last_ends(self._session, queues, SAMPLE, self._maps)
            ],
            self._errors(queues),
            sorted(crons_of(self._session, queues), key=lambda one: one.next or 0),
        )

    def _errors(self, queues: Sequence[Keys]) -> list[Failure]:
        """Return the last errors of a sample of messages that are alive, equal errors counted together."""
        answers, _ = ask_each(self._session, queues, lambda keys: queries.failure_sample(keys, SAMPLE), self._maps)
        samples = [[note for part in parts if isinstance(part, list) for note in part] for parts in answers]
        failures = [
            Failure(keys.name, None, reason, error, count, len(notes), raised)
            for keys, notes in zip(queues, samples, strict=True)
            for (reason, error, raised), count in Counter(
                (note.reason, note.error, note.raised) for note in notes
            ).most_common()
        ]
        return sorted(failures, key=lambda one: -one.count)


def _noted(session: Session, queues: Sequence[Keys], maps: ShardMaps) -> dict[str, tuple[deque[float], deque[float]]]:
    """Return the rates of the minutes that workers have noted, so that a first look has a past."""
    told = {
        keys.name: minutes for keys, minutes in histories_of(session, queues, NOTED_MINUTES, maps).items() if minutes
    }
    return {
        name: (
            deque((one.published / 60 for one in minutes), maxlen=TREND_LOOKS),
            deque((one.acked / 60 for one in minutes), maxlen=TREND_LOOKS),
        )
        for name, minutes in told.items()
    }
