"""What is asked of a queue whatever its bodies are: counts, a message's end or due time, a pause, dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq import requests as asking
from reliq import transitions
from reliq.client.client import Clients
from reliq.client.lanes import Lanes
from reliq.transport.connection import PUBLISH_SECONDS, Connection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from reliq.call import Request, T
    from reliq.events import Observer
    from reliq.keys import Keys
    from reliq.message import CancelStatus, Counts, Duration, Letter, RescheduleStatus
    from reliq.settings import QueueSettings
    from reliq.transport.pool import Target


class Control:
    """A queue without its bodies: its keys, settings and Redis, in both colours."""

    def __init__(
        self, keys: Keys, settings: QueueSettings, target: Target | None, observers: Sequence[Observer]
    ) -> None:
        self.keys = keys
        self.layout = keys.layout
        self.settings = settings
        self.target = target
        self.observers = observers
        self._lanes = Lanes()
        self._clients = Clients(self.connection, observers)

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.keys.name

    def cancel(self, id: str | UUID, *, tombstone: Duration | None = None) -> CancelStatus:
        """
        Cancel a message, so that it does not start or, if it runs, is not retried.

        The id of a `cancelled` one is free at once, that of a `running` one after its end and its `dedup`.

        Args:
            tombstone: for so long a publish of this id is refused as `tombstoned`, also one still on its way.

        Returns:
            `cancelled`; `running`, then its handler is told; `not_found`, it has ended or never was, or a first try
            whose reply was lost has cancelled it.
        """
        call = asking.cancelling(self.keys, id, tombstone)
        self._lanes.end(str(id))
        return self._ask(call)[0]

    async def acancel(self, id: str | UUID, *, tombstone: Duration | None = None) -> CancelStatus:
        """As `cancel`, in async code."""
        call = asking.cancelling(self.keys, id, tombstone)
        self._lanes.end(str(id))
        return (await self._aask(call))[0]

    def reschedule(self, id: str | UUID, *, delay: Duration = 0.0, at: datetime | None = None) -> RescheduleStatus:
        """Give a waiting message another due time: `rescheduled`, or it is `running` or `not_found`."""
        return self._ask(asking.rescheduling(self.keys, id, delay, at))[0]

    async def areschedule(
        self, id: str | UUID, *, delay: Duration = 0.0, at: datetime | None = None
    ) -> RescheduleStatus:
        """As `reschedule`, in async code."""
        return (await self._aask(asking.rescheduling(self.keys, id, delay, at)))[0]

    def counts(self) -> Counts:
        """Count the queue's messages by place, and every total, at one moment."""
        return self._ask(transitions.counts(self.keys))

    async def acounts(self) -> Counts:
        """As `counts`, in async code."""
        return await self._aask(transitions.counts(self.keys))

    def pause(self, *, reason: str = "", for_: Duration | None = None) -> None:
        """Have consumers stop claiming within a second, for a while or until `resume`; who, when and why is kept."""
        self._ask(asking.pausing(self.keys, reason, for_))

    async def apause(self, *, reason: str = "", for_: Duration | None = None) -> None:
        """As `pause`, in async code."""
        await self._aask(asking.pausing(self.keys, reason, for_))

    def resume(self) -> bool:
        """Have consumers claim again; return whether the queue was paused."""
        return self._ask(transitions.resume(self.keys))

    async def aresume(self) -> bool:
        """As `resume`, in async code."""
        return await self._aask(transitions.resume(self.keys))

    def letters(self, *, limit: int = 100, after: str = "") -> list[Letter]:
        """Return up to `limit` dead letters, oldest first, those after the letter named `after`."""
        return self._ask(asking.listing(self.keys, limit, after))

    async def aletters(self, *, limit: int = 100, after: str = "") -> list[Letter]:
        """As `letters`, in async code."""
        return await self._aask(asking.listing(self.keys, limit, after))

    def redrive(self, letters: Sequence[Letter], *, delay: Duration = 0.0) -> int:
        """
        Publish up to 500 dead letters again with fresh retries; return how many.

        An id that is alive stays. When a reply is lost the call is made again, and what the first try has redriven is
        not counted: `counts().totals["redriven"]` has all.
        """
        calls = asking.redriving(self.keys, self.settings, letters, delay)
        return sum(self._ask(call).count("redriven") for call in calls)

    async def aredrive(self, letters: Sequence[Letter], *, delay: Duration = 0.0) -> int:
        """As `redrive`, in async code."""
        calls = asking.redriving(self.keys, self.settings, letters, delay)
        return sum([(await self._aask(call)).count("redriven") for call in calls])

    def close(self) -> None:
        """Close the blocking connections of this queue's Redis; they come back when they are used again."""
        self.connection().close()

    async def aclose(self) -> None:
        """Close the running event loop's connections of this queue's Redis."""
        await self.connection().aclose()

    def connection(self) -> Connection:
        """Return the connection to the queue's Redis; raise ConfigurationError when none was named."""
        return Connection.to(self.target)

    def _ask(self, request: Request[T]) -> T:
        return self._clients.blocking().run(request, for_seconds=PUBLISH_SECONDS)

    async def _aask(self, request: Request[T]) -> T:
        return await self._clients.asynchronous().run(request, for_seconds=PUBLISH_SECONDS)
