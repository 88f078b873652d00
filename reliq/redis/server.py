"""
Connection pools and transports: all parts of a process that use the same Redis share them.

Each pool has a maximum size and timeouts. Its connections do not retry commands, and return replies as bytes.
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
from reliq.redis.connection import ASYNCIO, BLOCKING, Driver, ServerConnections, run_blocking
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
#: While Redis is unavailable, a publish is retried for this many seconds.
PUBLISH_SECONDS = 2.0
#: A publish waits at most this many seconds for a reply. So two tries that time out fit into PUBLISH_SECONDS.
PUBLISH_TIMEOUT_SECONDS = 0.9
#: A worker waits at most this many seconds for a reply. Some of its commands block for a second, and Redis may be slow.
WORKER_TIMEOUT_SECONDS = 5.0


def pool(target: Target, timeout_seconds: float, *, asynchronous: bool, node: str = "") -> Any:
    """Create a redis-py pool for `target`, or for one node (HOST:PORT) of the Cluster `target`."""
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
    """
    Return only the settings that the connection class `kind` of redis-py accepts.

    Blocking and asyncio connections accept different TLS settings.
    """
    makers: list[Any] = [vars(base).get("__init__") for base in kind.__mro__]
    known = {name for maker in makers if maker for name in inspect.signature(maker).parameters}
    return {name: value for name, value in settings.items() if name in known or name == "max_connections"}


class _LoopTransports:
    """The transports of one event loop, one for each reply timeout. They are closed when the loop ends."""

    def __init__(self) -> None:
        self.by_timeout: dict[float, Transport] = {}
        self.end = self._until_the_loop_ends()
        # Run the generator to its `yield`, because an event loop that ends closes only generators that were started.
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
    The transports of this process to one Redis.

    For each reply timeout, there is one transport for blocking code and one transport for each event loop.

    Attributes:
        clock: returns the current time for scripts, in unix microseconds; None if scripts use the clock of Redis.
        named: for each queue, the monotonic time at which this process must write the queue to the queue registry
            again.
        maps: the `KnownMap` (shard map) of each queue, shared by all objects of this process that use this Redis.
    """

    def __init__(self, target: Target, clock: Clock | None = None) -> None:
        self.clock = clock
        self._url = target if isinstance(target, str) else ""
        # A weak reference, so that this object does not keep the application's redis-py client in memory.
        self._client = None if isinstance(target, str) else weakref.ref(target)
        self.named: dict[str, float] = {}
        self.maps: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._blocking: dict[float, Transport] = {}
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopTransports] = weakref.WeakKeyDictionary()
        #: The servers whose version and kind were checked: addresses of Cluster nodes, or an empty text for a single
        #: server.
        self._checked: set[str] = set()

    @classmethod
    def to(cls, target: Target | None) -> "Connection":
        """
        Return the connection to a Redis. For the same `target`, all callers in this process get the same object.

        Args:
            target: a URL or a redis-py client; None for the URL in RELIQ_URL.

        Raises:
            ConfigurationError: `target` is None and RELIQ_URL is not set, or reliq cannot use `target`.
        """
        chosen = default_url() if target is None else target
        return _shared.connection(chosen)

    def anew(self) -> "Connection":
        """Create another connection to the same Redis, with its own transports."""
        return Connection(self._target(), self.clock)

    @property
    def name(self) -> str:
        """The URL of this Redis without its password, or the class name of the redis-py client."""
        return shown(self._target())

    @property
    def address(self) -> Address:
        """The hosts and the database of this Redis, taken from the URL or the redis-py client."""
        return address(self._target())

    def wire(self, timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS) -> Transport:
        """
        Return the transport for blocking code that waits at most `timeout_seconds` for a reply.

        For a Cluster, all timeouts have the same transport.
        """
        if transport := self._blocking.get(timeout_seconds):
            return transport
        with self._lock:
            return self._transport(BLOCKING, self._blocking, timeout_seconds)

    def async_wire(self, timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS) -> Transport:
        """Return the transport for the running event loop, see `wire`. It is closed when the loop ends."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._loops:
                # Drop the transports of event loops that were closed without `shutdown_asyncgens`.
                for closed in [known for known in self._loops if known.is_closed()]:
                    del self._loops[closed]
                self._loops[loop] = _LoopTransports()
            return self._transport(ASYNCIO, self._loops[loop].by_timeout, timeout_seconds)

    def close(self) -> None:
        """Close the connections of blocking code. Their next use opens them again."""
        with self._lock:
            transports = list(self._blocking.values())
        if servers := self.__dict__.get("_servers"):  # do not compute the cached property `_servers`
            servers.close()
        for transport in transports:
            run_blocking(transport.close())

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        with self._lock:
            ours = self._loops.pop(asyncio.get_running_loop(), None)
        if ours:
            await ours.end.aclose()

    def _transport(self, driver: Driver, known: dict[float, Transport], timeout_seconds: float) -> Transport:
        """Return the transport for a timeout from `known`, or create it. The caller must have the lock."""
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
        return ServerConnections(driver, made, node or shown(target), in_cluster=bool(node), checked=self._checked)

    @cached_property
    def _servers(self) -> Servers | None:
        """The nodes of the Cluster; None if this Redis is a single server."""
        nodes = seeds(self._target())
        return Servers(nodes, self._ask) if nodes else None

    def _ask(self, node: str, commands: Sequence[Sequence[str]]) -> list[Any]:
        """Open a connection to a node, and return the replies to `commands`. An error reply is an exception."""
        server = self._connections_to(BLOCKING, node, SERVER_SECONDS)
        try:
            return run_blocking(server.exchange(commands))
        finally:
            run_blocking(server.close())

    def _target(self) -> Target:
        client = self._client() if self._client else None
        if not self._url and client is None:
            raise ConfigurationError(
                "the redis-py client of this queue was garbage-collected; keep a reference to it as long as the queue"
            )
        return client if client is not None else self._url


class _Connections:
    """
    The `Connection` objects of this process, one for each URL and redis-py client.

    Attributes:
        only: inside a `redirected` block, the connection that is used for all URLs and clients; otherwise None.
    """

    def __init__(self, only: Connection | None = None) -> None:
        self.only = only
        self._lock = threading.Lock()
        self._by_url: dict[str, Connection] = {}
        self._by_client: weakref.WeakKeyDictionary[RedisClient, Connection] = weakref.WeakKeyDictionary()

    def anew(self) -> Self:
        """Create the object for a forked child. If `only` is set, the child gets a new connection to the same Redis."""
        return type(self)(self.only.anew() if self.only else None)

    def connection(self, target: Target) -> Connection:
        """Return the connection to `target`. The first use of a `target` checks it and creates the connection."""
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
#: Identifies the current connections. A fork replaces it by a new object, and so do the begin and the end of
#: `redirected`. Code that keeps a transport compares `epoch` before each use, and gets a new transport if it changed.
epoch = object()
#: Whether `redirected` has removed the application's RELIQ_URL. If so, the error message for a missing URL explains it.
_is_withheld = False


def _start_over() -> None:
    """
    Let a forked child open its own connections.

    The child keeps references to the parent's connections. If the child collected them as garbage, it could disturb the
    parent's use of the same sockets.
    """
    global _shared, epoch  # noqa: PLW0603  the epoch belongs to the process, like the connections
    _of_parents.append(_shared)
    _shared = _shared.anew()
    epoch = object()


os.register_at_fork(after_in_child=_start_over)


@contextmanager
def redirected(connection: Connection) -> Iterator[None]:
    """
    Inside the `with` block, use `connection` for all URLs and redis-py clients in this process and its forks.

    RELIQ_URL is set to the URL of `connection`, for spawned child processes. After the block, RELIQ_URL is not restored
    but removed, so that a thread that outlives the block cannot use the real Redis.
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
    """Return the URL in RELIQ_URL. Raise ConfigurationError if it is not set, because there is no default server."""
    if _shared.only:
        return _shared.only.name
    url = os.environ.get(URL_VARIABLE)
    if not url:
        why = f"; the end of an isolated test has removed {URL_VARIABLE}: use the fixture `reliq`, or isolated()"
        raise ConfigurationError(
            f"no Redis given: pass url='redis://HOST:6379/0', or set {URL_VARIABLE} (a command takes --url)"
            + (why if _is_withheld else "")
        )
    return url


def check_slots(target: Target | None, layout: Layout) -> None:
    """Raise ConfigurationError if `target` is a Cluster, and `layout` puts the keys of a queue into several slots."""
    if target is not None and seeds(target) and not layout.is_in_one_slot:
        raise ConfigurationError(
            f"in the layout {layout} a queue's keys are in several slots, so a Redis Cluster cannot have the queue; "
            "use the layout hdt3213:tag: Layout.hdt3213(hash_tag=True) in Python, NewQueueOnCluster in Go"
        )
