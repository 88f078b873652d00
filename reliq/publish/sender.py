"""Publishes in lanes: a call that gave up keeps its number for when the same messages are published again."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError, ReliqError
from reliq.events import PublishEnded, notify, wanting
from reliq.publish.batcher import Batcher
from reliq.publish.durability import Confirmer
from reliq.publish.orders import NOT_ASKED, receipts
from reliq.settings import Durability
from reliq.transport.connection import PUBLISH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from reliq.call import T
    from reliq.client.client import Clients
    from reliq.client.lanes import Lane, Lanes
    from reliq.events import Observer
    from reliq.message import Receipt
    from reliq.publish.orders import Order, Writer
    from reliq.publish.registry import Registrar


class Sender:
    """Sends orders through either client."""

    def __init__(
        self,
        writer: Writer,
        registrar: Registrar,
        lanes: Lanes,
        clients: Clients,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._writer, self._registrar, self._lanes, self._clients = writer, registrar, lanes, clients
        self._confirmer = Confirmer(writer.keys.name, clients)
        self._watching = wanting(observers, PublishEnded)
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher]
        self._batchers = weakref.WeakKeyDictionary()

    def send(self, orders: list[Order], confirmed: int = 0, durability: Durability = Durability.NONE) -> list[Receipt]:
        """Send `orders`; raise PublishFailed, with how many were `confirmed` before, when Redis is away or refuses."""
        lane, call_number = self._lanes.take(self._writer.known_by(orders) if self._lanes.parked else ())
        call, told, began = self._writer.call(orders, call_number), NOT_ASKED, time.monotonic()
        try:
            if durability.kind == "none":
                answer = self._clients.blocking().run(call, for_seconds=PUBLISH_SECONDS)
            else:
                answer, told = self._confirmer.run(call, orders, durability)
        except BaseException as error:
            self._failed(lane, orders, error, confirmed, began)
            raise
        self._lanes.give_back(lane)
        done = receipts(orders, answer, told)
        if self._watching:
            self._tell(began, Counter(one.status for one in done))
        if time.monotonic() >= self._clients.named_until and (entry := self._registrar.due()):
            with suppress(ReliqError):
                self._clients.blocking().run(entry)
        return done

    async def asend(
        self, orders: list[Order], confirmed: int = 0, durability: Durability = Durability.NONE
    ) -> list[Receipt]:
        """As `send`, in async code; those of many tasks share round trips."""
        lane, call_number = self._lanes.take(self._writer.known_by(orders) if self._lanes.parked else ())
        call, told, began = self._writer.call(orders, call_number), NOT_ASKED, time.monotonic()
        try:
            if durability.kind == "none":
                answer = await self._batcher().run(call, sum(len(order.value) for order in orders))
            else:
                answer, told = await self._confirmer.arun(call, orders, durability)
        except BaseException as error:
            self._failed(lane, orders, error, confirmed, began)
            raise
        self._lanes.give_back(lane)
        done = receipts(orders, answer, told)
        if self._watching:
            self._tell(began, Counter(one.status for one in done))
        if time.monotonic() >= self._clients.named_until and (entry := self._registrar.due()):
            with suppress(ReliqError):
                await self._clients.asynchronous().run(entry)
        return done

    def _batcher(self) -> Batcher:
        """Return what makes the calls of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._batchers:
            for closed in [one for one in self._batchers if one.is_closed()]:  # its last task may hold it for ever
                del self._batchers[closed]
            self._batchers[loop] = Batcher(self._clients.asynchronous, for_seconds=PUBLISH_SECONDS)
        return self._batchers[loop]

    def _tell(self, began: float, outcomes: Mapping[str, int]) -> None:
        """Tell the observers how a call ended that began at `began`."""
        notify(self._watching, [PublishEnded(self._writer.keys.name, time.monotonic() - began, outcomes)])

    def _failed(self, lane: Lane, orders: list[Order], error: BaseException, confirmed: int, began: float) -> None:
        """Keep the number of a call whose outcome is unknown; raise PublishFailed for what Redis did or did not do."""
        failure = self._writer.failed(orders, error, confirmed) if isinstance(error, ReliqError) else None
        is_refused = isinstance(error, ConfigurationError) or (failure and failure.outcome == "refused")
        self._tell(began, {"refused" if is_refused else "unknown": len(orders)})
        if is_refused:
            self._lanes.give_back(lane)
        elif not orders[0].terms.replace:  # who replaces wants it published now, whatever was before
            self._lanes.park(lane, self._writer.known_by(orders))
        if failure and not isinstance(error, ConfigurationError):
            raise failure from error


def begun(executor: Executor, call: Callable[[], T]) -> Callable[[], T]:
    """
    Begin `call` in a thread and return what waits for its answer.

    When the main thread has ended Python starts no more of them; then the call is made when its answer is asked for.
    """
    try:
        return executor.submit(call).result
    except RuntimeError:
        return call
