"""
The files in which the processes of a worker store their metrics. The supervisor adds them up at each scrape.

`Files` reads the files of prometheus_client, which hold the application's own metrics. It merges the file of a dead process
into one file of the same kind, so a thousand restarts leave no more files than one.

`Figures` stores reliq's own metrics as numbers, in one file for each process. The file begins with the number of bytes in
use. The series follow, and each is written once: the length of its key, the count of its numbers, its key, and the numbers.
Later only the numbers change. A reader that has read a series before finds its numbers at the same place.
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

    from reliq.metrics.exposition import Labels
    from reliq.metrics.names import Spec

logger = logging.getLogger(__name__)

#: The name of a metric and the values of its labels.
Key = tuple[str, ...]
#: A key and the numbers of its series.
Series = tuple[Key, Sequence[float]]

_DEAD = "dead"
#: Kind of file -> the function that merges two values of one series.
_FOLDS: dict[str, Callable[[float, float], float]] = {
    **dict.fromkeys(("counter", "histogram", "summary", "gauge_sum"), operator.add),
    "gauge_max": max,
    "gauge_min": min,
}

#: The end of the name of a file with a process's figures.
ENDING = ".figures"
#: A number takes eight bytes. Everything before it takes a multiple of eight, so numbers are aligned.
_WORD = 8
_USED = struct.Struct("Q")
_HEAD = struct.Struct("II")
#: The first size of a file. A full file is doubled.
FIRST_BYTES = 1 << 16


class Files:
    """The files of prometheus_client in `folder()`, which is created or emptied. A lock separates scrapes and folds."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        _empty(folder(), "*.db")

    def describe(self) -> list[Metric]:
        """Return no descriptions: the child processes describe their own metrics."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the sums over all processes, dead processes included."""
        with self._lock:
            # A process that was killed while it created its file leaves an empty file.
            files = [str(file) for file in self._folder().glob("*.db") if file.stat().st_size]
            merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
            return list(merged)

    def sweep(self, _pid: int = 0) -> None:
        """
        Fold the files of all dead processes into the files of the dead.

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


def _empty(folder: Path, pattern: str) -> None:
    """Create a folder, or remove the files of an earlier run from it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for file in folder.glob(pattern):
        file.unlink()


class Figures:
    """
    The figures of this process; safe to use from any thread. A new series begins with zeros.

    Args:
        path: the file that another process reads, or None for the memory of this process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._places: dict[tuple[Spec, Labels], int] = {}
        self._used = _USED.size
        if path is not None:
            path.unlink(missing_ok=True)  # of a dead process with the same number
            path.touch(mode=0o600)
        self._map(FIRST_BYTES)

    def add(self, spec: Spec, labels: Labels = (), number: float = 1.0) -> None:
        """Add to a counter."""
        with self._lock:
            at = self._place(spec, labels)
            self._numbers[at] += number

    def set(self, spec: Spec, labels: Labels, number: float) -> None:
        """Set a gauge. A new gauge begins with `number`: a reader must not take 0 for its value."""
        with self._lock:
            at = self._place(spec, labels, number)
            self._numbers[at] = number

    def observe(self, spec: Spec, labels: Labels, number: float) -> None:
        """Count `number` in a histogram: its numbers are a count for each bucket, and the sum."""
        with self._lock:
            at = self._place(spec, labels)
            self._numbers[at + bisect_left(spec.buckets, number)] += 1
            self._numbers[at + len(spec.buckets) + 1] += number

    def begin(self, spec: Spec, *labels: str) -> None:
        """Add a series. A series that begins with 0 shows its first event as a rate."""
        with self._lock:
            self._place(spec, labels)

    def raw(self) -> bytes:
        """Return the content of the file."""
        with self._lock:
            return self._memory[: self._used]

    def _place(self, spec: Spec, labels: Labels, first: float = 0.0) -> int:
        """Return the index of the first number of a series."""
        at = self._places.get((spec, labels))
        if at is None:
            at = self._places[spec, labels] = self._append((spec.name, *labels), (first,) * spec.size)
        return at

    def _append(self, key: Key, first: Sequence[float]) -> int:
        name = json.dumps(key).encode()
        name += b" " * (-len(name) % _WORD)
        series = _HEAD.pack(len(name), len(first)) + name + struct.pack(f"{len(first)}d", *first)
        end = self._used + len(series)
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
        self._memory[self._used : end] = series
        # The last write, in one piece: `pack_into` would write zeros first, and another process may read at any moment.
        self._memory[: _USED.size] = _USED.pack(end)
        self._used = end
        return end // _WORD - len(first)

    def _map(self, size: int) -> None:
        if self._path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            with self._path.open("r+b") as file:
                # Write the pages now: a mapped page without room on a full disk kills the process that writes to it.
                file.write(bytes(size - file.seek(0, os.SEEK_END)))
                file.flush()
                self._memory = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._memory).cast("d")


class FiguresReader:
    """Reads the content of a `Figures` repeatedly. It reads each key once."""

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
    """The sums over any number of processes, by series."""

    def __init__(self, sums: Mapping[Key, Sequence[float]] | None = None) -> None:
        self.numbers: dict[Key, Sequence[float]] = dict(sums or {})

    def add(self, series: Iterable[Series], *, dead: bool = False) -> None:
        """Add the figures of one process, without gauges when the process is dead."""
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
        """Return the sums by metric, for all metrics that processes measure."""
        rows: dict[str, dict[Key, Sequence[float] | float]] = {name: {} for name in names.MEASURED}
        for (name, *labels), numbers in self.numbers.items():
            rows[name][tuple(labels)] = numbers if len(numbers) > 1 else numbers[0]
        return [Family(spec, rows[name]) for name, spec in names.MEASURED.items()]


class Children(Collector):
    """The sums over the processes that store their figures in `folder()`, which is created or emptied."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # a scrape must not miss a process that is being buried
        self._readers: dict[Path, FiguresReader] = {}
        self._dead = Sums()
        self._classes: dict[str, set[str]] = {}
        _empty(folder(), f"*{ENDING}")

    def families(self) -> Iterable[Family]:
        """Return the sums over all processes, dead processes included."""
        with self._lock:
            sums = Sums(self._dead.numbers)
            for file in self._folder().glob(f"*{ENDING}"):
                sums.add(self._series(file))
            return sums.families()

    def bury(self, pid: int) -> None:
        """Keep the counts of a dead process, and remove its file."""
        with self._lock:
            file = file_of(self._folder(), pid)
            self._dead.add(self._series(file), dead=True)
            self._readers.pop(file, None)
            file.unlink(missing_ok=True)

    def _series(self, file: Path) -> Iterable[Series]:
        with suppress(OSError):  # the folder was cleaned up
            for key, numbers in self._readers.setdefault(file, FiguresReader()).series(file.read_bytes()):
                if key[0] == names.HANDLER_FAILURES.name:
                    yield (*key[:2], bounded_class(self._classes, *key[1:])), numbers
                else:
                    yield key, numbers


def bounded_class(classes: dict[str, set[str]], queue: str, name: str) -> str:
    """Return the label for a class of exceptions: `other` when the queue already has series for CLASSES_LIMIT classes."""
    known = classes.setdefault(queue, set())
    if name not in known and len(known) >= names.CLASSES_LIMIT:
        return names.OTHER
    known.add(name)
    return name


def file_of(folder: Path, pid: int) -> Path:
    """Return the path of the file for a process's figures."""
    return folder / f"{pid}{ENDING}"
