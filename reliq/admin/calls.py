"""Commands that read and change the keys of queues for operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from reliq.admin.words import Place
from reliq.keys import QUEUES_KEY, WORKERS_KEY, Keys, pattern, stack_request_key, stacks_key, worker_key
from reliq.redis.commands import (
    Command,
    StackReport,
    Worker,
    id_text,
    read_facts,
    read_ids,
    read_nothing,
    read_pause,
    read_raw_scores,
)
from reliq.text import clamp_time
from reliq.wire_format import FailureNote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.keys import Keys
    from reliq.lua import Script
    from reliq.message import Pause
    from reliq.redis.commands import SortedSet

T = TypeVar("T")

#: A request for stacks expires after this many ms.
REQUEST_MS = 60_000
#: At most this many workers are read.
WORKERS_LIMIT = 10_000


_worker_decoder = msgspec.json.Decoder(Worker)
_report_decoder = msgspec.json.Decoder(StackReport)

#: The Redis keys of a queue by name, with their types; ordering keys add others.
TYPES = {
    "pending": "zset",
    "ready": "list",
    "unack": "zset",
    "retry": "list",
    "garbage": "set",
    "retries_left": "hash",
    "lease": "hash",
    "errors": "hash",
    "windows": "hash",
    "leaving": "hash",
    "arrived": "hash",
    "dead": "stream",
    "totals": "hash",
    "minutes": "hash",
    "cron": "hash",
    "wake": "list",
    "token": "string",
    "watch": "string",
    "paused": "string",
    "map": "string",
    "epoch": "string",
}

#: Ids that are read in one step.
STEP_IDS = 250


@dataclass(frozen=True, slots=True)
class KeyQueueState:
    """A key queue, which is a list like ready. All key queues of a queue together are the state `waiting`."""

    key: str


Spot = Place | KeyQueueState


def is_list(spot: Spot) -> bool:
    """Return whether it is a list, in the order of claims."""
    return isinstance(spot, KeyQueueState) or spot in ("ready", "retry")


def place_of(spot: Spot) -> Place:
    """Return the name of the state."""
    return "waiting" if isinstance(spot, KeyQueueState) else spot


def redis_key(keys: Keys, spot: Spot) -> str:
    """Return the Redis key that has its messages; `waiting` has a Redis key for each key queue."""
    if isinstance(spot, KeyQueueState):
        return keys.line(spot.key)
    return keys.ends if spot == "ended" else str(getattr(keys, spot))


def keys_scanned(pattern: str, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Read about `count` keys; return the next cursor (0: no more keys), and the keys that match."""
    return Command(
        ("SCAN", cursor, "MATCH", pattern, "COUNT", count), lambda reply: (int(reply[0]), read_ids(reply[1]))
    )


def delete_keys(any_keys: Sequence[str]) -> Command[int]:
    """Delete keys."""
    return Command(("UNLINK", *any_keys), int)


def parameter(name: str) -> Command[dict[str, str]]:
    """Read a parameter of the server's configuration, by its name."""
    return Command(("CONFIG", "GET", name), _pairs)


def cluster_facts() -> Command[dict[str, str]]:
    """Read the state of the Cluster as a node reports it."""
    return Command(("CLUSTER", "INFO"), read_facts)


def eval_nothing() -> Command[bool]:
    """Run a script that does nothing: Redis refuses it to a user without EVAL."""
    return Command(("EVAL", "return 1", 0), bool)


def load_script(script: Script) -> Command[str]:
    """Load a script into the server; return its digest."""
    return Command(("SCRIPT", "LOAD", script.text), bytes.decode)


def _pairs(reply: Sequence[bytes]) -> dict[str, str]:
    texts = [part.decode("utf-8", "replace") for part in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


#: Keys of a queue that hold ids.
Index = Literal["pending", "unack", "garbage", "retries_left", "lease", "errors"]
Stream = Literal["ends", "history", "dead"]
_SCANS = {"pending": "ZSCAN", "unack": "ZSCAN", "garbage": "SSCAN", "retries_left": "HSCAN", "lease": "HSCAN"}


# ---- one message


def value(keys: Keys, id: str) -> Command[bytes | None]:
    """Read the value of a message; None when it is gone."""
    return Command(("GET", keys.msg(id)), _as_it_is)


def has_value(keys: Keys, id: str) -> Command[bool]:
    """Return whether a message has a body."""
    return Command(("EXISTS", keys.msg(id)), bool)


def ttl_ms(keys: Keys, id: str) -> Command[int]:
    """Return in how many ms a message's value expires; below 0 when it does not, or is gone."""
    return Command(("PTTL", keys.msg(id)), int)


def letter_failures(keys: Keys, letter: str) -> Command[list[FailureNote]]:
    """Read each failure that a dead letter keeps, the newest first."""
    return Command(("XRANGE", keys.dead, letter, letter), _letter_failures)


def is_in_garbage(keys: Keys, id: str) -> Command[bool]:
    """Return whether a message waits to be collected."""
    return Command(("SISMEMBER", keys.garbage, id), bool)


def marker(keys: Keys, id: str) -> Command[bytes | None]:
    """Read why a chosen id is taken after its end; None when it is not."""
    return Command(("GET", keys.dedup(id)), _as_it_is)


# ---- the messages of one place


def leaving(keys: Keys) -> Command[int]:
    """Count the messages that move to another shard; the hash has one field more."""
    return Command(("HLEN", keys.leaving), lambda reply: max(0, int(reply) - 1))


def size(keys: Keys, spot: Spot) -> Command[int]:
    """Count the messages in a state."""
    kinds = {"garbage": "SCARD", "dead": "XLEN", "ended": "XLEN"}
    command = "LLEN" if is_list(spot) else kinds.get(place_of(spot), "ZCARD")
    return Command((command, redis_key(keys, spot)), int)


def ids_at(keys: Keys, spot: Spot, at: int, count: int) -> Command[list[str]]:
    """Read ids of a list or sorted set from the index `at`, the first to be claimed first."""
    if is_list(spot):
        return Command(("LRANGE", redis_key(keys, spot), -at - count, -at - 1), lambda reply: read_ids(reply[::-1]))
    return Command(("ZRANGE", redis_key(keys, spot), at, at + count - 1), read_ids)


def scored_at(keys: Keys, place: SortedSet, at: int, count: int) -> Command[list[tuple[str, float]]]:
    """Read ids of a sorted set from the place `at`, each with its score as Redis has it."""
    return Command(("ZRANGE", getattr(keys, place), at, at + count - 1, "WITHSCORES"), read_raw_scores)


def count_to(keys: Keys, place: SortedSet, score: float, *, without: bool = False) -> Command[int]:
    """Count the ids of a sorted set up to a score; with `without`, below the score."""
    return Command(("ZCOUNT", getattr(keys, place), "-inf", f"{'(' * without}{score!r}"), int)


def index_of(keys: Keys, spot: Spot, id: str, *, newest_first: bool, most: int) -> Command[int | None]:
    """Return the index of an id in a list, 0 for the newest, when it is among the first or the newest `most`."""
    rank = "1" if newest_first else "-1"
    return Command(("LPOS", redis_key(keys, spot), id, "RANK", rank, "MAXLEN", most), _as_it_is)


def newest_ids(keys: Keys, spot: Spot, at: int, count: int) -> Command[list[str]]:
    """Read ids of a list from the index `at`, the last to be claimed first."""
    return Command(("LRANGE", redis_key(keys, spot), at, at + count - 1), read_ids)


def ids_scanned(keys: Keys, index: Index, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Read about `count` ids of a Redis key; return the next cursor (0: no more ids), and the ids."""
    command = _SCANS.get(index, "HSCAN")
    step = 1 if index == "garbage" else 2
    return Command(
        (command, getattr(keys, index), cursor, "COUNT", count),
        lambda reply: (int(reply[0]), read_ids(reply[1][::step])),
    )


def names_of(keys: Keys, kind: str, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Read about `count` keys of the whole key space; return the next cursor, and the ids with a `msg` or the keys with a `line`."""
    prefix = getattr(keys, kind)("")
    return Command(
        ("SCAN", cursor, "MATCH", pattern(prefix) + "*", "COUNT", count),
        lambda reply: (int(reply[0]), [id_text(key).removeprefix(prefix) for key in reply[1]]),
    )


def failure_sample(keys: Keys, count: int) -> Command[list[FailureNote]]:
    """Draw up to `count` of the messages that failed, and read why."""
    return Command(
        ("HRANDFIELD", keys.errors, count, "WITHVALUES"), lambda reply: [FailureNote.parse(one) for one in reply[1::2]]
    )


def newest_entries(keys: Keys, stream: Stream, before: str, count: int, first: str = "-") -> Command[list[Any]]:
    """Read up to `count` entries of a stream from the place `before` (`+`: its end) back to `first`, the newest first."""
    return Command(("XREVRANGE", getattr(keys, stream), before, first, "COUNT", count), list)


def _letter_failures(reply: Any) -> list[FailureNote]:
    fields = reply[0][1] if reply else []
    return FailureNote.parse_all(dict(zip(fields[::2], fields[1::2], strict=True)).get(b"note"))


def _as_it_is(reply: Any) -> Any:
    return reply


def key_count(keys: Keys) -> Command[int]:
    """Count the keys of a queue that only a queue has which was used."""
    places = (keys.pending, keys.ready, keys.unack, keys.retry, keys.garbage, keys.retries_left)
    return Command(("EXISTS", *places, keys.dead, keys.totals, keys.ends, keys.paused, keys.cron), int)


def pause_ms(keys: Keys) -> Command[int]:
    """Return for how many ms more a queue is paused; below 0 when it waits for its resume, or is not paused."""
    return Command(("PTTL", keys.paused), int)


def limit_fields(keys: Keys) -> Command[dict[str, str]]:
    """Read the limits of a queue as Redis has them; empty for a queue without keys."""
    return Command(
        ("HGETALL", keys.limits),
        lambda reply: {id_text(name): id_text(value) for name, value in zip(reply[::2], reply[1::2], strict=True)},
    )


def is_registered(keys: Keys) -> Command[bool]:
    """Return whether a queue is in the registry."""
    return Command(("HEXISTS", QUEUES_KEY, keys.entry), bool)


def unregister(keys: Keys) -> Command[int]:
    """Take a queue out of the registry."""
    return Command(("HDEL", QUEUES_KEY, keys.entry), int)


#: Sorted sets of message keys.
KeySet = Literal["ring", "asleep"]


def keys_among(keys: Keys, among: KeySet, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Read about `count` message keys of the ring, or throttled keys; return the next cursor (0: no more keys), and the keys."""
    return Command(
        ("ZSCAN", getattr(keys, among), cursor, "COUNT", count),
        lambda reply: (int(reply[0]), read_ids(reply[1][::2])),
    )


def keys_holding(keys: Keys, after: str | None, count: int) -> Command[list[str]]:
    """Read the keys of the next `count` messages that have a place of a key, after the key `after`; each key once."""
    start = "-" if after is None else f"({after}\1"
    return Command(
        ("ZRANGE", keys.held, start, "+", "BYLEX", "LIMIT", 0, count),
        lambda reply: list(dict.fromkeys(id_text(one.partition(b"\0")[0]) for one in reply)),
    )


def scores(keys: Keys, place: SortedSet, ids: Sequence[str]) -> Command[list[float | None]]:
    """Read the unix seconds at which messages are due, or their leases end; None for an id that is not there."""
    return Command(
        ("ZMSCORE", getattr(keys, place), *ids),
        lambda reply: [None if one is None else clamp_time(float(one)) for one in reply],
    )


def paused(keys: Keys) -> Command[Pause | None]:
    """Read the pause of a queue, with its author, time and reason; None when it is not paused."""
    return Command(("GET", keys.paused), lambda reply: None if reply is None else read_pause(reply))


def worker_ids() -> Command[list[str]]:
    """Return the workers that wrote a record in the last hour, the latest first; not all of them are alive."""
    return Command(
        ("ZREVRANGE", WORKERS_KEY, 0, WORKERS_LIMIT - 1),
        lambda reply: [one.decode("utf-8", "replace") for one in reply],
    )


def worker_records(ids: Sequence[str]) -> list[Command[Worker | None]]:
    """Read each worker's record; None without a valid record: the worker is not alive, or another program wrote the record."""
    return [Command(("GET", worker_key(id)), lambda reply: _decoded(_worker_decoder, reply)) for id in ids]


def server_seconds() -> Command[float]:
    """Return Redis' clock in unix seconds."""
    return Command(("TIME",), lambda reply: int(reply[0]) + int(reply[1]) / 1e6)


def ask_stacks(id: str) -> list[Command[Any]]:
    """Request the stacks of a worker, and delete its former report."""
    return [
        Command(("DEL", stacks_key(id)), int),
        Command(("SET", stack_request_key(id), "1", "PX", REQUEST_MS), read_nothing),
    ]


def asked_stacks(id: str) -> list[Command[Any]]:
    """
    Read for how many ms a request has waited for its worker, and the worker's report; None when there is none.

    The third answer is whether the worker was alive within the last hour.
    """
    waited = Command(("PTTL", stack_request_key(id)), lambda left: REQUEST_MS - left if left >= 0 else None)
    known = Command(("ZSCORE", WORKERS_KEY, id), lambda seen: seen is not None)
    return [waited, Command(("GET", stacks_key(id)), lambda reply: _decoded(_report_decoder, reply)), known]


def _decoded(decoder: msgspec.json.Decoder[T], reply: bytes | None) -> T | None:
    """Return a record of a worker; None when it is missing, or another program wrote it."""
    try:
        return None if reply is None else decoder.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
