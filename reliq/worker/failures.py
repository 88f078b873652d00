"""Reports failures: a log line for each, a traceback for a new kind, and the hooks of `Consumer.on_error`."""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from reliq.answers import Nack
from reliq.error_text import placed, traceback_of
from reliq.errors import UndecodableError
from reliq.foreign import printable
from reliq.readable import spoken
from reliq.settlement import OVERRAN, is_final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.handlers.job import Job
    from reliq.message import Delivery
    from reliq.settlement import Outcome
    from reliq.worker.delivery import HandlerCall, HeldDelivery

    ErrorHook = Callable[[Job[Any], BaseException, bool], Any]

logger = logging.getLogger("reliq")

#: The first failure of a kind is logged with its traceback; this many kinds are remembered.
KINDS_LIMIT = 1000
TEXT_HINT = " (text hidden: see `reliq show QUEUE ID`, or use --log-error-text)"


def is_failure(held: HeldDelivery, outcome: Outcome) -> bool:
    """Return whether the handler did not choose `outcome`, or it is a `Nack` after which no retry is left."""
    return outcome.failed or (outcome.kind == "nack" and is_final(held.delivery.claimed, outcome))


class Failures:
    """
    Reports failed deliveries; it never raises.

    Args:
        hooks: `Consumer.on_error`'s.
        error_text: write the texts of exceptions and the reasons of answers too, which may hold a part of a body.
        job_of: makes the job of a delivery, given its body.
    """

    def __init__(
        self,
        hooks: Sequence[ErrorHook],
        *,
        error_text: bool,
        job_of: Callable[[HeldDelivery, HandlerCall, Any], Job[Any]],
    ) -> None:
        self._hooks, self._error_text, self._job_of = hooks, error_text, job_of
        self._seen: set[tuple[str, str]] = set()

    def tell(self, run: HandlerCall, pairs: Sequence[tuple[HeldDelivery, Outcome]], cause: Any, seconds: float) -> None:
        """Report the deliveries of `pairs` that failed after `seconds`; `cause` was raised or answered, a list for a batch."""
        failed = [(held, outcome) for held, outcome in pairs if is_failure(held, outcome)]
        for held, outcome in failed:
            # By its type alone: an answer may raise when it is asked for its class.
            error = cause if issubclass(type(cause), BaseException) else Nack(reason=outcome.error)
            with suppress(BaseException):  # of an exception whose own code raises nothing can be told
                self._log(run, held, outcome, error, seconds)
            for hook in self._hooks:
                self._call(hook, run, held, error, is_final=is_final(held.delivery.claimed, outcome))

    def overran(self, run: HandlerCall, outcome: Outcome, seconds: float) -> None:
        """Report a handler whose thread overran its time, and where it stands; a new thread calls the hooks."""
        error = TimeoutError("the handler overran its timeout")
        frame = sys._current_frames().get(run.thread)  # noqa: SLF001  the documented way to see other threads
        traceback: TracebackType | None = None
        while frame is not None:
            traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        deliveries = list(run.unanswered)

        def tell() -> None:
            self.tell(run, [(held, outcome) for held in deliveries], error.with_traceback(traceback), seconds)

        with suppress(RuntimeError):  # no thread to be had
            threading.Thread(target=tell, name="reliq-overran", daemon=True).start()

    def _log(
        self, run: HandlerCall, held: HeldDelivery, outcome: Outcome, error: BaseException, seconds: float
    ) -> None:
        """Write a line: at ERROR, with the exception, when a message died; with its traceback when it is a new one."""
        final, kind = is_final(held.delivery.claimed, outcome), "timeout" if run.abandoned else outcome.kind
        level = logging.ERROR if final else logging.INFO
        if not logger.isEnabledFor(level):
            return
        delivery, place = held.delivery, outcome.raised
        what = outcome.kept if self._error_text else place
        with_trace = self._is_new(held.queue, error) or final
        error_type = place.partition(" ")[0]
        hint = TEXT_HINT if with_trace and outcome.error != error_type and not self._error_text else ""
        text = f"{held.queue} {delivery.id} {_ended(delivery, kind, seconds)}, {_goes_on(outcome, final=final)}"
        told = {
            "event": "handled",
            "queue": held.queue,
            "id": delivery.id,
            "attempt": delivery.attempt,
            "outcome": kind,
            "final": final,
            "seconds": round(seconds, 6),
            "error": what,
            "error_type": error_type,
            "place": place,
        }
        said = printable(f"{text}: {what}" if what else text)
        self._write(level, said + hint, told, error, with_trace=with_trace)

    def _write(self, level: int, text: str, told: dict[str, Any], error: BaseException, *, with_trace: bool) -> None:
        """Write a record whose traceback is ready, so that whoever formats it adds no text of an exception."""
        is_final = level == logging.ERROR
        exc_info = (type(error), error, error.__traceback__) if is_final else None
        record = logger.makeRecord(logger.name, level, __file__, 0, "%s", (text,), exc_info, extra={"reliq": told})
        if with_trace and not isinstance(error, UndecodableError):  # its place is ours, its text says the field
            record.exc_text = traceback_of(error, with_text=self._error_text)
        elif is_final:
            record.exc_text = type(error).__name__
        logger.handle(record)

    def _is_new(self, queue: str, error: BaseException) -> bool:
        """Return whether this is the first failure of its queue with these exceptions and places."""
        if (kind := (queue, placed(error))) in self._seen:
            return False
        if len(self._seen) >= KINDS_LIMIT:
            self._seen.clear()
        self._seen.add(kind)
        return True

    def _job(self, run: HandlerCall, held: HeldDelivery) -> Job[Any]:
        """Return the job that failed, its body as it was sent; of a body that does not decode its bytes."""
        payload = held.delivery.payload
        body: Any = payload
        with suppress(Exception):
            body = run.handler.codec.decode(payload)
        return self._job_of(held, run, body)

    def _call(
        self, hook: ErrorHook, run: HandlerCall, held: HeldDelivery, error: BaseException, *, is_final: bool
    ) -> None:
        try:
            hook(self._job(run, held), error, is_final)
        except BaseException as problem:
            logger.warning("on_error %s itself failed: %s", getattr(hook, "__qualname__", hook), placed(problem))


def _ended(delivery: Delivery, kind: str, seconds: float) -> str:
    """Return which attempt it was of how many, and for how long its handler ran."""
    number, verb = delivery.attempt, {"reject": "was rejected", "timeout": "overran its time"}.get(kind, "failed")
    which = "a delivery" if number is None else f"attempt {number} of {number + max(0, delivery.claimed.left)}"
    return f"{which} {verb} after {seconds:.3f} s"


def _goes_on(outcome: Outcome, *, final: bool) -> str:
    """Return when the message is delivered again, if it is."""
    if final:
        return "now a dead letter"
    if outcome is OVERRAN:
        return "again when its lease ends"
    return f"again in {spoken(outcome.delay_ms / 1000)}" if outcome.delay_ms else "again at once"
