"""Logging: events as log lines without bodies or passwords, written as text or JSON in a background thread, repeats held back."""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from reliq import events
from reliq.text import IDS_SHOWN, join_first, pluralize, printable, shell_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.events import Event


logger = logging.getLogger("reliq")

#: Ten lines that differ in their figures alone are written within 10 s; more are held back.
SAME_LINES = 10
SAME_SECONDS = 10.0
#: At 1,000 kinds of line a new window begins, which bounds the memory.
LINE_KINDS_LIMIT = 1000
#: A summary of lines that were held back has at most 100 ids as a field; its text names five.
HELD_IDS = 100
#: The event of that summary, which is never held back itself.
HELD_BACK = "held_back"
#: The event of an operator's change by the web page, which is never held back.
WEB_WRITE = "web_write"
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "text", "json")

#: So many lines wait while nothing reads standard error; later lines are dropped.
LINES_LIMIT = 1000
#: A line is usually written before the call that logs it returns: a process may crash next. It waits at most 0.1 s.
WRITE_SECONDS = 0.1
#: At its end a process waits at most 1 s for its last lines.
FLUSH_SECONDS = 1.0

_COLOURS = {logging.DEBUG: "\x1b[2m", logging.INFO: "", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}
_PLAIN = "\x1b[0m"
_LINE = "%(asctime)s %(process)d %(levelname)s %(name)s %(message)s"
#: Every record has these attributes; an application has given all others as `extra`.
_ORDINARY = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "reliq"})


class Background:
    """
    Calls functions one after another in a daemon thread of its own; each of them reports its own errors.

    The collector of garbage and signal handlers may log in the middle of any call here. So no call holds a lock that
    another call in the same thread would need: `SimpleQueue.put` may be entered again, `Queue.put` may not.

    Args:
        limit: how many functions may wait; 0 for any number.
    """

    def __init__(self, name: str, limit: int = 0) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._limit = limit
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], object]) -> bool:
        """Call `work` later; return False, and drop it, when too many functions wait."""
        if self._limit and self._waiting.qsize() >= self._limit:
            return False
        self._waiting.put(work)
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until all functions that wait now were called, at most `seconds`; return whether they were."""
        called = threading.Lock()
        called.acquire()
        self._waiting.put(called.release)
        return called.acquire(timeout=seconds)

    def close(self) -> None:
        """End the thread when it has called everything that waits."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            with suppress(BaseException):
                work()


@dataclass(slots=True)
class _Held:
    """The lines of one kind that were not written."""

    level: int
    like: str
    queue: str = ""
    count: int = 0
    messages: int = 0
    ids: list[str] = field(default_factory=list)


class Limiter(logging.Filter):
    """
    Lets few lines of one kind, at INFO and above, through in each window, which ends by a summary of the others.

    The next line ends a window that is over; if none comes, a timer does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._counts: dict[Any, int] = {}
        self._held: dict[Any, _Held] = {}
        self._until = 0.0
        self._timer: threading.Timer | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is written."""
        if record.levelno < logging.INFO or (kind := _kind(record)) is None:
            return True
        over: list[_Held] = []
        with self._lock:
            if record.created >= self._until or len(self._counts) >= LINE_KINDS_LIMIT:
                over = self._end_window()
                self._until = record.created + SAME_SECONDS
            count = self._counts.get(kind, 0) + 1
            self._counts[kind] = count
            if count > SAME_LINES:
                self._hold(kind, record)
        _log_held(over)
        return count <= SAME_LINES

    def flush(self) -> None:
        """End the window now, and write the summary of what it held back."""
        with self._lock:
            over = self._end_window()
        _log_held(over)

    def _hold(self, kind: Any, record: logging.LogRecord) -> None:
        fields = getattr(record, "reliq", {})
        held = self._held.setdefault(kind, _Held(record.levelno, record.getMessage(), fields.get("queue", "")))
        held.count += 1
        ids = fields["ids"] if "ids" in fields else [fields["id"]] if "id" in fields else []
        held.messages += fields.get("count", len(ids))
        held.ids += ids[: HELD_IDS - len(held.ids)]
        if self._timer is None:
            timer = threading.Timer(SAME_SECONDS, self.flush)
            timer.daemon = True
            with suppress(RuntimeError):  # the system gives no thread: the next line ends the window
                timer.start()
                self._timer = timer

    def _end_window(self) -> list[_Held]:
        over = list(self._held.values())
        self._counts = {}
        self._held = {}
        self._until = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return over


def _log_held(over: list[_Held]) -> None:
    """Write a line for each kind that was held back, with the ids it would have named."""
    for held in over:
        ids = f"; ids: {join_first(held.ids, held.messages)}" if held.ids else ""
        text = f"held back {pluralize(held.count, 'line')} like: {held.like}{ids}"
        fields = {"event": HELD_BACK, "queue": held.queue, "count": held.count, "ids": held.ids}
        logger.log(held.level, "%s", text, extra={"reliq": fields})


def _kind(record: logging.LogRecord) -> Any:
    """Return the kind of a line: the fields of its event but for ids and figures; None for lines never held back."""
    fields = getattr(record, "reliq", None)
    if fields is None:
        return record.name, record.levelno, str(record.msg)
    if fields.get("event") in (HELD_BACK, WEB_WRITE):
        return None
    return tuple(fields.get(name) for name in ("event", "queue", "outcome", "error_type", "place", "verb", "part"))


#: The one limiter of this process.
limiter = Limiter()


def configure_logging(level: str, format: str = "auto") -> bool:
    """
    Write reliq's lines to standard error unless the application has configured logging; return whether this is so.

    The handlers of an application get reliq's records by propagation. The records of an application without handlers
    are written like reliq's, and none of them is ever held back.
    """
    enable_logging()
    atexit.register(limiter.flush)
    reliq = logging.getLogger("reliq")
    for logger in _loggers():
        logger.addFilter(limiter)
    if reliq.hasHandlers():
        if reliq.level == logging.NOTSET:
            reliq.setLevel(level.upper())
        return False
    handler = BackgroundHandler(sys.stderr)
    colours = format == "auto" and sys.stderr.isatty()
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter(colours=colours))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    return True


def enable_logging() -> None:
    """Enable reliq's loggers again: `logging.config` disables all that exist, unless it is asked not to."""
    for logger in _loggers():
        logger.disabled = False


def _loggers() -> list[logging.Logger]:
    """Return each of reliq's loggers, for filters and `disabled` are not inherited."""
    names = [name for name in list(logging.root.manager.loggerDict) if name.startswith("reliq.")]
    return [logging.getLogger("reliq"), *map(logging.getLogger, names)]


class BackgroundHandler(logging.Handler):
    """
    Writes lines to `stream` in a thread of its own, so that a stream that nothing reads holds up no other thread.

    Lines beyond LINES_LIMIT are dropped, and counted in the next line that can be written.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._pid = os.getpid()
        self._writer = Background("reliq-log", LINES_LIMIT)
        self._dropped = 0
        self._is_stuck = False

    def emit(self, record: logging.LogRecord) -> None:
        """Hand over a line."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if os.getpid() != self._pid:  # a fork has no thread but its own
            self._write(line)
        elif not self._writer.put(partial(self._write, line)):
            self._dropped += 1
        elif not self._is_stuck:
            self._is_stuck = not self._writer.wait(WRITE_SECONDS)

    def flush(self) -> None:
        """Wait a moment for the lines that are not written yet."""
        if os.getpid() == self._pid:
            self._writer.wait(FLUSH_SECONDS)

    def _write(self, line: str) -> None:
        dropped = self._dropped
        self._dropped = 0
        if dropped:
            text = "%d log lines were dropped: nothing read standard error"
            record = logging.LogRecord("reliq", logging.WARNING, __file__, 0, text, (dropped,), None)
            line = f"{line}\n{self.format(record)}"
        with suppress(OSError, ValueError):  # the stream is closed, here or at its other end
            self._stream.write(f"{line}\n")
            self._stream.flush()
        self._is_stuck = False


class TextFormatter(logging.Formatter):
    """One readable line, its time with the offset from UTC; coloured by its level."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__(_LINE)
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        text = super().format(record)
        if record.name.partition(".")[0] == "reliq":  # an application's own text stays as it is
            text = "\n".join(map(printable, text.split("\n")))
        colour = _COLOURS.get(record.levelno, "") if self._colours else ""
        return f"{colour}{text}{_PLAIN}" if colour else text

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802  logging's
        """Return when `record` was made, in this machine's time zone."""
        return datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """One JSON object on a line: the fields of the line, and those that an application gave as `extra`, which lose."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        row: dict[str, Any] = {
            "time": moment.removesuffix("+00:00") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        row |= getattr(record, "reliq", {})
        if trace := record.exc_text or (self.formatException(record.exc_info) if record.exc_info else ""):
            row["trace"] = trace
        extra = {str(name): value for name, value in vars(record).items() if name not in _ORDINARY}
        try:
            return json.dumps(extra | row, default=str)
        except Exception:  # an object has no text, or contains itself
            return json.dumps(row | {"extra_left_out": list(extra)}, default=repr)


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
