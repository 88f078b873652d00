"""Notes the minutes of queues in Redis: whichever process meets a minute first that none has noted yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq import minutes
from reliq.minutes import MINUTE_MS, Totals
from reliq.snapshot.snapshot import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reliq.call import Request
    from reliq.client.client import Client
    from reliq.keys import Keys
    from reliq.snapshot.queue_look import QueueSnapshot


class MinuteNotes:
    """
    The notes of the shards that `shards` returns.

    A note is read once a minute and queue; who finds none looks at the queue and writes it. Two may do so at a time, and
    write nearly the same. A queue that refuses has no notes, and nothing else of it depends on them.
    """

    def __init__(self, client: Client, shards: Callable[[], Iterable[Keys]]) -> None:
        self._client, self._shards = client, shards
        self._unnoted = list[Any]()
        self._reader = SnapshotReader(client, lambda: self._unnoted)
        self._minute = -1

    def step(self, now_ms: int) -> None:
        """Note the minute of `now_ms`, by Redis' clock, where nobody has."""
        minute = now_ms // MINUTE_MS
        if minute == self._minute:
            return
        asked_of = list(self._shards())
        answers = self._client.run_all([minutes.noted(keys, [minute]) for keys in asked_of])
        self._unnoted = [
            keys
            for keys, answer in zip(asked_of, answers, strict=True)
            if isinstance(answer, list) and not any(one.at_ms // MINUTE_MS == minute for one in answer)
        ]
        if self._unnoted:
            looks = self._reader.look(now_ms).queues
            asked: list[Request[Any]] = [
                one for look in looks for one in minutes.note(look.keys, _totals(look, now_ms))
            ]
            self._client.run_all(asked)
        self._minute = minute


def _totals(look: QueueSnapshot, now_ms: int) -> Totals:
    late = [look.oldest[place] for place in ("ready", "retry") if place in look.oldest]
    due_ms = now_ms - round(max(late) * 1000) if look.counts.due and late else None
    return Totals(now_ms, *Totals.sums(look.counts.totals), look.counts.due, due_ms)
