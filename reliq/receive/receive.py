"""Messages without a decorator: claimed, renewed while the block runs, and settled at its end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from reliq.errors import RedisUnavailableError, ReliqError
from reliq.events import notify
from reliq.foreign import printable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from reliq.call import Call
    from reliq.client.aio import AsyncClient
    from reliq.client.client import Client
    from reliq.events import Observer
    from reliq.receive.batch import Batch
    from reliq.receive.listener import Found, Listener
    from reliq.receive.received import Received
    from reliq.transitions import Settled

B = TypeVar("B")

logger = logging.getLogger(__name__)

#: Taking messages tries at a Redis that is away for this long, in seconds, before it raises.
TAKE_SECONDS = 2.0
#: A cancelled `areceive` waits at most this many seconds for what it settles; then that goes on by itself.
CANCELLED_SECONDS = 2.0
#: A wait in Redis may overshoot by this many seconds; the rest of a wait for a due time is slept.
OVERSHOOT_SECONDS = 0.1

#: Settlings of cancelled blocks; an event loop itself keeps no hold of its tasks.
_settlings: set[asyncio.Task[None]] = set()


@contextmanager
def receiving(
    client: Client, batch: Batch[B], wait_seconds: float, places_to_wait: threading.Semaphore
) -> Iterator[list[Received[B]]]:
    """Take messages, renew their leases in a thread of its own while the block runs, and settle them."""
    _take(client, batch, wait_seconds, places_to_wait)
    over = threading.Event()
    renewer = threading.Thread(target=_renew_until, args=(over, client, batch), name="reliq-receive", daemon=True)
    renewer.start()
    error: BaseException | None = None
    try:
        yield batch.jobs
    except BaseException as raised:
        error = raised
        raise
    finally:
        over.set()
        renewer.join()
        with batch.noting_outages():
            _settle(client, batch, batch.settle(error))


def _settle(client: Client, batch: Batch[B], calls: list[Call[Settled]]) -> None:
    """Settle in one round trip; a call that Redis cannot answer now is made again alone."""
    answers = client.run_all(calls, for_seconds=batch.lease_seconds)
    for call, answer in zip(calls, answers, strict=True):
        if isinstance(answer, RedisUnavailableError):
            batch.told(client.run(call, for_seconds=batch.lease_seconds))
        elif not isinstance(answer, Exception):
            batch.told(answer)
    _raise_first(answers)


def _take(client: Client, batch: Batch[B], wait_seconds: float, places_to_wait: threading.Semaphore) -> None:
    try:
        with batch.noting_outages():
            _look(client, batch, wait_seconds, places_to_wait)
        large = batch.large_reads(client.run_all(batch.reads(), for_seconds=TAKE_SECONDS))
        for call in batch.fill(client.run_all(large, for_seconds=TAKE_SECONDS)):
            client.run(call, for_seconds=TAKE_SECONDS)
    except BaseException:
        with suppress(ReliqError):
            client.run_all(batch.release())
        raise
    _tell(client.observers, batch)


def _look(client: Client, batch: Batch[B], wait_seconds: float, places_to_wait: threading.Semaphore) -> None:
    batch.begin()
    until = time.monotonic() + wait_seconds
    while True:
        next_in = batch.looked(client.run_all(batch.look(), for_seconds=TAKE_SECONDS, once_sent=batch.may_detour))
        rest = until - time.monotonic()
        if batch.claimed or (rest <= 0 and next_in):
            break
        if batch.listener and next_in:
            if (found := batch.listener.wait(rest)) is None:
                break
            batch.heard(found)
        elif min(rest, next_in) > OVERSHOOT_SECONDS:
            _wait(client, batch, min(rest, next_in) - OVERSHOOT_SECONDS, places_to_wait)
        else:
            time.sleep(max(0.0, min(rest, next_in)))
    batch.over()


def _wait(client: Client, batch: Batch[B], seconds: float, places_to_wait: threading.Semaphore) -> None:
    """Wait in Redis for something to claim; where many do so already, for a place. The next look tells what failed."""
    until = time.monotonic() + seconds
    if places_to_wait.acquire(timeout=seconds):
        try:
            if (left := until - time.monotonic()) > 0:
                with suppress(RedisUnavailableError):
                    client.run(batch.token(left))
        finally:
            places_to_wait.release()


def _renew_until(over: threading.Event, client: Client, batch: Batch[B]) -> None:
    while batch.jobs and not over.wait(batch.lease_seconds / 3):
        with suppress(ReliqError), batch.noting_outages():
            batch.told(client.run(batch.renew()))


@asynccontextmanager
async def areceiving(
    client: AsyncClient, batch: Batch[B], wait_seconds: float, places_to_wait: asyncio.Semaphore
) -> AsyncIterator[list[Received[B]]]:
    """As `receiving`; the renewal is a task, so a block that holds the event loop up for a lease loses it."""
    # Taking is not cut off: what a cancelled caller has claimed is given back.
    taking = asyncio.ensure_future(_atake(client, batch, wait_seconds, places_to_wait))
    try:
        await asyncio.shield(taking)
    except asyncio.CancelledError:
        batch.give_up()
        with suppress(ReliqError):
            await taking
            await client.run_all(batch.release())
        raise
    renewer = asyncio.create_task(_arenew(client, batch))
    error: BaseException | None = None
    try:
        yield batch.jobs
    except BaseException as raised:
        error = raised
        raise
    finally:
        renewer.cancel()
        # Settling is not cut off either: what is dropped here would be delivered again, at the end of its lease.
        settling = asyncio.create_task(_asettle(client, batch, batch.settle(error)))
        _settlings.add(settling)
        settling.add_done_callback(_settlings.discard)
        try:
            await asyncio.shield(settling)
        except asyncio.CancelledError:
            await asyncio.wait([settling], timeout=CANCELLED_SECONDS)
            raise


async def _asettle(client: AsyncClient, batch: Batch[B], calls: list[Call[Settled]]) -> None:
    """As `_settle`, in async code."""
    with batch.noting_outages():
        answers = await client.run_all(calls, for_seconds=batch.lease_seconds)
        for call, answer in zip(calls, answers, strict=True):
            if isinstance(answer, RedisUnavailableError):
                batch.told(await client.run(call, for_seconds=batch.lease_seconds))
            elif not isinstance(answer, Exception):
                batch.told(answer)
    _raise_first(answers)


async def _atake(client: AsyncClient, batch: Batch[B], wait_seconds: float, places_to_wait: asyncio.Semaphore) -> None:
    try:
        with batch.noting_outages():
            await _alook(client, batch, wait_seconds, places_to_wait)
        if batch.given_up:
            return
        large = batch.large_reads(await client.run_all(batch.reads(), for_seconds=TAKE_SECONDS))
        for call in batch.fill(await client.run_all(large, for_seconds=TAKE_SECONDS)):
            await client.run(call, for_seconds=TAKE_SECONDS)
    except BaseException:
        with suppress(ReliqError):
            await client.run_all(batch.release())
        raise
    _tell(client.observers, batch)


async def _alook(client: AsyncClient, batch: Batch[B], wait_seconds: float, places_to_wait: asyncio.Semaphore) -> None:
    batch.begin()
    until = time.monotonic() + wait_seconds
    while not batch.given_up:
        next_in = batch.looked(await client.run_all(batch.look(), for_seconds=TAKE_SECONDS, once_sent=batch.may_detour))
        rest = until - time.monotonic()
        if batch.claimed or (rest <= 0 and next_in):
            break
        if batch.listener and next_in:
            if (found := await _alisten(batch.listener, batch, rest)) is None:
                break
            batch.heard(found)
        elif min(rest, next_in) > OVERSHOOT_SECONDS:
            await _await(client, batch, min(rest, next_in) - OVERSHOOT_SECONDS, places_to_wait)
        else:
            await asyncio.sleep(max(0.0, min(rest, next_in)))
    batch.over()


async def _alisten(listener: Listener, batch: Batch[B], seconds: float) -> Found | None:
    """Return where something has come; None when the time is over, or the caller has gone."""
    if batch.given_up:  # during the look
        return None
    listening = asyncio.ensure_future(listener.await_(seconds))
    batch.cut = listening.cancel
    try:
        found = await listening
    except asyncio.CancelledError:
        if batch.given_up:
            return None
        raise
    if found and batch.given_up:  # it came at the same moment
        listener.give_back(found)
        return None
    return found


async def _await(client: AsyncClient, batch: Batch[B], seconds: float, places_to_wait: asyncio.Semaphore) -> None:
    until = time.monotonic() + seconds
    with suppress(TimeoutError):
        await asyncio.wait_for(places_to_wait.acquire(), seconds)
        try:
            if (left := until - time.monotonic()) > 0:
                with suppress(RedisUnavailableError):
                    await client.run(batch.token(left))
        finally:
            places_to_wait.release()


async def _arenew(client: AsyncClient, batch: Batch[B]) -> None:
    while batch.jobs:
        await asyncio.sleep(batch.lease_seconds / 3)
        with suppress(ReliqError), batch.noting_outages():
            batch.told(await client.run(batch.renew()))


def _raise_first(answers: Sequence[Any]) -> None:
    """Raise the first of `answers` that is a refusal for good."""
    for answer in answers:
        if isinstance(answer, Exception) and not isinstance(answer, RedisUnavailableError):
            raise answer


def _tell(observers: Sequence[Observer], batch: Batch[B]) -> None:
    """Log bodies that do not decode, and notify of them as a worker does: the block never sees them."""
    for one in batch.undecodable:
        logger.warning("%s: %s does not decode and goes back: %s", one.queue, printable(one.id), one.error)
    notify(observers, batch.undecodable)
