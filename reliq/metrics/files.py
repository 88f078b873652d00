"""
The files in which handlers' own metrics of Prometheus' client are: added up for a scrape, folded when their process died.

A file of a dead process is folded into one of its kind, so a thousand restarts leave no more files than one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import psutil
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from prometheus_client.core import Metric

_DEAD = "dead"

#: Kind of file -> how two values of one series become one.
_FOLDS: dict[str, Callable[[float, float], float]] = {
    "counter": lambda one, other: one + other,
    "histogram": lambda one, other: one + other,
    "summary": lambda one, other: one + other,
    "gauge_sum": lambda one, other: one + other,
    "gauge_max": max,
    "gauge_min": min,
}


class Files:
    """The files in `folder()`, which is made or emptied. Scrapes and folds exclude each other."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        folder().mkdir(mode=0o700, exist_ok=True)
        for file in folder().glob("*.db"):
            file.unlink()

    def describe(self) -> list[Metric]:
        """Return no descriptions: the children describe their own metrics."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the sums over all processes, dead ones included."""
        with self._lock:
            # A process killed while it made its file leaves an empty one.
            files = [str(file) for file in self._folder().glob("*.db") if file.stat().st_size]
            merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
            return list(merged)

    def sweep(self, _pid: int = 0) -> None:
        """Fold the files of all processes that are no more."""
        with self._lock:
            for file in self._folder().glob("*.db"):
                kind, _, owner = file.stem.rpartition("_")
                if owner != _DEAD and not (owner.isdigit() and psutil.pid_exists(int(owner))):
                    self._fold(file, kind)

    def _fold(self, file: Path, kind: str) -> None:
        """Add a file to that of the dead; gauges of living processes, and those told apart by process, are dropped."""
        if kind in _FOLDS and file.stat().st_size:
            target = MmapedDict(str(self._folder() / f"{kind}_{_DEAD}.db"))  # type: ignore[no-untyped-call]
            try:
                known = {key: value for key, value, _ in target.read_all_values()}  # type: ignore[no-untyped-call]
                rows = MmapedDict.read_all_values_from_file(str(file))  # type: ignore[no-untyped-call]
                for key, value, stamp, _ in rows:
                    both = _FOLDS[kind](known[key], value) if key in known else value
                    target.write_value(key, both, stamp)  # type: ignore[no-untyped-call]
            finally:
                target.close()  # type: ignore[no-untyped-call]
        file.unlink()
