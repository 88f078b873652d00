"""Queues over time: figures that workers store each minute, and samples that you take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.admin.crons import crons_of
from reliq.admin.queues import MinuteStats, Overview, chosen, histories_of, overview
from reliq.admin.session import AdminBase, ask_each
from reliq.admin.show import last_ends
from reliq.redis.commands import Command
from reliq.wire_format import FailureNote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.messages import MessageEvent
    from reliq.keys import Keys
    from reliq.metrics.crons import CronState
    from reliq.metrics.snapshot import ShardMaps
    from reliq.redis.session import Session

#: For each shard of a queue, a sample reads this many ended messages, and the errors of this many living messages.
SAMPLE = 40


@dataclass(frozen=True, slots=True)
class Failure:
    """
    The last error of one or more living messages.

    Attributes:
        queue: name of the queue.
        reason: reason of the last failure, such as `failed` or `lost`.
        error: text of the last error.
        raised: class and source line of the exception; empty if the handler raised no exception.
        count: number of messages in the sample that have this error.
        sampled: number of messages of the queue in the sample.
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
    A sample of queues at one moment.

    Attributes:
        overview: the queues and the workers.
        ends: the messages that ended last without an ack, each with the name of its queue, newest first.
        errors: the last errors of living messages, from a sample of each queue, the most frequent error first.
        crons: the periodic jobs of the queues, the next job to run first.
    """

    overview: Overview
    ends: Sequence[tuple[str, MessageEvent]]
    errors: Sequence[Failure]
    crons: Sequence[CronState] = ()


class HistoryReads(AdminBase):
    """The methods that read how queues change over time."""

    def history(self, queue: str, *, minutes: int = 60) -> list[MinuteStats]:
        """
        Return the figures of a queue for the last minutes, oldest first, from totals that workers store each minute.

        Args:
            queue: name of the queue.
            minutes: number of minutes, up to 180.
        """
        session = self._queue(queue)
        return histories_of(session, [session.keys], minutes, self._maps())[session.keys]

    def histories(self, names: Sequence[str] = (), *, minutes: int = 60) -> dict[str, list[MinuteStats]]:
        """Return the history of each named queue, or of all registered queues, by queue name."""
        session = self._session()
        queues = chosen(session, [self.redis_keys(name) for name in names]).queues
        histories = histories_of(session, queues, minutes, self._maps())
        return {keys.name: history for keys, history in histories.items()}

    def watch(self, names: Sequence[str] = ()) -> Watcher:
        """Return a `Watcher`, which takes samples of the named queues, or of all registered queues."""
        return Watcher(self._session(), self._named(names), self._maps())


class Watcher:
    """
    Takes samples of queues, to show how they change. Use it in one thread only.

    In several threads, use `ReadOnlyAdmin.queues`.

    Args:
        session: the session with the whole Redis.
        named: the queues; empty for the queues that are registered when a sample is taken.
        maps: the cached shard maps.
    """

    def __init__(self, session: Session, named: Sequence[Keys], maps: ShardMaps) -> None:
        self._session = session
        self._named = named
        self._maps = maps
        self._last: Overview | None = None

    def look(self) -> QueueSample:
        """
        Take a sample of the queues, with the rates since the previous sample.

        The rates of the first sample are for about the last minute.

        Raises:
            RedisUnavailableError: Redis does not answer.
            RedisRefusedError: Redis refuses a command.
        """
        selection = chosen(self._session, self._named)
        queues = selection.queues
        self._last = overview(self._session, selection, self._maps, since=self._last)
        ends = last_ends(self._session, queues, SAMPLE, self._maps)
        crons = sorted(crons_of(self._session, queues), key=lambda entry: entry.next or 0)
        return QueueSample(self._last, [(keys.name, end) for keys, end in ends], self._errors(queues), crons)

    def _errors(self, queues: Sequence[Keys]) -> list[Failure]:
        def sample(keys: Keys) -> Command[list[FailureNote]]:
            command = ("HRANDFIELD", keys.errors, SAMPLE, "WITHVALUES")
            return Command(command, lambda reply: [*map(FailureNote.parse, reply[1::2])])

        answers, _ = ask_each(self._session, queues, sample, self._maps)
        failures = []
        for keys, shards in zip(queues, answers, strict=True):
            notes = [note for shard in shards if isinstance(shard, list) for note in shard]
            kinds = Counter((note.reason, note.error, note.raised) for note in notes)
            failures += [Failure(keys.name, *kind, count, len(notes)) for kind, count in kinds.items()]
        return sorted(failures, key=lambda failure: -failure.count)
