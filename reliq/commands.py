"""Every plain Redis command that is made for a queue, named and safe to repeat; `admin.queries` has the operators'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from reliq.call import Command, id_text
from reliq.foreign import moment
from reliq.keys import QUEUES_KEY, WORKERS_KEY, worker_key
from reliq.message import Confirmed
from reliq.replies import (
    read_bytes,
    read_facts,
    read_id,
    read_ids,
    read_letter,
    read_nothing,
    read_pause,
    read_scores,
    read_worker,
)
from reliq.rights import runs
from reliq.roster import FORGET_SECONDS, RECORD_MS, WORKERS_LIMIT
from reliq.settings import BATCH_LIMIT, milliseconds
from reliq.wireformat import StateWord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliq.keys import Keys
    from reliq.message import Letter, Pause
    from reliq.roster import Worker
    from reliq.settings import Durability

List = Literal["ready", "retry"]
LISTS: tuple[List, ...] = ("ready", "retry")
SortedSet = Literal["pending", "unack"]


# ---- messages and dead letters


@runs("msg:MGET")
def bodies(keys: Keys, ids: Sequence[str]) -> Command[list[bytes | None]]:
    """Read the values of messages; None where there is none."""
    return Command(
        ("MGET", *map(keys.msg, ids)), lambda reply: [one if isinstance(one, bytes) else None for one in reply]
    )


@runs("msg:GETRANGE")
def body_start(keys: Keys, id: str, length: int) -> Command[bytes]:
    """Read the first bytes of a value; empty when it is gone."""
    return Command(("GETRANGE", keys.msg(id), 0, length - 1), read_bytes)


@runs("lease:HMGET")
def state_words(keys: Keys, ids: Sequence[str]) -> Command[list[StateWord]]:
    """Read the state words of messages."""
    return Command(("HMGET", keys.lease, *ids), lambda reply: [StateWord.parse(one) for one in reply])


@runs("retries_left:HMGET")
def retries_left(keys: Keys, ids: Sequence[str]) -> Command[list[bytes | None]]:
    """Read the retries left of messages, as Redis has them; None where there is none."""
    return Command(("HMGET", keys.retries_left, *ids), list)


@runs("pending:ZMSCORE unack:ZMSCORE")
def scores(keys: Keys, place: SortedSet, ids: Sequence[str]) -> Command[list[float | None]]:
    """Read the unix seconds at which messages are due, or their leases end; None for one that is not there."""
    return Command(
        ("ZMSCORE", getattr(keys, place), *ids),
        lambda reply: [None if one is None else moment(float(one)) for one in reply],
    )


@runs("pending:ZRANGE unack:ZRANGE")
def first_score(keys: Keys, place: SortedSet) -> Command[float | None]:
    """Read the unix seconds at which the first message is due, or the first lease ends; None when there is none."""
    return Command(
        ("ZRANGE", getattr(keys, place), 0, 0, "WITHSCORES"),
        lambda reply: next((score for _, score in read_scores(reply)), None),
    )


@runs("pending:ZCOUNT")
def due_count(keys: Keys, now_seconds: float) -> Command[int]:
    """Count the pending messages whose due time has come."""
    return Command(("ZCOUNT", keys.pending, "-inf", f"{now_seconds:.3f}"), int)


@runs("unack:ZRANGE")
def held(keys: Keys, at: int = 0) -> Command[list[tuple[str, float]]]:
    """Read BATCH_LIMIT ids in unack from the place `at`, the first to end first, with when lease or backoff is over."""
    return Command(("ZRANGE", keys.unack, at, at + BATCH_LIMIT - 1, "WITHSCORES"), read_scores)


@runs("unack:ZRANDMEMBER")
def held_sample(keys: Keys, count: int) -> Command[list[str]]:
    """Draw up to `count` ids in unack."""
    return Command(("ZRANDMEMBER", keys.unack, count), read_ids)


@runs("ready:LINDEX retry:LINDEX")
def end_of(keys: Keys, place: List, *, newest: bool = False) -> Command[str]:
    """Read the id of a list that is claimed next, or the `newest`, which is claimed last; empty when there is none."""
    return Command(("LINDEX", keys.ready if place == "ready" else keys.retry, 0 if newest else -1), read_id)


@runs("garbage:SRANDMEMBER")
def garbage(keys: Keys, count: int) -> Command[list[str]]:
    """Return up to `count` ids that wait to be collected."""
    return Command(("SRANDMEMBER", keys.garbage, count), read_ids)


@runs("totals:HGET")
def claims(keys: Keys) -> Command[int]:
    """Return how many deliveries the queue has counted: a number that only grows."""
    return Command(("HGET", keys.totals, "claimed"), lambda reply: int(reply or 0))


@runs("dead:XRANGE,XREVRANGE")
def letters_between(
    keys: Keys, first: str, last: str, *, count: int, newest_first: bool = False
) -> Command[list[Letter]]:
    """Return up to `count` dead letters from the place `first` to `last` of their stream, both included."""
    command, places = ("XREVRANGE", (last, first)) if newest_first else ("XRANGE", (first, last))
    return Command(
        (command, keys.dead, *places, "COUNT", count), lambda reply: [read_letter(row, keys) for row in reply]
    )


@runs("dead:XDEL")
def delete_letters(keys: Keys, letters: Iterable[str]) -> Command[int]:
    """Delete dead letters; return how many were deleted."""
    return Command(("XDEL", keys.dead, *letters), int)


# ---- waiting for work, waking who waits, and the pause


@runs("wake:BLPOP")
def wake_token(keys: Keys, for_seconds: float) -> Command[bool]:
    """Take the token that says there is something to claim, waiting for it; say whether it came."""
    return Command(("BLPOP", keys.wake, f"{for_seconds:.3f}"), lambda reply: reply is not None)


@runs("lane:BLPOP wake:BLPOP")
def first_wake_token(poke: str, queues: Sequence[Keys], for_seconds: float) -> Command[str | None]:
    """Wait for a token of one of several queues, or for a `poke`; return the key it came by, None when none came."""
    tokens = (keys.wake for keys in queues)
    return Command(
        ("BLPOP", poke, *tokens, f"{for_seconds:.3f}"), lambda reply: None if reply is None else id_text(reply[0])
    )


@runs("wake:LPOP")
def wake_token_at_once(keys: Keys) -> Command[bool]:
    """Take the token that says there is something to claim, without waiting; say whether there was one."""
    return Command(("LPOP", keys.wake), bool)


@runs("wake:RPUSH,LTRIM")
def push_wake_token(keys: Keys) -> list[Command[Any]]:
    """Leave the queue one token."""
    return [Command(("RPUSH", keys.wake, "1"), int), Command(("LTRIM", keys.wake, 0, 0), bool)]


@runs("lane:RPUSH,PEXPIRE")
def poke(key: str, lasts_ms: int) -> list[Command[int]]:
    """End the wait for `first_wake_token` by its `poke`; when nobody waits, it is forgotten after so many ms."""
    return [Command(("RPUSH", key, "1"), int), Command(("PEXPIRE", key, lasts_ms), int)]


@runs("watch:DEL")
def drop_watch(keys: Keys) -> Command[int]:
    """Let another process watch for the next due time."""
    return Command(("DEL", keys.watch), int)


@runs("paused:SET")
def pause(keys: Keys, pause: Pause, for_ms: int | None) -> Command[None]:
    """Have the queue not claimed: for so many ms, or until it is resumed."""
    limit = () if for_ms is None else ("PX", for_ms)
    return Command(("SET", keys.paused, msgspec.json.encode(pause), *limit), read_nothing)


@runs("paused:GET")
def paused(keys: Keys) -> Command[Pause | None]:
    """Read who paused the queue, when and why; None when it is not paused."""
    return Command(("GET", keys.paused), lambda reply: None if reply is None else read_pause(reply))


@runs("paused:DEL asleep:ZREM wake:RPUSH,LTRIM")
def resume_queue(keys: Keys) -> list[Command[Any]]:
    """End the pause of a queue and the sleep of the whole queue: the first two answers are whether there was one."""
    return [
        Command(("DEL", keys.paused), bool),
        Command(("ZREM", keys.asleep, ""), bool),
        *push_wake_token(keys),
    ]


# ---- the registry of queues


@runs("QUEUES_KEY:HSET")
def register(entries: Sequence[str], now_seconds: int) -> Command[None]:
    """Note in the registry that these queues are in use, each by its `Keys.entry`."""
    pairs = [part for entry in entries for part in (entry, str(now_seconds))]
    return Command(("HSET", QUEUES_KEY, *pairs), read_nothing)


@runs("QUEUES_KEY:HLEN")
def registry_size() -> Command[int]:
    """Count the queues of the registry."""
    return Command(("HLEN", QUEUES_KEY), int)


@runs("QUEUES_KEY:HSCAN")
def registry_page(cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Read about `count` entries of the registry; return where the next are (0: these were the last), and them."""
    return Command(
        ("HSCAN", QUEUES_KEY, cursor, "COUNT", count), lambda reply: (int(reply[0]), read_ids(reply[1][::2]))
    )


# ---- the records of workers


@runs("worker_key:SET WORKERS_KEY:ZADD,ZREMRANGEBYSCORE")
def write_worker(worker: Worker) -> list[Command[None]]:
    """Write a worker's record and its place in the index; drop from the index who was silent for an hour."""
    return [
        Command(("SET", worker_key(worker.id), msgspec.json.encode(worker), "PX", RECORD_MS), read_nothing),
        Command(("ZADD", WORKERS_KEY, round(worker.seen), worker.id), read_nothing),
        Command(("ZREMRANGEBYSCORE", WORKERS_KEY, "-inf", round(worker.seen) - FORGET_SECONDS), read_nothing),
    ]


@runs("worker_key:DEL WORKERS_KEY:ZREM")
def remove_worker(id: str) -> list[Command[None]]:
    """Remove a worker's record and its place in the index."""
    return [Command(("DEL", worker_key(id)), read_nothing), Command(("ZREM", WORKERS_KEY, id), read_nothing)]


@runs("WORKERS_KEY:ZREVRANGE")
def worker_ids() -> Command[list[str]]:
    """Return the workers that wrote a record in the last hour, the latest first; not all of them are alive."""
    return Command(
        ("ZREVRANGE", WORKERS_KEY, 0, WORKERS_LIMIT - 1),
        lambda reply: [one.decode("utf-8", "replace") for one in reply],
    )


@runs("WORKERS_KEY:ZCOUNT")
def workers_alive(now_seconds: float, counted: Callable[[int], Any]) -> Command[None]:
    """Count the workers whose records have not expired; call `counted` with their number."""
    since = round(now_seconds - RECORD_MS / 1000)
    return Command(("ZCOUNT", WORKERS_KEY, since, "+inf"), lambda reply: counted(int(reply)))


@runs("worker_key:GET")
def worker_records(ids: Sequence[str]) -> list[Command[Worker | None]]:
    """Read each worker's record; None for one that is not alive, or whose record is none of ours."""
    return [Command(("GET", worker_key(id)), read_worker) for id in ids]


# ---- the server


@runs("INFO")
def server_facts(section: str) -> Command[dict[str, str]]:
    """Return a section of INFO."""
    return Command(("INFO", section), read_facts)


@runs("TIME")
def server_seconds() -> Command[float]:
    """Return Redis' clock in unix seconds."""
    return Command(("TIME",), lambda reply: int(reply[0]) + int(reply[1]) / 1e6)


@runs("TIME")
def server_ms() -> Command[int]:
    """Return Redis' clock in unix ms."""
    return Command(("TIME",), lambda reply: int(reply[0]) * 1000 + int(reply[1]) // 1000)


@runs("WAIT WAITAOF")
def confirmation(durability: Durability) -> Command[Confirmed]:
    """Wait until what came before on the same connection is confirmed; say what was."""
    count, timeout_ms = durability.count, milliseconds(durability.timeout)
    if durability.kind == "replicas":
        return Command(("WAIT", count, timeout_ms), lambda reply: Confirmed(int(reply) >= count, int(reply)))

    def on_disk(reply: Any) -> Confirmed:
        local, replicas = int(reply[0]) > 0 if durability.local else None, int(reply[1])
        return Confirmed(replicas >= count and local is not False, replicas, local)

    return Command(("WAITAOF", int(durability.local), count, timeout_ms), on_disk)
