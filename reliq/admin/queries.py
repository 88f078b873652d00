"""The plain commands by which operators look at one queue, and repair it; `reliq.commands` has those of everyone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from reliq.admin.places import is_list, place_of, redis_key
from reliq.call import Command, id_text
from reliq.failure_note import FailureNote
from reliq.keys import pattern
from reliq.message import Confirmed
from reliq.replies import read_ids, read_nothing, read_raw_scores, read_scores
from reliq.rights import runs
from reliq.wireformat import StateWord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin.places import Spot
    from reliq.commands import SortedSet
    from reliq.keys import Keys

#: Keys of a queue that hold ids.
Index = Literal["pending", "unack", "garbage", "retries_left", "lease", "errors"]
Stream = Literal["ends", "history", "dead"]
_SCANS = {"pending": "ZSCAN", "unack": "ZSCAN", "garbage": "SSCAN", "retries_left": "HSCAN", "lease": "HSCAN"}


# ---- one message


@runs("msg:GET")
def value(keys: Keys, id: str) -> Command[bytes | None]:
    """Read the value of a message; None when it is gone."""
    return Command(("GET", keys.msg(id)), _as_it_is)


@runs("msg:STRLEN")
def length(keys: Keys, id: str) -> Command[int]:
    """Count the bytes of a message's value."""
    return Command(("STRLEN", keys.msg(id)), int)


@runs("msg:EXISTS")
def has_value(keys: Keys, id: str) -> Command[bool]:
    """Say whether a message has a value."""
    return Command(("EXISTS", keys.msg(id)), bool)


@runs("msg:PTTL")
def ttl_ms(keys: Keys, id: str) -> Command[int]:
    """Return in how many ms a message's value expires; below 0 when it does not, or is gone."""
    return Command(("PTTL", keys.msg(id)), int)


@runs("errors:HMGET")
def failure_notes(keys: Keys, ids: Sequence[str]) -> Command[list[FailureNote]]:
    """Read why messages failed last."""
    return Command(("HMGET", keys.errors, *ids), lambda reply: [FailureNote.parse(one) for one in reply])


@runs("errors:HGET")
def failures(keys: Keys, id: str) -> Command[list[FailureNote]]:
    """Read each failure of a message that is kept, the newest first."""
    return Command(("HGET", keys.errors, id), FailureNote.parse_all)


@runs("dead:XRANGE")
def letter_failures(keys: Keys, letter: str) -> Command[list[FailureNote]]:
    """Read each failure that a dead letter keeps, the newest first."""
    return Command(("XRANGE", keys.dead, letter, letter), _letter_failures)


@runs("retries_left:HEXISTS")
def is_alive(keys: Keys, id: str) -> Command[bool]:
    """Say whether a message has a retry count: it is pending, in a list or in unack."""
    return Command(("HEXISTS", keys.retries_left, id), bool)


@runs("garbage:SISMEMBER")
def is_in_garbage(keys: Keys, id: str) -> Command[bool]:
    """Say whether a message waits to be collected."""
    return Command(("SISMEMBER", keys.garbage, id), bool)


@runs("dedup:GET")
def marker(keys: Keys, id: str) -> Command[bytes | None]:
    """Read why a chosen id is taken after its end; None when it is not."""
    return Command(("GET", keys.dedup(id)), _as_it_is)


@runs("dedup:PTTL")
def marker_ms(keys: Keys, id: str) -> Command[int]:
    """Return for how many ms more a chosen id is taken; below 0 when it is not."""
    return Command(("PTTL", keys.dedup(id)), int)


@runs("dedup:SET")
def take_id(keys: Keys, id: str, why: bytes, for_ms: int) -> Command[None]:
    """Have a chosen id taken for so many ms, unless it is so already."""
    return Command(("SET", keys.dedup(id), why, "PX", for_ms, "NX"), read_nothing)


@runs("dedup:DEL")
def free_id(keys: Keys, id: str) -> Command[None]:
    """Have a chosen id taken no more."""
    return Command(("DEL", keys.dedup(id)), read_nothing)


# ---- the messages of one place


@runs("WAIT")
def at_a_replica(for_ms: int) -> Command[Confirmed]:
    """Wait until one replica has what came before on the same connection; say whether it has."""
    return Command(("WAIT", 1, for_ms), lambda reply: Confirmed(int(reply) > 0, int(reply)))


@runs("leaving:HLEN")
def leaving(keys: Keys) -> Command[int]:
    """Count what is on its way to another shard; the hash has one field more."""
    return Command(("HLEN", keys.leaving), lambda reply: max(0, int(reply) - 1))


@runs("pending:ZCARD ready:LLEN line:LLEN unack:ZCARD retry:LLEN garbage:SCARD dead:XLEN")
def size(keys: Keys, spot: Spot) -> Command[int]:
    """Count what is in a place."""
    command = "LLEN" if is_list(spot) else {"garbage": "SCARD", "dead": "XLEN"}.get(place_of(spot), "ZCARD")
    return Command((command, redis_key(keys, spot)), int)


@runs("pending:ZRANGE ready:LRANGE line:LRANGE unack:ZRANGE retry:LRANGE")
def ids_at(keys: Keys, spot: Spot, at: int, count: int) -> Command[list[str]]:
    """Read ids of a list or sorted set from the place `at`, those first that come first."""
    if is_list(spot):
        return Command(("LRANGE", redis_key(keys, spot), -at - count, -at - 1), lambda reply: read_ids(reply[::-1]))
    return Command(("ZRANGE", redis_key(keys, spot), at, at + count - 1), read_ids)


@runs("pending:ZRANGE unack:ZRANGE")
def scored_at(keys: Keys, place: SortedSet, at: int, count: int) -> Command[list[tuple[str, float]]]:
    """Read ids of a sorted set from the place `at`, each with its score as Redis has it."""
    return Command(("ZRANGE", getattr(keys, place), at, at + count - 1, "WITHSCORES"), read_raw_scores)


@runs("pending:ZRANK unack:ZRANK")
def rank(keys: Keys, place: SortedSet, id: str) -> Command[int | None]:
    """Return how many of a sorted set come before an id; None when it is not there."""
    return Command(("ZRANK", getattr(keys, place), id), _as_it_is)


@runs("pending:ZSCORE unack:ZSCORE")
def score(keys: Keys, place: SortedSet, id: str) -> Command[float | None]:
    """Return the score of an id as Redis has it; None when it is not there."""
    return Command(("ZSCORE", getattr(keys, place), id), lambda reply: None if reply is None else float(reply))


@runs("pending:ZCOUNT unack:ZCOUNT")
def count_to(keys: Keys, place: SortedSet, score: float, *, without: bool = False) -> Command[int]:
    """Count those of a sorted set up to a score, or with `without` those below it."""
    return Command(("ZCOUNT", getattr(keys, place), "-inf", f"{'(' * without}{score!r}"), int)


@runs("ready:LPOS line:LPOS retry:LPOS")
def index_of(keys: Keys, spot: Spot, id: str, *, newest_first: bool, most: int) -> Command[int | None]:
    """Return the index of an id in a list, 0 for the newest, when it is among the first or the newest `most`."""
    rank = "1" if newest_first else "-1"
    return Command(("LPOS", redis_key(keys, spot), id, "RANK", rank, "MAXLEN", most), _as_it_is)


@runs("ready:LRANGE line:LRANGE retry:LRANGE")
def newest_ids(keys: Keys, spot: Spot, at: int, count: int) -> Command[list[str]]:
    """Read ids of a list from the place `at`, those first that come last."""
    return Command(("LRANGE", redis_key(keys, spot), at, at + count - 1), read_ids)


@runs("pending:ZSCAN unack:ZSCAN garbage:SSCAN retries_left:HSCAN lease:HSCAN errors:HSCAN")
def ids_scanned(keys: Keys, index: Index, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Read about `count` ids of a key; return where the next are (0: these were the last), and them."""
    command, step = _SCANS.get(index, "HSCAN"), 1 if index == "garbage" else 2
    return Command(
        (command, getattr(keys, index), cursor, "COUNT", count),
        lambda reply: (int(reply[0]), read_ids(reply[1][::step])),
    )


@runs("SCAN")
def names_of(keys: Keys, kind: str, cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Look at about `count` keys of the whole key space; return where the next are, and who has a `msg` or a `line`."""
    prefix = getattr(keys, kind)("")
    return Command(
        ("SCAN", cursor, "MATCH", pattern(prefix) + "*", "COUNT", count),
        lambda reply: (int(reply[0]), [id_text(key).removeprefix(prefix) for key in reply[1]]),
    )


@runs("lease:HSCAN")
def words_scanned(keys: Keys, cursor: int, count: int) -> Command[tuple[int, list[tuple[str, StateWord]]]]:
    """Read about `count` ids with their state words; return where the next are (0: these were the last), and them."""

    def read(reply: Any) -> tuple[int, list[tuple[str, StateWord]]]:
        pairs = zip(reply[1][::2], reply[1][1::2], strict=True)
        return int(reply[0]), [(id_text(id), StateWord.parse(word)) for id, word in pairs]

    return Command(("HSCAN", keys.lease, cursor, "COUNT", count), read)


@runs("pending:ZRANGE unack:ZRANGE")
def due_between(keys: Keys, place: SortedSet, first: int, last: int, count: int) -> Command[list[tuple[str, float]]]:
    """Read up to `count` ids that are due from `first` to `last`, in unix seconds, each with when."""
    rest = ("BYSCORE", "LIMIT", 0, count, "WITHSCORES")
    return Command(("ZRANGE", getattr(keys, place), first, last, *rest), read_scores)


@runs("errors:HRANDFIELD")
def failure_sample(keys: Keys, count: int) -> Command[list[FailureNote]]:
    """Draw up to `count` of the messages that failed, and read why."""
    return Command(
        ("HRANDFIELD", keys.errors, count, "WITHVALUES"), lambda reply: [FailureNote.parse(one) for one in reply[1::2]]
    )


@runs("retries_left:HRANDFIELD")
def any_id(keys: Keys) -> Command[list[str]]:
    """Draw the id of a message that is alive; none when there is none."""
    return Command(("HRANDFIELD", keys.retries_left, 1), read_ids)


@runs("ends:XREVRANGE history:XREVRANGE dead:XREVRANGE")
def newest_entries(keys: Keys, stream: Stream, before: str, count: int) -> Command[list[Any]]:
    """Read up to `count` entries of a stream from the place `before` (`+`: its end) back, the newest first."""
    return Command(("XREVRANGE", getattr(keys, stream), before, "-", "COUNT", count), list)


def _letter_failures(reply: Any) -> list[FailureNote]:
    fields = reply[0][1] if reply else []
    return FailureNote.parse_all(dict(zip(fields[::2], fields[1::2], strict=True)).get(b"note"))


def _as_it_is(reply: Any) -> Any:
    return reply
