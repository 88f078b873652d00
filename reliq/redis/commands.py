"""Requests to Redis as values: scripts and plain commands, each with a parser for its reply."""

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
    """Return an id as text. An id of another program may be any bytes; `packed` restores these bytes."""
    return raw.decode("utf-8", "surrogateescape")


def raise_first(answers: list[Any]) -> list[Any]:
    """Return answers, or raise the first exception among them."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def answered(answers: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """
    Return the answers of the available shards, and the numbers of the unavailable shards.

    Raise the first error if all shards are unavailable, or if a shard refused the request.
    """
    away = tuple(at for at, answer in enumerate(answers) if isinstance(answer, RedisUnavailableError))
    if len(away) == len(answers):
        raise_first([*answers])
    return raise_first([answer for at, answer in enumerate(answers) if at not in away]), away


def of_every_shard(queue: str, done: str, answers: Sequence[Any]) -> list[Any]:
    """Return the answers of all shards; raise RedisUnavailableError with the shard numbers if some are unavailable."""
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
    """Return no events: observers are not notified about the request."""
    return ()


#: Exceptions that a parser raises for a reply with an unexpected format.
_UNREADABLE = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """
    One script with its keys and arguments; it is sent when a client runs it.

    Attributes:
        script: the Lua script.
        keys: KEYS, in the order of the script's header.
        args: ARGV, in the order of the script's header.
        parse: parses the reply; raises any exception if the reply is unexpected.
        events: creates the events for observers from the parsed reply.
    """

    script: Script
    keys: Sequence[str]
    args: Sequence[Arg]
    parse: Callable[[Any], T]
    events: Callable[[T], Iterable[Event]] = no_events

    @property
    def command(self) -> tuple[Arg, ...]:
        """The EVALSHA command, with the script's digest."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)

    @property
    def command_in_full(self) -> tuple[Arg, ...]:
        """The EVAL command, with the script's text, for a server that has not cached the script."""
        return ("EVAL", self.script.text, len(self.keys), *self.keys, *self.args)

    def at(self, us: int) -> Call[T]:
        """Return a copy with the time `us`, in unix microseconds; a call that has a time is returned unchanged."""
        return replace(self, args=(us, *self.args[1:])) if self.args[0] == "" else self

    def read(self, reply: Any) -> T:
        """Return the parsed reply; raise ProtocolError for an unexpected reply."""
        try:
            return self.parse(reply)
        except _UNREADABLE as error:
            raise _unreadable(name=self.script.name, error=error) from error


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """
    One plain command that may be repeated safely; it is sent when a client runs it.

    Attributes:
        command: the command's name and arguments.
        parse: parses the reply.
        events: creates the events for observers from the parsed reply.
    """

    command: Sequence[Arg]
    parse: Callable[[Any], T]
    events: Callable[[T], Iterable[Event]] = no_events

    @property
    def command_in_full(self) -> Sequence[Arg]:
        """The same command; only scripts have a longer form."""
        return self.command

    def at(self, _us: int) -> Command[T]:
        """Return the same command: plain commands use Redis' own clock."""
        return self

    def read(self, reply: Any) -> T:
        """Return the parsed reply; raise ProtocolError for an unexpected reply."""
        try:
            return self.parse(reply)
        except _UNREADABLE as error:
            raise _unreadable(name=str(self.command[0]), error=error) from error


Request = Call[T] | Command[T]


def _unreadable(name: str, error: Exception) -> ProtocolError:
    return ProtocolError(f"{name} got an unexpected reply ({type(error).__name__})")


#: Seconds between two writes of a worker's record.
BEAT_SECONDS = 5.0
#: A worker's record expires this many ms after its last write, so the record of a killed worker disappears.
RECORD_MS = 15_000
#: A worker is removed from the index this many seconds after the last write of its record.
FORGET_SECONDS = 3600
#: A record lists at most this many running handlers.
SLOTS_LIMIT = 200

#: The numbers in a worker's record; a record with larger numbers is not from reliq and is ignored.
_Number = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Moment = Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]


@dataclass(frozen=True, slots=True)
class RunningJob:
    """
    A running handler.

    Attributes:
        attempt: 1 for the first delivery; None for a body without reliq's envelope.
        started: when it started, in unix seconds by its worker's clock.
    """

    queue: str
    id: str
    attempt: _Number | None
    started: _Moment


@dataclass(frozen=True, slots=True)
class Worker:
    """
    The record of a worker process, at most BEAT_SECONDS old. Times are unix seconds by the worker's clock.

    Attributes:
        version: the version of reliq.
        queues: the queues from which it claims messages.
        slots: how many handlers it can run at the same time.
        busy: how many handlers are running.
        started: when it started.
        last_claim: when it last completed its claims from all its queues.
        seen: when this record was written.
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


#: If another program wrote the pause of a queue, at most this many characters of it are shown as the reason.
FOREIGN_REASON_LIMIT = 200

_pause_decoder = msgspec.json.Decoder(Pause)


def read_nothing(_reply: object) -> None:
    """Ignore the reply."""


def read_bytes(reply: Any) -> bytes:
    """Return a bytes reply; raise ValueError for any other type, because `bytes(n)` would return n zeros."""
    if not isinstance(reply, bytes):
        raise ValueError  # noqa: TRY004  the same error as for other unexpected replies
    return reply


def read_text(reply: bytes | None) -> str:
    """Return a reply as text; None becomes an empty text."""
    return "" if reply is None else reply.decode("utf-8", "replace")


def read_ids(reply: Sequence[bytes]) -> list[str]:
    """Return a reply as ids."""
    return [id_text(one) for one in reply]


def read_scores(reply: Any) -> list[tuple[str, float]]:
    """Return ids with their scores, from a reply in RESP 2 or RESP 3."""
    return [(id, clamp_time(score)) for id, score in read_raw_scores(reply)]


def read_raw_scores(reply: Any) -> list[tuple[str, float]]:
    """Return ids with their scores, without a check; `read_scores` limits the scores to valid times."""
    pairs = reply if reply and isinstance(reply[0], list | tuple) else zip(reply[::2], reply[1::2], strict=True)
    return [(id_text(member), float(score)) for member, score in pairs]


def read_facts(reply: bytes) -> dict[str, str]:
    """Return the fields of an INFO reply."""
    rows = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: told for name, colon, told in rows if colon}


def read_pause(reply: bytes) -> Pause:
    """Parse a stored pause; if another program wrote the value, its first characters become the reason."""
    try:
        return _pause_decoder.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Pause("", None, reply.decode("utf-8", "replace")[:FOREIGN_REASON_LIMIT])


def read_letter(row: Any, keys: Keys) -> DeadLetter:
    """Return a dead letter from an entry of a shard's stream `dead`."""
    name = row[0].decode()
    pairs = row[1]
    fields = dict(zip(pairs[::2], pairs[1::2], strict=True))  # an entry of another program may lack fields
    header, payload = open_envelope(fields.get(b"value", b""), bare=keys.bare)
    note = FailureNote.parse(fields.get(b"note"))
    attempts = note.attempt
    if attempts is None and header.retries is not None:
        # Without a failure note, the last lease of the message expired when it had no retries left.
        attempts = header.retries + 1
    # The stream id contains the time of death. A letter that was moved from another shard has that time in the field
    # `died`, because its stream id contains the time of the move.
    death = fields.get(b"died", row[0]).split(b"-")[0]
    id = id_text(fields.get(b"id", b""))
    died = clamp_time((whole_number(death) or 0) / 1000)
    return DeadLetter(name, id, note.reason, note.error, attempts, died, header, payload, note.raised, keys.shard)


List = Literal["ready", "retry"]
LISTS: tuple[List, ...] = ("ready", "retry")
SortedSet = Literal["pending", "unack"]


# ---- messages and dead letters


def bodies(keys: Keys, ids: Sequence[str]) -> Command[list[bytes | None]]:
    """Read the values of messages; a missing value is None."""
    return Command(
        ("MGET", *map(keys.msg, ids)), lambda reply: [one if isinstance(one, bytes) else None for one in reply]
    )


def body_start(keys: Keys, id: str, length: int) -> Command[bytes]:
    """Read the first `length` bytes of a message's value; empty if Redis has no value."""
    return Command(("GETRANGE", keys.msg(id), 0, length - 1), read_bytes)


def state_words(keys: Keys, ids: Sequence[str]) -> Command[list[StateWord]]:
    """Read the state words of messages: their fields in the Redis hash `lease`."""
    return Command(("HMGET", keys.lease, *ids), lambda reply: [StateWord.parse(one) for one in reply])


def retries_left(keys: Keys, ids: Sequence[str]) -> Command[list[bytes | None]]:
    """Read how many retries messages have left, as bytes; None for a missing number."""
    return Command(("HMGET", keys.retries_left, *ids), list)


def first_score(keys: Keys, place: SortedSet) -> Command[float | None]:
    """Read the earliest due time or lease deadline in unix seconds; None if the set is empty."""
    return Command(
        ("ZRANGE", getattr(keys, place), 0, 0, "WITHSCORES"),
        lambda reply: next((score for _, score in read_scores(reply)), None),
    )


def due_count(keys: Keys, now_seconds: float) -> Command[int]:
    """Count the pending messages that are due."""
    return Command(("ZCOUNT", keys.pending, "-inf", f"{now_seconds:.3f}"), int)


def held(keys: Keys, at: int = 0) -> Command[list[tuple[str, float]]]:
    """
    Read up to BATCH_LIMIT ids in the sorted set `unack`, from index `at`.

    The ids are sorted by the end of their lease or backoff, earliest first.
    """
    return Command(("ZRANGE", keys.unack, at, at + BATCH_LIMIT - 1, "WITHSCORES"), read_scores)


def held_sample(keys: Keys, count: int) -> Command[list[str]]:
    """Return up to `count` random ids in the sorted set `unack`."""
    return Command(("ZRANDMEMBER", keys.unack, count), read_ids)


def end_of(keys: Keys, place: List) -> Command[str]:
    """Read the id that the next claim takes from a list; an empty text if the list is empty."""
    return Command(("LINDEX", keys.ready if place == "ready" else keys.retry, -1), lambda reply: id_text(reply or b""))


def garbage(keys: Keys, count: int) -> Command[list[str]]:
    """Return up to `count` ids in the set `garbage`."""
    return Command(("SRANDMEMBER", keys.garbage, count), read_ids)


def claims(keys: Keys) -> Command[int]:
    """Return the number of deliveries that the queue has counted; it only grows."""
    return Command(("HGET", keys.totals, "claimed"), lambda reply: int(reply or 0))


def letters_between(
    keys: Keys, first: str, last: str, *, count: int, newest_first: bool = False
) -> Command[list[DeadLetter]]:
    """Return up to `count` dead letters between two entries of the stream, both included."""
    command, places = ("XREVRANGE", (last, first)) if newest_first else ("XRANGE", (first, last))
    return Command(
        (command, keys.dead, *places, "COUNT", count), lambda reply: [read_letter(row, keys) for row in reply]
    )


def delete_letters(keys: Keys, letters: Iterable[str]) -> Command[int]:
    """Delete dead letters; return how many were deleted."""
    return Command(("XDEL", keys.dead, *letters), int)


# ---- wake tokens, pokes and pauses


def wake_token(poke: str, queues: Sequence[Keys], for_seconds: float) -> Command[str | None]:
    """
    Wait for a wake token of one of the queues, or for a value in the list `poke`.

    Return the Redis key of the list with the token or value; None after a timeout.
    """
    tokens = (keys.wake for keys in queues)
    return Command(
        ("BLPOP", poke, *tokens, f"{for_seconds:.3f}"), lambda reply: None if reply is None else id_text(reply[0])
    )


def wake_token_at_once(keys: Keys) -> Command[bool]:
    """Take the queue's wake token without waiting; return whether there was one."""
    return Command(("LPOP", keys.wake), bool)


def push_wake_token(keys: Keys) -> list[Command[Any]]:
    """Add a wake token to the queue."""
    return [Command(("RPUSH", keys.wake, "1"), int), Command(("LTRIM", keys.wake, 0, 0), bool)]


def poke(key: str, lasts_ms: int) -> list[Command[int]]:
    """Interrupt the `wake_token` call that waits for the list `key`; an unused poke expires after `lasts_ms`."""
    return [Command(("RPUSH", key, "1"), int), Command(("PEXPIRE", key, lasts_ms), int)]


def drop_watch(keys: Keys) -> Command[int]:
    """Delete the entry of the process that waits for the queue's next due time, so that another process waits."""
    return Command(("DEL", keys.watch), int)


def pause(keys: Keys, pause: Pause, for_ms: int | None) -> Command[None]:
    """Pause claims from the queue for `for_ms`; if `for_ms` is None, until the queue is resumed."""
    limit = () if for_ms is None else ("PX", for_ms)
    return Command(("SET", keys.paused, msgspec.json.encode(pause), *limit), read_nothing)


def resume_queue(keys: Keys) -> list[Command[Any]]:
    """
    End the pause and the throttling of the whole queue.

    The first answer reports whether the queue was paused, the second whether it was throttled.
    """
    return [Command(("DEL", keys.paused), bool), Command(("ZREM", keys.asleep, ""), bool), *push_wake_token(keys)]


# ---- the registry of queues


def register(entries: Sequence[str], now_seconds: int) -> Command[None]:
    """Write the current time to the entries (queue names) of the queue registry; add missing entries."""
    pairs = [part for entry in entries for part in (entry, str(now_seconds))]
    return Command(("HSET", QUEUES_KEY, *pairs), read_nothing)


def registry_size() -> Command[int]:
    """Count the queues in the registry."""
    return Command(("HLEN", QUEUES_KEY), int)


def registry_page(cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Read about `count` entries of the registry; return the next cursor (0: no more) and the entries."""
    return Command(
        ("HSCAN", QUEUES_KEY, cursor, "COUNT", count), lambda reply: (int(reply[0]), read_ids(reply[1][::2]))
    )


# ---- the records of workers


def write_worker(worker: Worker) -> list[Command[None]]:
    """
    Write a worker's record and its index entry.

    Also remove workers from the index that have written no record for an hour.
    """
    return [
        Command(("SET", worker_key(worker.id), msgspec.json.encode(worker), "PX", RECORD_MS), read_nothing),
        Command(("ZADD", WORKERS_KEY, round(worker.seen), worker.id), read_nothing),
        Command(("ZREMRANGEBYSCORE", WORKERS_KEY, "-inf", round(worker.seen) - FORGET_SECONDS), read_nothing),
    ]


def remove_worker(id: str) -> list[Command[None]]:
    """Remove a worker's record and its index entry."""
    return [Command(("DEL", worker_key(id)), read_nothing), Command(("ZREM", WORKERS_KEY, id), read_nothing)]


def workers_alive(now_seconds: float, counted: Callable[[int], Any]) -> Command[None]:
    """Count the live workers, whose records have not expired; pass the number to `counted`."""
    since = round(now_seconds - RECORD_MS / 1000)
    return Command(("ZCOUNT", WORKERS_KEY, since, "+inf"), lambda reply: counted(int(reply)))


# ---- the server

#: Where an operator sets a parameter of Redis; managed services deny CONFIG SET.
PLACES = "in redis.conf, or in the parameter group or console of a managed Redis"


def server_facts(section: str) -> Command[dict[str, str]]:
    """Return a section of INFO."""
    return Command(("INFO", section), read_facts)


def server_ms() -> Command[int]:
    """Return Redis' clock in unix ms."""
    return Command(("TIME",), lambda reply: int(reply[0]) * 1000 + int(reply[1]) // 1000)


def confirmation(durability: Durability) -> Command[Confirmed]:
    """Wait until the replicas or disks confirm earlier commands on this connection; return the confirmations."""
    count = durability.count
    timeout_ms = milliseconds(durability.timeout)
    if durability.kind == "replicas":
        return Command(("WAIT", count, timeout_ms), lambda reply: Confirmed(int(reply) >= count, int(reply)))

    def on_disk(reply: Any) -> Confirmed:
        local = int(reply[0]) > 0 if durability.local else None
        replicas = int(reply[1])
        return Confirmed(replicas >= count and local is not False, replicas, local)

    return Command(("WAITAOF", int(durability.local), count, timeout_ms), on_disk)


#: How many minutes of totals are kept.
MINUTES_LIMIT = 180
#: The length of a minute in ms.
MINUTE_MS = 60_000

#: The stored totals of a minute are this many numbers, and then `due_ms`, which is a number or `-`.
_NUMBERS = 7


class Totals(NamedTuple):
    """
    The totals of a queue, as stored once a minute.

    Attributes:
        at_ms: when they were read, in unix ms by Redis' clock.
        arrived: messages published or redriven.
        failed: deliveries that ended in an error or by an expired lease.
        dead: messages that became dead letters.
        ended: messages that ended without an ack, including dead letters.
        waiting: messages that are due and wait for a worker or for the turn of their key.
        due_ms: when the oldest waiting message was due, in unix ms; None when no message waits or the time is unknown.
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
        """The stored `arrived`, `acked`, `failed`, `dead` and `ended`, in the order that `sums` returns."""
        return self.arrived, self.acked, self.failed, self.dead, self.ended

    @staticmethod
    def sums(totals: Mapping[str, int]) -> tuple[int, int, int, int, int]:
        """Return `arrived`, `acked`, `failed`, `dead` and `ended`; each is the sum of some counts in `totals`."""
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
    Read the stored totals of these minutes, given as unix minutes.

    The caller must check `at_ms`, because an entry may still contain the totals from 180 minutes earlier.
    """
    return Command(
        ("HMGET", keys.minutes, *(minute % MINUTES_LIMIT for minute in minutes)),
        lambda reply: sorted(found for one in reply if (found := _read(one)) is not None),
    )


def note(keys: Keys, totals: Totals) -> list[Command[Any]]:
    """Store a queue's totals of one minute. All stored totals expire 180 minutes after the last store."""
    minute = totals.at_ms // MINUTE_MS
    text = " ".join("-" if number is None else str(number) for number in totals)
    return [
        Command(("HSET", keys.minutes, minute % MINUTES_LIMIT, text), int),
        Command(("PEXPIRE", keys.minutes, MINUTES_LIMIT * MINUTE_MS), int),
    ]


def _read(value: bytes | None) -> Totals | None:
    """Parse the stored totals of a minute; None if another program wrote the value."""
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
    The stack of one running handler.

    Attributes:
        queue: the queue's name; empty for the thread of the event loop, which runs coroutines.
        id: the message id; for a batch the id of the first message.
        frames: the frames as `file:line function`, the innermost frame last.
    """

    queue: str
    id: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StackReport:
    """
    The stacks of a worker process' handlers at one moment.

    Attributes:
        at: when the stacks were taken, in unix seconds by the worker's clock.
        stacks: the stacks of the handlers that had run the longest, in that order.
        left_out: how many other handlers were running; their stacks are left out.
    """

    at: Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]
    stacks: tuple[HandlerStack, ...]
    left_out: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0


def take_request(id: str, asked: Callable[[], Any]) -> Command[None]:
    """Read and delete the request for the stacks of a worker; call `asked` if there was a request."""

    def read(reply: bytes | None) -> None:
        if reply is not None:
            asked()

    return Command(("GETDEL", stack_request_key(id)), read)


def write_report(id: str, report: StackReport) -> Command[None]:
    """Write the requested stacks of a worker."""
    return Command(("SET", stacks_key(id), msgspec.json.encode(report), "PX", REPORT_MS), read_nothing)
