"""A limit for reliq's own log lines, by which they never flood a log; an application's own lines do not come here."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from reliq.text import count_of, some

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
#: The event of a line that says who changed what on the page: each of them counts.
WEB_WRITE = "web_write"


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
        """Say whether `record` is written."""
        if record.levelno < logging.INFO or (kind := _kind(record)) is None:
            return True
        over: list[_Held] = []
        with self._lock:
            if record.created >= self._until or len(self._counts) >= LINE_KINDS_LIMIT:
                over = self._end_window()
                self._until = record.created + SAME_SECONDS
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            if count > SAME_LINES:
                self._hold(kind, record)
        _tell(over)
        return count <= SAME_LINES

    def flush(self) -> None:
        """End the window now, and write the summary of what it held back."""
        with self._lock:
            over = self._end_window()
        _tell(over)

    def _hold(self, kind: Any, record: logging.LogRecord) -> None:
        told = getattr(record, "reliq", {})
        held = self._held.setdefault(kind, _Held(record.levelno, record.getMessage(), told.get("queue", "")))
        held.count += 1
        ids = told["ids"] if "ids" in told else [told["id"]] if "id" in told else []
        held.messages += told.get("count", len(ids))
        held.ids += ids[: HELD_IDS - len(held.ids)]
        if self._timer is None:
            timer = threading.Timer(SAME_SECONDS, self.flush)
            timer.daemon = True
            with suppress(RuntimeError):  # the system gives no thread: the next line ends the window
                timer.start()
                self._timer = timer

    def _end_window(self) -> list[_Held]:
        over = list(self._held.values())
        self._counts, self._held, self._until = {}, {}, 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return over


def _tell(over: list[_Held]) -> None:
    """Write a line for each kind that was held back, with the ids it would have named."""
    for held in over:
        ids = f"; ids: {some(held.ids, held.messages)}" if held.ids else ""
        text = f"held back {count_of(held.count, 'line')} like: {held.like}{ids}"
        told = {"event": HELD_BACK, "queue": held.queue, "count": held.count, "ids": held.ids}
        logger.log(held.level, "%s", text, extra={"reliq": told})


def _kind(record: logging.LogRecord) -> Any:
    """Return what lines of one kind share: of an event all but its ids and figures; None for what is never held back."""
    told = getattr(record, "reliq", None)
    if told is None:
        return record.name, record.levelno, str(record.msg)
    if told.get("event") in (HELD_BACK, WEB_WRITE):
        return None
    return tuple(told.get(name) for name in ("event", "queue", "outcome", "error_type", "place", "verb", "part"))
