"""The answers of a handler: what it returns or raises to say how its message goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reliq.message import Duration


@dataclass(frozen=True, slots=True)
class Ack:
    """A handler's answer: done. Any other value that it returns, None too, means the same."""


class Answer(Exception):  # noqa: N818  answers are raised, but they are not errors
    """
    The base class of what a handler may return or raise as its answer: `Nack`, `Reject`, `Snooze`, `RateLimited`.

    A handler that catches every exception lets it pass with `except Answer: raise`.
    """

    reason: str

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value not in (None, ""))
        return f"{type(self).__name__}({told})"

    def __str__(self) -> str:
        return str(self.reason)


class Nack(Answer):
    """
    A handler's answer: failed, deliver again. It spends a retry; without one left the message becomes a dead letter.

    Args:
        delay: seconds or timedelta until the next delivery; None for the handler's backoff.
        reason: a text for logs and the dead letter.

    Example: `raise Nack(delay=60, reason="the bank is closed")`
    """

    def __init__(self, delay: Duration | None = None, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = delay
        self.reason = reason


class Reject(Answer):
    """
    A handler's answer: never deliver again. The message becomes a dead letter at once.

    Example: `raise Reject("no such customer")`
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Snooze(Answer):
    """
    A handler's answer: not yet. It spends no retry.

    Args:
        delay: seconds or timedelta until the next delivery.
        reason: a text for logs.

    Example: `return Snooze(delay=timedelta(minutes=5))`
    """

    def __init__(self, delay: Duration, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = delay
        self.reason = reason


class RateLimited(Answer):
    """
    A handler's answer: whoever it calls takes no more for now, such as a server that answered 429. It spends no retry.

    The message goes back to where it was, and its key sleeps: no message of that key starts before `delay` is over, in
    any process. A message without a key puts its queue to sleep. Where a queue has neither keys nor limits the message
    alone waits, as after `Snooze`.

    Args:
        delay: seconds or timedelta until the next delivery.
        reason: a text for logs.
        max_delay: the longest `delay` that is allowed, an hour by default: a header in other units must not stop a
            queue for days. A longer delay is an error of the handler.

    Example: `raise RateLimited(delay=float(response.headers["Retry-After"]))`
    """

    def __init__(self, delay: Duration, reason: str = "", max_delay: Duration = 3600.0) -> None:
        super().__init__(delay, reason, max_delay)
        self.delay = delay
        self.reason = reason
        self.max_delay = max_delay
