"""Convert the results of handlers to outcomes, and outcomes to the script calls that settle messages."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from reliq.codec import Codec
from reliq.errors import BodyError, ConfigurationError, JobInterrupted, UndecodableError
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
    The outcome of a delivery, with the values that are written to Redis when the message is settled.

    Attributes:
        kind: how the delivery ends. `reject`, and `nack` without a retry left, make the message a dead letter.
        delay_ms: ms until the next delivery; with `rate_limited`, ms until messages of the key may run again; with
            `ack`, for how many ms Redis keeps the result.
        reason: the kind of failure: `failed`, `rejected` or `undecodable`.
        error: the error text stored for the operator; contains no part of an undecodable body.
        raised: class and source line of the exception, without any part of a body; empty without an exception.
        failed: whether an error caused the outcome; False if the handler chose the outcome, for example with `Nack`.
        result: the handler's result in the form that Redis keeps; empty to keep no result.
    """

    kind: OutcomeKind
    delay_ms: int = 0
    reason: str = "failed"
    error: str = ""
    raised: str = ""
    failed: bool = False
    result: str = ""


B = TypeVar("B")

ACKED = HandlerOutcome("ack")
RELEASED = HandlerOutcome("release")
EXPIRED = HandlerOutcome("expired")
#: The outcome for a message of a coroutine task that was claimed while the event loop is blocked. The message is
#: delivered later, so that the worker can claim messages of plain tasks that are behind it in the queue.
LOOP_BLOCKED = HandlerOutcome("snooze", 1000)
#: The outcome if a plain handler exceeded its timeout. Its thread cannot be killed, so the message is redelivered
#: when its lease expires.
OVERRAN = HandlerOutcome("nack", error="TimeoutError", raised="TimeoutError", failed=True)
#: The outcome if the handler's result cannot be encoded for Redis: the message becomes a dead letter.
UNTELLABLE = HandlerOutcome("reject", error="the result of the handler could not be sent to Redis")


@dataclass(slots=True)
class Settlement:
    """
    A delivery and its outcome outside a worker: in `Queue.receive` or in the test kit.

    Attributes:
        delivery: the delivery; if the outcome is `expired`, only its field `claimed` is set.
        outcome: the outcome with which the message is settled.
        took_ms: how long the handler ran, in ms; None if this was not measured.
        size: bytes of the stored body, if it is too large to be read together with other bodies; else 0.
        held_since: the monotonic time at which the body was read, in seconds.
        settling: whether the message is being settled, so that its body is not needed any more.
        has_successor: whether the id was published again with `on_conflict` during the delivery.
        started: whether the handler was called.
    """

    delivery: Delivery
    outcome: HandlerOutcome = RELEASED
    took_ms: int | None = None
    size: int = 0
    held_since: float = 0.0
    settling: bool = False
    has_successor: bool = False
    started: bool = True


#: The largest result that Redis keeps, as JSON in bytes.
RESULT_LIMIT = 65_536
#: How many results one script call stores at most: together at most 8 MiB.
RESULTS_LIMIT = 128
_RESULTS: Codec[Any] = Codec(Any)

#: A delivery to settle: `HeldDelivery` in a worker, `Settlement` outside a worker.
E = TypeVar("E", "HeldDelivery", Settlement)


def answered(answer: Any, attempt: int | None, settings: HandlerSettings) -> HandlerOutcome:
    """
    Return the outcome for `answer`, the value that a handler returned.

    Raises:
        ConfigurationError: the value is a class such as `Nack` instead of an instance.
    """
    if isinstance(answer, Nack | Reject | Snooze | RateLimited):
        return raised(answer, attempt, settings)
    if isinstance(answer, type) and issubclass(answer, Nack | Reject | Snooze | RateLimited):
        raise ConfigurationError(
            f"a handler returned the class {answer.__name__}; return an instance, such as {answer.__name__}(...)"
        )
    return ACKED


def kept(answer: Any, delivery: Delivery, keep_ms: int) -> HandlerOutcome:
    """
    Return the outcome `ack` for a message whose result Redis must keep.

    If JSON cannot encode the result, or it is larger than 64 KiB, Redis keeps the reason instead.
    """
    try:
        text = _RESULTS.encode(None if isinstance(answer, Ack) else answer)
        why = f"the result is larger than {RESULT_LIMIT} bytes: {len(text)}" if len(text) > RESULT_LIMIT else ""
    except BodyError as error:
        text, why = b"", str(error).replace("body", "the result", 1)
    value = f"!{why}" if why else text.decode()
    return HandlerOutcome("ack", keep_ms, result=f"{delivery.header.enqueued or 0} {delivery.attempt} {value}")


def raised(error: BaseException, attempt: int | None, settings: HandlerSettings) -> HandlerOutcome:
    """
    Return the outcome for an exception that a handler raised.

    `error` may also be a `Nack`, `Reject`, `Snooze` or `RateLimited` that the handler returned.

    Args:
        error: the exception.
        attempt: the number of the attempt, for the backoff; None counts as 1.
        settings: the handler's settings: backoff, and which exceptions to retry or reject.

    Raises:
        ConfigurationError: a delay is not allowed.
    """
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
    """
    Return the delay of `RateLimited` in seconds.

    Raises:
        ConfigurationError: the delay is above `max_delay`.
    """
    delay = seconds("delay", answer.delay)
    longest = seconds("max_delay", answer.max_delay)
    if delay > longest:
        raise ConfigurationError(
            f"delay of RateLimited must be at most {longest:g} seconds, not {delay:g}: is it in milliseconds? "
            f"To wait longer, give max_delay={delay:g} too"
        )
    return delay


def decoded(delivery: Delivery, decode: Callable[[bytes], B]) -> B:
    """
    Return the decoded body.

    Raises:
        UndecodableError: the body was too large to read.
        Exception: `decode` raised it.
    """
    if delivery.refusal:
        raise UndecodableError(why=delivery.refusal)
    return decode(delivery.payload)


def undecodable(error: BaseException, queue: str, id: str) -> UndecodableError:
    """
    Return an UndecodableError for an exception of the decoder.

    If `error` is not an UndecodableError, use only its class, because its text may contain parts of the body.
    """
    why = error.why if isinstance(error, UndecodableError) else f"decoding the body raised {class_name(error)}"
    return UndecodableError(why, queue, id)


def is_final(claimed: Claimed, outcome: HandlerOutcome) -> bool:
    """Return whether `outcome` makes the message a dead letter."""
    return outcome.kind == "reject" or (outcome.kind == "nack" and claimed.left <= 0)


def burial(keys: Keys, settings: QueueSettings, ids: Sequence[str]) -> Call[tuple[tuple[str, ...], tuple[str, ...]]]:
    """
    Return the script call that turns messages in `garbage` (failed for good) into dead letters.

    The settings of the queue limit the number and age of dead letters.
    """
    letters_ms = milliseconds(settings.dead_letter_ttl)
    return transitions.collect(keys, ids, dead_letter_limit=settings.dead_letter_limit, letters_ms=letters_ms)


def calls(keys: Keys, settings: QueueSettings, deliveries: Iterable[E]) -> list[tuple[Call[Settled], list[E]]]:
    """
    Return the script calls that settle `deliveries` of one queue, each with the deliveries that it settles.

    There is one script call for each kind of outcome, or several for more than `BATCH_LIMIT` messages.
    """
    groups: dict[tuple[OutcomeKind, int], list[E]] = defaultdict(list)
    followed: dict[OutcomeKind, list[E]] = defaultdict(list)
    for one in deliveries:
        kind = one.outcome.kind
        if one.has_successor:
            followed[kind].append(one)
            continue
        # `for_ms`: for acks, how long Redis keeps the results; for rate limits, how long the message key is throttled
        for_ms = one.outcome.delay_ms if kind == "ack" else 0
        if kind == "reject":
            kind = "nack"
        elif kind == "rate_limited":
            if one.delivery.claimed.key is None:  # no keys and limits in this queue: delay only this message
                kind = "snooze"
            else:
                kind = "release"
                for_ms = one.outcome.delay_ms
        groups[kind, for_ms].append(one)
    calls = []
    for (kind, for_ms), group in groups.items():
        limit = RESULTS_LIMIT if kind == "ack" and for_ms else BATCH_LIMIT
        starts = range(0, len(group), limit)
        # Each script call `release` puts its messages at the head of `ready`. To keep their order, release the first
        # messages last.
        for at in reversed(starts) if kind == "release" else starts:
            piece = group[at : at + limit]
            calls.append((_call(keys, settings, kind, for_ms, piece), piece))
    for kind, group in followed.items():
        for at in range(0, len(group), BATCH_LIMIT):
            piece = group[at : at + BATCH_LIMIT]
            claimed, took_ms = [one.delivery.claimed for one in piece], [one.took_ms or 0 for one in piece]
            word = "acked" if kind == "ack" else kind
            call = transitions.succeed(keys, claimed, kind=word, history=settings.keep_completed, took_ms=took_ms)
            calls.append((call, piece))
    return calls


def with_cost(claimed: Claimed, spent: int = 0) -> Claimed:
    """Return a copy of `claimed` with the real cost of its message, which is sent to Redis with the outcome."""
    return msgspec.structs.replace(claimed, spent=spent)


def unsettled(deliveries: Iterable[E], answer: Settled) -> list[E]:
    """Return the deliveries that Redis did not settle because their `has_successor` was wrong, and correct it."""
    left = [one for one in deliveries if one.delivery.id in answer.followed] if answer.followed else []
    for one in left:
        one.has_successor = not one.has_successor
    return left


def saving(keys: Keys, deliveries: Iterable[HeldDelivery]) -> Call[Settled]:
    """Return the script call that stores the last checkpoints of running messages."""
    return transitions.checkpoint(
        keys, [(one.delivery.claimed, *one.checkpoint[:2]) for one in deliveries if one.checkpoint]
    )


def _call(
    keys: Keys, settings: QueueSettings, kind: OutcomeKind, for_ms: int, deliveries: Sequence[E]
) -> Call[Settled]:
    match kind:
        case "ack":
            took_ms = [one.took_ms for one in deliveries if one.took_ms is not None] if settings.keep_completed else []
            took_ms = took_ms if len(took_ms) == len(deliveries) else []
            windows = [(one.delivery.claimed, one.delivery.header.window_ms) for one in deliveries]
            results = [one.outcome.result for one in deliveries] if for_ms else []
            return transitions.ack(
                keys, windows, history=settings.keep_completed, took_ms=took_ms, results=results, keep_ms=for_ms
            )
        case "expired":
            # The deduplication time in the envelope has expired together with the body, so use the queue's setting.
            claimed = [with_cost(one.delivery.claimed) for one in deliveries]
            windows = [(one, chosen_window_ms(one.id, settings.dedup)) for one in claimed]
            return transitions.ack(keys, windows, kind="expired")
        case "snooze":
            return transitions.snooze(keys, [(one.delivery.claimed, one.outcome.delay_ms) for one in deliveries])
        case "release":
            claimed = [one.delivery.claimed if one.started else with_cost(one.delivery.claimed) for one in deliveries]
            return transitions.release(keys, claimed, sleep_ms=for_ms or None)
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
    """
    Return two texts for the reason that a handler gave: a description, and the source lines of an exception.

    The second text is empty if the reason is not an exception.
    """
    if isinstance(reason, BaseException):
        return described(reason), placed(reason)
    return ("" if reason is None else clean_text(reason)), ""


def _backoff_ms(attempt: int | None, settings: HandlerSettings) -> int:
    return milliseconds(seconds_after(settings.backoff, attempt or 1))
