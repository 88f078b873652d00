"""
`Connection`: the wires to one Redis; a process has one for each URL or client.

The environment is read here, and by the CLI for variables of its own; nowhere else.
"""

import asyncio
import os
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

from reliq.call import Clock
from reliq.errors import ConfigurationError, InsecureWarning
from reliq.keys import Layout
from reliq.transport.many import AsyncWire, Wire
from reliq.transport.pool import places, sentinels
from reliq.transport.target import Address, RedisClient, Target, address, check_target, seeds, shown, weakness
from reliq.transport.wires import WireFactory

URL_VARIABLE = "RELIQ_URL"
#: A publish tries for this many seconds while Redis is away.
PUBLISH_SECONDS = 2.0
#: A publish waits this many seconds for one reply: two tries that hang fit into PUBLISH_SECONDS.
PUBLISH_TIMEOUT_SECONDS = 0.9
#: A worker waits at most this many seconds for one reply: it blocks in Redis for one, the others are for a slow server.
WORKER_TIMEOUT_SECONDS = 5.0


class OfLoop:
    """The wires of one event loop by their time-out, until the loop ends."""

    def __init__(self, places_to_wait: int) -> None:
        self.wires: dict[float, AsyncWire] = {}
        self.places_to_wait = asyncio.Semaphore(places_to_wait)
        self.end = self._until_the_loop_ends()
        # An event loop ends its asynchronous generators before it closes: from its first step on it knows this one.
        with suppress(StopIteration):
            self.end.__anext__().send(None)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            wires, self.wires = self.wires, {}
            for one in _pools(wires):
                await one.disconnect()
                for sentinel in sentinels(one):
                    await sentinel.aclose()


class Connection:
    """
    The wires to one Redis in this process, one for each time-out: blocking ones, and asyncio ones for each event loop.

    Attributes:
        clock: what scripts take for the time there; None is Redis' own clock.
    """

    def __init__(self, target: Target, clock: Clock | None = None) -> None:
        self.clock = clock
        self._url = target if isinstance(target, str) else ""
        # When the owner of a client drops it, the client and this connection are freed.
        self._client = None if isinstance(target, str) else weakref.ref(target)
        self._factory = WireFactory(self._target)
        #: Queue -> until when this process need not name it in the registry, by the monotonic clock.
        self.named: dict[str, float] = {}
        #: Queue -> the map of its shards, until when that is believed, and whether it has keys.
        self.maps: dict[str, tuple[Any, float, bool]] = {}
        self._lock = threading.Lock()
        self._wires: dict[float, Wire] = {}
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, OfLoop] = weakref.WeakKeyDictionary()

    @classmethod
    def to(cls, target: Target | None) -> "Connection":
        """
        Return the connection to a URL or around a client; for each there is one in a process.

        Raises:
            ConfigurationError: `target` is None and RELIQ_URL is not set, or it names no Redis that reliq can use.
        """
        chosen = default_url() if target is None else target
        return _shared.connection(chosen)

    def anew(self) -> "Connection":
        """Return another one to the same Redis, with wires of its own."""
        return Connection(self._target(), self.clock)

    @property
    def name(self) -> str:
        """The URL without its password, or the kind of client."""
        return shown(self._target())

    @property
    def address(self) -> Address:
        """The hosts, database and kind of the connection, as the URL or the client says."""
        return address(self._target())

    def wire(self, timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS) -> Wire:
        """Return a wire whose replies are awaited for at most `timeout_seconds`."""
        if made := self._wires.get(timeout_seconds):
            return made
        with self._lock:
            if timeout_seconds not in self._wires:
                self._wires[timeout_seconds] = self._factory.blocking(timeout_seconds)
            return self._wires[timeout_seconds]

    def async_wire(self, timeout_seconds: float = PUBLISH_TIMEOUT_SECONDS) -> AsyncWire:
        """Return a wire for the running event loop; its connections are closed when the loop ends."""
        with self._lock:
            wires = self._of_loop().wires
            if timeout_seconds not in wires:
                wires[timeout_seconds] = self._factory.asynchronous(timeout_seconds, wires.values())
            return wires[timeout_seconds]

    @cached_property
    def places_to_wait(self) -> threading.BoundedSemaphore:
        """Held by each call that blocks in Redis; there are places for half of the connections, the rest stay free."""
        return threading.BoundedSemaphore(self._places_to_wait())

    def async_places_to_wait(self) -> asyncio.Semaphore:
        """As `places_to_wait`, for the running event loop."""
        with self._lock:
            return self._of_loop().places_to_wait

    def close(self) -> None:
        """Close the blocking connections; they come back when they are used again."""
        with self._lock:
            open_pools = _pools(self._wires)
        self._factory.close()
        for one in open_pools:
            one.disconnect()
            for sentinel in sentinels(one):
                sentinel.close()

    async def aclose(self) -> None:
        """Close the running event loop's connections."""
        with self._lock:
            ours = self._loops.pop(asyncio.get_running_loop(), None)
        if ours:
            await ours.end.aclose()

    def _of_loop(self) -> OfLoop:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            for closed in [one for one in self._loops if one.is_closed()]:  # and did not end its generators first
                del self._loops[closed]
            self._loops[loop] = OfLoop(self._places_to_wait())
        return self._loops[loop]

    def _places_to_wait(self) -> int:
        return max(1, places(self._target()) // 2)

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
        self._by_client: weakref.WeakKeyDictionary[RedisClient, Connection] = weakref.WeakKeyDictionary()

    def anew(self) -> "_Shared":
        """Return those of a process that was forked from this one."""
        return _Shared()

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


class _Redirected(_Shared):
    """One connection, whatever is named."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.only = connection

    def connection(self, _target: Target) -> Connection:
        """Return the only connection."""
        return self.only

    def anew(self) -> "_Shared":
        """Return another connection to the same Redis."""
        return _Redirected(self.only.anew())


_shared = _Shared()
_of_parents: list[_Shared] = []
#: Another one after a fork, and when connections are redirected: whoever keeps a wire asks for a new one then.
epoch = object()
#: Whether connections were redirected, and RELIQ_URL taken away.
_is_withheld = False


def _start_over() -> None:
    """Leave the parent's connections to the parent; were they collected here, that would disturb them there."""
    global _shared, epoch
    _of_parents.append(_shared)
    _shared, epoch = _shared.anew(), object()


os.register_at_fork(after_in_child=_start_over)


@contextmanager
def redirected(connection: Connection) -> Iterator[None]:
    """
    Have every URL and client in this process, and in those forked from it, mean `connection`, RELIQ_URL included.

    Children that are spawned find its URL in RELIQ_URL. Afterwards that is gone: a thread may outlive the block.
    """
    global _shared, _is_withheld, epoch  # noqa: PLW0603  like the connections, it belongs to the process
    before = _shared
    _shared, epoch = _Redirected(connection), object()
    _is_withheld = _is_withheld or URL_VARIABLE in os.environ
    os.environ[URL_VARIABLE] = str(connection._url)  # noqa: SLF001  with its password
    try:
        yield
    finally:
        os.environ.pop(URL_VARIABLE, None)
        _shared, epoch = before, object()


def default_url() -> str:
    """Return RELIQ_URL, which must name one Redis; reliq never guesses a server."""
    if isinstance(_shared, _Redirected):
        return _shared.only.name
    url = os.environ.get(URL_VARIABLE)
    if not url:
        why = f"; the end of an isolated test has taken {URL_VARIABLE} away: use the fixture `reliq`, or isolated()"
        raise ConfigurationError(
            f"no Redis given: pass url='redis://HOST:6379/0', or set {URL_VARIABLE} (a command takes --url)"
            + (why if _is_withheld else "")
        )
    return url


def _pools(wires: Mapping[float, Wire | AsyncWire]) -> list[Any]:
    """Return every pool behind `wires`."""
    return [one for wire in wires.values() for one in wire.pools()]


def check_slots(target: Target | None, layout: Layout) -> None:
    """Raise ConfigurationError when `target` is a Cluster that would have a queue's keys in several of its slots."""
    if target is not None and seeds(target) and not layout.is_in_one_slot:
        raise ConfigurationError(
            f"in the layout {layout} a queue's keys lie in several slots, so that it cannot be used in a Redis Cluster; "
            "there take hdt3213:tag, which is Layout.hdt3213(hash_tag=True) and NewQueueOnCluster in Go"
        )
