"""
The files in which worker processes store their metrics.

At each scrape, the supervisor adds up the numbers of all files.

`Files` reads the files in which prometheus_client stores the application's own metrics. When a process has ended,
`Files` merges the file of this process into a common file, so that the number of files does not grow with restarts.

`Figures` stores reliq's own metrics as numbers, in one file for each process. The file begins with the number of bytes
in use. Then follow the series. A series consists of the length of its key, the count of its numbers, its key, and the
numbers. After a series was added, only its numbers change, at the same position in the file. So a reader parses the key
of each series only once.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from reliq.metrics import names
from reliq.metrics.exposition import Collector, Family, Labels

if TYPE_CHECKING:
    from pathlib import Path

    from prometheus_client.core import Metric

    from reliq.metrics.names import Spec

logger = logging.getLogger(__name__)

#: The name of a metric and the values of its labels.
Key = tuple[str, ...]
#: The key of a series, and its value or values.
Series = tuple[Key, Sequence[float]]

_DEAD = "dead"
#: The function that merges two values of one series, for each kind of file of prometheus_client.
_FOLDS: dict[str, Callable[[float, float], float]] = {
    **dict.fromkeys(("counter", "histogram", "summary", "gauge_sum"), operator.add),
    "gauge_max": max,
    "gauge_min": min,
}

#: The suffix of files that `Figures` writes.
ENDING = ".figures"
#: The size of a number in bytes. The size of each part of a file is a multiple of it, so that numbers are aligned.
_WORD = 8
_USED = struct.Struct("Q")
_HEAD = struct.Struct("II")
#: The size of a new file. A full file is doubled in size.
FIRST_BYTES = 1 << 16


class Files:
    """
    The files in `folder()` in which prometheus_client stores the metrics of each process.

    The constructor creates the folder, or removes the files of an earlier run. A lock prevents a scrape from reading
    the files while `sweep` merges the files of dead processes.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        _empty(folder(), "*.db")

    def describe(self) -> list[Metric]:
        """Return an empty list, because prometheus_client needs no description of the metrics at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return each metric, summed over all processes, including ended processes."""
        with self._lock:
            # Skip empty files: a process may leave one if it is killed while it creates its file.
            files = [str(file) for file in self._folder().glob("*.db") if file.stat().st_size]
            merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
            return list(merged)

    def sweep(self, _pid: int = 0) -> None:
        """
        Merge the files of dead processes into one common file for each kind of metric, and remove these files.

        Do not merge gauges that prometheus_client reports only for running processes, or separately for each process.
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
    """Create a folder; if it exists, remove the files of an earlier run."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for file in folder.glob(pattern):
        file.unlink()


class Figures:
    """
    The numbers of all metrics of this process; any thread may change them.

    Args:
        path: the file for the numbers, which the supervisor reads; None to keep the numbers in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._places: dict[tuple[Spec, Labels], int] = {}
        self._used = _USED.size
        if path is not None:
            path.unlink(missing_ok=True)  # a dead process with the same pid may have left its file
            path.touch(mode=0o600)
        self._map(FIRST_BYTES)

    def add(self, spec: Spec, labels: Labels = (), number: float = 1.0) -> None:
        """Add `number` to a counter."""
        with self._lock:
            at = self._place(spec, labels)
            self._numbers[at] += number

    def set(self, spec: Spec, labels: Labels, number: float) -> None:
        """Set a gauge. A new gauge begins with `number`, because a concurrent scrape could report an initial 0."""
        with self._lock:
            at = self._place(spec, labels, number)
            self._numbers[at] = number

    def observe(self, spec: Spec, labels: Labels, number: float) -> None:
        """Record the value `number` in a histogram: count it in its bucket, and add it to the sum of the histogram."""
        with self._lock:
            at = self._place(spec, labels)
            self._numbers[at + bisect_left(spec.buckets, number)] += 1
            self._numbers[at + len(spec.buckets) + 1] += number

    def begin(self, spec: Spec, *labels: str) -> None:
        """Add a series with the value 0, so that the function `rate` of Prometheus also counts the first event."""
        with self._lock:
            self._place(spec, labels)

    def raw(self) -> bytes:
        """Return all series in the format of the file, even if this object has no file."""
        with self._lock:
            return self._memory[: self._used]

    def _place(self, spec: Spec, labels: Labels, first: float = 0.0) -> int:
        """Return the index of the first number of a series; add a new series with all its numbers set to `first`."""
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
                logger.warning(
                    "metrics: cannot enlarge the file %s, so its metrics are no longer updated: %s", self._path, error
                )
                self._path = None
                self._map(size)
            self._memory[: len(used)] = used
        self._memory[self._used : end] = series
        # Another process may read the file at any time, so write the number of used bytes last. Do not write it with
        # `pack_into`, which writes zeros first.
        self._memory[: _USED.size] = _USED.pack(end)
        self._used = end
        return end // _WORD - len(first)

    def _map(self, size: int) -> None:
        if self._path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            with self._path.open("r+b") as file:
                # Allocate the disk space now: if the disk is full, a write to a mapped page would kill this process.
                file.write(bytes(size - file.seek(0, os.SEEK_END)))
                file.flush()
                self._memory = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._memory).cast("d")


class FiguresReader:
    """Reads the content of the same `Figures` file repeatedly, and parses the key of each series only once."""

    def __init__(self) -> None:
        self._known: list[tuple[Key, int, int]] = []
        self._seen = _USED.size

    def series(self, raw: bytes) -> Iterator[Series]:
        """Yield each series with its numbers; yield nothing for an empty file of a new process."""
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
    """The sums of the metrics of several processes, by series."""

    def __init__(self, sums: Mapping[Key, Sequence[float]] | None = None) -> None:
        self.numbers: dict[Key, Sequence[float]] = dict(sums or {})

    def add(self, series: Iterable[Series], *, dead: bool = False) -> None:
        """Add the series of one process to the sums; if the process is dead, skip its gauges."""
        for key, numbers in series:
            spec = names.MEASURED.get(key[0])
            if spec is None or spec.size != len(numbers) or (dead and spec.kind == "gauge"):
                continue  # the process may run another reliq version than the supervisor, with other metrics
            known = self.numbers.get(key)
            if known is None:
                self.numbers[key] = numbers
            elif spec.merged == "sum":
                self.numbers[key] = [*map(operator.add, known, numbers)]
            else:
                self.numbers[key] = [(max if spec.merged == "max" else min)(known[0], numbers[0])]

    def families(self) -> list[Family]:
        """Return the sums as metrics, including metrics that have no series yet."""
        rows: dict[str, dict[Key, Sequence[float] | float]] = {name: {} for name in names.MEASURED}
        for (name, *labels), numbers in self.numbers.items():
            rows[name][tuple(labels)] = numbers if len(numbers) > 1 else numbers[0]
        return [Family(spec, rows[name]) for name, spec in names.MEASURED.items()]


class Children(Collector):
    """
    The sums of reliq's metrics over all processes that store their metrics in `folder()`.

    The constructor creates the folder, or removes the files of an earlier run.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        # Without this lock, a scrape during `bury` could count a dead process twice, or not at all.
        self._lock = threading.Lock()
        self._readers: dict[Path, FiguresReader] = {}
        self._dead = Sums()
        self._classes: dict[str, set[str]] = {}
        _empty(folder(), f"*{ENDING}")

    def families(self) -> Iterable[Family]:
        """Return each metric, summed over all processes, including ended processes."""
        with self._lock:
            sums = Sums(self._dead.numbers)
            for file in self._folder().glob(f"*{ENDING}"):
                sums.add(self._series(file))
            return sums.families()

    def bury(self, pid: int) -> None:
        """Add the counts of a dead process to the totals of dead processes, and remove its file."""
        with self._lock:
            file = file_of(self._folder(), pid)
            self._dead.add(self._series(file), dead=True)
            self._readers.pop(file, None)
            file.unlink(missing_ok=True)

    def _series(self, file: Path) -> Iterable[Series]:
        with suppress(OSError):  # another program has removed the file
            for key, numbers in self._readers.setdefault(file, FiguresReader()).series(file.read_bytes()):
                if key[0] == names.HANDLER_FAILURES.name:
                    yield (*key[:3], bounded_class(self._classes, key[1], key[3])), numbers
                else:
                    yield key, numbers


def bounded_class(classes: dict[str, set[str]], queue: str, name: str) -> str:
    """Return the label for an exception class: its `name`, or `other` if the queue has CLASSES_LIMIT other labels."""
    known = classes.setdefault(queue, set())
    if name not in known and len(known) >= names.CLASSES_LIMIT:
        return names.OTHER
    known.add(name)
    return name


def file_of(folder: Path, pid: int) -> Path:
    """Return the path of the file in which the process `pid` stores its metrics."""
    return folder / f"{pid}{ENDING}"
