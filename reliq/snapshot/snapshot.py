"""One look at queues in Redis: a few round trips, whatever their number and length."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from reliq import commands
from reliq.keys import Keys
from reliq.snapshot.queue_look import QueueLook, QueueSnapshot
from reliq.snapshot.servers import facts_of
from reliq.snapshot.shard_maps import ShardMaps
from reliq.snapshot.waits import Waits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reliq.call import Request
    from reliq.client.client import Client
    from reliq.snapshot.held_up import HeldUp

INFO_SECTIONS = ("server", "memory", "persistence", "stats", "clients")
#: Queues of the registry that one snapshot has at most: anybody who may publish may write names there.
QUEUES_LIMIT = 2000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    Redis at one moment.

    Attributes:
        unreadable: queues that cannot be read, each with the reason.
        left_out: how many more queues the registry has.
        facts: the fields of INFO; empty where this user may not read it.
        seconds: how long the snapshot took.
        lost: entries of the registry: queues whose map of shards Redis has lost.
    """

    queues: Sequence[QueueSnapshot]
    unreadable: Mapping[Keys, str]
    left_out: int
    facts: Mapping[str, str]
    seconds: float
    lost: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """
    The queues to look at.

    Attributes:
        left_out: how many more the registry has.
        cursor: where in the registry the next choice goes on; 0 at its start.
    """

    queues: Sequence[Keys]
    left_out: int = 0
    cursor: int = 0


class SnapshotReader:
    """
    Looks at queues through one client.

    Args:
        queues: says which; None means those that the registry has. Of too many, those come first that the last look
            saw anything of; the rest takes turns.
        waits: what earlier looks saw waiting; None begins anew.
        maps: how many shards queues have, as earlier looks read it; None begins anew.
        held_up: what earlier looks saw of keys without a turn; None does not ask for them.
    """

    def __init__(
        self,
        client: Client,
        queues: Callable[[], Sequence[Keys]] | None = None,
        waits: Waits | None = None,
        maps: ShardMaps | None = None,
        held_up: HeldUp | None = None,
    ) -> None:
        self._client, self._queues, self._waits, self._maps = client, queues, waits or Waits(), maps or ShardMaps()
        self._held_up = held_up
        self._in_use: list[Keys] = []
        self._cursor = 0

    def look(self, clock_ms: float | None = None) -> Snapshot:
        """
        Return what Redis says now; `clock_ms` stands for its clock.

        Raises:
            RedisUnavailableError, RedisRefusedError: it says nothing.
        """
        started = time.monotonic()
        chosen = (
            Chosen(self._queues()) if self._queues else registered(self._client, lambda: self._in_use, self._cursor)
        )
        parts, now_ms, facts = self._first_looks(chosen.queues, clock_ms)
        unreadable = {keys: why for keys, looks in parts.items() if (why := _refusal(looks))}
        there = {
            keys: [look for look in looks if not look.is_away]
            for keys, looks in parts.items()
            if keys not in unreadable
        }
        readable = [look for looks in there.values() for look in looks]
        for look, answers in zip(readable, self._asked([look.second_requests() for look in readable]), strict=True):
            look.take_second(answers, now_ms)
        for look, answers in zip(readable, self._asked([look.third_requests() for look in readable]), strict=True):
            look.take_third(answers)
        self._waits.keep(chosen.queues)
        self._maps.keep(chosen.queues)
        if self._held_up:
            self._held_up.keep(chosen.queues)
        seen = [
            QueueSnapshot.sum(
                keys,
                self._maps.served(keys),
                [look.snapshot(now_ms) for look in looks],
                tuple(look.keys.shard for look in parts[keys] if look.is_away),
            )
            for keys, looks in there.items()
        ]
        if chosen.left_out:
            self._in_use = [*unreadable, *(one.keys for one in seen if one.counts.totals or one.counts.alive)]
            self._cursor = chosen.cursor
        return Snapshot(
            seen, unreadable, chosen.left_out, facts, time.monotonic() - started, frozenset(self._maps.lost)
        )

    def _first_looks(
        self, queues: Sequence[Keys], clock_ms: float | None
    ) -> tuple[dict[Keys, list[QueueLook]], float, dict[str, str]]:
        """Ask each shard of `queues` for all that can be asked at once; of shards that are new, in one more trip."""
        due = self._maps.due(queues)
        parts = {keys: [self._look_at(shard) for shard in self._maps.shards(keys)] for keys in queues}
        general: list[Request[Any]] = [
            commands.server_ms(),
            *map(commands.server_facts, INFO_SECTIONS),
            *self._maps.questions(due),
        ]
        looks = [look for some in parts.values() for look in some]
        (time_ms, *told), *rest = self._asked([general, *(look.first_requests() for look in looks)])
        if clock_ms is None and isinstance(time_ms, Exception):
            time_ms = self._client.run(commands.server_ms())  # of another server: the first is known to be away now
        now_ms = time_ms if clock_ms is None else clock_ms
        for look, answers in zip(looks, rest, strict=True):
            look.take_first(answers, now_ms)
        sections, maps = told[: len(INFO_SECTIONS)], told[len(INFO_SECTIONS) :]
        for keys, why in self._maps.learn(due, maps).items():
            parts[keys][0].refusal = str(why)
        self._look_at_new_shards(parts, now_ms)
        return parts, now_ms, self._facts(sections)

    def _facts(self, sections: Sequence[Any]) -> dict[str, str]:
        """Return the fields of INFO: of the server that was asked for `sections`, or of all."""
        if not self._client.has_many:
            return _joined(sections)
        everywhere = self._client.run_everywhere([commands.server_facts(section) for section in INFO_SECTIONS])
        return facts_of([_joined(told) for told in everywhere.values()])

    def _look_at_new_shards(self, parts: Mapping[Keys, list[QueueLook]], now_ms: float) -> None:
        """Look at the shards that a queue has gained, and not at those that it has lost."""
        for keys, looks in parts.items():
            del looks[len(self._maps.shards(keys)) :]
        new = [(looks, shard) for keys, looks in parts.items() for shard in self._maps.shards(keys)[len(looks) :]]
        more = [self._look_at(shard) for _, shard in new]
        for look, answers in zip(more, self._asked([look.first_requests() for look in more]), strict=True):
            look.take_first(answers, now_ms)
        for (looks, _), look in zip(new, more, strict=True):
            looks.append(look)

    def _look_at(self, shard: Keys) -> QueueLook:
        return QueueLook(shard, self._waits, self._held_up)

    def _asked(self, groups: Sequence[Sequence[Request[Any]]]) -> list[list[Any]]:
        """Make groups of requests in one round trip; return the answers of each group."""
        requests = [request for group in groups for request in group]
        answers = iter(self._client.run_all(requests) if requests else ())
        return [list(islice(answers, len(group))) for group in groups]


def _joined(sections: Sequence[Any]) -> dict[str, str]:
    """Return the fields of the sections that were told."""
    return {name: fact for section in sections if isinstance(section, dict) for name, fact in section.items()}


def _refusal(looks: Sequence[QueueLook]) -> str:
    """Return why a queue cannot be read; empty when each of its shards can, or the Redis of some is away."""
    is_partial = not all(look.is_away for look in looks)
    return next((look.refusal for look in looks if look.refusal and not (look.is_away and is_partial)), "")


def registered(client: Client, first: Callable[[], Sequence[Keys]], cursor: int = 0) -> Chosen:
    """Return the queues that workers and producers have noted in the registry: of too many, `first` and some others."""
    size = client.run(commands.registry_size())
    if size <= QUEUES_LIMIT:
        names, at = _page(client, 0, QUEUES_LIMIT)
        while at:
            more, at = _page(client, at, QUEUES_LIMIT)
            names |= more
    else:
        names = {keys.entry: None for keys in first()[:QUEUES_LIMIT]}
        more, at = _page(client, cursor, max(QUEUES_LIMIT - len(names), QUEUES_LIMIT // 10))
        names |= more
    queues = [keys for name in sorted(names) if (keys := Keys.registered(name)) is not None]
    return Chosen(queues, max(0, size - len(names)), at)


def _page(client: Client, cursor: int, count: int) -> tuple[dict[str, None], int]:
    """Return about so many names of the registry, and where the next are."""
    at, entries = client.run(commands.registry_page(cursor, count))
    return dict.fromkeys(entries), at
