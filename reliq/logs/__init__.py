"""Logging: events as lines of text or JSON, without bodies or passwords; a background thread writes, repeats are held back."""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from reliq import events
from reliq.text import IDS_SHOWN, join_first, pluralize, printable, shell_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from reliq.events import Event


logger = logging.getLogger("reliq")

#: Ten lines that differ only in ids and figures are written within 10 s; more are held back.
SAME_LINES = 10
SAME_SECONDS = 10.0
#: At 1,000 kinds of line a new window begins, which bounds the memory.
LINE_KINDS_LIMIT = 1000
#: A summary of the lines that were held back has at most 100 ids as a field; its text names five.
HELD_IDS = 100
#: The event of the summary, which is never held back itself.
HELD_BACK = "held_back"
#: The event of an operator's change on a web page, which is never held back.
WEB_WRITE = "web_write"
#: The fields that two events of the same kind share.
_KIND = ("event", "queue", "outcome", "error_type", "place", "verb", "part")
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "text", "json")

#: At most 1,000 lines wait while nothing reads standard error; later lines are dropped.
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
    A daemon thread that calls functions one after another. Each function reports its own errors.

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
    """The lines of a kind that were held back: `like` is the first of them."""

    level: int
    like: str
    queue: str
    count: int = 0
    messages: int = 0
    ids: list[str] = field(default_factory=list)


class Limiter(logging.Filter):
    """
    A filter that writes few lines of the same kind, at INFO and above, in each window of 10 s, and a summary at its end.

    The first line after a window ends it. Without such a line a timer does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._counts = Counter[Any]()
        self._held: dict[Any, _Held] = {}
        self._until = 0.0
        self._timer: threading.Timer | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write `record`."""
        fields = getattr(record, "reliq", {})
        if record.levelno < logging.INFO or fields.get("event") in (HELD_BACK, WEB_WRITE):
            return True
        # Events of a kind differ in ids and figures only.
        kind = tuple(map(fields.get, _KIND)) if fields else (record.name, record.levelno, str(record.msg))
        over: list[_Held] = []
        with self._lock:
            if record.created >= self._until or len(self._counts) >= LINE_KINDS_LIMIT:
                over = self._end_window()
                self._until = record.created + SAME_SECONDS
            self._counts[kind] += 1
            is_written = self._counts[kind] <= SAME_LINES
            if not is_written:
                held = self._held.setdefault(kind, _Held(record.levelno, record.getMessage(), fields.get("queue", "")))
                ids = fields["ids"] if "ids" in fields else [fields["id"]] if "id" in fields else []
                held.count += 1
                held.messages += fields.get("count", len(ids))
                held.ids += ids[: HELD_IDS - len(held.ids)]
                if self._timer is None:
                    timer = threading.Timer(SAME_SECONDS, self.flush)
                    timer.daemon = True
                    with suppress(RuntimeError):  # the system gives no thread: the next line ends the window
                        timer.start()
                        self._timer = timer
        _log_held(over)
        return is_written

    def flush(self) -> None:
        """End the window now, and write its summary."""
        with self._lock:
            over = self._end_window()
        _log_held(over)

    def _end_window(self) -> list[_Held]:
        over = [*self._held.values()]
        self._counts.clear()
        self._held.clear()
        self._until = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return over


def _log_held(over: list[_Held]) -> None:
    """Write a summary for each kind, with the ids of the lines that were held back."""
    for held in over:
        ids = f"; ids: {join_first(held.ids, held.messages)}" if held.ids else ""
        text = f"held back {pluralize(held.count, 'line')} like: {held.like}{ids}"
        fields = {"event": HELD_BACK, "queue": held.queue, "count": held.count, "ids": held.ids}
        logger.log(held.level, "%s", text, extra={"reliq": fields})


#: The limiter of this process.
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
    A handler that writes lines to `stream` in a separate thread, so a stream that nothing reads delays no other thread.

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
        if os.getpid() != self._pid:  # a forked process has only the thread that forked
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
    """Formats a record as a readable line: local time with the offset from UTC, coloured by level."""

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
    """Formats a record as a JSON object on one line: its fields, then the fields of the application's `extra`."""

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
    An observer that writes a line for each event that matters.

    Handlers that end well are logged at DEBUG, other results at INFO, dead letters and losses at WARNING. The worker logs
    a failure itself, because it has the traceback.

    Args:
        error_text: write the reason of each result; without it only the class and place of an exception.
    """

    def __init__(self, *, error_text: bool = False) -> None:
        self._error_text = error_text
        self._lock = threading.Lock()
        self._away: dict[tuple[str, str], float] = {}  # queue and part -> since when

    kinds = (
        *(events.Handled, events.LeaseLost, events.Reclaimed, events.Expired, events.DeadLettered, events.Inconsistent),
        *(
            events.RedisUnavailable,
            events.RedisRecovered,
            events.RenewalLate,
            events.Unconfirmed,
            events.CountersRegressed,
        ),
        *(events.WorkerReady, events.WorkerStopping, events.Ticked, events.ScheduleReplaced, events.Throttled),
    )

    @property
    def wants_success(self) -> bool:
        """Whether to log also handlers that ended well."""
        return logger.isEnabledFor(logging.DEBUG)

    def __call__(self, event: Event, /) -> None:
        """Log `event`, if it matters."""
        match event:
            case events.Handled(queue, id, attempt, outcome, seconds, error, raised, failed=False):
                level = logging.DEBUG if outcome in ("ack", "snooze", "rate_limited") else logging.INFO
                if logger.isEnabledFor(level):  # the text of most deliveries is not needed
                    shown = error if self._error_text else raised
                    which = "a delivery" if attempt is None else f"attempt {attempt}"
                    text = f"{queue} {id} {which} answered {outcome} after {seconds:.3f} s"
                    text += f": {shown}" if shown else ""
                    _log(level, "handled", event, text, error=shown, error_type=raised.partition(" ")[0])
            case events.RedisUnavailable():
                self._redis_away(event)
            case events.RedisRecovered():
                self._redis_back(event)
            case events.WorkerReady(_, queues):
                enable_logging()  # a lifespan may just have configured logging
                _log(logging.INFO, "ready", event, f"ready: working on {', '.join(queues)}", queues=queues)
            case events.WorkerStopping(_, running, grace):
                handlers = pluralize(running, "handler") if running else "no handlers"
                text = f"stopping: {handlers} running" + (f", {grace:.3g} s left" if running else "")
                _log(logging.INFO, "stopping", event, text)
            case events.Throttled(queue, _, keys, seconds):
                throttled = [f"key {key}" for key in keys if key] + ["the queue"] * ("" in keys)
                text = f"{queue}: rate limited, for {seconds:g} s: {join_first(throttled)}"
                _log(logging.INFO, "throttled", event, text)
            case _ if warning := self._warning(event):
                _log(logging.WARNING, warning[0], event, warning[1])

    @staticmethod
    def _warning(event: Event) -> tuple[str, str] | None:
        """Return the name and the text of an event that is logged as a warning."""
        match event:
            case events.RenewalLate(_, seconds, cause):
                why = "Redis answered slowly" if cause == "redis" else "something held this process up"
                return "renewal_late", f"a renewal came {seconds:.1f} s late: {why}"
            case events.LeaseLost(queue, ids, verb):
                return "lost", f"{queue}: {verb} came too late, the lease had expired: {join_first(ids)}"
            case events.Unconfirmed(queue, ids, why):
                return "unconfirmed", f"{queue}: published, but not as durable as asked for: {why}: {join_first(ids)}"
            case events.Reclaimed(queue, overdue, _, buried) if overdue or buried:
                parts = [f"leases ended without a result, redelivering: {join_first(overdue)}"] if overdue else []
                parts += [f"no retry left: {join_first(buried)}"] if buried else []
                return "reclaimed", f"{queue}: {'; '.join(parts)}"
            case events.Expired(queue, ids):
                return "expired", f"{queue}: expired before they could start: {join_first(ids)}"
            case events.DeadLettered(queue, ids):
                return "dead", f"{queue}: dead letters, see `{shell_command('dead list', queue)}`: {join_first(ids)}"
            case events.Inconsistent(queue, ids):
                return "inconsistent", f"{queue}: retry count missing or no number, taken as 0: {join_first(ids)}"
            case events.CountersRegressed(queue, before, after):
                why = "a spoilt total, see `reliq check`" if after < 0 else "Redis was reset or rewound"
                return (
                    "went_back",
                    f"{queue}: {why}: the queue counted {pluralize(before, 'claim')} and now counts {after}",
                )
            case events.Ticked(queue, entry, at, outcome, missed) if missed or outcome != "published":
                past = f"{_TICK_OUTCOMES[outcome]}; {pluralize(missed, 'was', 'were')} missed"
                return "ticked", f"{queue}: the tick {at} of the periodic entry {entry} was {past}"
            case events.ScheduleReplaced(queue, entry):
                why = "a newer process has another schedule for it"
                return "superseded", f"{queue}: this process no longer publishes the periodic entry {entry}: {why}"
        return None

    def _redis_away(self, event: events.RedisUnavailable) -> None:
        """Log once that Redis, or the server of a queue, is away, however many parts report it."""
        with self._lock:
            is_first = not any(queue == event.queue for queue, _ in self._away)
            self._away.setdefault((event.queue, event.part), time.monotonic())
        if is_first:
            subject = f"{event.queue}: its server" if event.queue else "Redis"
            state = f"refuses: {event.refusal}" if event.refusal else "is away" + ", others go on" * bool(event.queue)
            text = f"{subject} {state}, trying again until it is back ({event.error})"
            _log(logging.WARNING, "redis_away", event, text)

    def _redis_back(self, event: events.RedisRecovered) -> None:
        """Log once that it is back: the last part has reached it, and no other server of a queue is away."""
        with self._lock:
            since = min((at for (queue, _), at in self._away.items() if queue == event.queue), default=0.0)
            is_known = self._away.pop((event.queue, event.part), None) is not None
            is_last = is_known and not any(not event.queue or queue == event.queue for queue, _ in self._away)
        if is_last:
            seconds = time.monotonic() - since
            text = f"{event.queue}: its server" if event.queue else "Redis"
            _log(logging.INFO, "redis_back", event, f"{text} is back after {seconds:.1f} s", seconds=round(seconds, 3))


def _log(level: int, name: str, event: Event, text: str, **changed: Any) -> None:
    """Write a line with the fields of an event. Long fields are cut, and `count` is the number of all ids."""
    fields: dict[str, Any] = {"event": name}
    for field_name, value in msgspec.structs.asdict(event).items():
        fields[field_name] = value[:IDS_SHOWN] if isinstance(value, tuple) else value
    ids = event.overdue if isinstance(event, events.Reclaimed) else getattr(event, "ids", None)
    if ids is not None:
        fields |= {"ids": ids[:IDS_SHOWN], "count": len(ids)}
    logger.log(level, "%s", printable(text), extra={"reliq": fields | changed})
