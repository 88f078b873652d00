"""What to do with a message whose handler has answered: decided here, done by the settler."""

from dataclasses import dataclass
from typing import Any, Literal

from reliq.errors import ConfigurationError, Stopped, UndecodableError
from reliq.message import Ack, Nack, Reject, Snooze
from reliq.retry import seconds_after
from reliq.settings import HandlerSettings, milliseconds, seconds
from reliq.text import clean_text
from reliq.worker.exceptions import described, placed

Kind = Literal["ack", "nack", "reject", "snooze", "release", "expired"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    An answer for Redis.

    Attributes:
        delay_ms: until the next delivery.
        reason: `failed`, `rejected` or `undecodable`.
        error: what to remember, without the body.
        raised: class and place of what the handler raised, which may be told to anybody; empty when it raised nothing.
        failed: it is no answer of the handler's choice.
    """

    kind: Kind
    delay_ms: int = 0
    reason: str = "failed"
    error: str = ""
    raised: str = ""
    failed: bool = False

    @property
    def verb(self) -> Kind:
        """Which call tells Redis."""
        return "nack" if self.kind == "reject" else self.kind

    @property
    def kept(self) -> str:
        """What Redis keeps of it: why, and the places of an exception and its causes."""
        places = self.raised.partition(" ")[2]
        return f"{self.error} ({places})" if places else self.error


ACKED = Outcome("ack")
RELEASED = Outcome("release")
EXPIRED = Outcome("expired")
#: Of a handler whose thread cannot be ended: nobody answers, its lease is left to end.
OVERRAN = Outcome("nack", error="TimeoutError", raised="TimeoutError", failed=True)
#: Of a message whose own answer cannot be put into a call to Redis.
UNTELLABLE = Outcome("reject", error="its answer could not be told to Redis")


def answered(answer: Any, attempt: int | None, settings: HandlerSettings) -> Outcome:
    """
    Return the outcome of a handler that returned `answer`.

    Raises:
        ConfigurationError: it is none, though it is meant as one.
    """
    if isinstance(answer, Nack | Reject | Snooze):
        return raised(answer, attempt, settings)
    if isinstance(answer, type) and issubclass(answer, Nack | Reject | Snooze):
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
        case Reject(reason=reason):
            return Outcome("reject", 0, "rejected", *_said(reason))
        case Stopped():
            return RELEASED
        case UndecodableError() if settings.undecodable == "reject":
            return Outcome("reject", reason="undecodable", error=str(error), failed=True)
        case UndecodableError():
            return Outcome("nack", _backoff_ms(attempt, settings), "undecodable", str(error), failed=True)
    text, place = described(error), placed(error)
    retry = isinstance(error, settings.retry_on) or not isinstance(error, Exception)
    if isinstance(error, settings.reject_on) or not retry:
        return Outcome("reject", reason="rejected", error=text, raised=place, failed=True)
    return Outcome("nack", _backoff_ms(attempt, settings), error=text, raised=place, failed=True)


def _said(reason: object) -> tuple[str, str]:
    """Return the text of an answer's reason and, when that is an exception whose text may not be told, its place."""
    if isinstance(reason, BaseException):
        return described(reason), placed(reason)
    return ("" if reason is None else clean_text(reason)), ""


def _backoff_ms(attempt: int | None, settings: HandlerSettings) -> int:
    return milliseconds(seconds_after(settings.backoff, attempt or 1))


def _delay_ms(delay: Any) -> int:
    return milliseconds(seconds("delay", delay))
