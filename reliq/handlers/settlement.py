"""The end of a delivery: the outcome of an answer or an exception, and the calls that settle it in Redis."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from reliq.errors import ConfigurationError, Stopped, UndecodableError
from reliq.keys import chosen_window_ms
from reliq.lua import transitions
from reliq.message import Ack, Nack, RateLimited, Reject, Snooze
from reliq.settings import BATCH_LIMIT, milliseconds, seconds, seconds_after
from reliq.text import class_name, clean_text
from reliq.wire_format import described, placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reliq.keys import Keys
    from reliq.lua.transitions import Settled
    from reliq.message import Claimed, Delivery
    from reliq.redis.commands import Call
    from reliq.settings import HandlerSettings, QueueSettings

OutcomeKind = Literal["ack", "nack", "reject", "snooze", "rate_limited", "release", "expired"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    An answer for Redis.

    Attributes:
        kind: how the delivery ends; a `nack` with no retry left and a `reject` end the message.
        delay_ms: until the next delivery; of what is `rate_limited` until its key is served again.
        reason: `failed`, `rejected` or `undecodable`.
        error: text that is kept for the operator; of a body that does not decode it holds no part.
        raised: class and place of what the handler raised, which may be told to anybody; empty when it raised nothing.
        failed: it is no answer of the handler's choice.
    """

    kind: OutcomeKind
    delay_ms: int = 0
    reason: str = "failed"
    error: str = ""
    raised: str = ""
    failed: bool = False

    @property
    def kept(self) -> str:
        """The text that is shown: why, and the places of an exception and its causes."""
        places = self.raised.partition(" ")[2]
        return f"{self.error} ({places})" if places else self.error


class SettledDelivery(Protocol):
    """A delivery whose outcome is known."""

    @property
    def delivery(self) -> Delivery:
        """The delivery; of one that is `expired` only `claimed` is known."""

    @property
    def outcome(self) -> Outcome:
        """The answer for Redis."""

    @property
    def took_ms(self) -> int | None:
        """Milliseconds that its handler ran, None when nobody measured."""


class Settlement(NamedTuple):
    """A delivery and its outcome, for a holder that notes no more of it."""

    delivery: Delivery
    outcome: Outcome
    took_ms: int | None = None


class Move(NamedTuple):
    """
    A move that tells Redis outcomes: all of one move go into one call.

    Attributes:
        sleep_ms: for how long the keys of what is released sleep.
    """

    kind: OutcomeKind
    sleep_ms: int = 0


B = TypeVar("B")
E = TypeVar("E", bound=SettledDelivery)
_ACK = Move("ack")

ACKED = Outcome("ack")
RELEASED = Outcome("release")
EXPIRED = Outcome("expired")
#: A handler overran its time in a thread, which nobody can end: its lease is left to end.
OVERRAN = Outcome("nack", error="TimeoutError", raised="TimeoutError", failed=True)
#: The message's own answer cannot be put into a call to Redis.
UNTELLABLE = Outcome("reject", error="its answer could not be told to Redis")


def answered(answer: Any, attempt: int | None, settings: HandlerSettings) -> Outcome:
    """
    Return the outcome of a handler that returned `answer`.

    Raises:
        ConfigurationError: it is none, though it is meant as one.
    """
    if isinstance(answer, Nack | Reject | Snooze | RateLimited):
        return raised(answer, attempt, settings)
    if isinstance(answer, type) and issubclass(answer, Nack | Reject | Snooze | RateLimited):
        raise ConfigurationError(f"an answer must be made, such as {answer.__name__}(...), not the class itself")
    return ACKED


def raised(error: BaseException, attempt: int | None, settings: HandlerSettings) -> Outcome:
    """Return the outcome of a handler that raised `error`, with the backoff of its settings."""
    match error:
        case Ack():
            return ACKED
        case Nack(delay=delay, reason=reason):
            delay_ms = _backoff_ms(attempt, settings) if delay is None else _delay_ms(delay)
            return Outcome("nack", delay_ms, "failed", *_said(reason))
        case Snooze(delay=delay):
            return Outcome("snooze", _delay_ms(delay))
        case RateLimited(reason=reason):
            return Outcome("rate_limited", max(1, milliseconds(rate_limit_seconds(error))), "failed", *_said(reason))
        case Reject(reason=reason):
            return Outcome("reject", 0, "rejected", *_said(reason))
        case Stopped():
            return RELEASED
        case UndecodableError() if settings.undecodable == "reject":
            return Outcome("reject", 0, "undecodable", error.why, class_name(error), failed=True)
        case UndecodableError():
            return Outcome(
                "nack", _backoff_ms(attempt, settings), "undecodable", error.why, class_name(error), failed=True
            )
    text, place = described(error), placed(error)
    retry = isinstance(error, settings.retry_on) or not isinstance(error, Exception)
    if isinstance(error, settings.reject_on) or not retry:
        return Outcome("reject", reason="rejected", error=text, raised=place, failed=True)
    return Outcome("nack", _backoff_ms(attempt, settings), error=text, raised=place, failed=True)


def rate_limit_seconds(answer: RateLimited) -> float:
    """Return the delay of a rate limit; raise ConfigurationError where it is above its `max_delay`."""
    delay, longest = seconds("delay", answer.delay), seconds("max_delay", answer.max_delay)
    if delay > longest:
        raise ConfigurationError(
            f"delay of RateLimited must be at most {longest:g} seconds, not {delay:g}: is it in milliseconds? "
            f"To wait longer, give max_delay={delay:g} too"
        )
    return delay


def decoded(delivery: Delivery, decode: Callable[[bytes], B]) -> B:
    """Return the body of a delivery; raise UndecodableError for one that is too large, and what `decode` raises."""
    if delivery.refusal:
        raise UndecodableError(delivery.refusal)
    return decode(delivery.payload)


def undecodable(error: BaseException, queue: str, id: str) -> UndecodableError:
    """Return why the body of a message does not decode: of an exception of foreign code no more than the class."""
    why = error.why if isinstance(error, UndecodableError) else f"decoding the body raised {class_name(error)}"
    return UndecodableError(why, queue, id)


def is_final(claimed: Claimed, outcome: Outcome) -> bool:
    """Say whether the message becomes a dead letter."""
    return outcome.kind == "reject" or (outcome.kind == "nack" and claimed.left <= 0)


def burial(keys: Keys, settings: QueueSettings, ids: Sequence[str]) -> Call[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the call that turns garbage into dead letters, kept as the queue's settings say."""
    letters_ms = milliseconds(settings.letters_ttl)
    return transitions.collect(keys, ids, letters_max=settings.letters_max, letters_ms=letters_ms)


def calls(keys: Keys, settings: QueueSettings, some: Iterable[E]) -> list[tuple[Call[Settled], list[E]]]:
    """
    Return the calls that tell Redis how `some` deliveries of a queue end, each with its own deliveries.

    There is one call for each move, and more where that are more than `BATCH_LIMIT` messages.
    """
    by_move: dict[Move, list[E]] = defaultdict(list)
    for one in some:
        by_move[_ACK if one.outcome is ACKED else _move(one)].append(one)
    found = []
    for move, group in by_move.items():
        pieces = [group]
        if len(group) > BATCH_LIMIT:
            pieces = [group[at : at + BATCH_LIMIT] for at in range(0, len(group), BATCH_LIMIT)]
        if move.kind == "release":
            pieces.reverse()  # each goes before what is in ready: the first at last
        found += [(_call(keys, settings, move, piece), piece) for piece in pieces]
    return found


def _move(one: SettledDelivery) -> Move:
    """Return the move that tells Redis an outcome; a message that was claimed without regard to keys has none to sleep."""
    kind, delay_ms = one.outcome.kind, one.outcome.delay_ms
    if kind == "rate_limited":
        return Move("snooze") if one.delivery.claimed.key is None else Move("release", delay_ms)
    return Move("nack") if kind == "reject" else Move(kind)


def _call(keys: Keys, settings: QueueSettings, move: Move, some: Sequence[SettledDelivery]) -> Call[Settled]:
    if move.kind in ("ack", "expired"):
        return _ending(keys, settings, move.kind, some)
    if move.kind == "snooze":
        return transitions.snooze(keys, [(one.delivery.claimed, one.outcome.delay_ms) for one in some])
    if move.kind == "release":
        return transitions.release(keys, [one.delivery.claimed for one in some], sleep_ms=move.sleep_ms or None)
    return transitions.nack(keys, [_failure(one) for one in some])


def _ending(keys: Keys, settings: QueueSettings, kind: OutcomeKind, some: Sequence[SettledDelivery]) -> Call[Settled]:
    if kind == "ack":
        history = settings.history
        took_ms = [one.took_ms for one in some if one.took_ms is not None] if history else []
        took_ms = took_ms if len(took_ms) == len(some) else []
        rows = [(one.delivery.claimed, one.delivery.header.window_ms) for one in some]
        return transitions.ack(keys, rows, kind="acked", history=history, took_ms=took_ms)
    # The header of an expired message is gone with its body: only the shape of its id says whether it was chosen.
    claimed = [one.delivery.claimed for one in some]
    windows = [(one, chosen_window_ms(one.id, settings.dedup)) for one in claimed]
    return transitions.ack(keys, windows, kind="expired")


def _failure(one: SettledDelivery) -> tuple[Claimed, int, str, bytes]:
    outcome = one.outcome
    return transitions.failure(
        one.delivery,
        outcome.reason,
        outcome.error,
        outcome.delay_ms,
        final=outcome.kind == "reject",
        raised=outcome.raised,
        by=f"{socket.gethostname()}:{os.getpid()}",
        took_ms=one.took_ms,
    )


def _said(reason: object) -> tuple[str, str]:
    """Return the text of an answer's reason and, when that is an exception whose text may not be told, its place."""
    if isinstance(reason, BaseException):
        return described(reason), placed(reason)
    return ("" if reason is None else clean_text(reason)), ""


def _backoff_ms(attempt: int | None, settings: HandlerSettings) -> int:
    return milliseconds(seconds_after(settings.backoff, attempt or 1))


def _delay_ms(delay: Any) -> int:
    return milliseconds(seconds("delay", delay))
