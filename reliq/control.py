"""A queue whatever its bodies are: counts, a message's end or due time, a pause, dead letters."""

from __future__ import annotations

import getpass
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from reliq import commands, transitions
from reliq.call import answered, of_every_shard, raise_first
from reliq.client.client import Clients
from reliq.client.lanes import Lanes
from reliq.client.shards import Shards
from reliq.errors import ConfigurationError, RedisUnavailableError
from reliq.ids import check_id
from reliq.message import Counts, Pause
from reliq.publish.options import when
from reliq.redriving import Redriving, first_letters, listing
from reliq.settings import milliseconds, seconds
from reliq.transport.connection import PUBLISH_SECONDS, Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from uuid import UUID

    from reliq.call import Call, Command, Request, T
    from reliq.events import Observer
    from reliq.keys import Keys
    from reliq.message import CancelStatus, Duration, Letter, RescheduleStatus
    from reliq.settings import QueueSettings
    from reliq.transport.target import Target

S = TypeVar("S")

#: A pause's reason has at most this many characters.
REASON_LIMIT = 200


class Control:
    """A queue without its bodies: its keys, settings and Redis, in both colours."""

    def __init__(
        self,
        keys: Keys,
        settings: QueueSettings,
        target: Target | None,
        observers: Sequence[Observer],
        shards: int | None = None,
    ) -> None:
        self.keys = keys
        self.layout = keys.layout
        self.settings = settings
        self.target = target
        self.observers = observers
        self._lanes = Lanes()
        self._clients = Clients(target, observers)
        #: The shards as this process knows them, without a question to Redis.
        self.known_shards = Shards(keys, self._clients, shards)

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.keys.name

    def shards(self) -> tuple[Keys, ...]:
        """
        Return the keys of every shard that may hold messages, as Redis says now: one, of a queue that is not sharded.

        While the Redis of the map is away, they are those that this process knows of.

        Raises:
            ConfigurationError: there are not as many as the queue was made with.
            RedisUnavailableError: Redis is away, and nothing is known.
        """
        try:
            self.known_shards.read(for_seconds=PUBLISH_SECONDS)
        except RedisUnavailableError:
            if not self._clients.mapped_until:
                raise
        return self.known_shards.all

    async def ashards(self) -> tuple[Keys, ...]:
        """As `shards`, in async code."""
        try:
            await self.known_shards.aread(for_seconds=PUBLISH_SECONDS)
        except RedisUnavailableError:
            if not self._clients.mapped_until:
                raise
        return self.known_shards.all

    def cancel(self, id: str | UUID, *, tombstone: Duration | None = None) -> CancelStatus:
        """
        Cancel a message, so that it does not start or, if it runs, is not retried.

        The id of a `cancelled` one is free at once, that of a `running` one after its end and its `dedup`.

        Args:
            tombstone: seconds or timedelta for which a publish of this id is refused as `tombstoned`, also one that is
                still on its way.

        Returns:
            `cancelled`; `running`, then its handler sees it; `not_found`, it has ended or never was, or a first try
            whose reply was lost has cancelled it.
        """
        id, for_ms = check_id(id), tombstone_ms(tombstone)
        self._lanes.end(id)
        return self._at_home(id, lambda keys: transitions.cancel(keys, [id], tombstone_ms=for_ms))

    async def acancel(self, id: str | UUID, *, tombstone: Duration | None = None) -> CancelStatus:
        """As `cancel`, in async code."""
        id, for_ms = check_id(id), tombstone_ms(tombstone)
        self._lanes.end(id)
        return await self._aat_home(id, lambda keys: transitions.cancel(keys, [id], tombstone_ms=for_ms))

    def reschedule(self, id: str | UUID, *, delay: Duration = 0.0, at: datetime | None = None) -> RescheduleStatus:
        """Give a waiting message another due time: `rescheduled`, or it is `running` or `not_found`."""
        return self._at_home(check_id(id), lambda keys: rescheduling(keys, id, delay, at))

    async def areschedule(
        self, id: str | UUID, *, delay: Duration = 0.0, at: datetime | None = None
    ) -> RescheduleStatus:
        """As `reschedule`, in async code."""
        return await self._aat_home(check_id(id), lambda keys: rescheduling(keys, id, delay, at))

    def counts(self) -> Counts:
        """
        Count the queue's messages by place, and every total; of one shard, or of each, at one moment.

        While the Redis of some shards is away, the others are counted: `away` names those.
        """
        return Counts.sum(*answered(self._of_shards(transitions.counts, ever=True)))

    async def acounts(self) -> Counts:
        """As `counts`, in async code."""
        return Counts.sum(*answered(await self._aof_shards(transitions.counts, ever=True)))

    def pause(self, *, reason: str = "", for_: Duration | None = None) -> None:
        """
        Have consumers stop claiming within a second, for a while or until `resume`; who, when and why is kept.

        Raises:
            RedisUnavailableError: Redis is away; of a queue with several shards it says which are paused all the same.
        """
        of_every_shard(self.name, "paused", self._of_shards(lambda keys: pausing(keys, reason, for_)))

    async def apause(self, *, reason: str = "", for_: Duration | None = None) -> None:
        """As `pause`, in async code."""
        answers = await self._aof_shards(lambda keys: pausing(keys, reason, for_))
        of_every_shard(self.name, "paused", answers)

    def resume(self) -> bool:
        """Have consumers claim again; return whether the queue was paused, or put to sleep by `RateLimited`."""
        was = [self._of_shards(lambda keys: commands.resume_queue(keys)[at]) for at in range(4)]  # noqa: B023  called at once
        pauses, sleeps = (of_every_shard(self.name, "resumed", answers) for answers in was[:2])
        return any(pauses) or any(sleeps)

    async def aresume(self) -> bool:
        """As `resume`, in async code."""
        was = [await self._aof_shards(lambda keys: commands.resume_queue(keys)[at]) for at in range(4)]  # noqa: B023  called at once
        pauses, sleeps = (of_every_shard(self.name, "resumed", answers) for answers in was[:2])
        return any(pauses) or any(sleeps)

    def letters(self, *, limit: int = 100, after: str = "") -> list[Letter]:
        """Return up to `limit` dead letters, oldest first, those after the letter named `after`."""
        return first_letters(raise_first(self._of_shards(lambda keys: listing(keys, limit, after))), limit)

    async def aletters(self, *, limit: int = 100, after: str = "") -> list[Letter]:
        """As `letters`, in async code."""
        return first_letters(raise_first(await self._aof_shards(lambda keys: listing(keys, limit, after))), limit)

    def redrive(self, letters: Sequence[Letter], *, delay: Duration = 0.0) -> int:
        """
        Publish up to 500 dead letters again with fresh retries; return how many.

        An id that is alive stays. When a reply is lost the call is made again, and what the first try has redriven is
        not counted: `counts().totals["redriven"]` has all.
        """
        redriving = Redriving(self.known_shards, self.settings, letters, delay)
        self.known_shards.refresh()
        while redriving.left:
            for call, some in redriving.calls():
                redriving.told(some, self._ask(call))
            for way in redriving.ways():
                is_free = redriving.may_go(way, self._ask(way.ask), self._ask(way.look))
                if is_free and redriving.is_there(way, self._ask(way.publish)):
                    redriving.deleted(self._ask(way.delete))
            if redriving.left:
                self.known_shards.read(for_seconds=PUBLISH_SECONDS)
        return redriving.redriven

    async def aredrive(self, letters: Sequence[Letter], *, delay: Duration = 0.0) -> int:
        """As `redrive`, in async code."""
        redriving = Redriving(self.known_shards, self.settings, letters, delay)
        await self.known_shards.arefresh()
        while redriving.left:
            for call, some in redriving.calls():
                redriving.told(some, await self._aask(call))
            for way in redriving.ways():
                is_free = redriving.may_go(way, await self._aask(way.ask), await self._aask(way.look))
                if is_free and redriving.is_there(way, await self._aask(way.publish)):
                    redriving.deleted(await self._aask(way.delete))
            if redriving.left:
                await self.known_shards.aread(for_seconds=PUBLISH_SECONDS)
        return redriving.redriven

    def close(self) -> None:
        """Close the blocking connections of this queue's Redis; they come back when they are used again."""
        with suppress(ConfigurationError):  # no Redis was named: nothing was opened
            self._clients.close()

    async def aclose(self) -> None:
        """Close the running event loop's connections of this queue's Redis."""
        with suppress(ConfigurationError):
            await self._clients.aclose()

    def connection(self) -> Connection:
        """Return the connection to the queue's Redis; raise ConfigurationError when none was named."""
        return self._clients.connection()

    def _at_home(self, id: str, make: Callable[[Keys], Call[list[S]]]) -> S:
        """Make a call about a message at its home; while nobody knows it, where that was, and by the map as it is now."""
        make(self.keys)  # what is not allowed is refused before anything is asked
        self.known_shards.refresh()
        while True:
            known = self.known_shards.map
            for keys in self.known_shards.homes(id):
                [answer] = self._ask(make(keys))
                if answer != "not_found":
                    return answer
            self.known_shards.read(for_seconds=PUBLISH_SECONDS)
            if self.known_shards.map == known:
                return answer

    async def _aat_home(self, id: str, make: Callable[[Keys], Call[list[S]]]) -> S:
        """As `_at_home`, in async code."""
        make(self.keys)
        await self.known_shards.arefresh()
        while True:
            known = self.known_shards.map
            for keys in self.known_shards.homes(id):
                [answer] = await self._aask(make(keys))
                if answer != "not_found":
                    return answer
            await self.known_shards.aread(for_seconds=PUBLISH_SECONDS)
            if self.known_shards.map == known:
                return answer

    def _of_shards(self, make: Callable[[Keys], Request[T]], *, ever: bool = False) -> list[Any]:
        """
        Make a request of every shard that there is now, in one round trip; one that fails has its exception as answer.

        Args:
            ever: also of the shards that are no more.
        """
        first = make(self.keys)
        shards = self.shards()
        requests = [first, *map(make, (self.known_shards.ever if ever else shards)[1:])]
        if len(requests) == 1:
            return [self._ask(first)]
        return self._clients.blocking().run_all(requests, for_seconds=PUBLISH_SECONDS)

    async def _aof_shards(self, make: Callable[[Keys], Request[T]], *, ever: bool = False) -> list[Any]:
        """As `_of_shards`, in async code."""
        first = make(self.keys)
        shards = await self.ashards()
        requests = [first, *map(make, (self.known_shards.ever if ever else shards)[1:])]
        if len(requests) == 1:
            return [await self._aask(first)]
        return await self._clients.asynchronous().run_all(requests, for_seconds=PUBLISH_SECONDS)

    def _ask(self, request: Request[T]) -> T:
        return self._clients.blocking().run(request, for_seconds=PUBLISH_SECONDS)

    async def _aask(self, request: Request[T]) -> T:
        return await self._clients.asynchronous().run(request, for_seconds=PUBLISH_SECONDS)


def tombstone_ms(tombstone: Duration | None) -> int | None:
    """Return for how long a cancelled id is refused; raise ConfigurationError for what is no time above 0."""
    return None if tombstone is None else milliseconds(seconds("tombstone", tombstone, least=0.001))


def rescheduling(keys: Keys, id: str | UUID, delay: Duration, at: datetime | None) -> Call[list[RescheduleStatus]]:
    """Return the call that gives a message another due time; raise ConfigurationError for one that is not allowed."""
    at_ms, delay_ms = when(delay, at)
    return transitions.reschedule(keys, [check_id(id)], at_ms=at_ms, delay_ms=delay_ms)


def pausing(keys: Keys, reason: str, for_: Duration | None, by: str = "") -> Command[None]:
    """
    Return the command that pauses a queue; raise ConfigurationError for a reason or time that is not allowed.

    Args:
        by: who pauses it; by default user@host of this process.
    """
    for_seconds = None if for_ is None else seconds("for_", for_, least=0.001)
    pause = pause_by(by, reason, for_seconds)
    return commands.pause(keys, pause, None if for_seconds is None else milliseconds(for_seconds))


def pause_by(by: str, reason: str, for_seconds: float | None = None) -> Pause:
    """Return a pause that begins now; raise ConfigurationError for a reason that is not allowed."""
    if not isinstance(reason, str) or not reason.isprintable() or len(reason) > REASON_LIMIT:
        raise ConfigurationError(f"reason must be one line of at most {REASON_LIMIT} characters")
    now = round(time.time(), 3)
    return Pause(by or who(), now, reason, None if for_seconds is None else now + for_seconds)


def who() -> str:
    """Return user@host of this process; a container's user may have no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
