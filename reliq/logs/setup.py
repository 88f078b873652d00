"""How `reliq worker` and `reliq exporter` write log lines: text, coloured on a terminal, or JSON."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, TextIO

from reliq.background import Background
from reliq.foreign import printable
from reliq.logs.limiter import Limiter

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
        self._stream, self._pid = stream, os.getpid()
        self._writer = Background("reliq-log", LINES_LIMIT)
        self._dropped, self._is_stuck = 0, False

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
        dropped, self._dropped = self._dropped, 0
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
