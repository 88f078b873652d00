"""
Which Redis, and the wires to it: one `Connection` for each URL or client in a process.

The environment is read here and, for its own variables, by the command; nowhere else.
"""

import asyncio
import os
import threading
import warnings
import weakref
from typing import Any

import redis
import redis.asyncio

from reliq.errors import ConfigurationError, InsecureWarning
from reliq.pools import Address, Client, Target, address, node_pool, pool, sentinels, weakness
from reliq.urls import check_url, masked
from reliq.wires import AsyncClusterWire, AsyncPooledWire, AsyncWire, ClusterWire, Gate, Nodes, PooledWire, Wire

URL_VARIABLE = "RELIQ_URL"
#: A publish gives up after 2 s in all: one try that hangs, and another.
PUBLISH_TIMEOUT_SECONDS = 0.9
#: A worker waits in Redis for at most a second; the rest is for a slow server.
WORKER_TIMEOUT_SECONDS = 5.0


class Connection:
    """The pools of one Redis in this process, by time-out: blocking ones and, per event loop, ones for asyncio."""

    def __init__(self, target: Target) -> None:
        self._url = target if isinstance(target, str) else ""
        # A client goes when its owner lets it go, and this connection with it.
        self._client = None if isinstance(target, str) else weakref.ref(target)
        self._gate = Gate()
        #: Queue -> until when this process need not name it in the registry, by the monotonic clock.
        self.named: dict[str, float] = {}
        self._lock = threading.Lock()
        self._pools: dict[float, Any] = {}
        self._wires: dict[float, Wire] = {}
        self._async_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, Any]]
        self._async_pools = weakref.WeakKeyDictionary()

    @classmethod
    def to(cls, target: Target | None) -> "Connection":
        """
        Return the connection to a URL or around a client; for each there is one in a process.

        Raises:
            ConfigurationError: there is neither an argument nor RELIQ_URL, or it is none that reliq can use.
        """
        chosen = default_url() if target is None else target
        return _shared.connection(chosen)

    @property
    def name(self) -> str:
        """The URL without its password, or the kind of client."""
        return masked(self._url) if self._url else type(self._target()).__name__

    @property
    def address(self) -> Address:
        """Where it is, as the URL or the client says."""
        return address(self._target())

    def wire(self, timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS) -> Wire:
        """Return a wire whose replies are awaited for at most `timeout_seconds`."""
        if made := self._wires.get(timeout_seconds):
            return made
        with self._lock:
            if timeout_seconds not in self._wires:
                source = self._pools[timeout_seconds] = self._source(timeout_seconds, asynchronous=False)
                kind = ClusterWire if isinstance(source, Nodes) else PooledWire
                self._wires[timeout_seconds] = kind(source, self._gate)
            return self._wires[timeout_seconds]

    def async_wire(self, timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS) -> AsyncWire:
        """Return a wire for the running event loop."""
        with self._lock:
            pools = self._async_pools.setdefault(asyncio.get_running_loop(), {})
            if timeout_seconds not in pools:
                pools[timeout_seconds] = self._source(timeout_seconds, asynchronous=True)
            source = pools[timeout_seconds]
        if isinstance(source, Nodes):
            return AsyncClusterWire(source, self._gate)
        return AsyncPooledWire(source, self._gate)

    def close(self) -> None:
        """Close the blocking connections; they come back when they are used again."""
        with self._lock:
            open_pools = _flat(self._pools)
        for one in open_pools:
            one.disconnect()
            for sentinel in sentinels(one):
                sentinel.close()

    async def aclose(self) -> None:
        """Close the running event loop's connections."""
        with self._lock:
            open_pools = _flat(self._async_pools.pop(asyncio.get_running_loop(), {}))
        for one in open_pools:
            await one.disconnect()
            for sentinel in sentinels(one):
                await sentinel.aclose()

    def _source(self, timeout_seconds: float, *, asynchronous: bool) -> Any:
        target = self._target()
        if isinstance(target, redis.RedisCluster):
            cluster = weakref.proxy(target)
            return Nodes(
                cluster,
                lambda host, port: node_pool(cluster, host, port, timeout_seconds, asynchronous=asynchronous),
            )
        return pool(target, timeout_seconds, asynchronous=asynchronous)

    def _target(self) -> Target:
        client = self._client() if self._client else None
        if not self._url and client is None:
            raise ConfigurationError(
                "the redis-py client that this queue was given is gone; keep it as long as the queue"
            )
        return client if client is not None else self._url


class _Shared:
    """The connections of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_url: dict[str, Connection] = {}
        self._by_client: weakref.WeakKeyDictionary[Client, Connection] = weakref.WeakKeyDictionary()

    def connection(self, target: Target) -> Connection:
        """Return the connection to `target`, which is checked when it is met for the first time."""
        if isinstance(target, str) and (met := self._by_url.get(target)):
            return met
        check_target(target)
        with self._lock:
            known: Any = self._by_url if isinstance(target, str) else self._by_client
            if target not in known:
                if why := weakness(target):
                    warnings.warn(why, InsecureWarning, stacklevel=3)
                known[target] = Connection(target)
            found: Connection = known[target]
            return found


_shared = _Shared()
_of_parents: list[_Shared] = []


def _start_over() -> None:
    """Leave the parent's connections to the parent; were they collected here, that would disturb them there."""
    global _shared  # noqa: PLW0603  a fork changes the process
    _of_parents.append(_shared)
    _shared = _Shared()


os.register_at_fork(after_in_child=_start_over)


def default_url() -> str:
    """Return RELIQ_URL; reliq never guesses a server."""
    url = os.environ.get(URL_VARIABLE)
    if not url:
        raise ConfigurationError(
            f"no Redis given: pass url='redis://HOST:6379/0', or set {URL_VARIABLE} (a command takes --url)"
        )
    return url


def check_target(target: Target) -> None:
    """Raise ConfigurationError when `target` is neither a URL nor a client that reliq can use."""
    if isinstance(target, str):
        check_url(target)
    elif not isinstance(target, Client):
        raise ConfigurationError(f"url must be a Redis URL or a redis-py client, not {type(target).__name__}")


def _flat(sources: dict[float, Any]) -> list[Any]:
    """Return every pool among what `_source` returned."""
    return [one for source in sources.values() for one in (source.pools() if isinstance(source, Nodes) else [source])]
