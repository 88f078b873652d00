"""INFO of many servers as one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from reliq.errors import ProtocolError, RedisRefusedError, RedisUnavailableError, WrongKeyTypeError
from reliq.keys import Keys, made_at
from reliq.lua import transitions
from reliq.lua.transitions import KeyQueues
from reliq.message import Counts
from reliq.redis import commands
from reliq.redis.commands import LISTS
from reliq.redis.shards import UNSHARDED, WITNESSES, ShardMap, shard_map, witnesses
from reliq.schedule import CronState, cron_states
from reliq.text import shell_command
from reliq.wire_format import DUE_BYTES, envelope_due

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reliq.redis.client import Client
    from reliq.redis.commands import Call, Command, Request


#: Fields that are added up.
_SUMS = {"connected_clients", "evicted_keys"}
#: Fields of which another value than this one is told, whichever server has it.
_BEST = {"aof_enabled": "1", "maxmemory_policy": "noeviction"}


def facts_of(servers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """
    Return the fields of INFO for all of `servers`.

    Memory is that of the fullest one, clients and evicted keys are summed up; of eviction and the append-only file the
    worst is told.
    """
    fullest: Mapping[str, str] = max(servers, key=_fullness, default={})
    found = dict(fullest)
    for name in _SUMS & fullest.keys():
        found[name] = str(sum(_number(one, name) for one in servers))
    for name, best in _BEST.items():
        worse = [one[name] for one in servers if one.get(name, best) != best]
        found.update(zip([name], worse, strict=False))
    return found


def _fullness(facts: Mapping[str, str]) -> tuple[float, int]:
    used = _number(facts, "used_memory")
    return used / (_number(facts, "maxmemory") or _number(facts, "total_system_memory") or 1), used


def _number(facts: Mapping[str, str], field: str) -> int:
    text = facts.get(field, "")
    return int(text) if text.isdigit() else 0


#: Keys of a queue that are remembered at most, those held up for longest.
HELD_UP_LIMIT = 64
#: Keys that a look draws among those that sleep, and among those that have places.
DRAWN = 50


class BlockedKeys:
    """
    Remembers from look to look which message stood first under keys that sleep, or whose places are taken.

    As long as it is the same one, nothing of its key has started: a message that is old because its queue is slow does
    not count. The first look at a key tells nothing.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, tuple[str, float]]] = {}

    def question(self, keys: Keys) -> Call[dict[str, str]]:
        """Return what asks for the keys that were remembered, and for some others."""
        return transitions.held_up(keys, most=DRAWN, of=[*self._known.get(keys.entry, ())])

    def take(self, keys: Keys, first: Mapping[str, str], now_ms: float) -> float:
        """Take the answer to `question`; return for how many seconds the key is known to wait that waits for longest."""
        known = self._known.get(keys.entry, {})
        since = {key: known[key][1] if known.get(key, ("",))[0] == id else now_ms for key, id in first.items()}
        longest = sorted(since, key=since.__getitem__)[:HELD_UP_LIMIT]
        self._known[keys.entry] = {key: (first[key], since[key]) for key in longest}
        return max(0.0, now_ms - since[longest[0]]) / 1000 if longest else 0.0

    def keep(self, queues: Sequence[Keys]) -> None:
        """Forget every queue but these."""
        entries = {keys.entry for keys in queues}
        self._known = {entry: keys for entry, keys in self._known.items() if entry in entries}


#: Ids drawn from unack; their state words tell how many of all are leased and how many wait.
UNACK_SAMPLE = 200


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """
    One queue at one moment.

    Attributes:
        oldest: state -> seconds since its first message was due; empty in Go's layout, whose bodies have no due time.
        backoff: how many of unack wait after a nack.
        overdue: how many pending messages are due.
        crons: its periodic entries.
        shards: how many shards may hold messages.
        lines: of the keys with most messages; None in a queue without keys.
        held_up: for how many seconds nothing has started of the key that waits longest without a turn; None when that was
            not asked.
    """

    keys: Keys
    counts: Counts
    oldest: Mapping[str, float]
    backoff: int
    overdue: int
    crons: Sequence[CronState] = ()
    shards: int = 1
    lines: KeyQueues | None = None
    held_up: float | None = None

    @classmethod
    def sum(cls, keys: Keys, shards: int, parts: Sequence[QueueSnapshot], away: tuple[int, ...]) -> QueueSnapshot:
        """Return the snapshot of a queue from those of its shards; the Redis of some may be away."""
        if len(parts) == 1 and not away:
            return parts[0]
        oldest: dict[str, float] = {}
        for part in parts:
            oldest |= {state: max(seconds, oldest.get(state, 0.0)) for state, seconds in part.oldest.items()}
        return cls(
            keys,
            Counts.sum([part.counts for part in parts], away),
            oldest,
            sum(part.backoff for part in parts),
            sum(part.overdue for part in parts),
            parts[0].crons,  # the first shard has them all
            shards,
            next((part.lines for part in parts if part.lines), None),
            max((part.held_up for part in parts if part.held_up is not None), default=None),
        )

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.keys.name

    @property
    def backlog(self) -> int:
        """How many messages wait for a worker, or for the turn of their key."""
        return self.counts.due + self.overdue


class QueueLook:
    """
    One look at one queue: three times requests and the taking of their answers, then `snapshot`.

    Args:
        held_up: what earlier looks saw of keys without a turn; None does not ask for them.

    Attributes:
        refusal: why nothing can be read of the queue; empty when there is no reason.
        is_away: whether it is that Redis is away.
    """

    def __init__(self, keys: Keys, held_up: BlockedKeys | None = None) -> None:
        self.keys = keys
        self._held_up = held_up
        self.refusal, self.is_away = "", False
        self._told: dict[str, Any] = {}
        self._due_ms: dict[str, float] = {}
        self._waiting = 0.0
        self._now_ms = 0.0
        self._overdue = 0
        self._crons = list[CronState]()
        self._lines: KeyQueues | None = None
        self._held_seconds: float | None = None

    def first_requests(self) -> list[Request[Any]]:
        """Return what can be asked at once."""
        periodic = [] if self.keys.shard else [cron_states(self.keys)]
        return [*self._questions().values(), *periodic]

    def take_first(self, answers: Sequence[Any], now_ms: float) -> None:
        """Take the answers to `first_requests`; a queue with a spoilt key, or whose server is away, hides no other."""
        self._told, self._now_ms = dict(zip(self._questions(), answers, strict=False)), now_ms
        periodic = answers[len(self._told)] if not self.keys.shard else []
        self._crons = periodic if isinstance(periodic, list) else []
        for answer in self._told.values():
            if isinstance(answer, RedisRefusedError | ProtocolError | RedisUnavailableError):
                self.refusal, self.is_away = str(answer), isinstance(answer, RedisUnavailableError)
                return
            if isinstance(answer, Exception):
                raise answer
        scores = {place: self._told[place] for place in ("pending", "unack")}
        self._due_ms = {place: 1000 * score for place, score in scores.items() if score is not None}

    def second_requests(self) -> list[Request[Any]]:
        """Return what the first answers lead to: due times of first messages, and state words."""
        if self.refusal:
            return []
        asked: list[Request[Any]] = [commands.body_start(self.keys, id, DUE_BYTES) for id in self._heads().values()]
        if self._told["sample"]:
            asked.append(commands.state_words(self.keys, self._told["sample"]))
        if self._is_overdue:
            asked.append(commands.due_count(self.keys, self._now_ms / 1000))
        if self._told["counts"].keyed:
            asked.append(transitions.lines(self.keys))
            if self._held_up:
                asked.append(self._held_up.question(self.keys))
        return asked

    def take_second(self, answers: Sequence[Any], now_ms: float) -> None:
        """Take the answers to `second_requests`; one that was refused is passed over."""
        rest = iter(answers)
        for place, id in self._heads().items():
            self._take_due(place, id, next(rest))
        if self._told["sample"] and isinstance(words := next(rest), list):
            self._waiting = sum(word.waits for word in words) / len(words)
        if self._is_overdue and isinstance(overdue := next(rest), int):
            self._overdue = overdue
        if self._told["counts"].keyed and isinstance(lines := next(rest), KeyQueues):
            self._lines = lines
        first = next(rest, None)
        if self._held_up and isinstance(first, dict):
            self._held_seconds = self._held_up.take(self.keys, first, now_ms)

    def third_requests(self) -> list[Request[Any]]:
        """Return what the second answers lead to: the due time of the message whose turn is next."""
        return [commands.body_start(self.keys, self._lines.next, DUE_BYTES)] if self._lines and self._lines.next else []

    def take_third(self, answers: Sequence[Any]) -> None:
        """Take the answers to `third_requests`."""
        for answer in answers:
            self._take_due("waiting", self._lines.next if self._lines else "", answer)

    def snapshot(self, now_ms: float) -> QueueSnapshot:
        """Return what was seen; an empty state has nothing late."""
        counts: Counts = self._told["counts"]
        oldest: dict[str, float] = {}
        if not self.keys.bare:
            oldest = {place: max(0.0, (now_ms - due) / 1000) for place, due in self._due_ms.items()}
            for place in ("pending", "unack", *LISTS):
                if not getattr(counts, place):
                    oldest.setdefault(place, 0.0)
        waiting = round(counts.unack * self._waiting)
        return QueueSnapshot(
            self.keys,
            counts,
            oldest,
            waiting,
            self._overdue,
            self._crons,
            lines=self._lines,
            held_up=self._held_seconds,
        )

    def _take_due(self, place: str, id: str, start: Any) -> None:
        """Note since when the first message of a place has been due, by the start of its value, or else by its id."""
        due = envelope_due(start) if isinstance(start, bytes) else None
        due = made_at(id) if due is None else due
        if due is not None:
            self._due_ms[place] = due

    @property
    def _is_overdue(self) -> bool:
        """Whether the first pending message is due: the rest is asked about only then."""
        return self._due_ms.get("pending", self._now_ms + 1) <= self._now_ms

    def _questions(self) -> dict[str, Request[Any]]:
        return {
            "counts": transitions.counts(self.keys),
            "pending": commands.first_score(self.keys, "pending"),
            "unack": commands.first_score(self.keys, "unack"),
            "ready": commands.end_of(self.keys, "ready"),
            "retry": commands.end_of(self.keys, "retry"),
            "sample": commands.held_sample(self.keys, UNACK_SAMPLE),
        }

    def _heads(self) -> dict[str, str]:
        """Return the first message of each list whose bodies tell when they are due."""
        return {} if self.keys.bare else {place: self._told[place] for place in LISTS if self._told[place]}


#: A look reads a map again after this many seconds.
MAPS_SECONDS = 60.0


class ShardMaps:
    """
    The maps of queues that are looked at again and again.

    Args:
        whole: whether queues are meant with all of their shards; else each by the shard that its keys name.

    Attributes:
        lost: the registry's entries of queues whose map Redis has lost.
    """

    def __init__(self, *, whole: bool = True) -> None:
        self._whole = whole
        self.lost = set[str]()
        self._read_at: dict[str, float] = {}
        self._shards: dict[str, list[Keys]] = {}
        self._served: dict[str, int] = {}

    def due(self, queues: Sequence[Keys]) -> list[Keys]:
        """Return those of `queues` whose maps are to be read."""
        if not self._whole:
            return []
        old = time.monotonic() - MAPS_SECONDS
        return [keys for keys in queues if not keys.bare and self._read_at.get(keys.entry, old) <= old]

    def questions(self, queues: Sequence[Keys]) -> list[Command[Any]]:
        """Return what reads the maps of `queues`, and the fences that show whether one is lost."""
        return [one for keys in queues for one in (shard_map(keys), *witnesses(keys))]

    def learn(self, queues: Sequence[Keys], answers: Sequence[Any]) -> dict[Keys, Exception]:
        """
        Take the answers to `questions`; return which queues cannot be read, with the error.

        A map that this user may not read changes nothing: the rule of an earlier version knows of none. Nor does one whose
        Redis is away, when it was read before.
        """
        refused = dict[Keys, Exception]()
        each = iter(answers)
        for keys in queues:
            answer, *told = islice(each, 1 + WITNESSES)
            answer = ShardMap.or_fenced(answer, told)
            if isinstance(answer, RedisUnavailableError) and keys.entry in self._read_at:
                continue
            if isinstance(answer, WrongKeyTypeError | ProtocolError | RedisUnavailableError):
                refused[keys] = named(answer, keys)
            elif isinstance(answer, ShardMap):
                map = UNSHARDED.or_later(told).unless(answer)
                self._note(keys, map)
                self.lost.discard(keys.entry)
                if map.is_lost:
                    self.lost.add(keys.entry)
                    continue  # it is read again at the next look
            elif not isinstance(answer, RedisRefusedError):
                raise answer
            self._read_at[keys.entry] = time.monotonic()
        return refused

    def shards(self, keys: Keys) -> list[Keys]:
        """Return the keys of every shard of a queue, and of those that are no more, as far as it is known."""
        return self._shards.get(keys.entry, [keys]) if self._whole else [keys]

    def served(self, keys: Keys) -> int:
        """Return how many shards of a queue may hold messages, as far as it is known."""
        return self._served.get(keys.entry, 1)

    def keep(self, queues: Sequence[Keys]) -> None:
        """Forget every queue but these."""
        entries = {keys.entry for keys in queues}
        self._read_at = {entry: at for entry, at in self._read_at.items() if entry in entries}
        self._shards = {entry: known for entry, known in self._shards.items() if entry in entries}
        self._served = {entry: known for entry, known in self._served.items() if entry in entries}
        self.lost &= entries

    def _note(self, keys: Keys, found: ShardMap) -> None:
        self._served[keys.entry] = found.served
        if found.ever == 1:
            self._shards.pop(keys.entry, None)
        elif len(self._shards.get(keys.entry, ())) != found.ever:
            self._shards[keys.entry] = [keys.of_shard(shard) for shard in range(found.ever)]


def named(error: Exception, keys: Keys) -> Exception:
    """Return why a map cannot be read, with its key where Redis has said something that is none."""
    if not isinstance(error, ProtocolError):
        return error
    return ProtocolError(
        f"the Redis key {keys.map!r} does not say how many shards the queue has; something else wrote it. "
        f"Mend it: {shell_command('check', keys.name, options=['--repair'], layout=keys.layout)}"
    )


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
class Selection:
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
        maps: how many shards queues have, as earlier looks read it; None begins anew.
        held_up: what earlier looks saw of keys without a turn; None does not ask for them.
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
            Selection(self._queues()) if self._queues else registered(self._client, lambda: self._in_use, self._cursor)
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
        return QueueLook(shard, self._held_up)

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


def registered(client: Client, first: Callable[[], Sequence[Keys]], cursor: int = 0) -> Selection:
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
    return Selection(queues, max(0, size - len(names)), at)


def _page(client: Client, cursor: int, count: int) -> tuple[dict[str, None], int]:
    """Return about so many names of the registry, and where the next are."""
    at, entries = client.run(commands.registry_page(cursor, count))
    return dict.fromkeys(entries), at
