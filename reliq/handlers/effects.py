"""Database writes and follow-up messages of a job that happen only once, even if the job is redelivered."""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack

import msgspec

from reliq.errors import ConfigurationError
from reliq.handlers.settlement import Settlement, with_cost
from reliq.keys import first_published
from reliq.message import COST_LIMIT
from reliq.settings import DAY_SECONDS, OUTBOX_PREFIX, check_int, milliseconds, seconds, seconds_after

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Mapping

    from reliq.message import Duration, FollowUpOptions, Receipt
    from reliq.outbox.transactions import AsyncTransaction, Transaction
    from reliq.queue import Queue
    from reliq.settings import Durability, HandlerSettings, QueueSettings
    from reliq.worker.slots import HeldDelivery

B = TypeVar("B")

#: How long Redis refuses the id of a follow-up message after this message has ended, in seconds. In this time, a
#: redelivered job cannot publish the follow-up again.
FOLLOW_UP_SECONDS = DAY_SECONDS
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class AwaitedBool:
    """
    An awaitable that returns a bool, and detects a missing `await`.

    `if job.aonce(...)` without `await` raises TypeError. If `aonce` returned a coroutine, it would count as True.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, bool]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, bool]:
        return self._coroutine.__await__()

    def __bool__(self) -> NoReturn:
        self._coroutine.close()
        raise TypeError("`await` is missing: write `if not await job.aonce(...)`")


class Effects:
    """Base class of `Job` and `ReceivedJob` with the methods `spent`, `once` and `publish`."""

    __slots__ = ("_published",)

    id: str
    queue: str
    _held: HeldDelivery | Settlement
    #: How many follow-ups without a name this job has published.
    _published: int

    @property
    def publication_id(self) -> int:
        """
        A number that distinguishes this message from earlier and later messages with the same id.

        The publisher may give this number as the option `publication_id`. By default, it is the time of the publish in
        Unix milliseconds.
        """
        return self._first[2]

    @property
    def _first(self) -> tuple[str, str, int]:
        """
        The queue, id and publication_id with which the message was first published.

        They stay the same if the message moves to another queue.
        """
        return first_published(self.queue, self.id, self._held.delivery.header)

    @property
    def _inbox_keep_ms(self) -> int:
        """The longest possible time from the first delivery of the message to its last redelivery, in ms."""
        raise NotImplementedError

    def spent(self, cost: int) -> None:
        """
        Report the real cost of this message, in a queue with a rate by cost.

        The worker sends the cost to Redis with the outcome; only the last call of `spent` counts. If the real cost is
        below the message's `cost`, the rate's token bucket gets the difference back, minus the amount by which it has
        refilled since the claim. If the real cost is higher, later messages wait longer. In a queue without a rate by
        cost, `spent` has no effect.

        Args:
            cost: in the unit of the rate, such as tokens; 0 to 1,000,000,000.

        Raises:
            ConfigurationError: `cost` is not a whole number from 0 to 1,000,000,000.

        Example: `job.spent(reply.usage.total_tokens)`
        """
        claimed = with_cost(self._held.delivery.claimed, check_int("cost", cost, most=COST_LIMIT))
        self._held.delivery = msgspec.structs.replace(self._held.delivery, claimed=claimed)

    def once(self, tx: Transaction, *, keep: Duration | None = None, prefix: str = OUTBOX_PREFIX) -> bool:
        """
        Return True if the database writes of this message must be done, False if they are already committed.

        Call `once` first in the transaction that contains your writes. If `once` returns False, an earlier delivery has
        committed them, so return from the handler immediately. `once` inserts a row into the inbox table, so that your
        writes and this row are committed together. If two deliveries of a message run at the same time, the second call
        of `once` waits until the first transaction ends. In SQLite, make this call the first statement of the
        transaction, or run BEGIN IMMEDIATE before.

        Args:
            tx: your open transaction or session, as in `Queue.publish_in`.
            keep: how long to keep the row after each call of `once`, in seconds or as a timedelta. The default is
                computed from the settings of queue and handler, so that the row outlives the last possible redelivery,
                even after a redrive. Give a longer time if you publish with a longer `ttl`.
            prefix: the prefix of the table names ("reliq_"). To use a database schema, write `schema.prefix`.

        Raises:
            ConfigurationError: `tx` is not a transaction or is in autocommit mode, or the inbox table does not exist.

        Example:
            with Session(engine) as session, session.begin():
                if not job.once(session):
                    return
                session.add(Payment(order=body.order))
        """
        from reliq.outbox.tables import once_statement  # noqa: PLC0415  a satellite
        from reliq.outbox.transactions import write  # noqa: PLC0415  a satellite

        note = once_statement(*self._first, self._keep_ms(keep), prefix)
        if write(tx, note) == 1:
            return True
        # Keep the row for longer: the message has been redelivered, and may later be redriven as a dead letter.
        write(tx, replace(note, kind="prolong"))
        return False

    def aonce(self, tx: AsyncTransaction, *, keep: Duration | None = None, prefix: str = OUTBOX_PREFIX) -> AwaitedBool:
        """Async version of `once`; write `if not await job.aonce(session)`."""
        return AwaitedBool(self._aonce(tx, keep, prefix))

    async def _aonce(self, tx: AsyncTransaction, keep: Duration | None, prefix: str) -> bool:
        from reliq.outbox.tables import once_statement  # noqa: PLC0415  a satellite
        from reliq.outbox.transactions import awrite  # noqa: PLC0415  a satellite

        note = once_statement(*self._first, self._keep_ms(keep), prefix)
        if await awrite(tx, note) == 1:
            return True
        await awrite(tx, replace(note, kind="prolong"))
        return False

    def publish(
        self,
        queue: Queue[B],
        body: B,
        *,
        name: str = "",
        durability: Durability | None = None,
        **options: Unpack[FollowUpOptions],
    ) -> Receipt:
        """
        Publish a follow-up message of this job once, even if the job is redelivered.

        The id of the follow-up is derived from the id of this message, so it is the same in each delivery. If an earlier
        delivery has already published the follow-up, the receipt is false and its status is `duplicate`.

        Args:
            queue: the `Queue` to publish to.
            body: the body, of the queue's type.
            name: distinguishes this follow-up from other follow-ups of the job; 1 to 64 of A-Z a-z 0-9 _ . : -.
                Without names, follow-ups are numbered 1, 2, …, so publish them in the same order in each delivery.
            durability: which replicas or disks must confirm the publish, as in `Queue.publish`.
            options: the options of `Queue.publish` except `id` and `publication_id`; `dedup` is one day by default.

        Returns:
            The receipt, as `Queue.publish` returns it.

        Raises:
            ConfigurationError: an option is not allowed.
            BodyError: the body cannot be encoded.
            PublishFailed: Redis did not confirm the publish.

        Example: `job.publish(MAILS, Mail(body.order), name="receipt")`
        """
        return queue.publish(body, durability=durability, **self._follow_up(queue, name, options))

    async def apublish(
        self,
        queue: Queue[B],
        body: B,
        *,
        name: str = "",
        durability: Durability | None = None,
        **options: Unpack[FollowUpOptions],
    ) -> Receipt:
        """Async version of `publish`."""
        return await queue.apublish(body, durability=durability, **self._follow_up(queue, name, options))

    def _keep_ms(self, keep: Duration | None) -> int:
        return self._inbox_keep_ms if keep is None else milliseconds(seconds("keep", keep, least=1.0))

    def _follow_up(self, queue: Queue[Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """
        Return the options with which to publish a follow-up.

        They contain an id and a publication_id, which are the same in each delivery of this job.
        """
        if "id" in options or "publication_id" in options:
            raise ConfigurationError(
                "job.publish derives the id from its job; leave id and publication_id out, and give name= to "
                "distinguish follow-ups"
            )
        if name and _NAME.fullmatch(name) is None:
            raise ConfigurationError(f"name must be 1 to 64 of A-Z a-z 0-9 _ . : - , not {str(name)[:40]!r}")
        if not name:
            self._published += 1
            name = str(self._published)
        parts = (*map(str, self._first), queue.name, name)
        digest = sha256("\0".join(parts).encode("utf-8", "surrogateescape")).digest()[:16]
        id = f"{urlsafe_b64encode(digest).decode().rstrip('=')}.{name}"
        return {"dedup": FOLLOW_UP_SECONDS, **options, "id": id, "publication_id": self.publication_id}


@lru_cache(maxsize=1000)
def inbox_keep_ms(queue: QueueSettings, handler: HandlerSettings) -> int:
    """
    Return the longest possible time from the first delivery of a message to its last redelivery, in ms.

    A message can exist for `ttl` plus all backoffs, then for `dead_letter_ttl` as a dead letter, and after a redrive
    for `ttl` plus all backoffs again. Backoffs may be random, so this function doubles each backoff that it computes.
    """
    backoffs = sum(seconds_after(handler.backoff, attempt) for attempt in range(1, queue.retries + 1))
    life = seconds("ttl", queue.ttl) + 2 * backoffs
    return milliseconds(2 * life + seconds("dead_letter_ttl", queue.dead_letter_ttl) + DAY_SECONDS)
