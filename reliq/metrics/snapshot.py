"""
Snapshots of Redis for metrics and overviews: the state of queues, and INFO of the servers, in few round trips.

A `QueueLook` asks one shard of a queue, a `SnapshotReader` all shards of many queues at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from reliq.errors import ProtocolError, RedisRefusedError, RedisUnavailableError, WrongKeyTypeError
from reliq.keys import Keys, made_at
from reliq.lua import transitions
from reliq.lua.transitions import KeyQueues
from reliq.message import Counts, Pause
from reliq.metrics.crons import CronState, cron_states
from reliq.redis import commands
from reliq.redis.shards import UNREAD, UNSHARDED, KnownMap, ShardMap, shard_map, witnesses
from reliq.text import shell_command
from reliq.wire_format import DUE_BYTES, envelope_due

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence

    from reliq.redis.client import Client
    from reliq.redis.commands import Call, Request

    #: Makes requests in one round trip; a refused request is answered by its exception.
    RunAll = Callable[[Sequence[Request[Any]]], list[Any]]


#: Fields of INFO that are added up over all servers.
_SUMMED_FACTS = {"connected_clients", "evicted_keys"}
#: The best value of other fields. A server with another value decides.
_BEST_FACTS = {"aof_enabled": "1", "maxmemory_policy": "noeviction"}
#: At most this many blocked keys of a queue are remembered: the keys that were blocked for longest.
HELD_UP_LIMIT = 64
#: At most this many keys are drawn from the sleeping keys, and from the keys with messages in flight.
DRAWN = 50
#: Ids drawn from unack. Their state words show the share of leases and of backoffs in unack.
UNACK_SAMPLE = 200
#: A shard map is read again after this many seconds.
MAPS_SECONDS = 60.0
INFO_SECTIONS = ("server", "memory", "persistence", "stats", "clients")
#: At most this many queues of the registry are in a snapshot: any producer can write names into the registry.
QUEUES_LIMIT = 2000


def facts_of(servers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """
    Merge the fields of INFO of all `servers`.

    The memory fields are the fullest server's. Clients and evicted keys are added up. For eviction and the append-only file
    the worst value counts.
    """
    fullest: Mapping[str, str] = max(servers, key=_fullness, default={})
    facts = dict(fullest)
    for name in _SUMMED_FACTS & facts.keys():
        facts[name] = str(sum(_number(server, name) for server in servers))
    for name, best in _BEST_FACTS.items():
        if worse := [server[name] for server in servers if server.get(name, best) != best]:
            facts[name] = worse[0]
    return facts


def _fullness(facts: Mapping[str, str]) -> tuple[float, int]:
    used = _number(facts, "used_memory")
    return used / (_number(facts, "maxmemory") or _number(facts, "total_system_memory") or 1), used


def _number(facts: Mapping[str, str], field: str) -> int:
    text = facts.get(field, "")
    return int(text) if text.isdigit() else 0


class BlockedKeys:
    """
    Remembers the first message of each key that sleeps, or has all its concurrency in use, from look to look.

    While it is the same message, no message of the key has started. A message that is old because its queue is slow does
    not count. The age of a key is unknown at the first look.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, tuple[str, float]]] = {}

    def request(self, keys: Keys) -> Call[dict[str, str]]:
        """Return the request for the remembered keys, and for some other keys."""
        return transitions.held_up(keys, most=DRAWN, of=[*self._known.get(keys.entry, ())])

    def take(self, keys: Keys, first: Mapping[str, str], now_ms: float) -> float:
        """Take the answer to `request`; return the seconds for which the longest blocked key is known to be blocked."""
        known = self._known.get(keys.entry, {})
        since = {key: known[key][1] if known.get(key, ("",))[0] == id else now_ms for key, id in first.items()}
        longest = sorted(since, key=since.__getitem__)[:HELD_UP_LIMIT]
        self._known[keys.entry] = {key: (first[key], since[key]) for key in longest}
        return max(0.0, now_ms - since[longest[0]]) / 1000 if longest else 0.0

    def keep(self, queues: Sequence[Keys]) -> None:
        """Forget all queues except these."""
        entries = {keys.entry for keys in queues}
        self._known = {entry: keys for entry, keys in self._known.items() if entry in entries}


@dataclass(frozen=True, slots=True)
class Rates:
    """
    The throughput of a queue, in messages a second.

    Attributes:
        arrived: messages published or redriven.
        acked: messages that ended well.
        failed: deliveries that ended in an error, or when their lease expired.
        ended: messages that ended otherwise: dead, expired, cancelled or purged.
        over_seconds: the time in which the messages were counted.
    """

    arrived: float
    acked: float
    failed: float
    ended: float
    over_seconds: float

    @classmethod
    def between(cls, before: Sequence[int], after: Sequence[int], over: float) -> Rates:
        """Return the rates over `over` seconds from the results of `Totals.sums` before and after."""
        moved = (round(max(0, now - earlier) / over, 2) for earlier, now in zip(before, after, strict=True))
        arrived, acked, failed, _, ended = moved
        return cls(arrived, acked, failed, ended, over_seconds=round(over, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot(Counts):
    """
    A queue at a moment: its counts, its lateness and its workers.

    Attributes:
        layout: the layout as `--layout` accepts it: `reliq`, `hdt3213`, `hdt3213:tag`, …
        late: for how many seconds the first waiting message has been due; None when it is unknown, as in Go's layout.
        oldest: state -> the same for the state; in Go's layout without ready and retry, unless they are empty.
        backoff: how many messages of unack wait after a nack, estimated from a sample when unack is large.
        overdue: how many pending messages are due.
        crons: the periodic jobs.
        shards: how many shards may hold messages.
        lines: the key queues with most messages; None in a queue without keys.
        held_up: for how many seconds no message of the longest blocked key has started; None when it was not asked.
        rates: None when they are unknown, or were not asked for.
        workers, slots, busy: the worker processes that claim from the queue, their slots, and the slots that run messages
            of this queue; None when they were not asked for, or the Redis of the worker registry is away.
        pause: the operator's pause and its reason; None when the queue is not paused, or it was not asked.
    """

    queue: str
    layout: str
    late: float | None
    oldest: Mapping[str, float]
    backoff: int
    overdue: int
    crons: Sequence[CronState] = ()
    shards: int = 1
    lines: KeyQueues | None = None
    held_up: float | None = None
    rates: Rates | None = None
    workers: int | None = None
    slots: int | None = None
    busy: int | None = None
    pause: Pause | None = None

    @classmethod
    def of(cls, keys: Keys, counts: Counts, oldest: Mapping[str, float], **others: Any) -> QueueSnapshot:
        """Return the snapshot of a queue or shard, with its lateness."""
        late = max(oldest.values(), default=0.0)
        is_unknown = any(getattr(counts, state) and state not in oldest for state in ("ready", "retry"))
        return cls(
            **{name: getattr(counts, name) for name in Counts.__slots__},
            queue=keys.name,
            layout=str(keys.layout),
            late=late if late or not is_unknown else None,
            oldest=oldest,
            **others,
        )

    @classmethod
    def join(cls, keys: Keys, shards: int, parts: Sequence[QueueSnapshot], away: tuple[int, ...]) -> QueueSnapshot:
        """Merge the snapshots of a queue's shards; the Redis of some may be away."""
        if len(parts) == 1 and not away:
            return parts[0]
        oldest: dict[str, float] = {}
        for part in parts:
            oldest |= {state: max(seconds, oldest.get(state, 0.0)) for state, seconds in part.oldest.items()}
        return cls.of(
            keys,
            Counts.sum(parts, away),
            oldest,
            backoff=sum(part.backoff for part in parts),
            overdue=sum(part.overdue for part in parts),
            crons=parts[0].crons,  # the first shard has all of them
            shards=shards,
            lines=next((part.lines for part in parts if part.lines), None),
            held_up=max((part.held_up for part in parts if part.held_up is not None), default=None),
        )

    @property
    def backlog(self) -> int:
        """How many messages wait for a worker, or for their key."""
        return self.due + self.overdue


class QueueLook:
    """
    Reads the state of one shard of a queue, in three rounds of `requests` and `take`.

    Args:
        blocked_keys: the blocked keys that earlier looks saw; None does not ask for them.

    Attributes:
        requests: the requests of the next round, by name; may be empty.
        refusal: why the shard cannot be read; empty when it can.
        is_away: whether the reason is that Redis is away.
        snapshot: the state; None before the end of the third round.
    """

    def __init__(self, keys: Keys, blocked_keys: BlockedKeys | None = None) -> None:
        self.keys = keys
        self.refusal = ""
        self.is_away = False
        self.snapshot: QueueSnapshot | None = None
        self._rounds = self._look(blocked_keys)
        self.requests = next(self._rounds)

    def take(self, answers: Sequence[Any], now_ms: float) -> None:
        """Take the answers to `requests`. A queue with a spoilt key, or on a server that is away, hides no other queue."""
        try:
            self.requests = self._rounds.send((dict(zip(self.requests, answers, strict=True)), now_ms))
        except StopIteration as end:
            self.snapshot = end.value
        except (RedisRefusedError, ProtocolError, RedisUnavailableError) as error:
            self.requests = {}
            self.refusal = str(error)
            self.is_away = isinstance(error, RedisUnavailableError)

    def _look(
        self, blocked_keys: BlockedKeys | None
    ) -> Generator[dict[str, Request[Any]], tuple[dict[str, Any], float], QueueSnapshot]:
        keys = self.keys
        requests: dict[str, Request[Any]] = {
            "counts": transitions.counts(keys),
            "pending": commands.first_score(keys, "pending"),
            "unack": commands.first_score(keys, "unack"),
            "ready": commands.end_of(keys, "ready"),
            "retry": commands.end_of(keys, "retry"),
            "sample": commands.held_sample(keys, UNACK_SAMPLE),
        }
        if not keys.shard:
            requests["crons"] = cron_states(keys)
        answers, now_ms = yield requests
        crons = answers.pop("crons", ())
        commands.raise_first([*answers.values()])
        counts = answers["counts"]
        due_ms = {place: 1000 * answers[place] for place in ("pending", "unack") if answers[place] is not None}
        # The first message of each list; a bare body has no due time.
        heads = {} if keys.bare else {place: answers[place] for place in ("ready", "retry") if answers[place]}
        requests = {place: commands.body_start(keys, id, DUE_BYTES) for place, id in heads.items()}
        if answers["sample"]:
            requests["words"] = commands.state_words(keys, answers["sample"])
        if due_ms.get("pending", now_ms + 1) <= now_ms:
            requests["overdue"] = commands.due_count(keys, now_ms / 1000)
        if counts.keyed:
            requests["lines"] = transitions.key_queues(keys)
            if blocked_keys:
                requests["blocked"] = blocked_keys.request(keys)
        answers, now_ms = yield requests
        # From here on a refused answer is ignored.
        due_ms |= {place: _due_ms(id, answers[place]) for place, id in heads.items()}
        words, overdue, lines, blocked = map(answers.get, ("words", "overdue", "lines", "blocked"))
        lines = lines if isinstance(lines, KeyQueues) else None
        held_up = blocked_keys.take(keys, blocked, now_ms) if blocked_keys and isinstance(blocked, dict) else None
        waits = sum(word.waits for word in words) / len(words) if isinstance(words, list) else 0
        if lines and lines.next:
            answers, now_ms = yield {"turn": commands.body_start(keys, lines.next, DUE_BYTES)}
            due_ms["waiting"] = _due_ms(lines.next, answers["turn"])
        else:
            yield {}
        oldest = {place: max(0.0, (now_ms - due) / 1000) for place, due in due_ms.items() if due is not None}
        for place in ("pending", "unack", "ready", "retry"):
            if not getattr(counts, place):  # in an empty state nothing is late
                oldest.setdefault(place, 0.0)
        return QueueSnapshot.of(
            keys,
            counts,
            oldest,
            backoff=round(counts.unack * waits),
            overdue=overdue if isinstance(overdue, int) else 0,
            crons=crons if isinstance(crons, list) else (),
            lines=lines,
            held_up=held_up,
        )


def _due_ms(id: str, start: Any) -> int | None:
    """Return the due time of a message, from the start of its value or else from its id; None when unknown."""
    due = envelope_due(start) if isinstance(start, bytes) else None
    return made_at(id) if due is None else due


class ShardMaps:
    """
    The shard maps of queues that are read repeatedly.

    Args:
        whole: ask all shards of each queue; false asks only the shard that the queue's keys name.
    """

    def __init__(self, *, whole: bool = True) -> None:
        self._whole = whole
        self._known: dict[str, KnownMap] = {}

    @property
    def lost(self) -> frozenset[str]:
        """The registry's entries of queues without their map, because Redis has lost it."""
        return frozenset(entry for entry, known in self._known.items() if known.map.is_lost)

    def ask(
        self,
        run_all: RunAll,
        queues: Sequence[Keys],
        make: Callable[[Keys], Iterable[Request[Any]]],
        along: Sequence[Request[Any]] = (),
    ) -> tuple[dict[Keys, list[tuple[Keys, list[Any]]]], dict[Keys, Exception], list[Any]]:
        """
        Make requests for each shard of each queue in one round trip, and in another for shards that were unknown.

        Returns:
            The answers by queue, in the order of its shards; the queues with an unreadable map, with the error; the answers to `along`.
        """
        now = time.monotonic()
        due = [
            keys
            for keys in queues
            if self._whole and not keys.bare and self._known.get(keys.entry, UNREAD).until <= now
        ]
        known = [(keys, shard) for keys in queues for shard in self.shards(keys)]
        maps = [[shard_map(keys), *witnesses(keys)] for keys in due]
        extra, *answers = run_groups(run_all, [along, *maps, *(make(shard) for _, shard in known)])
        refused = {}
        for keys, (answer, *fences) in zip(due, answers, strict=False):
            if error := self._learn(keys, answer, fences):
                refused[keys] = error
        found: dict[Keys, list[tuple[Keys, list[Any]]]] = {keys: [] for keys in queues}
        for (keys, shard), answer in zip(known, answers[len(due) :], strict=True):
            found[keys].append((shard, answer))
        new = [(keys, shard) for keys in queues for shard in self.shards(keys)[len(found[keys]) :]]
        for (keys, shard), answer in zip(new, run_groups(run_all, [make(shard) for _, shard in new]), strict=True):
            found[keys].append((shard, answer))
        return {keys: shards[: len(self.shards(keys))] for keys, shards in found.items()}, refused, extra

    def _learn(self, keys: Keys, answer: Any, fences: Sequence[Any]) -> Exception | None:
        """
        Take the map of a queue and the fences that show whether it is lost; return why the queue cannot be read.

        A map that this user may not read changes nothing. Nor does a map on a Redis that is away, when it was read before.
        """
        answer = ShardMap.or_fenced(answer, fences)
        known = self._known.get(keys.entry)
        if isinstance(answer, RedisUnavailableError) and known:
            return None
        refused = isinstance(answer, WrongKeyTypeError | ProtocolError | RedisUnavailableError)
        if not refused and not isinstance(answer, ShardMap | RedisRefusedError):
            raise answer
        map = (known or UNREAD).map
        if isinstance(answer, ShardMap):
            map = UNSHARDED.or_later(fences).unless(answer)
        # A lost map is read again at the next look.
        self._known[keys.entry] = KnownMap(map, 0.0 if map.is_lost else time.monotonic() + MAPS_SECONDS)
        return map_error(answer, keys) if refused else None

    def shards(self, keys: Keys) -> list[Keys]:
        """Return the keys of each known shard of a queue, abandoned shards included."""
        ever = self._known.get(keys.entry, UNREAD).map.ever if self._whole else 1
        return [keys] if ever == 1 else [keys.of_shard(shard) for shard in range(ever)]

    def served(self, keys: Keys) -> int:
        """Return how many known shards of a queue may hold messages."""
        return self._known.get(keys.entry, UNREAD).map.served

    def keep(self, queues: Sequence[Keys]) -> None:
        """Forget all other queues."""
        entries = {keys.entry for keys in queues}
        self._known = {entry: known for entry, known in self._known.items() if entry in entries}


def run_groups(run_all: RunAll, groups: Iterable[Iterable[Request[Any]]]) -> list[list[Any]]:
    """Make groups of requests in one round trip; return the answers of each group."""
    listed = [[*group] for group in groups]
    requests = [request for group in listed for request in group]
    answers = iter(run_all(requests) if requests else ())
    return [list(islice(answers, len(group))) for group in listed]


def map_error(error: Exception, keys: Keys) -> Exception:
    """Return the error for a map that cannot be read; it names the key when the value in Redis is no map."""
    if not isinstance(error, ProtocolError):
        return error
    return ProtocolError(
        f"the Redis key {keys.map!r} does not say how many shards the queue has; something else wrote it. "
        f"Mend it: {shell_command('check', keys.name, options=['--repair'], layout=keys.layout)}"
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    The state of Redis at a moment.

    Attributes:
        unreadable: the queues that cannot be read, with the reason.
        left_out: how many more queues the registry has.
        facts: the fields of INFO; empty where this user may not read it.
        seconds: how long the snapshot took.
        lost: the registry's entries of the queues without their shard map, because Redis has lost it.
    """

    queues: Mapping[Keys, QueueSnapshot]
    unreadable: Mapping[Keys, str]
    left_out: int
    facts: Mapping[str, str]
    seconds: float
    lost: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """
    A choice of queues.

    Attributes:
        left_out: how many more queues the registry has.
        cursor: where in the registry the next choice continues; 0 at its start.
    """

    queues: Sequence[Keys]
    left_out: int = 0
    cursor: int = 0


class SnapshotReader:
    """
    Reads snapshots of queues through a client.

    Args:
        queues: returns the queues; None means all queues in the registry. When they are too many, the queues that were in
            use at the last look come first, and the others take turns.
        maps: the shard maps that earlier looks read; None reads them again.
        held_up: the blocked keys that earlier looks saw; None does not ask for them.
    """

    def __init__(
        self,
        client: Client,
        queues: Callable[[], Sequence[Keys]] | None = None,
        maps: ShardMaps | None = None,
        held_up: BlockedKeys | None = None,
    ) -> None:
        self._client = client
        self._queues = queues
        self._maps = maps or ShardMaps()
        self._blocked_keys = held_up
        self._in_use: list[Keys] = []
        self._cursor = 0

    def look(self, clock_ms: float | None = None) -> Snapshot:
        """
        Return the state of Redis now; `clock_ms` replaces Redis' clock.

        Raises:
            RedisUnavailableError, RedisRefusedError: Redis does not answer, or refuses.
        """
        started = time.monotonic()
        if self._queues is None:
            chosen = registered(self._client, lambda: self._in_use, self._cursor)
        else:
            chosen = Selection(self._queues())
        looks: dict[Keys, QueueLook] = {}

        def requests(shard: Keys) -> Iterable[Request[Any]]:
            look = looks[shard] = QueueLook(shard, self._blocked_keys)
            return look.requests.values()

        facts = [commands.server_facts(section) for section in INFO_SECTIONS]
        found, refused, (time_ms, *sections) = self._maps.ask(
            self._client.run_all, chosen.queues, requests, [commands.server_ms(), *facts]
        )
        servers = [*self._client.run_everywhere(facts).values()] if self._client.has_many else [sections]
        if clock_ms is None and isinstance(time_ms, Exception):
            time_ms = self._client.run(commands.server_ms())  # of another server: the first is known to be away now
        now_ms = time_ms if clock_ms is None else clock_ms
        for shard, answers in chain.from_iterable(found.values()):
            looks[shard].take(answers, now_ms)
        for _second_and_third in range(2):
            asked = [*looks.values()]
            groups = run_groups(self._client.run_all, [look.requests.values() for look in asked])
            for look, answers in zip(asked, groups, strict=True):
                look.take(answers, now_ms)
        self._maps.keep(chosen.queues)
        if self._blocked_keys:
            self._blocked_keys.keep(chosen.queues)
        snapshots: dict[Keys, QueueSnapshot] = {}
        unreadable = {keys: str(error) for keys, error in refused.items()}
        for keys, shards in found.items():
            parts = [looks[shard] for shard, _ in shards]
            away = tuple(look.keys.shard for look in parts if look.is_away)
            # A queue is shown in part when some of its shards are away, and not at all when a shard is spoilt.
            why = [look.refusal for look in parts if look.refusal and (not look.is_away or len(away) == len(parts))]
            if keys not in unreadable and why:
                unreadable[keys] = why[0]
            if keys not in unreadable:
                seen = [look.snapshot for look in parts if look.snapshot]
                snapshots[keys] = QueueSnapshot.join(keys, self._maps.served(keys), seen, away)
        if chosen.left_out:
            used = (keys for keys, queue in snapshots.items() if queue.totals or queue.alive)
            self._in_use = [*unreadable, *used]
            self._cursor = chosen.cursor
        seconds = time.monotonic() - started
        return Snapshot(
            snapshots, unreadable, chosen.left_out, facts_of([*map(_joined, servers)]), seconds, self._maps.lost
        )


def _joined(sections: Sequence[Any]) -> dict[str, str]:
    """Return the fields of the sections that this user may read."""
    return {name: fact for section in sections if isinstance(section, dict) for name, fact in section.items()}


def registered(client: Client, first: Callable[[], Sequence[Keys]], cursor: int = 0) -> Selection:
    """Return the queues that workers and producers wrote into the registry; of too many, `first` and some others."""
    size = client.run(commands.registry_size())
    if size <= QUEUES_LIMIT:
        at, entries = client.run(commands.registry_page(0, QUEUES_LIMIT))
        names = set(entries)
        while at:
            at, entries = client.run(commands.registry_page(at, QUEUES_LIMIT))
            names.update(entries)
    else:
        names = {keys.entry for keys in first()[:QUEUES_LIMIT]}
        at, entries = client.run(commands.registry_page(cursor, max(QUEUES_LIMIT - len(names), QUEUES_LIMIT // 10)))
        names.update(entries)
    queues = [keys for name in sorted(names) if (keys := Keys.registered(name)) is not None]
    return Selection(queues, max(0, size - len(names)), at)
