"""Publishes in lanes: a call that gave up keeps its number for when the same messages are published again."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError, RedisUnavailableError, ReliqError
from reliq.events import PublishEnded, notify, wanting
from reliq.publish.batcher import Batcher
from reliq.publish.durability import Confirmer
from reliq.publish.orders import NOT_ASKED, ShardPart, has_lines, receipts
from reliq.publish.registry import Registrar
from reliq.publish.route import Route
from reliq.settings import Durability
from reliq.transport import connection as transport
from reliq.transport.connection import PUBLISH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from reliq.call import T
    from reliq.client.client import Clients
    from reliq.client.lanes import Lane, Lanes
    from reliq.client.shards import Shards
    from reliq.events import Observer
    from reliq.message import Confirmed, Receipt
    from reliq.publish.orders import Order, Writer
    from reliq.transitions import PublishAnswer


class Sender:
    """Sends orders through either client."""

    def __init__(
        self,
        writer: Writer,
        shards: Shards,
        lanes: Lanes,
        clients: Clients,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._writer, self._shards, self._lanes, self._clients = writer, shards, lanes, clients
        self._registrar = Registrar(writer.keys, clients)
        self._confirmer = Confirmer(writer.keys.name, clients)
        self._watching = wanting(observers, PublishEnded)
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher]
        self._batchers = weakref.WeakKeyDictionary()

    def send(self, orders: list[Order], confirmed: int = 0, durability: Durability = Durability.NONE) -> list[Receipt]:
        """Send `orders`; raise PublishFailed, with how many were `confirmed` before, when Redis is away or refuses."""
        clients, shards, done = self._clients, self._shards, None
        is_first_key = self._is_first_key(orders)
        is_fresh = not is_first_key and time.monotonic() < clients.mapped_until and clients.epoch is transport.epoch
        if is_one := is_fresh and shards.map.n == shards.map.was == 1:
            done = self._call(ShardPart(orders, range(len(orders)), shards.first, shards.map), confirmed, durability)
        if not done:
            done = self._by_route(Route(shards, orders, confirmed, is_stale=is_one or is_first_key), durability)
        if time.monotonic() >= clients.named_until and (entry := self._registrar.due()):
            with suppress(ReliqError):
                clients.blocking().run(entry)
        return done

    async def asend(
        self, orders: list[Order], confirmed: int = 0, durability: Durability = Durability.NONE
    ) -> list[Receipt]:
        """As `send`, in async code; those of many tasks share round trips."""
        clients, shards, done = self._clients, self._shards, None
        is_first_key = self._is_first_key(orders)
        is_fresh = not is_first_key and time.monotonic() < clients.mapped_until and clients.epoch is transport.epoch
        if is_one := is_fresh and shards.map.n == shards.map.was == 1:
            part = ShardPart(orders, range(len(orders)), shards.first, shards.map)
            done = await self._acall(part, confirmed, durability)
        if not done:
            done = await self._aby_route(Route(shards, orders, confirmed, is_stale=is_one or is_first_key), durability)
        if time.monotonic() >= clients.named_until and (entry := self._registrar.due()):
            with suppress(ReliqError):
                await clients.asynchronous().run(entry)
        return done

    def _is_first_key(self, orders: list[Order]) -> bool:
        """Say whether orders with a key are perhaps the queue's first: another process may have given it several shards."""
        return self._writer.has_lines and not self._shards.is_keyed and has_lines(orders)

    def _by_route(self, route: Route, durability: Durability) -> list[Receipt]:
        """Send orders to their shards; those that a shard did not take go by a later map, or to another shard."""
        while route.left:
            if route.is_stale or self._shards.is_old:
                self._look(route)
            for part in self._parts(route):
                if part.old_home is not None:
                    part = self._ask(route, part)  # noqa: PLW2901  what is free there
                if part.orders:
                    with route.telling_rest():
                        done = self._call(part, route.confirmed, durability)
                    route.answered(part, done)
        return route.receipts

    async def _aby_route(self, route: Route, durability: Durability) -> list[Receipt]:
        """As `_by_route`, in async code."""
        while route.left:
            if route.is_stale or self._shards.is_old:
                await self._alook(route)
            for part in self._parts(route):
                if part.old_home is not None:
                    part = await self._aask(route, part)  # noqa: PLW2901  what is free there
                if part.orders:
                    with route.telling_rest():
                        done = await self._acall(part, route.confirmed, durability)
                    route.answered(part, done)
        return route.receipts

    def _parts(self, route: Route) -> list[ShardPart]:
        """Return the parts of a route; tell observers of orders that the queue cannot have."""
        try:
            return route.parts()
        except ConfigurationError as error:
            self._unsent(route.unsent, error, route.confirmed)
            raise

    def _look(self, route: Route) -> None:
        """Read the map, for the first time, because it is old, or because a shard knows a later one."""
        try:
            if route.is_stale:
                self._shards.read(for_seconds=PUBLISH_SECONDS)
            else:
                self._shards.refresh()
            route.looked()
        except ReliqError as error:
            self._unsent(route.unsent, error, route.confirmed)
            raise

    async def _alook(self, route: Route) -> None:
        """As `_look`, in async code."""
        try:
            if route.is_stale:
                await self._shards.aread(for_seconds=PUBLISH_SECONDS)
            else:
                await self._shards.arefresh()
            route.looked()
        except ReliqError as error:
            self._unsent(route.unsent, error, route.confirmed)
            raise

    def _ask(self, route: Route, part: ShardPart) -> ShardPart:
        """Ask the old home of a part; return what of it is free."""
        try:
            answers = self._clients.blocking().run(route.question(part), for_seconds=PUBLISH_SECONDS)
        except ReliqError as error:
            self._unsent(part.orders, error, route.confirmed)
            raise
        return route.asked(part, answers)

    def _call(self, part: ShardPart, confirmed: int, durability: Durability) -> list[Receipt] | None:
        """Send a part to its shard; return its receipts: none when a later map binds, None when another shard may have it."""
        lane, call_number = self._lanes.take(self._writer.known_by(part.orders) if self._lanes.parked else ())
        call, told, began = self._writer.call(part, call_number), NOT_ASKED, time.monotonic()
        try:
            if durability.kind != "none":
                answer, told = self._confirmer.run(call, part.orders, durability)
            elif part.may_detour:
                answer = self._clients.blocking().run_once_sent(call, for_seconds=PUBLISH_SECONDS)
            else:
                answer = self._clients.blocking().run(call, for_seconds=PUBLISH_SECONDS)
        except BaseException as error:
            if self._failed(part, lane, error, confirmed, began):
                return None
            raise
        return self._done(part, lane, answer, told, began)

    async def _aask(self, route: Route, part: ShardPart) -> ShardPart:
        """As `_ask`, in async code."""
        try:
            answers = await self._clients.asynchronous().run(route.question(part), for_seconds=PUBLISH_SECONDS)
        except ReliqError as error:
            self._unsent(part.orders, error, route.confirmed)
            raise
        return route.asked(part, answers)

    async def _acall(self, part: ShardPart, confirmed: int, durability: Durability) -> list[Receipt] | None:
        """As `_call`, in async code."""
        lane, call_number = self._lanes.take(self._writer.known_by(part.orders) if self._lanes.parked else ())
        call, told, began = self._writer.call(part, call_number), NOT_ASKED, time.monotonic()
        try:
            if durability.kind != "none":
                answer, told = await self._confirmer.arun(call, part.orders, durability)
            else:
                weight = sum(len(order.value) for order in part.orders)
                answer = await self._batcher().run(call, weight, once_sent=part.may_detour)
        except BaseException as error:
            if self._failed(part, lane, error, confirmed, began):
                return None
            raise
        return self._done(part, lane, answer, told, began)

    def _done(self, part: ShardPart, lane: Lane, answer: PublishAnswer, told: Confirmed, began: float) -> list[Receipt]:
        """Return the receipts in the answer of a shard."""
        self._lanes.give_back(lane)
        done = receipts(part.orders, answer, told)
        if self._watching and done:
            self._tell(began, Counter(one.status for one in done))
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

    def _unsent(self, orders: list[Order], error: ReliqError, confirmed: int) -> None:
        """Raise PublishFailed for what went wrong before anything was sent; the caller raises a ConfigurationError."""
        self._tell(time.monotonic(), {"refused": len(orders)})
        if not isinstance(error, ConfigurationError):
            raise self._writer.failed(orders, error, confirmed, unsent=True) from error

    def _failed(self, part: ShardPart, lane: Lane, error: BaseException, confirmed: int, began: float) -> bool:
        """
        Say whether another shard may have a part whose own could not be reached.

        Else keep the number of a call whose outcome is unknown, and raise PublishFailed for what Redis did or did not do;
        the caller raises any other error.
        """
        orders = part.orders
        failure = self._writer.failed(orders, error, confirmed) if isinstance(error, ReliqError) else None
        is_refused = isinstance(error, ConfigurationError) or (failure and failure.outcome == "refused")
        if is_refused and isinstance(error, RedisUnavailableError) and part.may_detour:
            self._lanes.give_back(lane)
            return True
        self._tell(began, {"refused" if is_refused else "unknown": len(orders)})
        if is_refused:
            self._lanes.give_back(lane)
        elif not orders[0].terms.replace:  # who replaces wants it published now, whatever was before
            self._lanes.park(lane, self._writer.known_by(orders))
        if failure and not isinstance(error, ConfigurationError):
            raise failure from error
        return False


def begun(executor: Executor, call: Callable[[], T]) -> Callable[[], T]:
    """
    Begin `call` in a thread and return what waits for its answer.

    When the main thread has ended Python starts no more of them; then the call is made when its answer is asked for.
    """
    try:
        return executor.submit(call).result
    except RuntimeError:
        return call
