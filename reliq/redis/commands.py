"""
Requests to Redis: script calls and plain commands, each with a parser for the reply of Redis.

The functions of this module only create requests. Their docstrings describe what Redis does and returns when a client
sends the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from reliq.errors import ProtocolError, RedisUnavailableError
from reliq.keys import QUEUES_KEY, WORKERS_KEY, Keys, stack_request_key, stacks_key, worker_key
from reliq.message import Confirmed, DeadLetter, Pause
from reliq.settings import BATCH_LIMIT, Durability, milliseconds
from reliq.text import LAST_SECOND, clamp_time, whole_number
from reliq.wire_format import FailureNote, StateWord, open_envelope

if TYPE_CHECKING:
    from reliq.events import Event
    from reliq.lua import Script


T = TypeVar("T")

Arg = str | bytes | int
#: A function that returns the current time in unix microseconds.
Clock = Callable[[], int]


def id_text(raw: bytes) -> str:
    """Decode a message id. An id that another program wrote may be invalid UTF-8; `packed` restores its bytes."""
    return raw.decode("utf-8", "surrogateescape")


def raise_first(answers: list[Any]) -> list[Any]:
    """Return the list of results `answers`. If some of them are exceptions, raise the first exception."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def answered(answers: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """
    Return the results of the available shards, and the numbers of the unavailable shards.

    If all shards are unavailable, raise the first error. If the Redis of a shard refused the request, raise its error.

    Args:
        answers: the result or the exception of each shard, in the order of the shards.
    """
    away = tuple(at for at, answer in enumerate(answers) if isinstance(answer, RedisUnavailableError))
    if len(away) == len(answers):
        raise_first([*answers])
    return raise_first([answer for at, answer in enumerate(answers) if at not in away]), away


def of_every_shard(queue: str, done: str, answers: Sequence[Any]) -> list[Any]:
    """Return the results of all shards. If some shards are unavailable, raise an error that names these shards."""
    there, away = answered(answers)
    if away:
        others = ", ".join(str(at) for at in range(len(answers)) if at not in away)
        raise RedisUnavailableError(
            f"queue {queue!r} is {done} in the shards {others}, but not in {', '.join(map(str, away))}, whose Redis is unavailable: "
            f"{answers[away[0]]}; repeat this when it is available",
            maybe_ran=True,
        )
    return there


def no_events(_result: Any, /) -> Iterable[Event]:
    """Return no events, so that observers are not notified about a request."""
    return ()


#: The exceptions that `parse` of a request may raise for a reply with an unexpected format.
_UNREADABLE = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """
    A script call: a Lua script with its keys and arguments. A client sends it to Redis.

    Attributes:
        script: the Lua script.
        keys: KEYS of the script, in the order of its header.
        args: ARGV of the script, in the order of its header.
        parse: a function that parses the reply. It raises an exception of `_UNREADABLE` for an unexpected reply.
        events: a function that creates the events for observers from the parsed reply.
    """

    script: Script
    keys: Sequence[str]
    args: Sequence[Arg]
    parse: Callable[[Any], T]
    events: Callable[[T], Iterable[Event]] = no_events

    @property
    def command(self) -> tuple[Arg, ...]:
        """The EVALSHA command, with the SHA-1 digest of the script."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)

    @property
    def command_in_full(self) -> tuple[Arg, ...]:
        """The EVAL command with the full text of the script, for a server that has not cached the script."""
        return ("EVAL", self.script.text, len(self.keys), *self.keys, *self.args)

    def at(self, us: int) -> Call[T]:
        """Return a copy with the time `us` (unix microseconds). A script call that has a time is returned unchanged."""
        return replace(self, args=(us, *self.args[1:])) if self.args[0] == "" else self

    def read(self, reply: Any) -> T:
        """Parse a reply of Redis. Raise ProtocolError if its format is unexpected."""
        try:
            return self.parse(reply)
        except _UNREADABLE as error:
            raise _unreadable(name=self.script.name, error=error) from error


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """
    A plain Redis command that may be repeated safely. A client sends it to Redis.

    Attributes:
        command: the name of the command and its arguments.
        parse: a function that parses the reply. It raises an exception of `_UNREADABLE` for an unexpected reply.
        events: a function that creates the events for observers from the parsed reply.
    """

    command: Sequence[Arg]
    parse: Callable[[Any], T]
    events: Callable[[T], Iterable[Event]] = no_events

    @property
    def command_in_full(self) -> Sequence[Arg]:
        """The same as `command`, because only script calls have a full form."""
        return self.command

    def at(self, _us: int) -> Command[T]:
        """Return this command unchanged, because plain commands always use the clock of Redis."""
        return self

    def read(self, reply: Any) -> T:
        """Parse a reply of Redis. Raise ProtocolError if its format is unexpected."""
        try:
            return self.parse(reply)
        except _UNREADABLE as error:
            raise _unreadable(name=str(self.command[0]), error=error) from error


Request = Call[T] | Command[T]


def _unreadable(name: str, error: Exception) -> ProtocolError:
    return ProtocolError(f"{name} got an unexpected reply ({type(error).__name__})")


#: A worker process writes its record to Redis every this many seconds.
BEAT_SECONDS = 5.0
#: The record of a worker process expires this many ms after its last write, so the record of a killed process
#: disappears.
RECORD_MS = 15_000
#: A worker process is removed from the worker index this many seconds after the last write of its record.
FORGET_SECONDS = 3600
#: The record of a worker process lists at most this many running handlers.
SLOTS_LIMIT = 200

#: A number in the record of a worker process. A record with a larger number was not written by reliq and is ignored.
_Number = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Moment = Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]


@dataclass(frozen=True, slots=True)
class RunningJob:
    """
    A message in a running handler.

    Attributes:
        attempt: 1 for the first delivery; None for a message without reliq's envelope.
        started: when the handler started, in unix seconds by the worker's clock.
    """

    queue: str
    id: str
    attempt: _Number | None
    started: _Moment


@dataclass(frozen=True, slots=True)
class Worker:
    """
    The record that a worker process writes to Redis every BEAT_SECONDS.

    Times are unix seconds by the clock of the worker's machine.

    Attributes:
        version: the version of reliq.
        queues: the queues from which the process claims messages.
        slots: how many handlers the process can run at the same time.
        busy: how many handlers are running.
        started: when the process started.
        last_claim: when the process last completed its claims from all its queues.
        seen: when the process wrote this record.
        running: the running handlers, the longest running first; at most SLOTS_LIMIT.
    """

    id: str
    host: str
    pid: _Number
    version: str
    queues: tuple[str, ...]
    slots: _Number
    busy: _Number
    started: _Moment
    last_claim: _Moment
    seen: _Moment
    running: tuple[RunningJob, ...] = ()


#: If another program wrote the Redis key `paused` of a queue, show at most this many characters of its value as the
#: reason of the pause.
FOREIGN_REASON_LIMIT = 200

_pause_decoder = msgspec.json.Decoder(Pause)


def read_nothing(_reply: object) -> None:
    """Ignore the reply of Redis."""


def read_bytes(reply: Any) -> bytes:
    """Return a reply that must be bytes. Raise ValueError for any other type (`bytes(n)` would return n zeros)."""
    if not isinstance(reply, bytes):
        raise ValueError  # noqa: TRY004  the same error as for other unexpected replies
    return reply


def read_text(reply: bytes | None) -> str:
    """Decode a reply of Redis. For the reply None, return an empty text."""
    return "" if reply is None else reply.decode("utf-8", "replace")


def read_ids(reply: Sequence[bytes]) -> list[str]:
    """Decode a reply of Redis that is a list of message ids."""
    return [id_text(one) for one in reply]


def read_scores(reply: Any) -> list[tuple[str, float]]:
    """Parse a reply with members of a sorted set and their scores. Scores beyond the valid times are limited."""
    return [(id, clamp_time(score)) for id, score in read_raw_scores(reply)]


def read_raw_scores(reply: Any) -> list[tuple[str, float]]:
    """Parse a reply (RESP 2 or 3) with members of a sorted set and their scores. The scores are not limited."""
    pairs = reply if reply and isinstance(reply[0], list | tuple) else zip(reply[::2], reply[1::2], strict=True)
    return [(id_text(member), float(score)) for member, score in pairs]


def read_facts(reply: bytes) -> dict[str, str]:
    """Parse the reply to INFO and return its fields with their values."""
    rows = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: told for name, colon, told in rows if colon}


def read_pause(reply: bytes) -> Pause:
    """Parse the stored pause of a queue. If another program wrote it, its first characters become the reason."""
    try:
        return _pause_decoder.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Pause("", None, reply.decode("utf-8", "replace")[:FOREIGN_REASON_LIMIT])


def read_letter(row: Any, keys: Keys) -> DeadLetter:
    """Parse an entry of the Redis stream `dead`, and return it as a dead letter."""
    name = row[0].decode()
    pairs = row[1]
    fields = dict(zip(pairs[::2], pairs[1::2], strict=True))  # an entry of another program may lack some fields
    header, payload = open_envelope(fields.get(b"value", b""), bare=keys.bare)
    note = FailureNote.parse(fields.get(b"note"))
    attempts = note.attempt
    if attempts is None and header.retries is not None:
        # If the note has no attempt, the last lease of the message expired. Assume that no retries were left.
        attempts = header.retries + 1
    # The id of the stream entry contains the time at which the message became a dead letter. If the dead letter was
    # moved from another shard, the entry id contains the time of the move, and the field `died` the original time.
    death = fields.get(b"died", row[0]).split(b"-")[0]
    id = id_text(fields.get(b"id", b""))
    died = clamp_time((whole_number(death) or 0) / 1000)
    return DeadLetter(name, id, note.reason, note.error, attempts, died, header, payload, note.raised, keys.shard)


List = Literal["ready", "retry"]
LISTS: tuple[List, ...] = ("ready", "retry")
SortedSet = Literal["pending", "unack"]


# ---- messages and dead letters


def bodies(keys: Keys, ids: Sequence[str]) -> Command[list[bytes | None]]:
    """Read the stored values (envelope and body) of messages. A missing value is None."""
    return Command(
        ("MGET", *map(keys.msg, ids)), lambda reply: [one if isinstance(one, bytes) else None for one in reply]
    )


def body_start(keys: Keys, id: str, length: int) -> Command[bytes]:
    """Read the first `length` bytes of the stored value of a message; empty if Redis has no value."""
    return Command(("GETRANGE", keys.msg(id), 0, length - 1), read_bytes)


def state_words(keys: Keys, ids: Sequence[str]) -> Command[list[StateWord]]:
    """Read the state words of messages. The state word of a message is its field in the Redis hash `lease`."""
    return Command(("HMGET", keys.lease, *ids), lambda reply: [StateWord.parse(one) for one in reply])


def retries_left(keys: Keys, ids: Sequence[str]) -> Command[list[bytes | None]]:
    """Read for each message how many retries are left, as undecoded bytes; None if Redis has no number."""
    return Command(("HMGET", keys.retries_left, *ids), list)


def first_score(keys: Keys, place: SortedSet) -> Command[float | None]:
    """
    Read the lowest score of a sorted set, in unix seconds; None if the set is empty.

    In `pending`, this is the earliest due time. In `unack`, it is the earliest end of a lease or backoff.
    """
    return Command(
        ("ZRANGE", getattr(keys, place), 0, 0, "WITHSCORES"),
        lambda reply: next((score for _, score in read_scores(reply)), None),
    )


def due_count(keys: Keys, now_seconds: float) -> Command[int]:
    """Count the messages in the sorted set `pending` whose due time has passed."""
    return Command(("ZCOUNT", keys.pending, "-inf", f"{now_seconds:.3f}"), int)


def held(keys: Keys, at: int = 0) -> Command[list[tuple[str, float]]]:
    """
    Read up to BATCH_LIMIT message ids and their scores from the sorted set `unack`, beginning at index `at`.

    The score of an id is the end of its lease or backoff. The ids are sorted by score, the lowest first.
    """
    return Command(("ZRANGE", keys.unack, at, at + BATCH_LIMIT - 1, "WITHSCORES"), read_scores)


def held_sample(keys: Keys, count: int) -> Command[list[str]]:
    """Read up to `count` random message ids from the sorted set `unack`."""
    return Command(("ZRANDMEMBER", keys.unack, count), read_ids)


def end_of(keys: Keys, place: List) -> Command[str]:
    """Read the id that the next claim would take from the list `ready` or `retry`; empty if the list is empty."""
    return Command(("LINDEX", keys.ready if place == "ready" else keys.retry, -1), lambda reply: id_text(reply or b""))


def garbage(keys: Keys, count: int) -> Command[list[str]]:
    """Read up to `count` random message ids from the set `garbage`."""
    return Command(("SRANDMEMBER", keys.garbage, count), read_ids)


def claims(keys: Keys) -> Command[int]:
    """Read how many deliveries were counted since the queue was created."""
    return Command(("HGET", keys.totals, "claimed"), lambda reply: int(reply or 0))


def letters_between(
    keys: Keys, first: str, last: str, *, count: int, newest_first: bool = False
) -> Command[list[DeadLetter]]:
    """Read up to `count` dead letters, from the stream entry `first` to the entry `last`, both included."""
    command, places = ("XREVRANGE", (last, first)) if newest_first else ("XRANGE", (first, last))
    return Command(
        (command, keys.dead, *places, "COUNT", count), lambda reply: [read_letter(row, keys) for row in reply]
    )


def delete_letters(keys: Keys, letters: Iterable[str]) -> Command[int]:
    """Delete the dead letters with these stream entry ids. Return how many were deleted."""
    return Command(("XDEL", keys.dead, *letters), int)


# ---- wake tokens, pokes and pauses


def wake_token(poke: str, queues: Sequence[Keys], for_seconds: float) -> Command[str | None]:
    """
    Wait until one of the shards has a wake token, or until another client pushes a value to the list `poke`.

    Take the token or value, and return the Redis key of its list. Return None after `for_seconds`.
    """
    tokens = (keys.wake for keys in queues)
    return Command(
        ("BLPOP", poke, *tokens, f"{for_seconds:.3f}"), lambda reply: None if reply is None else id_text(reply[0])
    )


def wake_token_at_once(keys: Keys) -> Command[bool]:
    """Take a wake token of a shard without waiting. Return whether the shard had a token."""
    return Command(("LPOP", keys.wake), bool)


def push_wake_token(keys: Keys) -> list[Command[Any]]:
    """Add a wake token to a shard, unless it has one already."""
    return [Command(("RPUSH", keys.wake, "1"), int), Command(("LTRIM", keys.wake, 0, 0), bool)]


def poke(key: str, lasts_ms: int) -> list[Command[int]]:
    """End a `wake_token` that waits for the list `key`: push a value, which expires after `lasts_ms`."""
    return [Command(("RPUSH", key, "1"), int), Command(("PEXPIRE", key, lasts_ms), int)]


def drop_watch(keys: Keys) -> Command[int]:
    """Delete the name of the process that waits for the shard's next due time, so that another process waits."""
    return Command(("DEL", keys.watch), int)


def pause(keys: Keys, pause: Pause, for_ms: int | None) -> Command[None]:
    """Pause the queue, so that workers claim no messages, for `for_ms`; None means until `resume_queue`."""
    limit = () if for_ms is None else ("PX", for_ms)
    return Command(("SET", keys.paused, msgspec.json.encode(pause), *limit), read_nothing)


def resume_queue(keys: Keys) -> list[Command[Any]]:
    """
    End the pause of the queue, and the throttling of the whole queue.

    The first result is whether the queue was paused, the second result is whether it was throttled.
    """
    return [Command(("DEL", keys.paused), bool), Command(("ZREM", keys.asleep, ""), bool), *push_wake_token(keys)]


# ---- the registry of queues


def register(entries: Sequence[str], now_seconds: int) -> Command[None]:
    """Add the queues with the names `entries` to the queue registry, and store the current time for each."""
    pairs = [part for entry in entries for part in (entry, str(now_seconds))]
    return Command(("HSET", QUEUES_KEY, *pairs), read_nothing)


def registry_size() -> Command[int]:
    """Count the queues in the queue registry."""
    return Command(("HLEN", QUEUES_KEY), int)


def registry_page(cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Read about `count` queue names from the queue registry. Return the next cursor (0 at the end) and the names."""
    return Command(
        ("HSCAN", QUEUES_KEY, cursor, "COUNT", count), lambda reply: (int(reply[0]), read_ids(reply[1][::2]))
    )


# ---- the records of workers


def write_worker(worker: Worker) -> list[Command[None]]:
    """
    Write the record of a worker process, and its entry in the worker index.

    Also remove all processes from the index that have not written their record for an hour.
    """
    return [
        Command(("SET", worker_key(worker.id), msgspec.json.encode(worker), "PX", RECORD_MS), read_nothing),
        Command(("ZADD", WORKERS_KEY, round(worker.seen), worker.id), read_nothing),
        Command(("ZREMRANGEBYSCORE", WORKERS_KEY, "-inf", round(worker.seen) - FORGET_SECONDS), read_nothing),
    ]


def remove_worker(id: str) -> list[Command[None]]:
    """Remove the record of a worker process, and its entry in the worker index."""
    return [Command(("DEL", worker_key(id)), read_nothing), Command(("ZREM", WORKERS_KEY, id), read_nothing)]


def workers_alive(now_seconds: float, counted: Callable[[int], Any]) -> Command[None]:
    """Count the worker processes whose records have not expired, and call `counted` with the number."""
    since = round(now_seconds - RECORD_MS / 1000)
    return Command(("ZCOUNT", WORKERS_KEY, since, "+inf"), lambda reply: counted(int(reply)))


# ---- the server

#: Where an operator changes the configuration of Redis. Managed services do not allow CONFIG SET.
PLACES = "in redis.conf, or in the parameter group or console of a managed Redis"


def server_facts(section: str) -> Command[dict[str, str]]:
    """Read one section of INFO and return its fields."""
    return Command(("INFO", section), read_facts)


def server_ms() -> Command[int]:
    """Read the clock of Redis, in unix milliseconds."""
    return Command(("TIME",), lambda reply: int(reply[0]) * 1000 + int(reply[1]) // 1000)


def confirmation(durability: Durability) -> Command[Confirmed]:
    """Wait (WAIT or WAITAOF) until replicas or disks have the earlier writes of this connection, or a timeout ends."""
    count = durability.count
    timeout_ms = milliseconds(durability.timeout)
    if durability.kind == "replicas":
        return Command(("WAIT", count, timeout_ms), lambda reply: Confirmed(int(reply) >= count, int(reply)))

    def on_disk(reply: Any) -> Confirmed:
        local = int(reply[0]) > 0 if durability.local else None
        replicas = int(reply[1])
        return Confirmed(replicas >= count and local is not False, replicas, local)

    return Command(("WAITAOF", int(durability.local), count, timeout_ms), on_disk)


#: For how many minutes Redis keeps the totals that are stored once a minute.
MINUTES_LIMIT = 180
#: One minute in ms.
MINUTE_MS = 60_000

#: The stored text of `Totals` has this many numbers, and then `due_ms`, which is a number or `-` for None.
_NUMBERS = 7


class Totals(NamedTuple):
    """
    The totals of a queue at one moment. A worker stores them in Redis once a minute.

    Attributes:
        at_ms: when these totals were read, in unix ms by the clock of Redis.
        arrived: how many messages were published or redriven.
        failed: how many deliveries ended in an error or by an expired lease.
        dead: how many messages became dead letters.
        ended: how many messages ended without an ack, including dead letters.
        waiting: how many messages are due and wait for a worker, or for other messages with the same message key.
        due_ms: when the oldest waiting message was due, in unix ms; None if no message waits or the time is unknown.
    """

    at_ms: int
    arrived: int
    acked: int
    failed: int
    dead: int
    ended: int
    waiting: int
    due_ms: int | None

    @property
    def sums_then(self) -> tuple[int, int, int, int, int]:
        """The stored `arrived`, `acked`, `failed`, `dead` and `ended`, in the same order as `sums` returns them."""
        return self.arrived, self.acked, self.failed, self.dead, self.ended

    @staticmethod
    def sums(totals: Mapping[str, int]) -> tuple[int, int, int, int, int]:
        """Return `arrived`, `acked`, `failed`, `dead` and `ended`: each is a sum of counts in the hash `totals`."""
        kinds = (
            ("published", "redriven"),
            ("acked",),
            ("nacked", "retried_lease"),
            ("dead",),
            ("dead", "expired", "cancelled", "purged"),
        )
        arrived, acked, failed, dead, ended = (sum(totals.get(kind, 0) for kind in some) for some in kinds)
        return arrived, acked, failed, dead, ended


def noted(keys: Keys, minutes: Sequence[int]) -> Command[list[Totals]]:
    """
    Read the stored totals of these unix minutes.

    If no totals were stored in one of these minutes, Redis may still have the totals from 180 minutes earlier. So the
    caller must check `at_ms`.
    """
    return Command(
        ("HMGET", keys.minutes, *(minute % MINUTES_LIMIT for minute in minutes)),
        lambda reply: sorted(found for one in reply if (found := _read(one)) is not None),
    )


def note(keys: Keys, totals: Totals) -> list[Command[Any]]:
    """Store the totals of a queue for one minute. If no totals are stored for 180 minutes, all of them expire."""
    minute = totals.at_ms // MINUTE_MS
    text = " ".join("-" if number is None else str(number) for number in totals)
    return [
        Command(("HSET", keys.minutes, minute % MINUTES_LIMIT, text), int),
        Command(("PEXPIRE", keys.minutes, MINUTES_LIMIT * MINUTE_MS), int),
    ]


def _read(value: bytes | None) -> Totals | None:
    """Parse the stored totals of one minute. Return None for no value or a value that another program wrote."""
    *texts, due = (value or b"").split(b" ")
    numbers = [number for text in texts if (number := whole_number(text)) is not None and number >= 0]
    if len(numbers) != len(texts) or len(numbers) != _NUMBERS or numbers[0] > LAST_SECOND * 1000:
        return None
    at_ms, arrived, acked, failed, dead, ended, waiting = numbers
    return Totals(at_ms, arrived, acked, failed, dead, ended, waiting, whole_number(due))


#: How long Redis keeps a stack report, in ms: ten minutes.
REPORT_MS = 600_000


@dataclass(frozen=True, slots=True)
class HandlerStack:
    """
    The call stack of one running handler.

    Attributes:
        queue: the queue's name; empty for the thread of the event loop, which runs the async handlers.
        id: the message id; for a batch, the id of the first message.
        frames: the frames of the stack as `file:line function`, the innermost frame last.
    """

    queue: str
    id: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StackReport:
    """
    The call stacks of the running handlers of a worker process.

    Attributes:
        at: when the stacks were read, in unix seconds by the worker's clock.
        stacks: the stacks of the handlers, the longest running first. If async handlers run, the stack of the event
            loop is the first.
        left_out: how many stacks are not in `stacks`, because the size of the report is limited.
    """

    at: Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]
    stacks: tuple[HandlerStack, ...]
    left_out: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0


def take_request(id: str, asked: Callable[[], Any]) -> Command[None]:
    """If an operator has requested a `StackReport` of a worker process, delete the request and call `asked`."""

    def read(reply: bytes | None) -> None:
        if reply is not None:
            asked()

    return Command(("GETDEL", stack_request_key(id)), read)


def write_report(id: str, report: StackReport) -> Command[None]:
    """Write the stack report that an operator has requested from a worker process."""
    return Command(("SET", stacks_key(id), msgspec.json.encode(report), "PX", REPORT_MS), read_nothing)
