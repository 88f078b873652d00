"""Failures to get a reply: what they are, and whether the command may have run."""

from __future__ import annotations

import re
import select
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio
from redis import exceptions

from reliq.errors import ConfigurationError
from reliq.lua import text_of
from reliq.redis.commands import Arg, read_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


#: Errors after which a connection is of no more use.
BROKEN = (redis.ConnectionError, redis.TimeoutError, OSError)


class NotSentError(redis.ConnectionError):
    """
    No connection could be had, so the command cannot have run.

    Attributes:
        is_crowded: whether all connections that there may be are in use: that says nothing of the server.
    """

    is_crowded = False


def is_failure(reply: Any) -> bool:
    """Say whether a reply is none: its server did not answer, or could not be reached."""
    return isinstance(reply, BROKEN) and not isinstance(reply, redis.AuthenticationError)


def not_sent(error: Exception, pool: Any) -> Exception:
    """Return what to raise when a connection could not be made; a refused login stays what it is."""
    if isinstance(error, redis.AuthenticationError):
        return error
    if isinstance(error, redis.ResponseError):  # to SELECT or AUTH
        return redis.AuthenticationError(str(error))
    text = str(error)
    if text.startswith("No connection available"):
        crowded = NotSentError(text)
        crowded.is_crowded = True
        return crowded
    kind = getattr(pool, "beneath", pool).connection_class
    is_secure = issubclass(kind, redis.SSLConnection | redis.asyncio.SSLConnection)
    if is_secure and ("Timeout connecting" in text or "WRONG_VERSION_NUMBER" in text):
        return NotSentError(f"{text}; if that port speaks no TLS, the URL begins with redis://")
    if not is_secure and "connecting to" not in text:  # it was closed at the greeting
        return NotSentError(f"{text}; if that port speaks TLS, the URL begins with rediss://")
    return NotSentError(text)


#: This server refuses, and another one behind the same address may not.
ELSEWHERE = {"READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"}
#: The server refuses now, and may not in a moment.
NOT_NOW = ELSEWHERE | {"BUSY", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "MOVED", "ASK"}

#: redis-py cuts the first word off some replies; their class stands for it.
_CODES: dict[type[Exception], str] = {
    exceptions.ReadOnlyError: "READONLY",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.AskError: "ASK",
    exceptions.MovedError: "MOVED",
}
#: Redis before 7.0 wraps the refusal of a command inside a script in a text like this.
_IN_SCRIPT = re.compile(r"^(?:ERR )?Error running script .*: -([A-Z]+) ")


def code(error: Exception) -> str:
    """Return the first word of an error reply, its code; a proxy may write ERR before it."""
    if known := _CODES.get(type(error)):
        return known
    text = str(error)
    wrapped = _IN_SCRIPT.match(text)
    return wrapped[1] if wrapped else text.removeprefix("ERR ").partition(" ")[0]


def is_elsewhere(replies: Iterable[Any]) -> bool:
    """Say whether one of `replies` sends us to another server."""
    return any(isinstance(reply, redis.ResponseError) and code(reply) in ELSEWHERE for reply in replies)


#: The oldest server whose commands the scripts can do with.
OLDEST_SERVER = (6, 2)


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """
    Which release a server says it is, in its INFO; the numbers are empty when it hides that.

    Valkey says two: the release of Redis whose commands it has, and its own.
    """

    text: str
    numbers: tuple[int, ...]

    @classmethod
    def read(cls, facts: Mapping[str, str], product: str = "redis") -> ServerVersion:
        """Return what the section `server` of INFO says of `product`, `redis` or `valkey`."""
        text = facts.get(f"{product}_version", "")
        return cls(text, tuple(int(part) for part in text.split(".") if part.isdigit()))

    def is_before(self, release: tuple[int, ...]) -> bool:
        """Say whether the server is older than `release`; one that hides its version is not."""
        return bool(self.numbers) and self.numbers < release

    def check(self) -> None:
        """Raise ConfigurationError when the server is too old for reliq."""
        if self.is_before(OLDEST_SERVER):
            raise ConfigurationError(f"Redis must be 6.2 or newer, not {self.text}")


class WrongKindError(ConfigurationError):
    """A node of a Cluster was named as a single server, or a single server as a node of a Cluster."""


class ServerCheck:
    """
    Lets no command through before a server is known to be new enough and of the kind that was named.

    A server that hides what it is passes.

    Args:
        in_cluster: whether it was named as a node of a Cluster.
        place: where it is, for what is told.
    """

    #: Asked on a new connection; it is part of the connection's beginning, as redis-py's own HELLO is.
    question = ("INFO", "server")

    def __init__(self, *, in_cluster: bool = False, place: str = "") -> None:
        self.is_open = False
        self._in_cluster, self._place = in_cluster, place

    def judge(self, reply: Any) -> None:
        """Open, or raise ConfigurationError: the server is too old, or of the other kind."""
        facts = read_facts(reply) if isinstance(reply, bytes) else {}
        ServerVersion.read(facts).check()
        mode = facts.get("redis_mode", facts.get("server_mode"))  # Valkey's word
        if mode == "cluster" and not self._in_cluster:
            raise WrongKindError(
                f"{self._place} is a node of a Redis Cluster; write redis+cluster://HOST:PORT, with one node or several "
                "(rediss+cluster:// for TLS), instead of redis://"
            )
        if self._in_cluster and mode == "standalone":
            raise WrongKindError(
                f"{self._place} is a single server and no node of a Redis Cluster; write redis://HOST:PORT/0 "
                "(rediss:// for TLS) instead of redis+cluster://"
            )
        self.is_open = True


class KeptPool:
    """
    A pool over redis-py's blocking pool that keeps idle connections itself.

    redis-py's bookkeeping for each use takes as long as sending a command. An idle connection counts as in use there,
    so the limit of that pool holds; while a thread waits for a connection, those given back go to that pool.
    """

    def __init__(self, pool: redis.BlockingConnectionPool) -> None:
        self.beneath = pool
        self._pool: Any = pool
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._waiting = 0
        #: Connection -> its socket, and the function that says whether there is something to read from it.
        self._polls: dict[Any, tuple[Any, Callable[[], Any]]] = {}

    def get_connection(self) -> Any:
        """Return a connection that is ready to send; raise as redis-py does when there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    self._waiting += 1
                    break
                kept = self._idle.pop()
            if self._is_ready(kept):
                return kept
            kept.disconnect()
            self._pool.release(kept)
        try:
            return self._pool.get_connection()
        finally:
            with self._lock:
                self._waiting -= 1

    def release(self, connection: Any) -> None:
        """Take a connection back, with every reply read; one that is disconnected goes to the pool, to be made anew."""
        with self._lock:
            if connection._sock and not self._waiting:  # noqa: SLF001  `is_connected` came with redis-py 7
                self._idle.append(connection)
                return
        self._pool.release(connection)

    def disconnect(self) -> None:
        """Close every connection; they come back when they are used again."""
        for kept in self._take_idle():
            self._pool.release(kept)
        self._pool.disconnect()

    def close_idle(self) -> None:
        """Close the connections that nobody uses."""
        for kept in self._take_idle():
            kept.disconnect()
            self._pool.release(kept)

    def _take_idle(self) -> list[Any]:
        with self._lock:
            idle, self._idle = self._idle, []
            return idle

    def _is_ready(self, connection: Any) -> bool:
        """Say whether a connection is open with nothing to read: the server closes those that are idle for long."""
        socket = connection._sock  # noqa: SLF001  redis-py's own `can_read` makes and fills a poll object at each call
        if socket is None:
            return False
        known, poll = self._polls.get(connection, (None, None))
        if poll is None or known is not socket:
            poll = partial(_poll_of(socket), 0)
            self._polls[connection] = socket, poll
        return not poll()


def await_reply(connection: Any, within_seconds: float) -> None:
    """Wait until there is something to read from a connection; raise redis.TimeoutError when it does not come."""
    if not _poll_of(connection._sock)(1000 * within_seconds):  # noqa: SLF001  it has no public name
        raise redis.TimeoutError("no reply came in time")


def _poll_of(socket: Any) -> Callable[[float], Any]:
    """Return a function whose answer is true when there is something to read from `socket` within so many ms."""
    if not hasattr(select, "poll"):  # eventlet takes it away; Windows has none
        return lambda ms: select.select([socket], [], [], ms / 1000)[0]
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return poll.poll


def is_unknown_script(reply: Any) -> bool:
    """Say whether Redis does not know a script by its digest."""
    return isinstance(reply, redis.ResponseError) and (
        isinstance(reply, redis.exceptions.NoScriptError) or str(reply).startswith("NOSCRIPT")
    )


def is_denied_eval(reply: Any) -> bool:
    """Say whether the user may run no scripts but by their digests."""
    return isinstance(reply, redis.exceptions.NoPermissionError) and "'eval'" in str(reply)


class KnownScripts:
    """
    The scripts that a server has, as far as this process has seen.

    Redis refuses a digest that it does not know and goes on with the commands behind it. The script would then be sent in
    full and run after those. A script that the server may lack goes in full at once when something comes behind it.

    Attributes:
        sent: connection -> the digests of what was sent over it in full and is not answered yet.
    """

    def __init__(self) -> None:
        self._known: set[Arg] = set()
        self._may_eval: bool | None = None  # nobody knows yet
        #: Connection -> what it is connected by: another one means that the server may be another too.
        self._links: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self.sent: dict[Any, set[Arg]] = {}

    def spelled(self, commands: Sequence[Sequence[Arg]], connection: Any, link: Any) -> Sequence[Sequence[Arg]]:
        """Return several commands as they are to be sent together over a connection."""
        if self._may_eval is False:
            return commands
        known = self._links.get(connection)
        if link is None or known is None or known() is not link:
            if link is None or known is not None:
                self.forget()
            if link is not None:  # somebody has closed the connection: it is made anew as it is used
                self._links[connection] = weakref.ref(link)
        for command in commands[:-1]:
            if command[0] == "EVALSHA" and command[1] not in self._known:
                break
        else:
            return commands
        sent = self.sent[connection] = set()
        spelled = [self._in_full(command, sent) for command in commands[:-1]]
        # While nobody knows whether the user may EVAL every script goes in full: all are refused, or none.
        return [*spelled, commands[-1] if self._may_eval else self._in_full(commands[-1], sent)]

    def answered(self, connection: Any, refusals: Sequence[Any]) -> None:
        """Learn from what was answered over a connection; `refusals` are all answers when there is one among them."""
        if (sent := self.sent.pop(connection, None)) and not refusals:
            self._known |= sent
            self._may_eval = True
        if refusals and any(map(is_denied_eval, refusals)):
            self._may_eval = False
        if refusals and any(map(is_unknown_script, refusals)):
            self.forget()

    def forget(self) -> None:
        """Note that the server may have lost its scripts, or be another one."""
        self._known = set()
        self.sent.clear()

    def _in_full(self, command: Sequence[Arg], sent: set[Arg]) -> Sequence[Arg]:
        """Return a command with the text of its script, where the server may lack that and is not `sent` it before."""
        if command[0] != "EVALSHA" or command[1] in self._known or (self._may_eval and command[1] in sent):
            return command
        text = text_of(command[1])
        if text is None:
            return command
        sent.add(command[1])
        return ("EVAL", text, *command[2:])
