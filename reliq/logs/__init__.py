"""
Log the events of workers and of the web pages as lines of text or JSON, without message bodies and passwords.

`Limiter` suppresses log lines if many lines of the same kind follow each other. `BackgroundHandler` writes lines in a
thread, so that the worker does not wait for a program that reads standard error slowly.
"""

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

#: In each window of SAME_SECONDS, write at most SAME_LINES lines of the same kind, and suppress further lines. Lines of
#: the same kind differ only in ids and numbers.
SAME_LINES = 10
SAME_SECONDS = 10.0
#: If lines of this many kinds were written in a window, the window ends early, to limit memory.
LINE_KINDS_LIMIT = 1000
#: A summary of suppressed lines has at most this many message ids in its field `ids`. Its text contains the first ids.
HELD_IDS = 100
#: The field `event` has this value in a summary of suppressed lines. Summaries are never suppressed.
HELD_BACK = "held_back"
#: The field `event` has this value in a line about a change that an operator made on a web page. These lines are never
#: suppressed.
WEB_WRITE = "web_write"
#: Two log lines about events are of the same kind if their values of these fields are equal.
_KIND = ("event", "queue", "outcome", "error_type", "place", "verb", "part")
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "text", "json")

#: If standard error is blocked, at most this many lines wait, and further lines are dropped.
LINES_LIMIT = 1000
#: A call that logs a line waits at most this many seconds until the line is written, because a crash of the process
#: would lose an unwritten line.
WRITE_SECONDS = 0.1
#: When a process exits, it waits at most this many seconds until its last lines are written.
FLUSH_SECONDS = 1.0

_COLOURS = {logging.DEBUG: "\x1b[2m", logging.INFO: "", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}
_PLAIN = "\x1b[0m"
_LINE = "%(asctime)s %(process)d %(levelname)s %(name)s %(message)s"
#: The attributes that each log record has. All other attributes come from the argument `extra` when an application
#: logs.
_ORDINARY = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "reliq"})


class Background:
    """
    A daemon thread with a queue of functions. It calls them one after another, and ignores their exceptions.

    A signal handler or the garbage collector may interrupt a method of this class, log a line, and so call `put` in the
    same thread. So the methods hold no locks. They use `SimpleQueue`, because its `put` is reentrant.

    Args:
        name: the name of the thread.
        limit: the maximum number of functions in the queue; 0 for any number.
    """

    def __init__(self, name: str, limit: int = 0) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._limit = limit
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], object]) -> bool:
        """
        Add a function to the queue, so that the thread calls it.

        If the queue is full, drop the function and return False.
        """
        if self._limit and self._waiting.qsize() >= self._limit:
            return False
        self._waiting.put(work)
        return True

    def wait(self, seconds: float) -> bool:
        """
        Wait until the thread has called all functions that are in the queue now.

        Return False if this takes longer than `seconds`.
        """
        called = threading.Lock()
        called.acquire()
        self._waiting.put(called.release)
        return called.acquire(timeout=seconds)

    def close(self) -> None:
        """Let the thread end after it has called all functions in the queue. Return immediately."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            with suppress(BaseException):
                work()


@dataclass(slots=True)
class _Held:
    """
    The number and the message ids of suppressed lines of the same kind.

    `like` is the text of the first suppressed line.
    """

    level: int
    like: str
    queue: str
    count: int = 0
    messages: int = 0
    ids: list[str] = field(default_factory=list)


class Limiter(logging.Filter):
    """
    A logging filter that suppresses lines at level INFO or higher if there are too many of the same kind.

    In each window of SAME_SECONDS, the first SAME_LINES lines of a kind are written. At the end of the window, a
    summary reports the suppressed lines. A window ends with the first line after SAME_SECONDS, or by a timer
    that starts with the first suppressed line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._counts = Counter[Any]()
        self._held: dict[Any, _Held] = {}
        self._until = 0.0
        self._timer: threading.Timer | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a log record. If not, count it for the summary."""
        fields = getattr(record, "reliq", {})
        if record.levelno < logging.INFO or fields.get("event") in (HELD_BACK, WEB_WRITE):
            return True
        # Log records of the same kind differ only in ids and numbers.
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
                    # if no thread can be started for the timer, a later line ends the window
                    with suppress(RuntimeError):
                        timer.start()
                        self._timer = timer
        _log_held(over)
        return is_written

    def flush(self) -> None:
        """End the current window now, and log its summaries."""
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
    """Log a summary for each kind of suppressed lines, with the message ids in these lines."""
    for held in over:
        ids = f"; ids: {join_first(held.ids, held.messages)}" if held.ids else ""
        text = f"log: held back {pluralize(held.count, 'line')} like: {held.like}{ids}"
        fields = {"event": HELD_BACK, "queue": held.queue, "count": held.count, "ids": held.ids}
        logger.log(held.level, "%s", text, extra={"reliq": fields})


#: The limiter of this process.
limiter = Limiter()


def configure_logging(level: str, format: str = "auto") -> bool:
    """
    Write log lines to standard error, unless the application has configured logging.

    If the application has log handlers, they also get reliq's log records, by propagation. Otherwise, reliq adds a
    handler to the root logger. This handler also writes the log records of the application, in the same format, and
    never suppresses them.

    Returns:
        Whether this function has added a log handler; False if the application already has log handlers.
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
    """
    Enable reliq's loggers again after `logging.config` has disabled them.

    By default, `logging.config` disables all loggers that exist when an application calls it.
    """
    for logger in _loggers():
        logger.disabled = False


def _loggers() -> list[logging.Logger]:
    """
    Return all loggers of reliq.

    Filters and `disabled` must be set on each logger, because loggers do not inherit them from their parents.
    """
    names = [name for name in list(logging.root.manager.loggerDict) if name.startswith("reliq.")]
    return [logging.getLogger("reliq"), *map(logging.getLogger, names)]


class BackgroundHandler(logging.Handler):
    """
    A log handler that writes lines in a separate thread.

    If the stream is blocked, a thread that logs a line waits for at most WRITE_SECONDS.

    If more than LINES_LIMIT lines wait to be written, new lines are dropped. As soon as lines can be written again, a
    line reports the number of dropped lines.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._pid = os.getpid()
        self._writer = Background("reliq-log", LINES_LIMIT)
        self._dropped = 0
        self._is_stuck = False

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the line for a log record to the thread that writes lines."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if os.getpid() != self._pid:  # a forked process does not have the writing thread
            self._write(line)
        elif not self._writer.put(partial(self._write, line)):
            self._dropped += 1
        elif not self._is_stuck:
            self._is_stuck = not self._writer.wait(WRITE_SECONDS)

    def flush(self) -> None:
        """Wait until all buffered log lines are written, but at most FLUSH_SECONDS."""
        if os.getpid() == self._pid:
            self._writer.wait(FLUSH_SECONDS)

    def _write(self, line: str) -> None:
        dropped = self._dropped
        self._dropped = 0
        if dropped:
            text = "%d log lines were dropped: nothing read standard error"
            record = logging.LogRecord("reliq", logging.WARNING, __file__, 0, text, (dropped,), None)
            line = f"{line}\n{self.format(record)}"
        with suppress(OSError, ValueError):  # this process or the reader has closed the stream
            self._stream.write(f"{line}\n")
            self._stream.flush()
        self._is_stuck = False


class TextFormatter(logging.Formatter):
    """
    Formats a log record as a readable line, coloured by its level.

    The line contains the local time with its offset from UTC.
    """

    def __init__(self, *, colours: bool) -> None:
        super().__init__(_LINE)
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the log line of `record`."""
        text = super().format(record)
        if record.name.partition(".")[0] == "reliq":  # do not change the text of an application's log records
            text = "\n".join(map(printable, text.split("\n")))
        colour = _COLOURS.get(record.levelno, "") if self._colours else ""
        return f"{colour}{text}{_PLAIN}" if colour else text

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802  the signature of logging.Formatter
        """Return the time of `record` in ISO 8601, in this machine's time zone."""
        return datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """
    Formats a log record as a JSON object on one line.

    The object also contains the fields in `extra`, if the application passed this argument when it logged.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the log line of `record`."""
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
        except Exception:  # a value in `extra` cannot be converted, or contains itself
            return json.dumps(row | {"extra_left_out": list(extra)}, default=repr)


#: For each outcome of a tick of a periodic job, the text in the log line.
_TICK_OUTCOMES = {
    "published": "was published",
    "paused": "was skipped, because the job is paused",
    "overlap": "was skipped, because its last message is still alive",
    "missed": "was missed",
}
#: For each outcome of a handler, the text in the log line about the consequence for the message.
_CONSEQUENCES = {
    "ack": "finished",
    "nack": "retrying",
    "reject": "now a dead letter",
    "snooze": "redelivering later",
    "rate_limited": "waiting for the rate limit",
    "timeout": "retrying",
}


class LogObserver:
    """
    An observer that logs a line for each important event.

    Successful handlers are logged at level DEBUG, other outcomes at INFO, and dead letters and lost leases at WARNING.
    This class does not log the failures of handlers: the class `Runner` logs them, with the traceback.

    Args:
        error_text: whether to log the texts of exceptions and of reasons for outcomes, which may contain parts of
            message bodies. If False, only the class and source line of an exception are logged.
    """

    def __init__(self, *, error_text: bool = False) -> None:
        self._error_text = error_text
        self._lock = threading.Lock()
        #: When a part of the worker, such as its fetcher, lost the connection to the Redis of a queue, in monotonic
        #: seconds. The keys of this dictionary consist of queue and part.
        self._away: dict[tuple[str, str], float] = {}

    kinds = (
        *(events.Handled, events.LeaseLost, events.Reclaimed, events.Expired, events.DeadLettered, events.Inconsistent),
        *(events.RedisUnavailable, events.RedisRecovered, events.RenewalLate, events.Unconfirmed),
        *(events.CountersRegressed, events.WorkerReady, events.WorkerStopping),
        *(events.Ticked, events.ScheduleReplaced, events.Throttled),
    )

    @property
    def wants_success(self) -> bool:
        """Whether this observer needs the events of successful handlers: only at level DEBUG."""
        return logger.isEnabledFor(logging.DEBUG)

    def __call__(self, event: Event, /) -> None:
        """Log a line about an event, if this class of events has a line, and the line's level is enabled."""
        if logger.disabled:  # the consumer's lifespan may have used `logging.config`, which disables loggers
            enable_logging()
        match event:
            case events.Handled(queue, id, attempt, outcome, seconds, error, raised, failed=False):
                level = logging.DEBUG if outcome in ("ack", "snooze", "rate_limited") else logging.INFO
                if logger.isEnabledFor(level):  # do not build a text that is not written
                    shown = error if self._error_text else raised
                    which = "attempt" if attempt is None else f"attempt {attempt}"
                    text = f"queue {queue}: message {id}: {which} ended with {outcome} after {seconds:.3f} s"
                    text += f", {_CONSEQUENCES[outcome]}"
                    text += f": {shown}" if shown else ""
                    _log(level, "handled", event, text, error=shown, error_type=raised.partition(" ")[0])
            case events.RedisUnavailable():
                self._redis_away(event)
            case events.RedisRecovered():
                self._redis_back(event)
            case events.WorkerReady(_, queues):
                _log(logging.INFO, "ready", event, f"worker: ready; working on {', '.join(queues)}", queues=queues)
            case events.WorkerStopping(_, running, grace):
                waits = f"waiting up to {grace:.3g} s for {pluralize(running, 'handler')} to finish"
                _log(logging.INFO, "stopping", event, f"worker: stopping; {waits if running else 'no handler runs'}")
            case events.Throttled(queue, _, keys, seconds):
                throttled = [f"key {key}" for key in keys if key] + ["the queue"] * ("" in keys)
                text = f"queue {queue}: a handler reported a rate limit; throttled for {seconds:g} s: {join_first(throttled)}"
                _log(logging.INFO, "throttled", event, text)
            case _ if warning := self._warning(event):
                _log(logging.WARNING, warning[0], event, warning[1])

    @staticmethod
    def _warning(event: Event) -> tuple[str, str] | None:
        """
        Return the name of an event and the text of its log line, if the event is logged as a warning.

        For all other events, return None.
        """
        match event:
            case events.RenewalLate(_, seconds, cause):
                why = "Redis answered slowly" if cause == "redis" else "this process was delayed"
                lost = "messages whose leases expired meanwhile are redelivered"
                return "renewal_late", f"worker: leases were renewed {seconds:.1f} s late, because {why}; {lost}"
            case events.LeaseLost(queue, ids, verb):
                return "lost", (
                    f"queue {queue}: {verb} refused, because the leases had expired; these messages may run again: "
                    f"{join_first(ids)}"
                )
            case events.Unconfirmed(queue, ids, why):
                return "unconfirmed", (
                    f"queue {queue}: published without the requested durability, so a crash of Redis may lose these "
                    f"messages: {why}: {join_first(ids)}"
                )
            case events.Reclaimed(queue, overdue, _, buried) if overdue or buried:
                parts = [f"leases expired without a result; redelivering: {join_first(overdue)}"] if overdue else []
                parts += [f"no retry is left, so these become dead letters: {join_first(buried)}"] if buried else []
                return "reclaimed", f"queue {queue}: {'; '.join(parts)}"
            case events.Expired(queue, ids):
                return (
                    "expired",
                    f"queue {queue}: messages expired before they started, and will not run: {join_first(ids)}",
                )
            case events.DeadLettered(queue, ids):
                see = shell_command("list", queue, options=["--state", "dead"])
                return "dead", f"queue {queue}: messages became dead letters; see `{see}`: {join_first(ids)}"
            case events.Inconsistent(queue, ids):
                return "inconsistent", (
                    f"queue {queue}: the retry count is missing or not a number, so these messages get no retry: "
                    f"{join_first(ids)}"
                )
            case events.CountersRegressed(queue, before, after):
                why = "a total is damaged" if after < 0 else "Redis was reset or rewound"
                see = f"see `{shell_command('check', queue)}`"
                claims = f"{pluralize(before, 'claim')} before, {after} now"
                return "went_back", f"queue {queue}: {why} ({claims}), so messages may be missing; {see}"
            case events.Ticked(queue, entry, at, outcome, missed) if missed or outcome != "published":
                past = f"the tick at {datetime.fromtimestamp(at, UTC):%F %T} UTC {_TICK_OUTCOMES[outcome]}; missed in all: {pluralize(missed, 'tick')}"
                return "ticked", f"queue {queue}: periodic job {entry}: {past}"
            case events.ScheduleReplaced(queue, entry):
                why = "a newer process has another schedule, so this process no longer publishes the job"
                return "superseded", f"queue {queue}: periodic job {entry}: {why}"
        return None

    def _redis_away(self, event: events.RedisUnavailable) -> None:
        """
        Log once that Redis, or the server of a queue, is unavailable.

        If several parts of the worker lose the connection in the same outage, log only the first event.
        """
        with self._lock:
            is_first = not any(queue == event.queue for queue, _ in self._away)
            self._away.setdefault((event.queue, event.part), time.monotonic())
        if is_first:
            state = f"refuses: {event.refusal}" if event.refusal else "is away" + ", others go on" * bool(event.queue)
            text = f"{_redis_of(event.queue)} {state}; retrying until it is back ({event.error})"
            _log(logging.WARNING, "redis_away", event, text)

    def _redis_back(self, event: events.RedisRecovered) -> None:
        """
        Log once that Redis, or the server of a queue, is available again.

        If several parts of the worker lost the connection, log only when all these parts have reached Redis again. If
        an outage affected all servers, log only when all servers are available again.
        """
        with self._lock:
            since = min((at for (queue, _), at in self._away.items() if queue == event.queue), default=0.0)
            is_known = self._away.pop((event.queue, event.part), None) is not None
            is_last = is_known and not any(not event.queue or queue == event.queue for queue, _ in self._away)
        if is_last:
            seconds = time.monotonic() - since
            text = f"{_redis_of(event.queue)} is back after {seconds:.1f} s; working again"
            _log(logging.INFO, "redis_back", event, text, seconds=round(seconds, 3))


def _redis_of(queue: str) -> str:
    return f"queue {queue}: its Redis" if queue else "Redis"


def _log(level: int, name: str, event: Event, text: str, **changed: Any) -> None:
    """
    Log a text about an event, with the fields of the event.

    At most IDS_SHOWN message ids are logged. The field `count` contains the number of all ids.
    """
    fields: dict[str, Any] = {"event": name}
    for field_name, value in msgspec.structs.asdict(event).items():
        fields[field_name] = value[:IDS_SHOWN] if isinstance(value, tuple) else value
    ids = event.overdue if isinstance(event, events.Reclaimed) else getattr(event, "ids", None)
    if ids is not None:
        fields |= {"ids": ids[:IDS_SHOWN], "count": len(ids)}
    logger.log(level, "%s", printable(text), extra={"reliq": fields | changed})
