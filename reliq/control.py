"""A queue whatever its bodies are: counts, a message's end or due time, a pause, dead letters."""

from __future__ import annotations

import getpass
import re
import socket
import time
from typing import TYPE_CHECKING

from reliq import commands, transitions
from reliq.client.client import Clients
from reliq.client.lanes import Lanes
from reliq.client.shards import Shards
from reliq.errors import ConfigurationError
from reliq.ids import check_id
from reliq.message import Letter, Pause
from reliq.publish.orders import when
from reliq.settings import BATCH_LIMIT, MIB, milliseconds, seconds, whole
from reliq.transport.connection import PUBLISH_SECONDS, Connection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from uuid import UUID

    from reliq.call import Call, Command, Request, T
    from reliq.events import Observer
    from reliq.keys import Keys
    from reliq.message import CancelStatus, Counts, Duration, RescheduleStatus
    from reliq.settings import QueueSettings
    from reliq.transport.target import Target

#: A pause's reason has at most this many characters.
REASON_LIMIT = 200
#: One call of a redrive writes back at most this many bytes of bodies: a script holds all others up.
LETTER_BYTES = 8 * MIB

_LETTER_NAME = re.compile(r"\d{1,20}-\d{1,20}")


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
        self._shards = Shards(keys, self._clients, shards)

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.keys.name

    @property
    def known_shards(self) -> Shards:
        """The shards as this process knows them, without a question to Redis."""
        return self._shards

    def shards(self) -> tuple[Keys, ...]:
        """
        Return the keys of every shard that may hold messages, as Redis says now: one, of a queue that is not sharded.

        Raises:
            ConfigurationError: there are not as many as the queue was made with.
            RedisUnavailableError: Redis is away.
        """
        self._shards.read(for_seconds=PUBLISH_SECONDS)
        return self._shards.all

    async def ashards(self) -> tuple[Keys, ...]:
        """As `shards`, in async code."""
        await self._shards.aread(for_seconds=PUBLISH_SECONDS)
        return self._shards.all

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
        call = cancelling(self.keys, id, tombstone)
        self._lanes.end(str(id))
        return self._ask(call)[0]

    async def acancel(self, id: str | UUID, *, tombstone: Duration | None = None) -> CancelStatus:
        """As `cancel`, in async code."""
        call = cancelling(self.keys, id, tombstone)
        self._lanes.end(str(id))
        return (await self._aask(call))[0]

    def reschedule(self, id: str | UUID, *, delay: Duration = 0.0, at: datetime | None = None) -> RescheduleStatus:
        """Give a waiting message another due time: `rescheduled`, or it is `running` or `not_found`."""
        return self._ask(rescheduling(self.keys, id, delay, at))[0]

    async def areschedule(
        self, id: str | UUID, *, delay: Duration = 0.0, at: datetime | None = None
    ) -> RescheduleStatus:
        """As `reschedule`, in async code."""
        return (await self._aask(rescheduling(self.keys, id, delay, at)))[0]

    def counts(self) -> Counts:
        """Count the queue's messages by place, and every total, at one moment."""
        return self._ask(transitions.counts(self.keys))

    async def acounts(self) -> Counts:
        """As `counts`, in async code."""
        return await self._aask(transitions.counts(self.keys))

    def pause(self, *, reason: str = "", for_: Duration | None = None) -> None:
        """Have consumers stop claiming within a second, for a while or until `resume`; who, when and why is kept."""
        self._ask(pausing(self.keys, reason, for_))

    async def apause(self, *, reason: str = "", for_: Duration | None = None) -> None:
        """As `pause`, in async code."""
        await self._aask(pausing(self.keys, reason, for_))

    def resume(self) -> bool:
        """Have consumers claim again; return whether the queue was paused."""
        was_paused = self._ask(commands.unpause(self.keys))
        for command in commands.push_wake_token(self.keys):
            self._ask(command)
        return was_paused

    async def aresume(self) -> bool:
        """As `resume`, in async code."""
        was_paused = await self._aask(commands.unpause(self.keys))
        for command in commands.push_wake_token(self.keys):
            await self._aask(command)
        return was_paused

    def letters(self, *, limit: int = 100, after: str = "") -> list[Letter]:
        """Return up to `limit` dead letters, oldest first, those after the letter named `after`."""
        return self._ask(listing(self.keys, limit, after))

    async def aletters(self, *, limit: int = 100, after: str = "") -> list[Letter]:
        """As `letters`, in async code."""
        return await self._aask(listing(self.keys, limit, after))

    def redrive(self, letters: Sequence[Letter], *, delay: Duration = 0.0) -> int:
        """
        Publish up to 500 dead letters again with fresh retries; return how many.

        An id that is alive stays. When a reply is lost the call is made again, and what the first try has redriven is
        not counted: `counts().totals["redriven"]` has all.
        """
        calls = redriving(self.keys, self.settings, letters, delay)
        return sum(self._ask(call).count("redriven") for call in calls)

    async def aredrive(self, letters: Sequence[Letter], *, delay: Duration = 0.0) -> int:
        """As `redrive`, in async code."""
        calls = redriving(self.keys, self.settings, letters, delay)
        return sum([(await self._aask(call)).count("redriven") for call in calls])

    def close(self) -> None:
        """Close the blocking connections of this queue's Redis; they come back when they are used again."""
        self.connection().close()

    async def aclose(self) -> None:
        """Close the running event loop's connections of this queue's Redis."""
        await self.connection().aclose()

    def connection(self) -> Connection:
        """Return the connection to the queue's Redis; raise ConfigurationError when none was named."""
        return self._clients.connection()

    def _ask(self, request: Request[T]) -> T:
        return self._clients.blocking().run(request, for_seconds=PUBLISH_SECONDS)

    async def _aask(self, request: Request[T]) -> T:
        return await self._clients.asynchronous().run(request, for_seconds=PUBLISH_SECONDS)


def cancelling(keys: Keys, id: str | UUID, tombstone: Duration | None) -> Call[list[CancelStatus]]:
    """Return the call that cancels a message; raise ConfigurationError for what is no id, or no time."""
    return transitions.cancel(keys, [check_id(id)], tombstone_ms=tombstone_ms(tombstone))


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


def listing(keys: Keys, limit: int, after: str) -> Command[list[Letter]]:
    """Return the command that reads dead letters; raise ConfigurationError for a limit or place not allowed."""
    if not isinstance(after, str) or (after and _LETTER_NAME.fullmatch(after) is None):
        raise ConfigurationError("after must be the `letter` of a dead letter, such as '1700000000000-0', or empty")
    return commands.letters(keys, count=whole("limit", limit, least=1, most=BATCH_LIMIT), after=after)


def redriving(
    keys: Keys, settings: QueueSettings, letters: Sequence[Letter], delay: Duration
) -> list[Call[list[transitions.RedriveStatus]]]:
    """Return the calls that publish dead letters again; raise ConfigurationError for what is none, or too many."""
    if not isinstance(letters, list | tuple) or not all(isinstance(one, Letter) for one in letters):
        raise ConfigurationError(
            f"letters must be a list of dead letters, as `letters()` returns them, not {type(letters).__name__}"
        )
    whole("number of letters", len(letters), most=BATCH_LIMIT)
    ttl_ms, delay_ms = milliseconds(settings.ttl), milliseconds(seconds("delay", delay))
    calls = []
    for some in by_bytes(letters):
        retries = [settings.retries if one.header.retries is None else one.header.retries for one in some]
        rows = [(one.letter, one.id, left) for one, left in zip(some, retries, strict=True)]
        calls.append(transitions.redrive(keys, rows, ttl_ms=ttl_ms, delay_ms=delay_ms))
    return calls


def by_bytes(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    """Yield letters in pieces of at most `LETTER_BYTES` of bodies, or of one: a script holds all others up."""
    piece, size = list[Letter](), 0
    for letter in letters:
        size += len(letter.payload)
        if piece and size > LETTER_BYTES:
            yield piece
            piece, size = [], len(letter.payload)
        piece.append(letter)
    if piece:
        yield piece


def who() -> str:
    """Return user@host of this process; a container's user may have no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
