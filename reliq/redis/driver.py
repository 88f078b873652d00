"""
How code that talks to Redis waits: by blocking calls, or on an event loop.

The code is written once, as coroutines whose every wait is an operation of a driver. The operations of `BLOCKING` have
ended when they return, so `run_blocking` runs a coroutine of them in one step, without an event loop.
"""

from __future__ import annotations

import asyncio
import select
import time
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import redis

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose operations are those of `BLOCKING`, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking call waited for an event loop")


class Blocking:
    """Operations that block their thread, on the connections and pools of `redis`."""

    #: Returns the socket of a connection, None while it is closed; `is_connected` came with redis-py 7.
    stream = staticmethod(attrgetter("_sock"))

    async def get_connection(self, pool: Any) -> Any:
        """Return a connection of a pool, open and with nothing to read."""
        return pool.get_connection()

    async def release(self, pool: Any, connection: Any) -> None:
        """Give a connection back to its pool."""
        pool.release(connection)

    async def connect(self, connection: Any) -> None:
        """Open a connection."""
        connection.connect()

    async def disconnect(self, connection: Any, *, is_broken: bool = True) -> None:  # noqa: ARG002  it makes no difference
        """Close a connection; it is opened again when it is used."""
        connection.disconnect()

    async def disconnect_pool(self, pool: Any) -> None:
        """Close every connection of a pool, and those by which it asks Sentinel."""
        pool.disconnect()
        if hasattr(pool, "sentinel_manager"):
            for sentinel in pool.sentinel_manager.sentinels:
                sentinel.close()

    def input_check(self, stream: Any) -> Callable[[], Any]:
        """Return a function whose answer is true when a stream has input or is closed; `can_read` of redis-py is slow."""
        return partial(_poll_of(stream), 0)

    async def write(self, connection: Any, packed: list[bytes]) -> None:
        """Send packed commands."""
        connection.send_packed_command(packed)

    async def read(self, connection: Any, count: int, within_seconds: float | None) -> tuple[list[Any], bool]:
        """
        Read `count` replies; return them, each refusal as an exception in its place, and whether there is one.

        Raises:
            redis.TimeoutError: none came within so many seconds, by default those of the connection.
        """
        if within_seconds is not None and not _poll_of(connection._sock)(1000 * within_seconds):  # noqa: SLF001
            raise redis.TimeoutError("no reply came in time")
        replies: list[Any] = []
        is_refused = False
        for _ in range(count):
            if within_seconds is not None and within_seconds > connection.socket_timeout:
                connection.can_read(within_seconds)  # the reply to a WAIT comes later than those before it
            try:
                replies.append(connection.read_response())
            except redis.ConnectionError:
                raise
            except redis.ResponseError as error:
                replies.append(error)
                is_refused = True
        return replies, is_refused

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)  # noqa: ASYNC251  no event loop runs this

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block."""
        return function(*args)


def _poll_of(socket: Any) -> Callable[[float], Any]:
    """Return a function whose answer is true when there is something to read from `socket` within so many ms."""
    if not hasattr(select, "poll"):  # eventlet takes it away; Windows has none
        return lambda ms: select.select([socket], [], [], ms / 1000)[0]
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return poll.poll


class Asyncio:
    """The same operations on an event loop, on the connections and pools of `redis.asyncio`."""

    #: Returns the stream of a connection, None while it is closed.
    stream = staticmethod(attrgetter("_reader"))

    async def get_connection(self, pool: Any) -> Any:
        """Return a connection of a pool, open and with nothing to read."""
        return await pool.get_connection()

    async def release(self, pool: Any, connection: Any) -> None:
        """Give a connection back to its pool."""
        await pool.release(connection)

    async def connect(self, connection: Any) -> None:
        """Open a connection."""
        await connection.connect()

    async def disconnect(self, connection: Any, *, is_broken: bool = True) -> None:
        """Close a connection, and wait for its end unless it is broken; it is opened again when it is used."""
        await connection.disconnect(nowait=is_broken)

    async def disconnect_pool(self, pool: Any) -> None:
        """Close every connection of a pool, and those by which it asks Sentinel."""
        await pool.disconnect()
        if hasattr(pool, "sentinel_manager"):
            for sentinel in pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    def input_check(self, stream: Any) -> Callable[[], Any]:
        """Return a function whose answer is true when a stream has input or is closed."""
        return lambda: stream._buffer or stream._eof or stream.exception()  # noqa: SLF001  a look takes no turn of the loop

    async def write(self, connection: Any, packed: list[bytes]) -> None:
        """Send packed commands."""
        await connection.send_packed_command(packed)

    async def read(self, connection: Any, count: int, within_seconds: float | None) -> tuple[list[Any], bool]:
        """
        Read `count` replies; return them, each refusal as an exception in its place, and whether there is one.

        Raises:
            redis.TimeoutError: one did not come within so many seconds, by default those of the connection.
        """
        replies: list[Any] = []
        is_refused = False
        for _ in range(count):
            late_at = None if within_seconds is None else time.monotonic() + within_seconds
            try:
                reply = await connection.read_response(timeout=within_seconds)
                if reply is None and late_at is not None and time.monotonic() >= late_at:
                    raise redis.TimeoutError("no reply came in time")  # redis-py returns None then
                replies.append(reply)
            except redis.ConnectionError:
                raise
            except redis.ResponseError as error:
                replies.append(error)
                is_refused = True
        return replies, is_refused

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block, in a thread."""
        return await asyncio.to_thread(function, *args)


Driver = Blocking | Asyncio
BLOCKING = Blocking()
ASYNCIO = Asyncio()
