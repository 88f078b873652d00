"""Queues over time: the minutes that workers noted, and repeated looks at the queues."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.admin.crons import crons_of
from reliq.admin.queues import chosen, overview
from reliq.admin.rates import MinuteStats, histories_of
from reliq.admin.session import AdminBase, ask_each
from reliq.admin.show import last_ends

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.messages import MessageEvent
    from reliq.admin.queues import Overview
    from reliq.keys import Keys
    from reliq.metrics.crons import CronState
    from reliq.metrics.snapshot import ShardMaps
    from reliq.redis.session import Session

#: A look reads this many ends of each queue, and the errors of this many messages that wait for a redelivery.
SAMPLE = 40


@dataclass(frozen=True, slots=True)
class Failure:
    """
    An error that messages of a queue wait to be redelivered with.

    Attributes:
        queue: name of the queue.
        reason: reason of the last failure, such as `failed` or `lost`.
        error: text of the error.
        raised: class and place of the exception; empty when the handler raised none.
        count: messages of the sample with this error.
        sampled: size of the sample.
    """

    queue: str
    reason: str
    error: str
    raised: str = ""
    count: int = 1
    sampled: int = 1


@dataclass(frozen=True, slots=True)
class QueueSample:
    """
    One look at queues.

    Attributes:
        overview: the queues and the workers.
        ends: the last abnormal ends with the names of their queues, the newest first.
        errors: errors of living messages, from a sample of each queue, the most frequent first.
        crons: periodic entries, the next to tick first.
    """

    overview: Overview
    ends: Sequence[tuple[str, MessageEvent]]
    errors: Sequence[Failure]
    crons: Sequence[CronState] = ()


class HistoryReads(AdminBase):
    """The methods that read queues over time."""

    def history(self, queue: str, *, minutes: int = 60) -> list[MinuteStats]:
        """Return the last minutes of a queue as its workers noted them, up to 180, the oldest first."""
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
        return Watcher(self._redis.session(), self._named(names), self._maps())


class Watcher:
    """
    Looks at queues again and again, from one thread; `ReadOnlyAdmin.queues` is safe for several.

    Args:
        session: the session of the whole Redis.
        named: the queues; empty for all in the registry, which each look reads again.
        maps: how many shards the queues have.
    """

    def __init__(self, session: Session, named: Sequence[Keys], maps: ShardMaps) -> None:
        self._session = session
        self._named = named
        self._maps = maps
        self._last: Overview | None = None

    def look(self) -> QueueSample:
        """
        Return the queues as they are now, with the rates since the last look; at first since a worker's note.

        Raises:
            RedisUnavailableError, RedisRefusedError: Redis does not answer, or refuses.
        """
        selection = chosen(self._session, self._named)
        queues = selection.queues
        self._last = overview(self._session, selection, self._maps, since=self._last)
        ends = last_ends(self._session, queues, SAMPLE, self._maps)
        crons = sorted(crons_of(self._session, queues), key=lambda entry: entry.next or 0)
        return QueueSample(self._last, [(keys.name, end) for keys, end in ends], self._errors(queues), crons)

    def _errors(self, queues: Sequence[Keys]) -> list[Failure]:
        answers, _ = ask_each(self._session, queues, lambda keys: calls.failure_sample(keys, SAMPLE), self._maps)
        failures = []
        for keys, shards in zip(queues, answers, strict=True):
            notes = [note for shard in shards if isinstance(shard, list) for note in shard]
            kinds = Counter((note.reason, note.error, note.raised) for note in notes)
            failures += [Failure(keys.name, *kind, count, len(notes)) for kind, count in kinds.items()]
        return sorted(failures, key=lambda failure: -failure.count)
