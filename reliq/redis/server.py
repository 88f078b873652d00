"""
The connections of a process to each Redis that it uses, and their pools.

A pool is bounded, has timeouts and no hidden retries, and returns replies as bytes.
"""

import asyncio
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Self

from reliq.errors import ConfigurationError, InsecureWarning
from reliq.keys import Layout
from reliq.redis.cluster import SERVER_SECONDS, ClusterTransport, Servers, Transport
from reliq.redis.commands import Clock
from reliq.redis.connection import (
    ASYNCIO,
    BLOCKING,
    Driver,
    ServerConnections,
    ServerFacts,
    connect_error,
    run_blocking,
)
from reliq.redis.redis_py import redis
from reliq.redis.url import (
    Address,
    RedisClient,
    Target,
    address,
    check_target,
    is_secure,
    primary,
    seeds,
    settings,
    shown,
    weakness,
)

URL_VARIABLE = "RELIQ_URL"
CONNECT_SECONDS = 2.0
#: A publish retries for this many seconds while Redis is unavailable.
PUBLISH_SECONDS = 2.0
#: A publish waits this many seconds for one reply: two tries that time out fit into PUBLISH_SECONDS.
PUBLISH_TIMEOUT_SECONDS = 0.9
#: A worker waits at most this many seconds for one reply: commands block for one second, the rest is for a slow server.
WORKER_TIMEOUT_SECONDS = 5.0


def pool(target: Target, timeout_seconds: float, *, asynchronous: bool, node: str = "") -> Any:
    """Return a blocking or asyncio pool of redis-py for `target`, or for one node of it as HOST:PORT."""
    module: Any = redis.asyncio if asynchronous else redis
    theirs = settings(target)
    ours: dict[str, Any] = {
        "retry": module.retry.Retry(redis.backoff.NoBackoff(), 0),
        "decode_responses": False,
        "protocol": 2,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": min(timeout_seconds, CONNECT_SECONDS),
        "socket_keepalive": True,
    }
    if sentinel := primary(target):
        secure = "SSL" if is_secure(target) else ""
        kind = getattr(module.sentinel, f"SentinelManaged{secure}Connection")
        manager = module.sentinel.Sentinel(
            sentinel.sentinels, min_other_sentinels=sentinel.min_other_sentinels, sentinel_kwargs=sentinel.rights | ours
        )
        theirs = {name: value for name, value in theirs.items() if name not in ("host", "port")}
        return module.sentinel.SentinelConnectionPool(
            sentinel.service, manager, connection_class=kind, **_accepted(kind, theirs), **ours
        )
    if is_secure(target):
        kind = module.SSLConnection
        theirs.pop("path", None)
    elif "path" in theirs:
        kind = module.UnixDomainSocketConnection
        del ours["socket_keepalive"]
    else:
        kind = module.Connection
    if node:
        host, _, port = node.rpartition(":")
        theirs |= {"host": host, "port": int(port)}
    return module.BlockingConnectionPool(
        connection_class=kind, timeout=timeout_seconds, **_accepted(kind, theirs), **ours
    )


def _accepted(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that connections of `kind` accept: blocking and asyncio differ in a few TLS settings."""
    makers: list[Any] = [vars(base).get("__init__") for base in kind.__mro__]
    known = {name for maker in makers if maker for name in inspect.signature(maker).parameters}
    return {name: value for name, value in settings.items() if name in known or name == "max_connections"}


class _LoopTransports:
    """The transports of one event loop by their timeout, closed when the loop ends."""

    def __init__(self) -> None:
        self.by_timeout: dict[float, Transport] = {}
        self.end = self._until_the_loop_ends()
        # An event loop closes its started asynchronous generators when it ends, so this generator is started now.
        with suppress(StopIteration):
            self.end.__anext__().send(None)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            transports = self.by_timeout
            self.by_timeout = {}
            for transport in transports.values():
                await transport.close()


class Connection:
    """
    The transports to one Redis in this process, one for each timeout and kind: blocking, or one event loop.

    Attributes:
        clock: returns the time for scripts on this Redis, in unix microseconds; None means Redis' own clock.
        named: queue -> until when this process need not write it to the registry again, by the monotonic clock.
        maps: queue -> its `KnownMap`, shared by everything in this process that uses this Redis.
    """

    def __init__(self, target: Target, clock: Clock | None = None) -> None:
        self.clock = clock
        self._url = target if isinstance(target, str) else ""
        # A weak reference: when the owner drops the client, the client and this connection are freed.
        self._client = None if isinstance(target, str) else weakref.ref(target)
        self.named: dict[str, float] = {}
        self.maps: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._blocking: dict[float, Transport] = {}
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopTransports] = weakref.WeakKeyDictionary()
        #: Node (empty for a single server) -> its facts, shared by all transports.
        self._facts: dict[str, ServerFacts] = {}

    @classmethod
    def to(cls, target: Target | None) -> "Connection":
        """
        Return the connection to a URL or around a client; a process has one for each.

        Raises:
            ConfigurationError: `target` is None and RELIQ_URL is not set, or reliq cannot use `target`.
        """
        chosen = default_url() if target is None else target
        return _shared.connection(chosen)

    def anew(self) -> "Connection":
        """Return a new connection to the same Redis, with its own transports."""
        return Connection(self._target(), self.clock)

    @property
    def name(self) -> str:
        """The URL without its password, or the kind of client."""
        return shown(self._target())

    @property
    def address(self) -> Address:
        """The hosts, database and kind of the connection, from the URL or the client."""
        return address(self._target())

    def wire(self, timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS) -> Transport:
        """
        Return the transport for blocking code that waits at most `timeout_seconds` for a reply.

        A Cluster has one transport for all timeouts.
        """
        if transport := self._blocking.get(timeout_seconds):
            return transport
        with self._lock:
            return self._transport(BLOCKING, self._blocking, timeout_seconds)

    def async_wire(self, timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS) -> Transport:
        """Return the transport for the running event loop, see `wire`; its connections close when the loop ends."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._loops:
                # A loop that was closed without closing its async generators is still here.
                for closed in [known for known in self._loops if known.is_closed()]:
                    del self._loops[closed]
                self._loops[loop] = _LoopTransports()
            return self._transport(ASYNCIO, self._loops[loop].by_timeout, timeout_seconds)

    def close(self) -> None:
        """Close the blocking connections; the next use opens them again."""
        with self._lock:
            transports = list(self._blocking.values())
        if servers := self.__dict__.get("_servers"):  # only if they were used
            servers.close()
        for transport in transports:
            run_blocking(transport.close())

    async def aclose(self) -> None:
        """Close the running event loop's connections."""
        with self._lock:
            ours = self._loops.pop(asyncio.get_running_loop(), None)
        if ours:
            await ours.end.aclose()

    def _transport(self, driver: Driver, known: dict[float, Transport], timeout_seconds: float) -> Transport:
        """Return the transport for a timeout, creating it if necessary; the caller holds the lock."""
        if timeout_seconds not in known:
            if self._servers is None:
                made: Transport = self._connections_to(driver, "", timeout_seconds)
            else:
                made = next(iter(known.values()), None) or ClusterTransport(
                    driver, self._servers, lambda node: self._connections_to(driver, node, SERVER_SECONDS)
                )
            known[timeout_seconds] = made
        return known[timeout_seconds]

    def _connections_to(self, driver: Driver, node: str, timeout_seconds: float) -> ServerConnections:
        target = self._target()
        made = pool(target, timeout_seconds, asynchronous=driver is ASYNCIO, node=node)
        facts = self._facts.setdefault(node, ServerFacts())
        return ServerConnections(driver, made, node or shown(target), in_cluster=bool(node), facts=facts)

    @cached_property
    def _servers(self) -> Servers | None:
        """The nodes of a Cluster and their states; None for a single server."""
        nodes = seeds(self._target())
        return Servers(nodes, self._ask) if nodes else None

    def _ask(self, node: str, commands: Sequence[Sequence[str]]) -> list[Any]:
        """Connect to a node and return the replies to `commands`; a refused command has the exception as reply."""
        made = pool(self._target(), SERVER_SECONDS, asynchronous=False, node=node)
        try:
            connection = made.get_connection()
        except (redis.RedisError, OSError) as error:
            raise connect_error(error, made) from error
        try:
            replies = []
            for command in commands:
                connection.send_command(*command)
                replies += run_blocking(BLOCKING.read(connection, 1, None))[0]
            return replies
        finally:
            connection.disconnect()

    def _target(self) -> Target:
        client = self._client() if self._client else None
        if not self._url and client is None:
            raise ConfigurationError(
                "the redis-py client that this queue was given is gone; keep it as long as the queue"
            )
        return client if client is not None else self._url


class _Connections:
    """
    The connections of this process.

    Attributes:
        only: while connections are redirected, the connection that every URL and client stands for.
    """

    def __init__(self, only: Connection | None = None) -> None:
        self.only = only
        self._lock = threading.Lock()
        self._by_url: dict[str, Connection] = {}
        self._by_client: weakref.WeakKeyDictionary[RedisClient, Connection] = weakref.WeakKeyDictionary()

    def anew(self) -> Self:
        """Return new connections for a process that was forked from this process."""
        return type(self)(self.only.anew() if self.only else None)

    def connection(self, target: Target) -> Connection:
        """Return the connection to `target`; `target` is checked at the first call."""
        if self.only:
            return self.only
        if isinstance(target, str) and (connection := self._by_url.get(target)):
            return connection
        check_target(target)
        with self._lock:
            known: Any = self._by_url if isinstance(target, str) else self._by_client
            if target not in known:
                if why := weakness(target):
                    warnings.warn(why, InsecureWarning, stacklevel=3)
                known[target] = Connection(target)
            made: Connection = known[target]
            return made


_shared = _Connections()
_of_parents: list[_Connections] = []
#: Replaced after a fork and when connections are redirected: holders of a transport must then get a new transport.
epoch = object()
#: Whether connections were redirected and RELIQ_URL was removed.
_is_withheld = False


def _start_over() -> None:
    """Keep the parent's connections referenced: collecting them here would disturb the parent's use of them."""
    global _shared, epoch  # noqa: PLW0603  the epoch belongs to the process, like the connections
    _of_parents.append(_shared)
    _shared = _shared.anew()
    epoch = object()


os.register_at_fork(after_in_child=_start_over)


@contextmanager
def redirected(connection: Connection) -> Iterator[None]:
    """
    Make every URL and client in this process, and in its forks, mean `connection`, RELIQ_URL included.

    Spawned children read its URL from RELIQ_URL. It is removed afterwards, because a thread may outlive the block.
    """
    global _shared, _is_withheld, epoch  # noqa: PLW0603  the epoch belongs to the process, like the connections
    before = _shared
    _shared = _Connections(connection)
    epoch = object()
    _is_withheld = _is_withheld or URL_VARIABLE in os.environ
    os.environ[URL_VARIABLE] = str(connection._url)  # noqa: SLF001  with its password
    try:
        yield
    finally:
        os.environ.pop(URL_VARIABLE, None)
        _shared = before
        epoch = object()


def default_url() -> str:
    """Return RELIQ_URL, which must be set; there is no default server."""
    if _shared.only:
        return _shared.only.name
    url = os.environ.get(URL_VARIABLE)
    if not url:
        why = f"; the end of an isolated test has taken {URL_VARIABLE} away: use the fixture `reliq`, or isolated()"
        raise ConfigurationError(
            f"no Redis given: pass url='redis://HOST:6379/0', or set {URL_VARIABLE} (a command takes --url)"
            + (why if _is_withheld else "")
        )
    return url


def check_slots(target: Target | None, layout: Layout) -> None:
    """Raise ConfigurationError if `target` is a Cluster and the layout would put a queue's keys in several slots."""
    if target is not None and seeds(target) and not layout.is_in_one_slot:
        raise ConfigurationError(
            f"in the layout {layout} a queue's keys lie in several slots, so that it cannot be used in a Redis Cluster; "
            "there take hdt3213:tag, which is Layout.hdt3213(hash_tag=True) and NewQueueOnCluster in Go"
        )
