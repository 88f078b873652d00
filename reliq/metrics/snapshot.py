"""
Read the state of queues and of Redis servers in few round trips, for metrics and overviews.

A `QueueLook` reads one shard of a queue; a `SnapshotReader` reads all shards of many queues at once.
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

    #: A function that sends requests to Redis in one round trip, and returns their results.
    #: If Redis refuses a request, the result of this request is the exception.
    RunAll = Callable[[Sequence[Request[Any]]], list[Any]]


#: `BlockedKeys` remembers at most this many keys of a queue: the keys that have been blocked for the longest time.
HELD_UP_LIMIT = 64
#: To find blocked keys, each snapshot samples up to this many throttled keys, and up to this many running messages.
DRAWN = 50
#: How many ids of unack messages are sampled, to estimate the share of messages that wait for their backoff.
UNACK_SAMPLE = 200
#: The shard map of a queue is read again after this many seconds.
MAPS_SECONDS = 60.0
SERVER_FACTS = [commands.server_facts(section) for section in ("server", "memory", "persistence", "stats", "clients")]
#: A snapshot contains at most this many queues of the queue registry, because any producer can add names to it.
QUEUES_LIMIT = 2000


class BlockedKeys:
    """
    Measures for how long message keys have been blocked.

    A key is blocked while it is throttled, paused or at its concurrency limit. A key that only waits for a free worker
    is not blocked.

    This class remembers the first waiting message of each blocked key between snapshots. While the first message stays
    the same, no message of the key has started. The duration counts from the first snapshot in which the key is
    blocked.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, tuple[str, float]]] = {}

    def request(self, keys: Keys) -> Call[dict[str, str]]:
        """Return the script call that reads the first message of the known blocked keys and of a sample of keys."""
        return transitions.held_up(keys, most=DRAWN, of=[*self._known.get(keys.entry, ())])

    def take(self, keys: Keys, first: Mapping[str, str], now_ms: float) -> float:
        """
        Store the result of the script call, and return the longest time in seconds for which a key has been blocked.

        Args:
            keys: the queue.
            first: the id of the first waiting message, by message key.
            now_ms: the current time in unix milliseconds.
        """
        known = self._known.get(keys.entry, {})
        since = {key: known[key][1] if known.get(key, ("",))[0] == id else now_ms for key, id in first.items()}
        longest = sorted(since, key=since.__getitem__)[:HELD_UP_LIMIT]
        self._known[keys.entry] = {key: (first[key], since[key]) for key in longest}
        return max(0.0, now_ms - since[longest[0]]) / 1000 if longest else 0.0

    def keep(self, queues: Sequence[Keys]) -> None:
        """Forget the blocked keys of all queues except `queues`."""
        entries = {keys.entry for keys in queues}
        self._known = {entry: keys for entry, keys in self._known.items() if entry in entries}


@dataclass(frozen=True, slots=True)
class Rates:
    """
    The throughput of a queue, in messages a second.

    Attributes:
        arrived: messages published or redriven.
        acked: messages that handlers finished successfully.
        failed: attempts that ended with an error or an expired lease.
        ended: messages that ended without an ack: dead, expired, cancelled or purged.
        over_seconds: the seconds between the two counts from which the rates were computed.
    """

    arrived: float
    acked: float
    failed: float
    ended: float
    over_seconds: float

    @classmethod
    def between(cls, before: Sequence[int], after: Sequence[int], over: float) -> Rates:
        """Compute the rates from two results of `Totals.sums` that were read `over` seconds apart."""
        moved = (round(max(0, now - earlier) / over, 2) for earlier, now in zip(before, after, strict=True))
        arrived, acked, failed, _, ended = moved
        return cls(arrived, acked, failed, ended, over_seconds=round(over, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot(Counts):
    """
    The state of a queue at one time: its counts, its lateness and its workers.

    Attributes:
        layout: the layout as `--layout` accepts it: `reliq`, `hdt3213`, `hdt3213:tag`, …
        late: for how many seconds the oldest due message has waited; None if it cannot be computed, as in Go's layout.
        oldest: for how many seconds the oldest due message of each state has waited. Go's layout stores no due times:
            the value for ready or retry is missing while this state has messages.
        backoff: how many messages in unack wait for their backoff; estimated from a sample if unack is large.
        overdue: how many pending messages are due.
        crons: the periodic jobs of the queue.
        shards: how many shards may contain messages.
        lines: counts of the key queues, and the largest key queues; None in a queue without message keys.
        held_up: for how many seconds no message of the longest blocked key has started; None if it was not read.
        rates: the throughput; None if it is not known or was not requested.
        workers, slots, busy: how many worker processes claim from the queue, how many slots they have, and how many of
            these slots run messages of this queue; None if it is not known or was not requested.
        pause: the operator's pause and its reason; None if the queue is not paused, or the pause was not requested.
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
        """Return the snapshot of a queue or shard; compute `late` from `oldest`."""
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
        """Merge the snapshots `parts` of a queue's shards; `away` are the shards whose Redis server is unavailable."""
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
            crons=parts[0].crons,  # periodic jobs are stored in shard 0
            shards=shards,
            lines=next((part.lines for part in parts if part.lines), None),
            held_up=max((part.held_up for part in parts if part.held_up is not None), default=None),
        )

    @property
    def backlog(self) -> int:
        """How many due messages wait for a worker, for their message key, or because of a limit."""
        return self.due + self.overdue


class QueueLook:
    """
    Reads the state of one shard of a queue in three rounds of requests.

    In each round, the caller sends the requests in `requests` to Redis, and passes their results to `take`.

    Args:
        blocked_keys: the blocked keys of earlier snapshots; None if the snapshot does not measure blocked keys.

    Attributes:
        requests: the requests of the next round, by name; may be empty.
        refusal: why the shard cannot be read; empty if it can be read.
        is_away: whether the shard cannot be read because Redis is unavailable.
        snapshot: the state of the shard; None before the end of the third round.
    """

    def __init__(self, keys: Keys, blocked_keys: BlockedKeys | None = None) -> None:
        self.keys = keys
        self.refusal = ""
        self.is_away = False
        self.snapshot: QueueSnapshot | None = None
        self._rounds = self._look(blocked_keys)
        self.requests = next(self._rounds)

    def take(self, answers: Sequence[Any], now_ms: float) -> None:
        """
        Process the results of `requests`. Set `requests` to the requests for the next round trip.

        If the shard cannot be read, store the error in `refusal` instead of raising it, so that the snapshot still
        contains the other queues.
        """
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
        # Read the due time of the first message of each list. Messages in Go's layout contain no due time.
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
        # From here on, ignore the errors of requests, because the snapshot is useful without their results.
        due_ms |= {place: due_time_ms(id, answers[place]) for place, id in heads.items()}
        words, overdue, lines, blocked = map(answers.get, ("words", "overdue", "lines", "blocked"))
        lines = lines if isinstance(lines, KeyQueues) else None
        held_up = blocked_keys.take(keys, blocked, now_ms) if blocked_keys and isinstance(blocked, dict) else None
        waits = sum(word.waits for word in words) / len(words) if isinstance(words, list) else 0
        if lines and lines.next:
            answers, now_ms = yield {"turn": commands.body_start(keys, lines.next, DUE_BYTES)}
            due_ms["waiting"] = due_time_ms(lines.next, answers["turn"])
        else:
            yield {}
        oldest = {place: max(0.0, (now_ms - due) / 1000) for place, due in due_ms.items() if due is not None}
        for place in ("pending", "unack", "ready", "retry"):
            if not getattr(counts, place):  # a state without messages has no late message
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


def due_time_ms(id: str, start: Any) -> int | None:
    """
    Return the due time of a message in unix milliseconds; None if it cannot be read.

    `start` contains the first bytes of the message as Redis stores it. If they contain no due time, use the id.
    """
    due = envelope_due(start) if isinstance(start, bytes) else None
    return made_at(id) if due is None else due


class ShardMaps:
    """
    A cache of the shard maps of queues that are read repeatedly.

    Args:
        whole: True to read all shards of each queue; False to read only the shard of the given `Keys`.
    """

    def __init__(self, *, whole: bool = True) -> None:
        self._whole = whole
        self._known: dict[str, KnownMap] = {}

    @property
    def lost(self) -> frozenset[str]:
        """The registry entries of queues whose shard map Redis has lost."""
        return frozenset(entry for entry, known in self._known.items() if known.map.is_lost)

    def ask(
        self,
        run_all: RunAll,
        queues: Sequence[Keys],
        make: Callable[[Keys], Iterable[Request[Any]]],
        along: Sequence[Request[Any]] = (),
    ) -> tuple[dict[Keys, list[tuple[Keys, list[Any]]]], dict[Keys, Exception], list[Any]]:
        """
        Send the requests that `make` returns, for each shard of each queue.

        The requests for known shards take one round trip. If a map shows new shards, a second round trip follows.

        Args:
            run_all: sends requests in one round trip and returns their results.
            queues: the queues.
            make: a function that returns the requests for a shard.
            along: additional requests for the first round trip.

        Returns:
            Three values. The first value contains, for each queue, its shards in order, each with the results of its
            requests. The second value contains the error of each queue whose map cannot be read. The third value
            contains the results of `along`.
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
        Store the shard map of a queue; return the error if the queue cannot be read.

        If the Redis user may not read the map, or if Redis is unavailable, keep the map that is already known.

        Args:
            answer: the map in Redis, or the error of the request that reads it.
            fences: the fences (copies of the map) of some shards, which show whether Redis has lost the map.
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
        # If Redis has lost the map, read it again for the next snapshot.
        self._known[keys.entry] = KnownMap(map, 0.0 if map.is_lost else time.monotonic() + MAPS_SECONDS)
        return map_error(answer, keys) if refused else None

    def shards(self, keys: Keys) -> list[Keys]:
        """Return the `Keys` of each known shard of a queue, including shards that a resize removed."""
        ever = self._known.get(keys.entry, UNREAD).map.ever if self._whole else 1
        return [keys] if ever == 1 else [keys.of_shard(shard) for shard in range(ever)]

    def served(self, keys: Keys) -> int:
        """Return how many known shards of a queue may contain messages."""
        return self._known.get(keys.entry, UNREAD).map.served

    def keep(self, queues: Sequence[Keys]) -> None:
        """Forget the shard maps of all queues except `queues`."""
        entries = {keys.entry for keys in queues}
        self._known = {entry: known for entry, known in self._known.items() if entry in entries}


def run_groups(run_all: RunAll, groups: Iterable[Iterable[Request[Any]]]) -> list[list[Any]]:
    """Send groups of requests to Redis in one round trip; return the list of results of each group."""
    listed = [[*group] for group in groups]
    requests = [request for group in listed for request in group]
    answers = iter(run_all(requests) if requests else ())
    return [list(islice(answers, len(group))) for group in listed]


def map_error(error: Exception, keys: Keys) -> Exception:
    """Return the error for a shard map that cannot be read; for an invalid map, name the command that repairs it."""
    if not isinstance(error, ProtocolError):
        return error
    return ProtocolError(
        f"the Redis key {keys.map!r} is not a valid shard map; another program wrote it. "
        f"Repair it: {shell_command('check', keys.name, options=['--repair'], layout=keys.layout)}"
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    The state of several queues at one time.

    Attributes:
        queues: the state of each readable queue.
        unreadable: the reason why a queue cannot be read, for each unreadable queue.
        left_out: how many queues of the registry are not in the snapshot, because there are too many.
        lost: the registry entries of queues whose shard map Redis has lost.
    """

    queues: Mapping[Keys, QueueSnapshot]
    unreadable: Mapping[Keys, str]
    left_out: int
    lost: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """
    The queues that a snapshot reads.

    Attributes:
        left_out: how many queues of the registry are not selected, because there are too many.
        cursor: the SCAN cursor of the registry at which the next selection continues; 0 for its start.
    """

    queues: Sequence[Keys]
    left_out: int = 0
    cursor: int = 0


class SnapshotReader:
    """
    Reads snapshots of queues through a client.

    Args:
        queues: a function that returns the queues to read; None for all queues in the queue registry. If the registry
            has more than QUEUES_LIMIT queues, each snapshot contains the queues that were in use in the last snapshot,
            and some other queues in rotation.
        maps: the shard maps of earlier snapshots; None to read the maps again.
        held_up: the blocked keys of earlier snapshots; None if the snapshots do not measure blocked keys.
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
        self._chosen = Selection(())

    def look(self, clock_ms: float | None = None) -> Snapshot:
        """
        Return the current state of the queues.

        The snapshot uses `clock_ms` as the current time in unix milliseconds; if `clock_ms` is None, it uses the clock
        of Redis. If the server of a Cluster that stores the queue registry is unavailable, read the same queues as in
        the last snapshot.

        Raises:
            RedisUnavailableError: Redis does not answer.
            RedisRefusedError: Redis refuses a command.
        """
        chosen = self._chosen = self._choose()
        looks: dict[Keys, QueueLook] = {}

        def requests(shard: Keys) -> Iterable[Request[Any]]:
            look = looks[shard] = QueueLook(shard, self._blocked_keys)
            return look.requests.values()

        found, refused, (time_ms,) = self._maps.ask(
            self._client.run_all, chosen.queues, requests, [commands.server_ms()]
        )
        if clock_ms is None and isinstance(time_ms, Exception):
            # The server that should report the time is unavailable. The client now avoids it and asks another server.
            time_ms = self._client.run(commands.server_ms())
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
            # If only some shards are unavailable, the snapshot contains the other shards of the queue.
            # If a shard has invalid data, the whole queue is unreadable.
            why = [look.refusal for look in parts if look.refusal and (not look.is_away or len(away) == len(parts))]
            if keys not in unreadable and why:
                unreadable[keys] = why[0]
            if keys not in unreadable:
                seen = [look.snapshot for look in parts if look.snapshot]
                snapshots[keys] = QueueSnapshot.join(keys, self._maps.served(keys), seen, away)
        if chosen.left_out:
            used = (keys for keys, queue in snapshots.items() if queue.totals or queue.alive)
            self._in_use = [*unreadable, *used]
        return Snapshot(snapshots, unreadable, chosen.left_out, self._maps.lost)

    def _choose(self) -> Selection:
        if self._queues is not None:
            return Selection(self._queues())
        try:
            return registered(self._client, lambda: self._in_use, self._chosen.cursor)
        except RedisUnavailableError:
            if not self._client.has_many or not self._chosen.queues:
                raise
            return self._chosen


def facts_in(sections: Sequence[Any]) -> dict[str, str]:
    """Merge the results of SERVER_FACTS into one dict; skip the sections of INFO that the Redis user may not read."""
    return {name: fact for section in sections if isinstance(section, dict) for name, fact in section.items()}


def registered(client: Client, first: Callable[[], Sequence[Keys]], cursor: int = 0) -> Selection:
    """
    Return the queues in the queue registry.

    If the registry has more than QUEUES_LIMIT queues, return the queues of `first()`, and a part of the other queues.
    This part begins at the SCAN cursor `cursor`.
    """
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
