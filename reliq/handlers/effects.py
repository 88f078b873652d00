"""The inbox and follow-up messages: a handler commits and publishes once, even if its message is redelivered."""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack

from reliq.errors import ConfigurationError
from reliq.settings import DAY_SECONDS, OUTBOX_PREFIX, milliseconds, seconds, seconds_after

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Mapping

    from reliq.message import Duration, FollowUpOptions, Receipt
    from reliq.outbox.transactions import AsyncTransaction, Transaction
    from reliq.queue import Queue
    from reliq.settings import Durability, HandlerSettings, QueueSettings

B = TypeVar("B")

#: How long the id of a finished follow-up stays taken: a redelivered job does not publish it again in this time.
FOLLOW_UP_SECONDS = DAY_SECONDS
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class AwaitedBool:
    """Awaitable bool. Using it without `await` raises TypeError, where a plain coroutine would count as True."""

    def __init__(self, coroutine: Coroutine[Any, Any, bool]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, bool]:
        return self._coroutine.__await__()

    def __bool__(self) -> NoReturn:
        self._coroutine.close()
        raise TypeError("`await` is missing: write `if not await job.aonce(...)`")


class Effects:
    """Base class of `Job` and `ReceivedJob`: `once` and `publish`, which take effect once for each message."""

    __slots__ = ("_published",)

    id: str
    queue: str
    #: The number of unnamed follow-ups published so far.
    _published: int

    @property
    def publication_id(self) -> int:
        """Unix milliseconds of the publish, or the number given to it; distinguishes messages that reuse an id."""
        return self._first[2]

    @property
    def _first(self) -> tuple[str, str, int]:
        """Queue, id and publication_id of the first publish; moves and redrives to another queue keep them."""
        raise NotImplementedError

    @property
    def _inbox_keep_ms(self) -> int:
        """How long the message may be redelivered, in ms."""
        raise NotImplementedError

    def once(self, tx: Transaction, *, keep: Duration | None = None, prefix: str = OUTBOX_PREFIX) -> bool:
        """
        Return True on the first call for this message, and False once its transaction has committed.

        Call it first in the transaction that writes your effects, and return at once when it is False. It writes a row
        to the inbox table in the same transaction, so effects and row are committed together. If two deliveries run at
        the same time, the second call waits until the first transaction ends. In SQLite, make it the first statement of
        the transaction, or run BEGIN IMMEDIATE before.

        Args:
            tx: your open transaction or session, as in `Queue.publish_in`.
            keep: how long to keep the row after each call, in seconds or as a timedelta. Default: the longest time that
                the message, its dead letter and a redrive of it can live by the settings of queue and handler. Give
                more if you publish with a longer `ttl`.
            prefix: the prefix of the table names ("reliq_"); `schema.prefix` names a schema too.

        Raises:
            ConfigurationError: `tx` is not a transaction, is in autocommit mode, or the table does not exist.

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
        write(tx, replace(note, kind="prolong"))  # the message may still become a dead letter and be redriven
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

        Its id is derived from this message's id, so it is the same in each delivery. If an earlier delivery has already
        published it, the receipt is false and its status is `duplicate`.

        Args:
            queue: the `Queue` to publish to.
            body: the body, of the queue's type.
            name: a name that distinguishes this follow-up from others of the job, 1 to 64 of A-Z a-z 0-9 _ . : -.
                Without a name, follow-ups are numbered 1, 2, …: publish them in the same order in each delivery.
            durability: how many replicas must confirm the publish, as in `Queue.publish`.
            options: options of `Queue.publish`, without `id`; `dedup` is one day by default.

        Returns:
            The receipt, as of `Queue.publish`.

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
        """Return the options of a follow-up: its id and publication_id are the same in each delivery."""
        if "id" in options or "publication_id" in options:
            raise ConfigurationError(
                "job.publish derives the id from its job; leave id and publication_id out, and give "
                "name= to distinguish "
                "follow-ups"
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
    Return how long after its first delivery a message may be redelivered, in ms.

    This is `ttl` plus all backoffs, then `dead_letter_ttl` as a dead letter, then the first time again after a redrive.
    Backoffs count twice, because they are random and this function draws only a sample.
    """
    backoffs = sum(seconds_after(handler.backoff, attempt) for attempt in range(1, queue.retries + 1))
    life = seconds("ttl", queue.ttl) + 2 * backoffs
    return milliseconds(2 * life + seconds("dead_letter_ttl", queue.dead_letter_ttl) + DAY_SECONDS)
