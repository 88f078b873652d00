"""Requests to Redis as values: scripts and plain commands, each with a parser for its reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from reliq.errors import ProtocolError, RedisUnavailableError
from reliq.keys import QUEUES_KEY, WORKERS_KEY, Keys, stack_request_key, stacks_key, worker_key
from reliq.message import Confirmed, Letter, Pause
from reliq.settings import BATCH_LIMIT, Durability, milliseconds
from reliq.text import LAST_SECOND, clamp_time, whole_number
from reliq.wire_format import FailureNote, StateWord, open_envelope

if TYPE_CHECKING:
    from reliq.events import Event
    from reliq.lua import Script


T = TypeVar("T")

Arg = str | bytes | int
#: Returns unix microseconds.
Clock = Callable[[], int]


def id_text(raw: bytes) -> str:
    """Return an id as text; one of a foreign publisher may be any bytes, and goes back to Redis as it came."""
    return raw.decode("utf-8", "surrogateescape")


def raise_first(answers: list[Any]) -> list[Any]:
    """Return answers; raise the first that is an exception."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def answered(answers: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return the answers of a queue's shards, and the numbers of those that are away; raise when all are, or one refused."""
    away = tuple(at for at, answer in enumerate(answers) if isinstance(answer, RedisUnavailableError))
    if len(away) == len(answers):
        raise_first([*answers])
    return raise_first([answer for at, answer in enumerate(answers) if at not in away]), away


def of_every_shard(queue: str, done: str, answers: Sequence[Any]) -> list[Any]:
    """Return the answers of all shards; when some are away, raise RedisUnavailableError, which names them and the others."""
    there, away = answered(answers)
    if away:
        others = ", ".join(str(at) for at in range(len(answers)) if at not in away)
        raise RedisUnavailableError(
            f"queue {queue!r} is {done} in the shards {others}, and not in {', '.join(map(str, away))}, whose Redis is away: "
            f"{answers[away[0]]}; do it again when that is back",
            maybe_ran=True,
        )
    return there


def no_events(_result: Any, /) -> Iterable[Event]:
    """Return no events: nobody watches for this request."""
    return ()


#: A parser raises one of these for a reply that is not its own.
_UNREADABLE = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """
    One script with its keys and arguments; nothing is sent before a client runs it.

    Attributes:
        script: the Lua script.
        keys: KEYS, as the script's header names them.
        args: ARGV, as the script's header names them.
        parse: reads the reply; any error that it raises means a reply that is not this script's.
        events: the events that observers hear, made from the parsed reply.
    """

    script: Script
    keys: Sequence[str]
    args: Sequence[Arg]
    parse: Callable[[Any], T]
    events: Callable[[T], Iterable[Event]] = no_events

    @property
    def command(self) -> tuple[Arg, ...]:
        """The command by the script's digest."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)

    @property
    def command_in_full(self) -> tuple[Arg, ...]:
        """The command with the script's text, for a server that does not know it yet."""
        return ("EVAL", self.script.text, len(self.keys), *self.keys, *self.args)

    def at(self, us: int) -> Call[T]:
        """Return the call at that moment, in unix microseconds, instead of Redis' own; one that names a moment keeps it."""
        return replace(self, args=(us, *self.args[1:])) if self.args[0] == "" else self

    def read(self, reply: Any) -> T:
        """Return the reply as `parse` reads it; raise ProtocolError for a reply that is not this script's."""
        try:
            return self.parse(reply)
        except _UNREADABLE as error:
            raise _unreadable(self.script.name, error) from error


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """
    One plain command, safe to repeat; nothing is sent before a client runs it.

    Attributes:
        command: its name and arguments.
        parse: reads the reply.
        events: the events that observers hear, made from the parsed reply.
    """

    command: Sequence[Arg]
    parse: Callable[[Any], T]
    events: Callable[[T], Iterable[Event]] = no_events

    @property
    def command_in_full(self) -> Sequence[Arg]:
        """The same: a command needs no text."""
        return self.command

    def at(self, _us: int) -> Command[T]:
        """Return the same: a command goes by Redis' own clock."""
        return self

    def read(self, reply: Any) -> T:
        """Return the reply as `parse` reads it; raise ProtocolError for a reply that is not this command's."""
        try:
            return self.parse(reply)
        except _UNREADABLE as error:
            raise _unreadable(str(self.command[0]), error) from error


Request = Call[T] | Command[T]


def _unreadable(name: str, error: Exception) -> ProtocolError:
    return ProtocolError(f"{name} answered something that is not its reply ({type(error).__name__})")


#: Seconds between two writes of a record.
BEAT_SECONDS = 5.0
#: A record expires this many ms after its worker was killed.
RECORD_MS = 15_000
#: A worker that is silent for this many seconds leaves the index too.
FORGET_SECONDS = 3600
#: Running handlers that a record names at most.
SLOTS_LIMIT = 200

#: A record with other numbers is none of ours.
_Number = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Moment = Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]


@dataclass(frozen=True, slots=True)
class RunningJob:
    """
    A handler that runs.

    Attributes:
        attempt: 1 for the first delivery; None for a bare body.
        started: when it began, in unix seconds by its worker's clock.
    """

    queue: str
    id: str
    attempt: _Number | None
    started: _Moment


@dataclass(frozen=True, slots=True)
class Worker:
    """
    The record of a worker process, at most BEAT_SECONDS old. Times are unix seconds by its clock.

    Attributes:
        version: of reliq.
        queues: what it claims from.
        slots: how many handlers it runs at once.
        busy: how many run.
        started: since when it works.
        last_claim: when its last round of claims was completed.
        seen: when it said this.
        running: the handlers that run, the longest running first; at most SLOTS_LIMIT.
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


#: Characters that are read of a pause's reason which something else than reliq wrote.
FOREIGN_REASON_LIMIT = 200

_pause_decoder = msgspec.json.Decoder(Pause)


def read_nothing(_reply: object) -> None:
    """Read nothing from the reply."""


def read_bytes(reply: Any) -> bytes:
    """Return a reply as it is; raise ValueError for one that is none: `bytes` would make any number into zeros."""
    if not isinstance(reply, bytes):
        raise ValueError  # noqa: TRY004  as of any reply that is none
    return reply


def read_text(reply: bytes | None) -> str:
    """Return a text; empty for nothing."""
    return "" if reply is None else reply.decode("utf-8", "replace")


def read_ids(reply: Sequence[bytes]) -> list[str]:
    """Return ids."""
    return [id_text(one) for one in reply]


def read_scores(reply: Any) -> list[tuple[str, float]]:
    """Return ids with their scores, as RESP 2 and RESP 3 tell them."""
    return [(id, clamp_time(score)) for id, score in read_raw_scores(reply)]


def read_raw_scores(reply: Any) -> list[tuple[str, float]]:
    """Return ids with their scores as Redis has them: any numbers."""
    pairs = reply if reply and isinstance(reply[0], list | tuple) else zip(reply[::2], reply[1::2], strict=True)
    return [(id_text(member), float(score)) for member, score in pairs]


def read_facts(reply: bytes) -> dict[str, str]:
    """Return the fields of INFO."""
    rows = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: told for name, colon, told in rows if colon}


def read_pause(reply: bytes) -> Pause:
    """Return a pause; of a value that something else wrote the start of its text is the reason."""
    try:
        return _pause_decoder.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Pause("", None, reply.decode("utf-8", "replace")[:FOREIGN_REASON_LIMIT])


def read_letter(row: Any, keys: Keys) -> Letter:
    """Return the dead letter in an entry of the stream `dead` of a shard."""
    name = row[0].decode()
    pairs = row[1]
    fields = dict(zip(pairs[::2], pairs[1::2], strict=True))  # something else may have written others than ours
    header, payload = open_envelope(fields.get(b"value", b""), bare=keys.bare)
    note = FailureNote.parse(fields.get(b"note"))
    attempts = note.attempt
    if attempts is None and header.retries is not None:
        attempts = header.retries + 1  # only a message with no retry left ends by its lease
    # One that came from another shard says when it died: its name here says when it came.
    death = fields.get(b"died", row[0]).split(b"-")[0]
    id = id_text(fields.get(b"id", b""))
    died = clamp_time((whole_number(death) or 0) / 1000)
    return Letter(name, id, note.reason, note.error, attempts, died, header, payload, note.raised, keys.shard)


List = Literal["ready", "retry"]
LISTS: tuple[List, ...] = ("ready", "retry")
SortedSet = Literal["pending", "unack"]


# ---- messages and dead letters


def bodies(keys: Keys, ids: Sequence[str]) -> Command[list[bytes | None]]:
    """Read the values of messages; None where there is none."""
    return Command(
        ("MGET", *map(keys.msg, ids)), lambda reply: [one if isinstance(one, bytes) else None for one in reply]
    )


def body_start(keys: Keys, id: str, length: int) -> Command[bytes]:
    """Read the first bytes of a value; empty when it is gone."""
    return Command(("GETRANGE", keys.msg(id), 0, length - 1), read_bytes)


def state_words(keys: Keys, ids: Sequence[str]) -> Command[list[StateWord]]:
    """Read the state words of messages."""
    return Command(("HMGET", keys.lease, *ids), lambda reply: [StateWord.parse(one) for one in reply])


def retries_left(keys: Keys, ids: Sequence[str]) -> Command[list[bytes | None]]:
    """Read the retries left of messages, as Redis has them; None where there is none."""
    return Command(("HMGET", keys.retries_left, *ids), list)


def first_score(keys: Keys, place: SortedSet) -> Command[float | None]:
    """Read the unix seconds at which the first message is due, or the first lease ends; None when there is none."""
    return Command(
        ("ZRANGE", getattr(keys, place), 0, 0, "WITHSCORES"),
        lambda reply: next((score for _, score in read_scores(reply)), None),
    )


def due_count(keys: Keys, now_seconds: float) -> Command[int]:
    """Count the pending messages whose due time has come."""
    return Command(("ZCOUNT", keys.pending, "-inf", f"{now_seconds:.3f}"), int)


def held(keys: Keys, at: int = 0) -> Command[list[tuple[str, float]]]:
    """Read BATCH_LIMIT ids in unack from the place `at`, the first to end first, with when lease or backoff is over."""
    return Command(("ZRANGE", keys.unack, at, at + BATCH_LIMIT - 1, "WITHSCORES"), read_scores)


def held_sample(keys: Keys, count: int) -> Command[list[str]]:
    """Draw up to `count` ids in unack."""
    return Command(("ZRANDMEMBER", keys.unack, count), read_ids)


def end_of(keys: Keys, place: List) -> Command[str]:
    """Read the id of a list that is claimed next; empty when there is none."""
    return Command(("LINDEX", keys.ready if place == "ready" else keys.retry, -1), lambda reply: id_text(reply or b""))


def garbage(keys: Keys, count: int) -> Command[list[str]]:
    """Return up to `count` ids that wait to be collected."""
    return Command(("SRANDMEMBER", keys.garbage, count), read_ids)


def claims(keys: Keys) -> Command[int]:
    """Return how many deliveries the queue has counted: a number that only grows."""
    return Command(("HGET", keys.totals, "claimed"), lambda reply: int(reply or 0))


def letters_between(
    keys: Keys, first: str, last: str, *, count: int, newest_first: bool = False
) -> Command[list[Letter]]:
    """Return up to `count` dead letters from the place `first` to `last` of their stream, both included."""
    command, places = ("XREVRANGE", (last, first)) if newest_first else ("XRANGE", (first, last))
    return Command(
        (command, keys.dead, *places, "COUNT", count), lambda reply: [read_letter(row, keys) for row in reply]
    )


def delete_letters(keys: Keys, letters: Iterable[str]) -> Command[int]:
    """Delete dead letters; return how many were deleted."""
    return Command(("XDEL", keys.dead, *letters), int)


# ---- waiting for work, waking who waits, and the pause


def wake_token(poke: str, queues: Sequence[Keys], for_seconds: float) -> Command[str | None]:
    """Wait for a token of one of several queues, or for a `poke`; return the key it came by, None when none came."""
    tokens = (keys.wake for keys in queues)
    return Command(
        ("BLPOP", poke, *tokens, f"{for_seconds:.3f}"), lambda reply: None if reply is None else id_text(reply[0])
    )


def wake_token_at_once(keys: Keys) -> Command[bool]:
    """Take the token that says there is something to claim, without waiting; say whether there was one."""
    return Command(("LPOP", keys.wake), bool)


def push_wake_token(keys: Keys) -> list[Command[Any]]:
    """Leave the queue one token."""
    return [Command(("RPUSH", keys.wake, "1"), int), Command(("LTRIM", keys.wake, 0, 0), bool)]


def poke(key: str, lasts_ms: int) -> list[Command[int]]:
    """End the wait for `wake_token` by its `poke`; when nobody waits, it is forgotten after so many ms."""
    return [Command(("RPUSH", key, "1"), int), Command(("PEXPIRE", key, lasts_ms), int)]


def drop_watch(keys: Keys) -> Command[int]:
    """Let another process watch for the next due time."""
    return Command(("DEL", keys.watch), int)


def pause(keys: Keys, pause: Pause, for_ms: int | None) -> Command[None]:
    """Have the queue not claimed: for so many ms, or until it is resumed."""
    limit = () if for_ms is None else ("PX", for_ms)
    return Command(("SET", keys.paused, msgspec.json.encode(pause), *limit), read_nothing)


def resume_queue(keys: Keys) -> list[Command[Any]]:
    """End the pause of a queue and the sleep of the whole queue: the first two answers are whether there was one."""
    return [Command(("DEL", keys.paused), bool), Command(("ZREM", keys.asleep, ""), bool), *push_wake_token(keys)]


# ---- the registry of queues


def register(entries: Sequence[str], now_seconds: int) -> Command[None]:
    """Note in the registry that these queues are in use, each by its `Keys.entry`."""
    pairs = [part for entry in entries for part in (entry, str(now_seconds))]
    return Command(("HSET", QUEUES_KEY, *pairs), read_nothing)


def registry_size() -> Command[int]:
    """Count the queues of the registry."""
    return Command(("HLEN", QUEUES_KEY), int)


def registry_page(cursor: int, count: int) -> Command[tuple[int, list[str]]]:
    """Read about `count` entries of the registry; return where the next are (0: these were the last), and them."""
    return Command(
        ("HSCAN", QUEUES_KEY, cursor, "COUNT", count), lambda reply: (int(reply[0]), read_ids(reply[1][::2]))
    )


# ---- the records of workers


def write_worker(worker: Worker) -> list[Command[None]]:
    """Write a worker's record and its place in the index; drop from the index who was silent for an hour."""
    return [
        Command(("SET", worker_key(worker.id), msgspec.json.encode(worker), "PX", RECORD_MS), read_nothing),
        Command(("ZADD", WORKERS_KEY, round(worker.seen), worker.id), read_nothing),
        Command(("ZREMRANGEBYSCORE", WORKERS_KEY, "-inf", round(worker.seen) - FORGET_SECONDS), read_nothing),
    ]


def remove_worker(id: str) -> list[Command[None]]:
    """Remove a worker's record and its place in the index."""
    return [Command(("DEL", worker_key(id)), read_nothing), Command(("ZREM", WORKERS_KEY, id), read_nothing)]


def workers_alive(now_seconds: float, counted: Callable[[int], Any]) -> Command[None]:
    """Count the workers whose records have not expired; call `counted` with their number."""
    since = round(now_seconds - RECORD_MS / 1000)
    return Command(("ZCOUNT", WORKERS_KEY, since, "+inf"), lambda reply: counted(int(reply)))


# ---- the server


def server_facts(section: str) -> Command[dict[str, str]]:
    """Return a section of INFO."""
    return Command(("INFO", section), read_facts)


def server_ms() -> Command[int]:
    """Return Redis' clock in unix ms."""
    return Command(("TIME",), lambda reply: int(reply[0]) * 1000 + int(reply[1]) // 1000)


def confirmation(durability: Durability) -> Command[Confirmed]:
    """Wait until what came before on the same connection is confirmed; say what was."""
    count = durability.count
    timeout_ms = milliseconds(durability.timeout)
    if durability.kind == "replicas":
        return Command(("WAIT", count, timeout_ms), lambda reply: Confirmed(int(reply) >= count, int(reply)))

    def on_disk(reply: Any) -> Confirmed:
        local = int(reply[0]) > 0 if durability.local else None
        replicas = int(reply[1])
        return Confirmed(replicas >= count and local is not False, replicas, local)

    return Command(("WAITAOF", int(durability.local), count, timeout_ms), on_disk)


#: Minutes that are kept, and the ms of one.
MINUTES_LIMIT = 180
MINUTE_MS = 60_000

#: Numbers in a value, the last one aside.
_NUMBERS = 7


class Totals(NamedTuple):
    """
    A queue as a minute's note has it.

    Attributes:
        at_ms: when, in unix ms by Redis' clock.
        arrived: published or redriven.
        failed: deliveries that ended in an error, or by their lease.
        dead, ended: messages that became dead letters; that ended in any way but by an ack, these included.
        waiting: due, for a worker or for the turn of their key.
        due_ms: since when the first of them has been due; None when nothing waits, or nobody knows.
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
        """The answer of `sums` then."""
        return self.arrived, self.acked, self.failed, self.dead, self.ended

    @staticmethod
    def sums(totals: Mapping[str, int]) -> tuple[int, int, int, int, int]:
        """Return how many arrived, were acked, failed, died and ended in any way but by an ack, of a queue's totals."""
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
    """Read what the ring has in the places of these minutes, each by its number; it may be of the minutes before them."""
    return Command(
        ("HMGET", keys.minutes, *(minute % MINUTES_LIMIT for minute in minutes)),
        lambda reply: sorted(found for one in reply if (found := _read(one)) is not None),
    )


def note(keys: Keys, totals: Totals) -> list[Command[Any]]:
    """Note a queue's totals of one minute; the notes are gone when none was written for as long as they last."""
    minute = totals.at_ms // MINUTE_MS
    text = " ".join("-" if number is None else str(number) for number in totals)
    return [
        Command(("HSET", keys.minutes, minute % MINUTES_LIMIT, text), int),
        Command(("PEXPIRE", keys.minutes, MINUTES_LIMIT * MINUTE_MS), int),
    ]


def _read(value: bytes | None) -> Totals | None:
    """Return what a value says; None for one that something else wrote."""
    *texts, due = (value or b"").split(b" ")
    numbers = [number for text in texts if (number := whole_number(text)) is not None and number >= 0]
    if len(numbers) != len(texts) or len(numbers) != _NUMBERS or numbers[0] > LAST_SECOND * 1000:
        return None
    at_ms, arrived, acked, failed, dead, ended, waiting = numbers
    return Totals(at_ms, arrived, acked, failed, dead, ended, waiting, whole_number(due))


#: The stacks are kept for ten minutes.
REPORT_MS = 600_000


@dataclass(frozen=True, slots=True)
class HandlerStack:
    """
    Where one handler stands.

    Attributes:
        queue: empty for the thread of the event loop, on which coroutines run.
        id: the message, of a batch the first.
        frames: `file:line function`, the innermost last.
    """

    queue: str
    id: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StackReport:
    """
    Where the handlers of a worker process stood.

    Attributes:
        at: when, in unix seconds by its clock.
        stacks: of the handlers that had run the longest first.
        left_out: how many more there were than a report has room for.
    """

    at: Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]
    stacks: tuple[HandlerStack, ...]
    left_out: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0


def take_request(id: str, asked: Callable[[], Any]) -> Command[None]:
    """Take the request for the stacks of a worker; call `asked` when there was one."""

    def read(reply: bytes | None) -> None:
        if reply is not None:
            asked()

    return Command(("GETDEL", stack_request_key(id)), read)


def write_report(id: str, report: StackReport) -> Command[None]:
    """Write the stacks of a worker, which somebody asked for."""
    return Command(("SET", stacks_key(id), msgspec.json.encode(report), "PX", REPORT_MS), read_nothing)
