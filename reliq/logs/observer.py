"""Events as log lines. No line has a body, a header or a password."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from reliq import events
from reliq.logs import enable_logging
from reliq.text import IDS_SHOWN, join_first, pluralize, printable, shell_command

if TYPE_CHECKING:
    from reliq.events import Event

logger = logging.getLogger("reliq")

#: The outcomes of a tick in a log line.
_TICK_OUTCOMES = {
    "published": "published",
    "paused": "skipped in its pause",
    "overlap": "skipped, for its last message is alive",
    "missed": "missed itself",
}


class LogObserver:
    """
    Writes a line for each event that matters: handled well at DEBUG, answers at INFO, ends and losses at WARNING.

    Failures are logged where their exception is at hand, with its traceback.

    Args:
        error_text: write also the reasons of answers; else of a reason that is an exception its class and place alone.
    """

    def __init__(self, *, error_text: bool = False) -> None:
        self._error_text = error_text
        self._lock = threading.Lock()
        self._away: dict[tuple[str, str], float] = {}  # queue and part -> since when

    kinds = (
        *(events.Handled, events.Lost, events.Reclaimed, events.Expired, events.Collected, events.Inconsistent),
        *(events.RedisAway, events.RedisBack, events.RenewalLate, events.Unconfirmed, events.WentBack),
        *(events.WorkerReady, events.WorkerStopping, events.Ticked, events.Superseded, events.Throttled),
    )

    @property
    def hears_success(self) -> bool:
        """Whether the end of a handler that went well is logged, too."""
        return logger.isEnabledFor(logging.DEBUG)

    def __call__(self, event: Event, /) -> None:
        """Log `event`, if it is one to log."""
        match event:
            case events.Handled(failed=False):
                _log_handled(event, event.error if self._error_text else event.raised)
            case events.RedisAway(queue, part, error, refusal):
                self._redis_away(queue, part, error, refusal)
            case events.RedisBack(queue, part):
                self._redis_back(queue, part)
            case events.WorkerReady(_, queues):
                enable_logging()  # a lifespan may just have configured logging
                _info(f"ready: working on {', '.join(queues)}", event="ready", queues=queues)
            case events.WorkerStopping(_, running, grace):
                handlers = pluralize(running, "handler") if running else "no handlers"
                text = f"stopping: {handlers} running" + (f", {grace:.3g} s left" if running else "")
                _info(text, event="stopping", running=running, grace=round(grace, 3))
            case events.RenewalLate(queue, seconds, cause):
                why = "Redis answered slowly" if cause == "redis" else "something held this process up"
                _warn(
                    f"a renewal came {seconds:.1f} s late: {why}",
                    event="renewal_late",
                    queue=queue,
                    seconds=round(seconds, 3),
                    cause=cause,
                )
            case events.Lost(queue, ids, verb):
                text = f"{queue}: {verb} came too late, the message went on without us: {join_first(ids)}"
                _warn(text, event="lost", queue=queue, ids=ids, verb=verb)
            case events.Unconfirmed(queue, ids, why):
                text = f"{queue}: published, but not as durable as asked for: {why}: {join_first(ids)}"
                _warn(text, event="unconfirmed", queue=queue, ids=ids, why=why)
            case events.Reclaimed(queue, overdue, _, buried) if overdue or buried:
                parts = [f"leases ended without a result, redelivering: {join_first(overdue)}"] if overdue else []
                parts += [f"no retry left: {join_first(buried)}"] if buried else []
                _warn(f"{queue}: {'; '.join(parts)}", event="reclaimed", queue=queue, ids=overdue, buried=buried)
            case events.Throttled(queue, ids, keys, seconds):
                throttled = [f"key {key}" for key in keys if key] + ["the queue"] * ("" in keys)
                text = f"{queue}: rate limited, for {seconds:g} s: {join_first(throttled)}"
                _info(text, event="throttled", queue=queue, ids=ids[:IDS_SHOWN], keys=keys[:IDS_SHOWN], seconds=seconds)
            case events.Expired(queue, ids):
                _warn(
                    f"{queue}: expired before they could start: {join_first(ids)}",
                    event="expired",
                    queue=queue,
                    ids=ids,
                )
            case events.Collected(queue, ids):
                text = f"{queue}: dead letters, see `{shell_command('dead list', queue)}`: {join_first(ids)}"
                _warn(text, event="dead", queue=queue, ids=ids)
            case events.Inconsistent(queue, ids):
                text = f"{queue}: retry count missing or no number, taken as 0: {join_first(ids)}"
                _warn(text, event="inconsistent", queue=queue, ids=ids)
            case events.WentBack(queue, before, after):
                why = "a spoilt total, see `reliq check`" if after < 0 else "Redis was reset or rewound"
                text = f"{queue}: {why}: the queue counted {pluralize(before, 'claim')} and now counts {after}"
                _warn(text, event="went_back", queue=queue, before=before, after=after)
            case events.Ticked(queue, entry, at, outcome, missed) if missed or outcome != "published":
                text = f"{queue}: the tick {at} of the periodic entry {entry} was {_TICK_OUTCOMES[outcome]}; {pluralize(missed, 'was', 'were')} missed"
                _warn(text, event="ticked", queue=queue, entry=entry, at=at, outcome=outcome, missed=missed)
            case events.Superseded(queue, entry):
                text = (
                    f"{queue}: a newer process has another schedule for the periodic entry {entry}; this one lets it be"
                )
                _warn(text, event="superseded", queue=queue, entry=entry)

    def _redis_away(self, queue: str, part: str, error: str, refusal: str) -> None:
        """Log once that Redis, or the server of a queue, is away, however many parts report it."""
        with self._lock:
            is_first = not any(name == queue for name, _ in self._away)
            self._away.setdefault((queue, part), time.monotonic())
        if is_first:
            text = f"{queue}: its server is away, others go on" if queue else "Redis is away"
            if refusal:
                text = f"{queue}: its server refuses: {refusal}" if queue else f"Redis refuses: {refusal}"
            _warn(f"{text}, trying again until it is back ({error})", event="redis_away", queue=queue, part=part)

    def _redis_back(self, queue: str, part: str) -> None:
        """Log once that it is back, when the last part that missed it has reached it, and no queue's server is away."""
        with self._lock:
            since = min((at for (name, _), at in self._away.items() if name == queue), default=0.0)
            is_known = self._away.pop((queue, part), None) is not None
            is_last = is_known and not any(not queue or name == queue for name, _ in self._away)
        if is_last:
            seconds = time.monotonic() - since
            text = f"{queue}: its server" if queue else "Redis"
            _info(f"{text} is back after {seconds:.1f} s", event="redis_back", queue=queue, seconds=round(seconds, 3))


def _log_handled(event: events.Handled, error: str) -> None:
    """Log how a handler ended."""
    level = logging.DEBUG if event.outcome in ("ack", "snooze", "rate_limited") else logging.INFO
    if not logger.isEnabledFor(level):
        return
    what = f": {error}" if error else ""
    which = "a delivery" if event.attempt is None else f"attempt {event.attempt}"
    text = f"{event.queue} {event.id} {which} answered {event.outcome} after {event.seconds:.3f} s{what}"
    fields = {
        "event": "handled",
        "queue": event.queue,
        "id": event.id,
        "attempt": event.attempt,
        "outcome": event.outcome,
        "seconds": round(event.seconds, 6),
        "error": error,
        "error_type": event.raised.partition(" ")[0],
    }
    logger.log(level, "%s", printable(text), extra={"reliq": fields})


def _info(text: str, **fields: Any) -> None:
    logger.info("%s", printable(text), extra={"reliq": fields})


def _warn(text: str, **fields: Any) -> None:
    if "ids" in fields:
        fields |= {"ids": fields["ids"][:IDS_SHOWN], "count": len(fields["ids"])}
    logger.warning("%s", printable(text), extra={"reliq": fields})
