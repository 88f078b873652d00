"""A request to Redis as a value that has not been made yet, with the reader of its reply."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from reliq.errors import ProtocolError, RedisUnavailableError
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

    def at(self, us: int) -> "Call[T]":
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

    def at(self, _us: int) -> "Command[T]":
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
