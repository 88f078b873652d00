"""The inbox and follow-ups: a handler commits and publishes once, however often its message is delivered."""

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

#: The id of a follow-up stays taken for a day after its end: a job that is delivered again until then publishes nothing.
FOLLOW_UP_SECONDS = DAY_SECONDS
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class AwaitedBool:
    """A bool once it is awaited. Without `await`, `if job.aonce(session)` raises; a coroutine would count as True."""

    def __init__(self, coroutine: Coroutine[Any, Any, bool]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, bool]:
        return self._coroutine.__await__()

    def __bool__(self) -> NoReturn:
        self._coroutine.close()
        raise TypeError("`await` is missing: write `if not await job.aonce(...)`")


class Effects:
    """The part of a job that has its effects happen once. The classes that inherit it say which message it is."""

    __slots__ = ("_published",)

    id: str
    queue: str
    #: How many follow-ups without a name it has published.
    _published: int

    @property
    def publication_id(self) -> int:
        """Tells this message from another one of its id: the ms of its publish, unless that said another number."""
        return self._first[2]

    @property
    def _first(self) -> tuple[str, str, int]:
        """Queue, id and publication_id of the first publication: a move or a redrive to another queue keeps them."""
        raise NotImplementedError

    @property
    def _inbox_keep_ms(self) -> int:
        """For how long the message may be delivered again."""
        raise NotImplementedError

    def once(self, tx: Transaction, *, keep: Duration | None = None, prefix: str = OUTBOX_PREFIX) -> bool:
        """
        Return whether the effects of this message are still to be made: False once they are committed.

        It writes a row to the inbox in the transaction `tx`, which must be the transaction of the effects. Of two deliveries at the
        same time one waits here for the end of the other. In SQLite it must be the first statement of a transaction, or
        come after BEGIN IMMEDIATE.

        Args:
            tx: as in `Queue.publish_in`.
            keep: seconds or timedelta for which the row stays after each call; None: as long as the message, its dead
                letter and what is redriven of it may live, by the settings of queue and handler. Give more for what is
                published with a longer `ttl`.
            prefix: what the names of the tables begin with; `schema.prefix` names a schema too.

        Raises:
            ConfigurationError: `tx` is no transaction or would commit the row by itself, or the table is not there.

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
        write(tx, replace(note, kind="prolong"))  # it may die after this delivery, and be redriven again
        return False

    def aonce(self, tx: AsyncTransaction, *, keep: Duration | None = None, prefix: str = OUTBOX_PREFIX) -> AwaitedBool:
        """As `once`, in async code."""
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
        Publish the next step of this job: once, however often the job is delivered.

        Its id is made of this message's, and is the same in each delivery. It is a `duplicate`, and the receipt false,
        when an earlier delivery has published it.

        Args:
            queue: where to publish it.
            body: of the queue's type.
            name: distinguishes it from other follow-ups of this job; empty: it is the first, second, … that the handler
                publishes, so that it must publish them in the same order each time.
            options: as `Queue.publish` has them, without `id`; `dedup` is a day unless given.

        Raises:
            ConfigurationError: an option is not allowed.
            BodyError, PublishFailed: as `Queue.publish`.

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
        """As `publish`, in async code."""
        return await queue.apublish(body, durability=durability, **self._follow_up(queue, name, options))

    def _keep_ms(self, keep: Duration | None) -> int:
        return self._inbox_keep_ms if keep is None else milliseconds(seconds("keep", keep, least=1.0))

    def _follow_up(self, queue: Queue[Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a follow-up: its id and publication_id are the same in each delivery."""
        if "id" in options or "publication_id" in options:
            raise ConfigurationError("a follow-up has an id that is made of its job's; give name to tell several apart")
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
    Return for how long after its first delivery a message may be delivered again, in ms.

    It lives for its `ttl` and its backoffs, lies as a dead letter for `dead_letter_ttl`, and lives once more when it is
    redriven on its last day. A backoff may be twice as long as one that is drawn: half of it and more is chance.
    """
    backoffs = sum(seconds_after(handler.backoff, attempt) for attempt in range(1, queue.retries + 1))
    life = seconds("ttl", queue.ttl) + 2 * backoffs
    return milliseconds(2 * life + seconds("dead_letter_ttl", queue.dead_letter_ttl) + DAY_SECONDS)
