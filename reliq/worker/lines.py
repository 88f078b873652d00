"""The lines of all queues in this process: which of them is next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq.worker.line import Line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.handler import Handler


class Lines:
    """
    The lines of all queues in this process.

    Attributes:
        has_async, has_plain: whether there are handlers of that kind.
    """

    def __init__(self, handlers: Sequence[Handler], concurrency: int) -> None:
        self._by_queue = {handler.queue.name: Line(handler, concurrency) for handler in handlers}
        self.has_async = any(line.is_async for line in self)
        self.has_plain = not all(line.is_async for line in self)

    def __iter__(self) -> Iterator[Line]:
        return iter(self._by_queue.values())

    def __getitem__(self, queue: str) -> Line:
        return self._by_queue[queue]

    def oldest(self, now: float, *, is_async: bool) -> Line | None:
        """Return the line whose first flight was claimed first, of those that may start one."""
        oldest: Line | None = None
        for line in self._by_queue.values():
            if not line.waiting or line.is_async is not is_async or line.running >= line.slots:
                continue
            head = line.head()
            if head is None or line.ripe_at(head) > now:
                continue
            if oldest is None or head.fetched_at < oldest.waiting[0].fetched_at:
                oldest = line
        return oldest

    def linger(self, now: float, *, is_async: bool) -> float | None:
        """Return the seconds until a batch that lingers now may start, None when there is none."""
        lines = [line for line in self if line.batch > 1 and line.is_async is is_async and line.waiting]
        ripe = [line.ripe_at(head) for line in lines if (head := line.head()) is not None]
        return min((at - now for at in ripe if at > now), default=None)
