"""Measure a worker and its Redis and detect growth. Ignore the first fifth of the run, in which caches fill."""

from collections.abc import Sequence
from statistics import median

import psutil
import redis

MIB = 1024 * 1024
#: Figure -> allowed growth between the second and the last fifth: as a fraction, and in its own unit.
ALLOWED = {
    "worker_mib": (0.05, 4.0),
    "supervisor_mib": (0.05, 2.0),
    "redis_mib": (0.10, 2.0),
    "threads": (0.0, 2),
    "files": (0.0, 4),
    "clients": (0.0, 4),
}


def look(at: float, supervisor: psutil.Process, client: redis.Redis, queue) -> dict[str, float]:
    """Measure resident memory, threads and open files of the processes, Redis' memory, and the queue's length."""
    workers = supervisor.children()
    processes = [supervisor, *workers]
    counts = queue.counts()
    return {
        "at": at,
        "worker_mib": sum(one.memory_info().rss for one in workers) / MIB,
        "supervisor_mib": supervisor.memory_info().rss / MIB,
        "redis_mib": client.info("memory")["used_memory"] / MIB,
        "threads": sum(one.num_threads() for one in processes),
        "files": sum(one.num_fds() for one in processes),
        "clients": client.info("clients")["connected_clients"],
        "keys": client.dbsize(),
        "alive": counts.alive,
        "acked": counts.totals.get("acked", 0),
    }


def fifth(samples: Sequence[dict[str, float]], number: int, name: str) -> float:
    """Return the median of `name` in a fifth of the run, numbered 1 to 5."""
    size = max(1, len(samples) // 5)
    return median(one[name] for one in samples[(number - 1) * size :][:size])


def faults(samples: Sequence[dict[str, float]]) -> list[str]:
    """Return descriptions of the figures that grew too much."""
    found = []
    for name, (part, most) in ALLOWED.items():
        before = fifth(samples, 2, name)
        grown = fifth(samples, 5, name) - before
        if grown > max(most, part * before):
            found.append(f"{name} grew by {grown:.1f} from {before:.1f}")
    return found
