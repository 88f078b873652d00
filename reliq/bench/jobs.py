"""The handlers that the worker processes of a benchmark run: they do nothing, or note when they began."""

import time
from typing import Any

from reliq.consumer.consumer import Consumer
from reliq.handlers.job import Job
from reliq.queue import Queue
from reliq.settings import HandlerSettings

BATCHES: dict[str, Any] = {"batch": 100, "linger": 0.05}
#: The handlers that do nothing.
KINDS = ("plain", "async", "batch") if "batch" in HandlerSettings.__dataclass_fields__ else ("plain", "async")


def do_nothing(_body: dict[str, Any]) -> None:
    """Return at once."""


async def do_nothing_async(_body: dict[str, Any]) -> None:
    """Return at once, on the event loop."""


def do_nothing_batch(_bodies: list[dict[str, Any]]) -> None:
    """Return at once, for all of them."""


class Diary:
    """Notes when handlers began, and when their messages were due and sent (unix seconds)."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float]] = []

    def note(self, body: dict[str, Any], job: Job[dict[str, Any]]) -> None:
        """Note one message: a handler."""
        self._rows.append((time.time(), job.due or 0.0, float(body["sent"])))

    def note_sent(self, sent: float) -> None:
        """Note what was sent at that time and is there now."""
        self._rows.append((time.time(), 0.0, sent))

    def take(self) -> list[tuple[float, float, float]]:
        """Return the rows since the last time."""
        rows, self._rows = self._rows, []
        return rows


def register(consumer: Consumer, queue: Queue[dict[str, Any]], kind: str, diary: Diary) -> None:
    """Register the handler called `kind`, with default settings but for batches of 100."""
    functions: dict[str, Any] = {
        "plain": do_nothing,
        "async": do_nothing_async,
        "batch": do_nothing_batch,
        "timed": diary.note,
    }
    options: dict[str, Any] = BATCHES if kind == "batch" else {}
    consumer.handler(queue, **options)(functions[kind])
