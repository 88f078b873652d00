"""
The files in which the processes of a worker keep their metrics for the supervisor, which adds them up at a scrape.

Handlers' own metrics of prometheus_client are in files of that library (`Files`): a file of a dead process is folded into
a file of its kind, so a thousand restarts leave no more files than one.

reliq's own metrics are numbers in one file for each process (`Figures`). A file begins with how many bytes of it are in
use. Series follow, each written once: the length of its key, how many numbers it has, its key, and the numbers, which
alone change. A reader that has seen a series before knows where they are.
"""

from __future__ import annotations

import json
import logging
import mmap
import operator
import os
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from reliq.metrics import names
from reliq.metrics.exposition import Collector, Family

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

#: Name of a metric and the values of its labels.
Key = tuple[str, ...]
#: A key, and the numbers of one series.
Series = tuple[Key, Sequence[float]]

_DEAD = "dead"
#: Kind of file -> the function that merges two values of one series.
_FOLDS: dict[str, Callable[[float, float], float]] = {
    "counter": operator.add,
    "histogram": operator.add,
    "summary": operator.add,
    "gauge_sum": operator.add,
    "gauge_max": max,
    "gauge_min": min,
}

#: How the name of a file ends in which a process keeps its figures.
ENDING = ".figures"
#: Numbers take eight bytes, and everything else as many times eight.
_WORD = 8
_USED = struct.Struct("Q")
_HEAD = struct.Struct("II")
#: A file begins with so many bytes and doubles when it is full.
FIRST_BYTES = 1 << 16


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
        """
        Fold the files of all processes that are no more into those of the dead.

        Gauges of living processes, and gauges with a series for each process, are dropped.
        """
        with self._lock:
            for file in self._folder().glob("*.db"):
                kind, _, owner = file.stem.rpartition("_")
                if owner == _DEAD or (owner.isdigit() and psutil.pid_exists(int(owner))):
                    continue
                if kind in _FOLDS and file.stat().st_size:
                    target = MmapedDict(str(self._folder() / f"{kind}_{_DEAD}.db"))  # type: ignore[no-untyped-call]
                    try:
                        known = {key: value for key, value, _ in target.read_all_values()}  # type: ignore[no-untyped-call]
                        rows = MmapedDict.read_all_values_from_file(str(file))  # type: ignore[no-untyped-call]
                        for key, value, stamp, _ in rows:
                            folded = _FOLDS[kind](known[key], value) if key in known else value
                            target.write_value(key, folded, stamp)  # type: ignore[no-untyped-call]
                    finally:
                        target.close()  # type: ignore[no-untyped-call]
                file.unlink()


class Figures:
    """
    The figures of this process; safe to use from any thread.

    Args:
        path: the file that another process reads, None for memory of this process alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._places: dict[Key, int] = {}
        self._used = _USED.size
        if path is not None:
            path.unlink(missing_ok=True)  # of a dead process with the same number
            path.touch(mode=0o600)
        self._map(FIRST_BYTES)

    def place(self, key: Key, *first: float) -> int:
        """Return where the numbers of a series begin; a new one has the values `first`, an old one keeps its own."""
        with self._lock:
            if key not in self._places:
                self._places[key] = self._append(json.dumps(key).encode(), first)
            return self._places[key]

    def add(self, place: int, number: float = 1.0) -> None:
        """Add to a counter."""
        with self._lock:
            self._numbers[place] += number

    def set(self, place: int, number: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._numbers[place] = number

    def observe(self, place: int, bounds: Sequence[float], number: float) -> None:
        """Count `number` in a histogram, which has a count for each bucket and one above all bounds, and the sum."""
        with self._lock:
            self._numbers[place + bisect_left(bounds, number)] += 1
            self._numbers[place + len(bounds) + 1] += number

    def raw(self) -> bytes:
        """Return what the file holds."""
        with self._lock:
            return self._memory[: self._used]

    def _append(self, name: bytes, first: Sequence[float]) -> int:
        name += b" " * (-len(name) % _WORD)
        at = self._used + _HEAD.size + len(name)
        end = at + _WORD * len(first)
        if end > len(self._memory):
            used = self._memory[: self._used]
            size = len(self._memory)
            while size < end:
                size *= 2
            try:
                self._map(size)
            except OSError as error:
                logger.warning("metrics: cannot enlarge %s, so it no longer changes: %s", self._path, error)
                self._path = None
                self._map(size)
            self._memory[: len(used)] = used
        _HEAD.pack_into(self._memory, self._used, len(name), len(first))
        self._memory[at - len(name) : at] = name
        self._numbers[at // _WORD : end // _WORD] = memoryview(struct.pack(f"{len(first)}d", *first)).cast("d")
        self._used = end
        _USED.pack_into(self._memory, 0, end)  # at last: a reader sees a whole series, or none of it
        return at // _WORD

    def _map(self, size: int) -> None:
        if self._path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            with self._path.open("r+b") as file:
                # Written out: a page that a full disk has no room for kills each process that writes to it.
                file.write(bytes(size - file.seek(0, os.SEEK_END)))
                file.flush()
                self._memory = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._memory).cast("d")


class FiguresReader:
    """Reads what a `Figures` holds, again and again; the keys are read once."""

    def __init__(self) -> None:
        self._known: list[tuple[Key, int, int]] = []
        self._seen = _USED.size

    def series(self, raw: bytes) -> Iterator[Series]:
        """Yield each series with its numbers; nothing for a file that its process had no time to fill."""
        if len(raw) < _USED.size:
            return
        (used,) = _USED.unpack_from(raw)
        while self._seen < used:
            length, count = _HEAD.unpack_from(raw, self._seen)
            at = self._seen + _HEAD.size + length
            key = tuple(json.loads(raw[at - length : at]))
            self._known.append((key, at // _WORD, at // _WORD + count))
            self._seen = at + _WORD * count
        numbers = struct.unpack_from(f"{used // _WORD}d", raw)
        for key, start, end in self._known:
            yield key, numbers[start:end]


class Sums:
    """Numbers by series, of any number of processes."""

    def __init__(self, sums: Mapping[Key, Sequence[float]] | None = None) -> None:
        self.numbers: dict[Key, Sequence[float]] = dict(sums or {})

    def add(self, series: Iterable[Series], *, dead: bool = False) -> None:
        """Add the figures of one process; the gauges of a dead process do not count."""
        for key, numbers in series:
            spec = names.MEASURED.get(key[0])
            if spec is None or spec.size != len(numbers) or (dead and spec.kind == "gauge"):
                continue  # a process may run a newer version than its supervisor
            known = self.numbers.get(key)
            if known is None:
                self.numbers[key] = numbers
            elif spec.merged == "sum":
                self.numbers[key] = [*map(operator.add, known, numbers)]
            else:
                self.numbers[key] = [(max if spec.merged == "max" else min)(known[0], numbers[0])]

    def families(self) -> list[Family]:
        """Return the sums by metric, of every metric that processes measure."""
        rows: dict[str, dict[Key, Sequence[float] | float]] = {name: {} for name in names.MEASURED}
        for (name, *labels), numbers in self.numbers.items():
            rows[name][tuple(labels)] = numbers if len(numbers) > 1 else numbers[0]
        return [Family(spec, rows[name]) for name, spec in names.MEASURED.items()]


class Children(Collector):
    """The sums over the processes that keep their figures in `folder()`, which is made or emptied."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # a scrape must not miss a process that is being buried
        self._readers: dict[Path, FiguresReader] = {}
        self._dead = Sums()
        self._classes: dict[str, set[str]] = {}
        folder().mkdir(mode=0o700, exist_ok=True)
        for file in folder().glob(f"*{ENDING}"):
            file.unlink()

    def families(self) -> Iterable[Family]:
        """Return the sums over all processes, dead ones included."""
        with self._lock:
            sums = Sums(self._dead.numbers)
            for file in self._folder().glob(f"*{ENDING}"):
                sums.add(self._series(file))
            return sums.families()

    def bury(self, pid: int) -> None:
        """Keep what a dead process has counted, and remove its file."""
        with self._lock:
            file = file_of(self._folder(), pid)
            self._dead.add(self._series(file), dead=True)
            self._readers.pop(file, None)
            file.unlink(missing_ok=True)

    def _series(self, file: Path) -> Iterable[Series]:
        with suppress(OSError):  # the folder was cleaned up
            for key, numbers in self._readers.setdefault(file, FiguresReader()).series(file.read_bytes()):
                yield self._bounded(key), numbers

    def _bounded(self, key: Key) -> Key:
        """Return the key of a series; failures by class are `other` after the first classes of the sum of all processes."""
        if key[0] != names.HANDLER_FAILURES.name:
            return key
        name, queue, exception = key
        known = self._classes.setdefault(queue, set())
        if exception not in known and len(known) >= names.CLASSES_LIMIT:
            return name, queue, names.OTHER
        known.add(exception)
        return key


def file_of(folder: Path, pid: int) -> Path:
    """Return the file in which a process keeps its figures."""
    return folder / f"{pid}{ENDING}"
