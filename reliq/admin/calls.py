"""Redis commands with which `Admin` reads and changes the Redis keys of queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from reliq.admin.filters import Place
from reliq.keys import QUEUES_KEY, WORKERS_KEY, Keys, pattern, stack_request_key, stacks_key, worker_key
from reliq.redis import commands
from reliq.redis.commands import Command, id_text, read_ids
from reliq.text import clamp_time
from reliq.wire_format import FailureNote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.message import Pause

T = TypeVar("T")

#: If a worker does not report its stacks, the request for them expires after this many ms.
REQUEST_MS = 60_000
#: Commands read the records of at most this many workers.
WORKERS_LIMIT = 10_000


_worker_decoder = msgspec.json.Decoder(commands.Worker)
_report_decoder = msgspec.json.Decoder(commands.StackReport)

#: Attributes of `Keys` with the types of their Redis keys, which every queue can have. A queue with message keys
#: (ordering keys) has further Redis keys.
TYPES = {
    **dict.fromkeys(("pending", "unack", "plans_due"), "zset"),
    **dict.fromkeys(("ready", "retry", "wake"), "list"),
    **dict.fromkeys(("token", "watch", "paused", "map", "epoch"), "string"),
    **dict.fromkeys(("retries_left", "lease", "errors", "windows", "leaving", "arrived"), "hash"),
    **dict.fromkeys(("totals", "minutes", "cron", "plans"), "hash"),
    "garbage": "set",
    "dead": "stream",
}

#: One command reads about this many ids of a list, set or sorted set.
STEP_IDS = 250


@dataclass(frozen=True, slots=True)
class KeyQueueState:
    """
    The messages that wait under one message key; Redis stores them in a list.

    The key queues of all message keys together are the state `waiting`.
    """

    key: str


Spot = Place | KeyQueueState


def is_list(spot: Spot) -> bool:
    """Return whether Redis stores the ids of a state or key queue in a list, in the order of claims."""
    return isinstance(spot, KeyQueueState) or spot in ("ready", "retry")


def place_of(spot: Spot) -> Place:
    """Return the state that `spot` is; for a key queue, return the state `waiting`."""
    return "waiting" if isinstance(spot, KeyQueueState) else spot


def redis_key(keys: Keys, spot: Spot) -> str:
    """Return the Redis key that contains the ids of a state, or of one key queue."""
    if isinstance(spot, KeyQueueState):
        return keys.line(spot.key)
    return keys.ends if spot == "ended" else str(getattr(keys, spot))


def keys_scanned(pattern: str, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Scan about `count` Redis keys; return the next cursor (0 at the end), and the keys that match the pattern."""
    return Command(
        ("SCAN", cursor, "MATCH", pattern, "COUNT", count), lambda reply: (int(reply[0]), read_ids(reply[1]))
    )


def parameter(name: str) -> Command[dict[str, str]]:
    """Read the configuration parameter `name` of the Redis server."""
    return Command(("CONFIG", "GET", name), _pairs)


def _pairs(reply: Sequence[bytes]) -> dict[str, str]:
    texts = [part.decode("utf-8", "replace") for part in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


#: Attributes of `Keys` for the Redis keys whose members or fields are message ids.
Index = Literal["pending", "unack", "garbage", "retries_left", "lease", "errors"]
Stream = Literal["ends", "history", "dead"]
_SCANS = {"pending": "ZSCAN", "unack": "ZSCAN", "garbage": "SSCAN", "retries_left": "HSCAN", "lease": "HSCAN"}


# ---- commands on one message


def value(keys: Keys, id: str) -> Command[bytes | None]:
    """Read the bytes that Redis stores for a message, that is, its header and body; None if there are none."""
    return Command(("GET", keys.msg(id)), _as_it_is)


def has_value(keys: Keys, id: str) -> Command[bool]:
    """Check whether Redis stores the body of a message."""
    return Command(("EXISTS", keys.msg(id)), bool)


def ttl_ms(keys: Keys, id: str) -> Command[int]:
    """Read the ms until the body of a message expires; negative if it never expires or does not exist."""
    return Command(("PTTL", keys.msg(id)), int)


def letter_failures(keys: Keys, letter: str) -> Command[list[FailureNote]]:
    """Read the failures that a dead letter stores, newest first."""
    return Command(("XRANGE", keys.dead, letter, letter), _letter_failures)


def marker(keys: Keys, id: str) -> Command[bytes | None]:
    """Read the marker of a chosen id, which can keep it taken after its message ended; None without a marker."""
    return Command(("GET", keys.dedup(id)), _as_it_is)


# ---- commands on the messages of one state


def size(keys: Keys, spot: Spot) -> Command[int]:
    """Count the messages in a state, or in one key queue."""
    kinds = {"garbage": "SCARD", "dead": "XLEN", "ended": "XLEN"}
    command = "LLEN" if is_list(spot) else kinds.get(place_of(spot), "ZCARD")
    return Command((command, redis_key(keys, spot)), int)


def ids_at(keys: Keys, spot: Spot, at: int, count: int) -> Command[list[str]]:
    """Read `count` ids of a list or sorted set from the index `at`, in the order of claims."""
    if is_list(spot):
        return Command(("LRANGE", redis_key(keys, spot), -at - count, -at - 1), lambda reply: read_ids(reply[::-1]))
    return Command(("ZRANGE", redis_key(keys, spot), at, at + count - 1), read_ids)


def scored_at(keys: Keys, place: commands.SortedSet, at: int, count: int) -> Command[list[tuple[str, float]]]:
    """Read `count` ids of a sorted set from the index `at`, each with its score as Redis returns it."""
    return Command(("ZRANGE", getattr(keys, place), at, at + count - 1, "WITHSCORES"), commands.read_raw_scores)


def index_of(keys: Keys, spot: Spot, id: str, *, newest_first: bool, most: int) -> Command[int | None]:
    """
    Find the index of an id in a list: 0 for the newest entry, None if the id is not found.

    The command compares at most `most` entries. With `newest_first`, it begins at the newest entry; without, at the
    oldest entry.
    """
    rank = "1" if newest_first else "-1"
    return Command(("LPOS", redis_key(keys, spot), id, "RANK", rank, "MAXLEN", most), _as_it_is)


def newest_ids(keys: Keys, spot: Spot, at: int, count: int) -> Command[list[str]]:
    """Read `count` ids of a list from the index `at`, newest first. The newest id has the index 0."""
    return Command(("LRANGE", redis_key(keys, spot), at, at + count - 1), read_ids)


def ids_scanned(keys: Keys, index: Index, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Scan about `count` ids in the Redis key `index`; return the next cursor (0 at the end) and the ids."""
    command = _SCANS.get(index, "HSCAN")
    step = 1 if index == "garbage" else 2
    return Command(
        (command, getattr(keys, index), cursor, "COUNT", count),
        lambda reply: (int(reply[0]), read_ids(reply[1][::step])),
    )


def names_of(keys: Keys, kind: str, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """
    Scan about `count` Redis keys; return the next cursor (0 at the end), and the ids or message keys that were found.

    With the kind `msg`, find the ids of messages that have a body. With the kind `line`, find the message keys that
    have a key queue.
    """
    prefix = getattr(keys, kind)("")
    return Command(
        ("SCAN", cursor, "MATCH", pattern(prefix) + "*", "COUNT", count),
        lambda reply: (int(reply[0]), [id_text(key).removeprefix(prefix) for key in reply[1]]),
    )


def newest_entries(keys: Keys, stream: Stream, before: str, count: int, first: str = "-") -> Command[list[Any]]:
    """
    Read up to `count` entries of a stream, newest first.

    Begin at the stream id `before` (`+` for the newest entry), and end at the stream id `first` (`-` for the oldest).
    """
    return Command(("XREVRANGE", getattr(keys, stream), before, first, "COUNT", count), list)


def _letter_failures(reply: Any) -> list[FailureNote]:
    fields = reply[0][1] if reply else []
    return FailureNote.parse_all(dict(zip(fields[::2], fields[1::2], strict=True)).get(b"note"))


def _as_it_is(reply: Any) -> Any:
    return reply


def limit_fields(keys: Keys) -> Command[dict[str, str]]:
    """Read the fields of a queue's Redis hash `limits` as texts; return no fields if the hash does not exist."""
    return Command(
        ("HGETALL", keys.limits),
        lambda reply: {id_text(name): id_text(value) for name, value in zip(reply[::2], reply[1::2], strict=True)},
    )


def unregister(keys: Keys) -> Command[int]:
    """Remove a queue from the queue registry."""
    return Command(("HDEL", QUEUES_KEY, keys.entry), int)


#: Names of the sorted sets whose members are message keys.
KeySet = Literal["ring", "asleep"]


def keys_among(keys: Keys, among: KeySet, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """
    Read about `count` message keys from the Redis key `ring` or `asleep`.

    `ring` contains the message keys that take turns; `asleep` contains the throttled and paused keys.

    Returns:
        The next cursor (0 at the end) and the message keys.
    """
    return Command(
        ("ZSCAN", getattr(keys, among), cursor, "COUNT", count), lambda reply: (int(reply[0]), read_ids(reply[1][::2]))
    )


def scores(keys: Keys, place: commands.SortedSet, ids: Sequence[str]) -> Command[list[float | None]]:
    """Read the scores of ids (due times or ends of leases) in unix seconds; None for an id outside the sorted set."""
    return Command(
        ("ZMSCORE", getattr(keys, place), *ids),
        lambda reply: [None if one is None else clamp_time(float(one)) for one in reply],
    )


def paused(keys: Keys) -> Command[Pause | None]:
    """Read who paused a queue, when and why; None if it is not paused."""
    return Command(("GET", keys.paused), lambda reply: None if reply is None else commands.read_pause(reply))


def worker_ids() -> Command[list[str]]:
    """
    Read the ids of the workers that wrote a record in the last hour, the latest record first.

    Some of these workers may have ended.
    """
    return Command(
        ("ZREVRANGE", WORKERS_KEY, 0, WORKERS_LIMIT - 1),
        lambda reply: [one.decode("utf-8", "replace") for one in reply],
    )


def worker_records(ids: Sequence[str]) -> list[Command[commands.Worker | None]]:
    """Return commands that read the records of workers; None for a worker that is dead or has a malformed record."""
    return [Command(("GET", worker_key(id)), lambda reply: _decoded(_worker_decoder, reply)) for id in ids]


def ask_stacks(id: str) -> list[Command[Any]]:
    """Return commands that request the stacks of a worker, and delete its previous report."""
    return [
        Command(("DEL", stacks_key(id)), int),
        Command(("SET", stack_request_key(id), "1", "PX", REQUEST_MS), commands.read_nothing),
    ]


def asked_stacks(id: str) -> list[Command[Any]]:
    """
    Return commands that read whether a worker has reported its stacks after a request.

    Returns:
        Commands that read three values: the ms since the request, None if no request is waiting; the worker's report,
            None if there is no report; and whether the worker was alive within the last hour.
    """
    waited = Command(("PTTL", stack_request_key(id)), lambda left: REQUEST_MS - left if left >= 0 else None)
    known = Command(("ZSCORE", WORKERS_KEY, id), lambda seen: seen is not None)
    return [waited, Command(("GET", stacks_key(id)), lambda reply: _decoded(_report_decoder, reply)), known]


def _decoded(decoder: msgspec.json.Decoder[T], reply: bytes | None) -> T | None:
    """Decode a record or report of a worker; return None if it is missing or malformed."""
    try:
        return None if reply is None else decoder.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
