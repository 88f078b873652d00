"""Messages without a decorator: claimed, renewed while the block runs, and settled at its end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from reliq.errors import RedisUnavailableError, ReliqError
from reliq.events import notify
from reliq.foreign import printable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from reliq.doors.asynchronous import AsyncDoor
    from reliq.doors.batch import Batch, Received
    from reliq.doors.blocking import BlockingDoor
    from reliq.events import Observer

B = TypeVar("B")

logger = logging.getLogger(__name__)

#: For so long a Redis that is away is tried.
TRY_SECONDS = 2.0
#: A wait in Redis may overshoot by so much; the rest of a wait for a due time is slept.
OVERSHOOT_SECONDS = 0.1


@contextmanager
def receiving(
    door: BlockingDoor, batch: Batch[B], wait_seconds: float, places_to_wait: threading.Semaphore
) -> Iterator[list[Received[B]]]:
    """Take messages, renew their leases in a thread of its own while the block runs, and settle them."""
    _take(door, batch, wait_seconds, places_to_wait)
    over = threading.Event()
    renewer = threading.Thread(target=_renew_until, args=(over, door, batch), name="reliq-receive", daemon=True)
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
        for call in batch.settle(error):
            batch.settled(door.run(call, for_seconds=batch.lease_seconds))


def _take(door: BlockingDoor, batch: Batch[B], wait_seconds: float, places_to_wait: threading.Semaphore) -> None:
    try:
        _look(door, batch, wait_seconds, places_to_wait)
        for call in batch.fill(door.run_all(batch.bodies(), for_seconds=TRY_SECONDS)):
            door.run(call, for_seconds=TRY_SECONDS)
    except BaseException:
        if batch.claimed:
            with suppress(ReliqError):
                door.run(batch.release())
        raise
    _tell(door.observers, batch)


def _look(door: BlockingDoor, batch: Batch[B], wait_seconds: float, places_to_wait: threading.Semaphore) -> None:
    until = time.monotonic() + wait_seconds
    while True:
        next_in = batch.looked(door.run_all(batch.look(), for_seconds=TRY_SECONDS))
        rest = until - time.monotonic()
        if batch.claimed or rest <= 0:
            break
        if min(rest, next_in) > OVERSHOOT_SECONDS:
            _wait(door, batch, min(rest, next_in) - OVERSHOOT_SECONDS, places_to_wait)
        else:
            time.sleep(min(rest, next_in))
    batch.over()


def _wait(door: BlockingDoor, batch: Batch[B], seconds: float, places_to_wait: threading.Semaphore) -> None:
    """Wait in Redis for something to claim; where many do so already, for a place. The next look tells what failed."""
    until = time.monotonic() + seconds
    if places_to_wait.acquire(timeout=seconds):
        try:
            if (left := until - time.monotonic()) > 0:
                with suppress(RedisUnavailableError):
                    door.run(batch.token(left))
        finally:
            places_to_wait.release()


def _renew_until(over: threading.Event, door: BlockingDoor, batch: Batch[B]) -> None:
    while batch.jobs and not over.wait(batch.lease_seconds / 3):
        with suppress(ReliqError):
            batch.renewed(door.run(batch.renew()))


@asynccontextmanager
async def areceiving(
    door: AsyncDoor, batch: Batch[B], wait_seconds: float, places_to_wait: asyncio.Semaphore
) -> AsyncIterator[list[Received[B]]]:
    """As `receiving`; the renewal is a task, so a block that holds the event loop up for a lease loses it."""
    # Taking is not cut off: what a cancelled caller has claimed is given back.
    taking = asyncio.ensure_future(_atake(door, batch, wait_seconds, places_to_wait))
    try:
        await asyncio.shield(taking)
    except asyncio.CancelledError:
        batch.give_up()
        with suppress(ReliqError):
            await taking
            if batch.claimed:
                await door.run(batch.release())
        raise
    renewer = asyncio.create_task(_arenew(door, batch))
    error: BaseException | None = None
    try:
        yield batch.jobs
    except BaseException as raised:
        error = raised
        raise
    finally:
        renewer.cancel()
        for call in batch.settle(error):
            batch.settled(await door.run(call, for_seconds=batch.lease_seconds))


async def _atake(door: AsyncDoor, batch: Batch[B], wait_seconds: float, places_to_wait: asyncio.Semaphore) -> None:
    try:
        await _alook(door, batch, wait_seconds, places_to_wait)
        if batch.given_up:
            return
        for call in batch.fill(await door.run_all(batch.bodies(), for_seconds=TRY_SECONDS)):
            await door.run(call, for_seconds=TRY_SECONDS)
    except BaseException:
        if batch.claimed:
            with suppress(ReliqError):
                await door.run(batch.release())
        raise
    _tell(door.observers, batch)


async def _alook(door: AsyncDoor, batch: Batch[B], wait_seconds: float, places_to_wait: asyncio.Semaphore) -> None:
    until = time.monotonic() + wait_seconds
    while not batch.given_up:
        next_in = batch.looked(await door.run_all(batch.look(), for_seconds=TRY_SECONDS))
        rest = until - time.monotonic()
        if batch.claimed or rest <= 0:
            break
        if min(rest, next_in) > OVERSHOOT_SECONDS:
            await _await(door, batch, min(rest, next_in) - OVERSHOOT_SECONDS, places_to_wait)
        else:
            await asyncio.sleep(min(rest, next_in))
    batch.over()


async def _await(door: AsyncDoor, batch: Batch[B], seconds: float, places_to_wait: asyncio.Semaphore) -> None:
    until = time.monotonic() + seconds
    with suppress(TimeoutError):
        await asyncio.wait_for(places_to_wait.acquire(), seconds)
        try:
            if (left := until - time.monotonic()) > 0:
                with suppress(RedisUnavailableError):
                    await door.run(batch.token(left))
        finally:
            places_to_wait.release()


async def _arenew(door: AsyncDoor, batch: Batch[B]) -> None:
    while batch.jobs:
        await asyncio.sleep(batch.lease_seconds / 3)
        with suppress(ReliqError):
            batch.renewed(await door.run(batch.renew()))


def _tell(observers: Sequence[Observer], batch: Batch[B]) -> None:
    """Tell of what did not decode, as a worker does: whoever receives never sees it."""
    for one in batch.undecodable:
        logger.warning("%s: %s does not decode and goes back: %s", one.queue, printable(one.id), one.error)
    notify(observers, batch.undecodable)
