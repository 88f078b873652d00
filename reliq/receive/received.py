"""One message as the block of a `receive` has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from reliq.answers import Ack, Nack, RateLimited, Reject, Snooze
from reliq.outbox.effects import Effects
from reliq.settings import seconds
from reliq.settlement import rate_limit_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reliq.message import Duration

B = TypeVar("B")


@dataclass(slots=True)
class Received(Effects, Generic[B]):
    """
    One message taken with `receive`. Unless it is answered otherwise, the end of the block answers for it.

    Attributes:
        attempt: 1 for the first delivery, None for a bare body.
        due: unix seconds, or None for a bare body.
        queue: the queue's name.
        key: None without one.
        token: above that of every earlier delivery of this message, and in an ordered queue of its key: for stores that
            refuse what comes late.
        lost: whether its lease ran out, so that another may have it.
        cancelled: whether it was cancelled meanwhile.
        answer: the answer that the end of the block gives to Redis, None for the block's own.
    """

    id: str
    body: B
    attempt: int | None
    retries_left: int
    due: float | None
    headers: Mapping[str, str]
    queue: str = ""
    key: str | None = None
    token: int = 0
    _first: tuple[str, str, int] = field(default=("", "", 0), repr=False)
    _kept_ms: Callable[[], int] = field(default=int, repr=False)
    _published: int = field(default=0, repr=False)
    lost: bool = False
    cancelled: bool = False
    answer: Ack | Nack | Reject | Snooze | RateLimited | None = field(default=None, repr=False)

    def _ordinal(self) -> int:
        self._published += 1
        return self._published

    @property
    def _inbox_keep_ms(self) -> int:
        return self._kept_ms()

    def ack(self) -> None:
        """Answer: done."""
        self.answer = Ack()

    def nack(self, *, delay: Duration | None = None, reason: str = "") -> None:
        """Answer: deliver again after `delay`, None for the default backoff."""
        self.answer = Nack(delay=None if delay is None else seconds("delay", delay), reason=reason)

    def reject(self, *, reason: str = "") -> None:
        """Answer: a dead letter at once."""
        self.answer = Reject(reason=reason)

    def snooze(self, *, delay: Duration, reason: str = "") -> None:
        """Answer: deliver again after `delay`, and spend no retry."""
        self.answer = Snooze(delay=seconds("delay", delay), reason=reason)

    def rate_limited(self, *, delay: Duration, reason: str = "", max_delay: Duration = 3600.0) -> None:
        """Answer: deliver again, as nothing else of its key, after `delay`, and spend no retry; see `RateLimited`."""
        answer = RateLimited(delay, reason, max_delay)
        rate_limit_seconds(answer)
        self.answer = answer
