"""One message as its publisher may describe it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypedDict, TypeVar

from reliq.keywords import checking_keywords

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from reliq.message import Duration, Priority

B = TypeVar("B")


class FollowUpOptions(TypedDict, total=False):
    """The options of a job's next step, whose id is made of the job's."""

    delay: Duration
    at: datetime | None
    retries: int | None
    ttl: Duration | None
    headers: Mapping[str, str] | None
    dedup: Duration | None
    replace: bool
    key: str | None
    priority: Priority


class PublishOptions(FollowUpOptions, total=False):
    """The options of one message, for type checkers; the docstring of `Queue.publish` describes each."""

    id: str | UUID | None
    incarnation: int | None


@checking_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing(Generic[B]):
    """
    One message for `publish_many`, with options of its own: those of `Queue.publish`, which describes them.

    Example: `queue.publish_many([Outgoing(body=order, id=f"order-{order.id}", delay=60) for order in orders])`
    """

    body: B
    delay: Duration = 0.0
    at: datetime | None = None
    id: str | UUID | None = None
    retries: int | None = None
    ttl: Duration | None = None
    headers: Mapping[str, str] | None = None
    dedup: Duration | None = None
    replace: bool = False
    incarnation: int | None = None
    key: str | None = None
    priority: Priority = "normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(Outgoing[B]):
    """A message copied from another queue; `origin` is the queue and id of its first publication, for `Job.once`."""

    origin: tuple[str, str] | None = None
