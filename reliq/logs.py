"""Events as log lines: text, coloured on a terminal, or JSON. No line holds a body, a header or a password."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from reliq import events

if TYPE_CHECKING:
    from reliq.events import Event

logger = logging.getLogger("reliq")

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "text", "json")
#: Of lines that differ in their figures alone, so many are written within so many seconds.
SAME_LINES = 10
SAME_SECONDS = 10.0
#: So many kinds of line are told apart.
KINDS_LIMIT = 1000
IDS_SHOWN = 5

_COLOURS = {logging.DEBUG: "\x1b[2m", logging.INFO: "", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}
_PLAIN = "\x1b[0m"
_LINE = "%(asctime)s %(process)d %(levelname)s %(message)s"


class LogObserver:
    """
    Writes a line for each event that matters: handled well at DEBUG, failures at INFO, ends and losses at WARNING.

    Args:
        error_text: write the texts of exceptions too, which may hold a piece of a body; else class and place alone.
    """

    def __init__(self, *, error_text: bool = False) -> None:
        self._error_text = error_text

    kinds = (
        *(events.Handled, events.Lost, events.Reclaimed, events.Expired, events.Collected, events.Inconsistent),
        *(events.RedisAway, events.RenewalLate, events.Unconfirmed, events.WentBack),
    )

    def __call__(self, event: Event, /) -> None:
        """Log `event`, if it is one to log."""
        match event:
            case events.Handled():
                _handled(event, event.error if self._error_text else event.raised or event.error)
            case events.Lost(queue, ids, verb):
                text = f"{queue}: {verb} came too late, the message went on without us: {_some(ids)}"
                _warn(text, event="lost", queue=queue, ids=ids, verb=verb)
            case events.Unconfirmed(queue, ids, why):
                text = f"{queue}: published, but not as durable as asked for: {why}: {_some(ids)}"
                _warn(text, event="unconfirmed", queue=queue, ids=ids, why=why)
            case events.Reclaimed(queue, overdue, _, buried) if overdue or buried:
                text = f"{queue}: leases ran out: {_some(overdue)}; no retry left: {_some(buried)}"
                _warn(text, event="reclaimed", queue=queue, ids=overdue, buried=buried)
            case events.Expired(queue, ids):
                _warn(f"{queue}: expired before they could start: {_some(ids)}", event="expired", queue=queue, ids=ids)
            case events.Collected(queue, ids):
                _warn(f"{queue}: dead letters: {_some(ids)}", event="dead", queue=queue, ids=ids)
            case events.Inconsistent(queue, ids):
                text = f"{queue}: retry count missing or no number, taken as 0: {_some(ids)}"
                _warn(text, event="inconsistent", queue=queue, ids=ids)
            case events.RedisAway(_, part, error):
                _warn(f"{part}: Redis is away, trying again: {error}", event="redis_away", part=part)
            case events.WentBack(queue, before, after):
                text = f"{queue}: Redis was reset or rewound: the queue counted {before} claims and now counts {after}"
                _warn(text, event="went_back", queue=queue, before=before, after=after)
            case events.RenewalLate(queue, seconds):
                text = f"a renewal came {seconds:.1f} s late: something holds this process up"
                _warn(text, event="renewal_late", queue=queue, seconds=round(seconds, 3))


def configure_logging(level: str, format: str = "auto") -> None:
    """Send log lines to standard error, with time and process; `auto` colours them on a terminal."""
    handler = logging.StreamHandler(sys.stderr)
    colours = format == "auto" and sys.stderr.isatty()
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter(colours=colours))
    handler.addFilter(Limiter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """One readable line; coloured by its level."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__(_LINE)
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        text = super().format(record)
        colour = _COLOURS.get(record.levelno, "") if self._colours else ""
        return f"{colour}{text}{_PLAIN}" if colour else text


class JsonFormatter(logging.Formatter):
    """One JSON object on a line: time, level, logger, process, message, and what the event says."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        row: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        row |= getattr(record, "reliq", {})
        if record.exc_info:
            row["trace"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str)


class Limiter(logging.Filter):
    """Lets lines at INFO and above of one kind through a few at a time, and says how many it held back."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[Any, tuple[float, int]] = {}  # kind -> when it began, how many since

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether `record` is written."""
        if record.levelno < logging.INFO:
            return True
        with self._lock:
            began, count = self._seen.get(kind := _kind(record), (record.created, 0))
            fresh = record.created - began >= SAME_SECONDS
            held_back = count - SAME_LINES if fresh else 0
            if len(self._seen) >= KINDS_LIMIT:
                self._seen.clear()
            self._seen[kind] = (record.created, 1) if fresh else (began, count + 1)
        if held_back > 0:
            record.msg, record.args = f"{record.getMessage()} (and {held_back} like it held back)", ()
        return fresh or count < SAME_LINES


def _kind(record: logging.LogRecord) -> Any:
    """Return what lines have in common that tell the same again: of an event, all but its ids and figures."""
    told = getattr(record, "reliq", None)
    if told is None:
        return record.name, record.levelno, str(record.msg)
    return tuple(told.get(name) for name in ("event", "queue", "outcome", "error_type", "verb", "part"))


def _handled(event: events.Handled, error: str) -> None:
    """Write how a handler ended."""
    level = logging.DEBUG if event.outcome in ("ack", "snooze") else logging.INFO
    if not logger.isEnabledFor(level):
        return
    what = f": {error}" if error else ""
    text = f"{event.queue} {event.id} attempt {event.attempt or '-'}: {event.outcome} in {event.seconds:.3f} s{what}"
    told = {
        "event": "handled",
        "queue": event.queue,
        "id": event.id,
        "attempt": event.attempt,
        "outcome": event.outcome,
        "seconds": round(event.seconds, 6),
        "error": error,
        "error_type": event.raised.partition(" ")[0],
    }
    logger.log(level, "%s", _one_line(text), extra={"reliq": told})


def _warn(text: str, **told: Any) -> None:
    if "ids" in told:
        told |= {"ids": told["ids"][:IDS_SHOWN], "count": len(told["ids"])}
    logger.warning("%s", _one_line(text), extra={"reliq": told})


def _one_line(text: str) -> str:
    """Return `text` with what is not printable escaped: an error's text and a foreign id may hold anything."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _some(ids: tuple[str, ...]) -> str:
    more = f" and {len(ids) - IDS_SHOWN} more" if len(ids) > IDS_SHOWN else ""
    return (", ".join(ids[:IDS_SHOWN]) or "none") + more
