"""The figures of many processes added up; those of dead ones stay."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq.metrics import exemplars as kept, names
from reliq.metrics.exposition import Collector, Family
from reliq.metrics.figures import FiguresReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from reliq.metrics.exposition import Exemplar
    from reliq.metrics.figures import Key, Series

#: How the name of a file ends in which a process keeps its figures.
ENDING = ".figures"


class Sums:
    """Numbers by series, of any number of processes."""

    def __init__(self, sums: Mapping[Key, Sequence[float]] | None = None) -> None:
        self.numbers: dict[Key, Sequence[float]] = dict(sums or {})

    def add(self, series: Iterable[Series], *, dead: bool = False) -> None:
        """Add the figures of one process; a gauge of a dead one says nothing."""
        for key, numbers in series:
            spec = names.MEASURED.get(key[0])
            if spec is None or spec.size != len(numbers) or (dead and spec.kind == "gauge"):
                continue  # a process may run a newer version than its supervisor
            known = self.numbers.get(key)
            if known is None:
                self.numbers[key] = numbers
            elif spec.merged == "sum":
                self.numbers[key] = [one + other for one, other in zip(known, numbers, strict=True)]
            else:
                self.numbers[key] = [(max if spec.merged == "max" else min)(known[0], numbers[0])]

    def families(self, exemplars: Mapping[tuple[Key, int], Exemplar]) -> list[Family]:
        """Return the sums by metric, of every metric that processes measure."""
        rows: dict[str, dict[Key, Sequence[float] | float]] = {name: {} for name in names.MEASURED}
        for (name, *labels), numbers in self.numbers.items():
            rows[name][tuple(labels)] = numbers if len(numbers) > 1 else numbers[0]
        told: dict[str, dict[tuple[Key, int], Exemplar]] = {name: {} for name in rows}
        for ((name, *labels), bucket), exemplar in exemplars.items():
            told[name][tuple(labels), bucket] = exemplar
        return [Family(spec, rows[name], told[name]) for name, spec in names.MEASURED.items()]


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

    def families(self, *, exemplars: bool = False) -> Iterable[Family]:
        """Return the sums over all processes, dead ones included."""
        with self._lock:
            sums = Sums(self._dead.numbers)
            files = list(self._folder().glob(f"*{ENDING}"))
            for file in files:
                sums.add(self._series(file))
            return sums.families(kept.read(map(kept.path_of, files)) if exemplars else {})

    def bury(self, pid: int) -> None:
        """Keep what a dead process has counted, and remove its files."""
        with self._lock:
            file = file_of(self._folder(), pid)
            self._dead.add(self._series(file), dead=True)
            self._readers.pop(file, None)
            file.unlink(missing_ok=True)
            kept.path_of(file).unlink(missing_ok=True)

    def _series(self, file: Path) -> Iterable[Series]:
        with suppress(OSError):  # somebody has cleaned up the folder
            for key, numbers in self._readers.setdefault(file, FiguresReader()).series(file.read_bytes()):
                yield self._bounded(key), numbers

    def _bounded(self, key: Key) -> Key:
        """Return the key of a series; of failures by class each process has its own first classes, the sum has few."""
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
