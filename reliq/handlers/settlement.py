"""Settle deliveries: turn answers and exceptions into outcomes, and outcomes into calls to Redis."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from reliq.errors import ConfigurationError, JobInterrupted, UndecodableError
from reliq.keys import Keys, chosen_window_ms
from reliq.lua import transitions
from reliq.message import Ack, Claimed, Delivery, Nack, RateLimited, Reject, Snooze
from reliq.settings import BATCH_LIMIT, HandlerSettings, QueueSettings, milliseconds, seconds, seconds_after
from reliq.text import class_name, clean_text
from reliq.wire_format import described, placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliq.lua.transitions import Settled
    from reliq.redis.commands import Call
    from reliq.worker.slots import HeldDelivery

OutcomeKind = Literal["ack", "nack", "reject", "snooze", "rate_limited", "release", "expired"]


@dataclass(frozen=True, slots=True)
class HandlerOutcome:
    """
    The result of a delivery, as it is written to Redis.

    Attributes:
        kind: how the delivery ends; `reject`, and `nack` without a retry left, make the message a dead letter.
        delay_ms: ms until the next delivery; with `rate_limited`, ms until the key may run again.
        reason: `failed`, `rejected` or `undecodable`.
        error: the text stored for the operator; contains no part of an undecodable body.
        raised: class and source line of the exception, without any part of a body; empty without an exception.
        failed: whether the outcome comes from an error, not from an answer that the handler chose.
    """

    kind: OutcomeKind
    delay_ms: int = 0
    reason: str = "failed"
    error: str = ""
    raised: str = ""
    failed: bool = False


B = TypeVar("B")

ACKED = HandlerOutcome("ack")
RELEASED = HandlerOutcome("release")
EXPIRED = HandlerOutcome("expired")
#: A handler in a thread exceeded its timeout. A thread cannot be killed, so the lease is left to expire.
OVERRAN = HandlerOutcome("nack", error="TimeoutError", raised="TimeoutError", failed=True)
#: The handler's answer cannot be encoded in a call to Redis.
UNTELLABLE = HandlerOutcome("reject", error="the answer of the handler could not be sent to Redis")


@dataclass(slots=True)
class Settlement:
    """
    A delivery outside a worker (`receive`, the testing kit) and its outcome.

    Attributes:
        delivery: the delivery; if the outcome is `expired`, only its `claimed` is filled.
        took_ms: how long the handler ran, in ms; None if unknown.
        size: bytes of the stored body, if it is too large to be read with others.
        held_since: the monotonic time at which the body was read.
        settling: whether the body must not be read any more.
    """

    delivery: Delivery
    outcome: HandlerOutcome = RELEASED
    took_ms: int | None = None
    size: int = 0
    held_since: float = 0.0
    settling: bool = False


#: A delivery with an outcome.
E = TypeVar("E", "HeldDelivery", Settlement)


def answered(answer: Any, attempt: int | None, settings: HandlerSettings) -> HandlerOutcome:
    """
    Return the outcome for the value that a handler returned.

    Raises:
        ConfigurationError: `answer` is a class such as `Nack` instead of an instance.
    """
    if isinstance(answer, Nack | Reject | Snooze | RateLimited):
        return raised(answer, attempt, settings)
    if isinstance(answer, type) and issubclass(answer, Nack | Reject | Snooze | RateLimited):
        raise ConfigurationError(
            f"a handler returned the class {answer.__name__}; return an instance, such as {answer.__name__}(...)"
        )
    return ACKED


def raised(error: BaseException, attempt: int | None, settings: HandlerSettings) -> HandlerOutcome:
    """Return the outcome for an exception that a handler raised, with the backoff of its settings."""
    match error:
        case Ack():
            return ACKED
        case Nack(delay=delay, reason=reason):
            delay_ms = _backoff_ms(attempt, settings) if delay is None else milliseconds(seconds("delay", delay))
            return HandlerOutcome("nack", delay_ms, "failed", *_format_reason(reason))
        case Snooze(delay=delay):
            return HandlerOutcome("snooze", milliseconds(seconds("delay", delay)))
        case RateLimited(reason=reason):
            delay_ms = max(1, milliseconds(rate_limit_seconds(error)))
            return HandlerOutcome("rate_limited", delay_ms, "failed", *_format_reason(reason))
        case Reject(reason=reason):
            return HandlerOutcome("reject", 0, "rejected", *_format_reason(reason))
        case JobInterrupted():
            return RELEASED
        case UndecodableError() if settings.on_decode_error == "reject":
            return HandlerOutcome("reject", 0, "undecodable", error.why, class_name(error), failed=True)
        case UndecodableError():
            return HandlerOutcome(
                "nack", _backoff_ms(attempt, settings), "undecodable", error.why, class_name(error), failed=True
            )
    retry = isinstance(error, settings.retry_on) or not isinstance(error, Exception)
    if isinstance(error, settings.reject_on) or not retry:
        return HandlerOutcome("reject", 0, "rejected", described(error), placed(error), failed=True)
    return HandlerOutcome(
        "nack", _backoff_ms(attempt, settings), "failed", described(error), placed(error), failed=True
    )


def rate_limit_seconds(answer: RateLimited) -> float:
    """Return the delay of a rate limit in seconds; raise ConfigurationError if it is above `max_delay`."""
    delay = seconds("delay", answer.delay)
    longest = seconds("max_delay", answer.max_delay)
    if delay > longest:
        raise ConfigurationError(
            f"delay of RateLimited must be at most {longest:g} seconds, not {delay:g}: is it in milliseconds? "
            f"To wait longer, give max_delay={delay:g} too"
        )
    return delay


def decoded(delivery: Delivery, decode: Callable[[bytes], B]) -> B:
    """Return the decoded body; raise UndecodableError if it is too large, or the exception of `decode`."""
    if delivery.refusal:
        raise UndecodableError(delivery.refusal)
    return decode(delivery.payload)


def undecodable(error: BaseException, queue: str, id: str) -> UndecodableError:
    """Return an UndecodableError for `error`; of other exceptions it contains only the class, never their text."""
    why = error.why if isinstance(error, UndecodableError) else f"decoding the body raised {class_name(error)}"
    return UndecodableError(why, queue, id)


def is_final(claimed: Claimed, outcome: HandlerOutcome) -> bool:
    """Return whether `outcome` makes the message a dead letter."""
    return outcome.kind == "reject" or (outcome.kind == "nack" and claimed.left <= 0)


def burial(keys: Keys, settings: QueueSettings, ids: Sequence[str]) -> Call[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the call that turns garbage into dead letters, with the limits in the queue's settings."""
    letters_ms = milliseconds(settings.dead_letter_ttl)
    return transitions.collect(keys, ids, dead_letter_limit=settings.dead_letter_limit, letters_ms=letters_ms)


def calls(keys: Keys, settings: QueueSettings, deliveries: Iterable[E]) -> list[tuple[Call[Settled], list[E]]]:
    """
    Return the calls that settle `deliveries` of one queue, each with its deliveries.

    There is one call for each kind of outcome, and more calls for more than `BATCH_LIMIT` messages.
    """
    groups: dict[tuple[OutcomeKind, int], list[E]] = defaultdict(list)
    for one in deliveries:
        kind = one.outcome.kind
        sleep_ms = 0  # how long the keys of released messages are throttled
        if kind == "reject":
            kind = "nack"
        elif kind == "rate_limited":
            if one.delivery.claimed.key is None:  # no key to throttle
                kind = "snooze"
            else:
                kind = "release"
                sleep_ms = one.outcome.delay_ms
        groups[kind, sleep_ms].append(one)
    calls = []
    for (kind, sleep_ms), group in groups.items():
        starts = range(0, len(group), BATCH_LIMIT)
        # Each release puts messages at the head of ready: release the first messages last to keep their order.
        for at in reversed(starts) if kind == "release" else starts:
            piece = group[at : at + BATCH_LIMIT]
            calls.append((_call(keys, settings, kind, sleep_ms, piece), piece))
    return calls


def _call(
    keys: Keys, settings: QueueSettings, kind: OutcomeKind, sleep_ms: int, deliveries: Sequence[E]
) -> Call[Settled]:
    match kind:
        case "ack":
            took_ms = [one.took_ms for one in deliveries if one.took_ms is not None] if settings.keep_completed else []
            took_ms = took_ms if len(took_ms) == len(deliveries) else []
            windows = [(one.delivery.claimed, one.delivery.header.window_ms) for one in deliveries]
            return transitions.ack(keys, windows, kind="acked", history=settings.keep_completed, took_ms=took_ms)
        case "expired":
            # The header expired with the body. Only the form of the id shows whether the publisher chose it.
            claimed = [one.delivery.claimed for one in deliveries]
            windows = [(one, chosen_window_ms(one.id, settings.dedup)) for one in claimed]
            return transitions.ack(keys, windows, kind="expired")
        case "snooze":
            return transitions.snooze(keys, [(one.delivery.claimed, one.outcome.delay_ms) for one in deliveries])
        case "release":
            return transitions.release(keys, [one.delivery.claimed for one in deliveries], sleep_ms=sleep_ms or None)
    by = f"{socket.gethostname()}:{os.getpid()}"
    failures = [
        transitions.failure(
            one.delivery,
            one.outcome.reason,
            one.outcome.error,
            one.outcome.delay_ms,
            final=one.outcome.kind == "reject",
            raised=one.outcome.raised,
            by=by,
            took_ms=one.took_ms,
        )
        for one in deliveries
    ]
    return transitions.nack(keys, failures)


def _format_reason(reason: object) -> tuple[str, str]:
    """Return the text of a reason and, for an exception, its class and source line."""
    if isinstance(reason, BaseException):
        return described(reason), placed(reason)
    return ("" if reason is None else clean_text(reason)), ""


def _backoff_ms(attempt: int | None, settings: HandlerSettings) -> int:
    return milliseconds(seconds_after(settings.backoff, attempt or 1))
