"""The handlers that the worker processes of a benchmark run: they do nothing, or note when they began."""

import time
from typing import Any

from reliq.consumer import Consumer
from reliq.job import Job
from reliq.queue import Queue


def do_nothing(_body: dict[str, Any]) -> None:
    """Return at once."""


async def do_nothing_async(_body: dict[str, Any]) -> None:
    """Return at once, on the event loop."""


class Diary:
    """A handler that notes when it began, and when its message was due and sent (unix seconds)."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float]] = []

    def note(self, body: dict[str, Any], job: Job[dict[str, Any]]) -> None:
        """Note one message."""
        self._rows.append((time.time(), job.due or 0.0, float(body["sent"])))

    def take(self) -> list[tuple[float, float, float]]:
        """Return the rows since the last time."""
        rows, self._rows = self._rows, []
        return rows


def register(consumer: Consumer, queue: Queue[dict[str, Any]], kind: str, diary: Diary) -> None:
    """Register the handler called `kind` with its default settings."""
    functions: dict[str, Any] = {"plain": do_nothing, "async": do_nothing_async, "timed": diary.note}
    consumer.handler(queue)(functions[kind])
