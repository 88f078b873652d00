"""Exemplars: for each bucket of a histogram one measured value, and the trace that it is from."""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq.metrics import names
from reliq.metrics.exposition import Exemplar

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from reliq.metrics.store import Key

#: A process keeps the newest of at most 500 buckets, of those that measured last.
EXEMPLARS_LIMIT = 500
#: They are written every second at most: Prometheus scrapes no more often.
WRITE_SECONDS = 1.0


class Exemplars:
    """
    The exemplars of this process.

    Args:
        path: of its figures: they are written beside those; None keeps them in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = None if path is None else path_of(path)
        self._lock = threading.Lock()
        self._newest: dict[tuple[Key, int], Exemplar] = {}
        self._is_new = False
        self._written_at = 0.0

    def note(self, key: Key, value: float, trace_id: str) -> None:
        """Keep a value, which was measured now."""
        place = key, bisect_left(names.MEASURED[key[0]].buckets, value)
        with self._lock:
            self._newest.pop(place, None)  # so that it comes last
            if len(self._newest) >= EXEMPLARS_LIMIT:
                del self._newest[next(iter(self._newest))]
            self._newest[place] = Exemplar(trace_id, value, time.time())
            self._is_new = True

    def newest(self) -> dict[tuple[Key, int], Exemplar]:
        """Return a copy."""
        with self._lock:
            return dict(self._newest)

    def write(self) -> None:
        """Write them for the supervisor, if there are new ones and it is time."""
        now = time.monotonic()
        if self._path is None or not self._is_new or now < self._written_at + WRITE_SECONDS:
            return
        self._is_new, self._written_at = False, now
        rows = [(key, bucket, *exemplar) for (key, bucket), exemplar in self.newest().items()]
        half = self._path.with_suffix(".half")
        half.write_text(json.dumps(rows))
        half.replace(self._path)


def path_of(figures: Path) -> Path:
    """Return where the exemplars of the process are that keeps its figures in this file."""
    return figures.with_suffix(".exemplars")


def read(paths: Iterable[Path]) -> dict[tuple[Key, int], Exemplar]:
    """Return the newest of all processes; nothing of a file that is not there."""
    newest: dict[tuple[Key, int], Exemplar] = {}
    for path in paths:
        with suppress(OSError):
            for key, bucket, *rest in json.loads(path.read_text()):
                place, exemplar = (tuple(key), bucket), Exemplar(*rest)
                if place not in newest or newest[place].at < exemplar.at:
                    newest[place] = exemplar
    return newest
