"""The figures of a worker's processes as the system sees them: how many, which versions, and the use each makes of the machine."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

import psutil

from reliq import events
from reliq.distribution import VERSION
from reliq.metrics import names
from reliq.metrics.exposition import Collector, Family
from reliq.metrics.queues import single

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reliq.events import Event
    from reliq.metrics.exposition import Labels
    from reliq.metrics.names import Spec

#: The reasons for which a process is replaced.
REASONS = ("crashed", "killed", "hung", "overran", "memory", "jobs")


class Build(Collector):
    """The versions of reliq, Python and redis-py, as the labels of a metric."""

    def families(self, *, exemplars: bool = False) -> Iterator[Family]:  # noqa: ARG002
        """Yield the metric."""
        yield Family(names.BUILD, {(VERSION, platform.python_version(), version("redis")): 1})


class Processes(Collector):
    """
    An observer in the parent: how many processes run, and how many ended and were replaced, by reason.

    Args:
        bury: keeps the figures of a process that has ended, by its number.
    """

    def __init__(self, living: Callable[[], int], *bury: Callable[[int], None]) -> None:
        self._living, self._bury = living, bury
        self._lock = threading.Lock()
        self._restarts: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def __call__(self, event: Event, /) -> None:
        """Count a restart, and keep the figures of the dead."""
        if isinstance(event, events.ProcessEnded):
            for keep in self._bury:
                keep(event.pid)
            if event.reason:
                with self._lock:
                    self._restarts[event.reason] += 1

    def families(self, *, exemplars: bool = False) -> Iterator[Family]:  # noqa: ARG002
        """Yield the figures."""
        yield single(names.WORKERS, self._living())
        with self._lock:
            rows: dict[Labels, float] = {(reason,): count for reason, count in self._restarts.items()}
        yield Family(names.RESTARTS, rows)


class Usage(Collector):
    """
    The use that each process makes of the machine.

    Args:
        pids: returns the processes by the label that tells them apart.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids

    def families(self, *, exemplars: bool = False) -> Iterator[Family]:  # noqa: ARG002
        """Yield the figures of the processes that run."""
        used: dict[Spec, dict[Labels, float]] = {
            spec: {} for spec in (names.CPU, names.MEMORY, names.OPEN_FDS, names.STARTED)
        }
        for label, pid in self._pids().items():
            with suppress(psutil.Error):  # it has ended meanwhile
                for spec, value in _usage_of(pid).items():
                    used[spec][label,] = value
        for spec, rows in used.items():
            yield Family(spec, rows)


def _usage_of(pid: int) -> dict[Spec, float]:
    process = psutil.Process(pid)
    with process.oneshot():
        times = process.cpu_times()
        return {
            names.CPU: times.user + times.system,
            names.MEMORY: process.memory_info().rss,
            names.OPEN_FDS: process.num_fds(),
            names.STARTED: process.create_time(),
        }
