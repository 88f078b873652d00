"""Publishes in lanes: a call that gave up keeps its number for when the same messages are published again."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from reliq.doors.lanes import Lanes
from reliq.doors.publishing import receipts
from reliq.errors import ConfigurationError, ReliqError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reliq.doors.asynchronous import AsyncDoor
    from reliq.doors.blocking import BlockingDoor
    from reliq.doors.publishing import Order, Writer
    from reliq.message import Receipt
    from reliq.transitions import Turn


class Sender:
    """Sends orders through either door."""

    def __init__(
        self, writer: Writer, door: Callable[[], BlockingDoor], adoor: Callable[[], AsyncDoor], *, try_seconds: float
    ) -> None:
        self._writer, self._door, self._adoor, self._try_seconds = writer, door, adoor, try_seconds
        self._lanes = Lanes()

    def send(self, orders: list[Order], confirmed: int = 0) -> list[Receipt]:
        """Send `orders`; raise PublishFailed, with how many were `confirmed` before, when Redis is away or refuses."""
        with self._turn(orders, confirmed) as turn:
            return receipts(orders, self._door().run(self._writer.call(orders, turn), for_seconds=self._try_seconds))

    async def asend(self, orders: list[Order], confirmed: int = 0) -> list[Receipt]:
        """As `send`, in async code."""
        with self._turn(orders, confirmed) as turn:
            call = self._writer.call(orders, turn)
            return receipts(orders, await self._adoor().run(call, for_seconds=self._try_seconds))

    @contextmanager
    def _turn(self, orders: list[Order], confirmed: int) -> Iterator[Turn]:
        same = tuple((order.id, hash(self._writer.body_of(order))) for order in orders)
        lane, turn = self._lanes.take(same)
        try:
            yield turn
        except ConfigurationError:
            self._lanes.give_back(lane)
            raise
        except ReliqError as error:
            self._lanes.park(lane, same)
            raise self._writer.failed(orders, error, confirmed) from error
        except BaseException:
            self._lanes.park(lane, same)
            raise
        self._lanes.give_back(lane)
