"""Whether a row of samples is flat. The first fifth is left out: caches and arenas fill."""

from collections.abc import Sequence
from statistics import median

from tests.harness.soak.gauges import Sample

#: What a figure may grow by between the second and the last fifth, as a part of itself, and in its own unit.
ALLOWED = {
    "worker_mib": (0.05, 4.0),
    "supervisor_mib": (0.05, 2.0),
    "redis_mib": (0.10, 2.0),
    "threads": (0.0, 2),
    "files": (0.0, 4),
    "clients": (0.0, 4),
}


def fifth(samples: Sequence[Sample], number: int, name: str) -> float:
    """Return the median of `name` in a fifth of the run, 1 to 5."""
    size = max(1, len(samples) // 5)
    return median(getattr(one, name) for one in samples[(number - 1) * size :][:size])


def growth(samples: Sequence[Sample], name: str) -> float:
    """Return how much `name` grew from the second fifth to the last."""
    return fifth(samples, 5, name) - fifth(samples, 2, name)


def faults(samples: Sequence[Sample]) -> list[str]:
    """Return what grew more than it may, in words."""
    found = []
    for name, (part, most) in ALLOWED.items():
        grown, before = growth(samples, name), fifth(samples, 2, name)
        if grown > max(most, part * before):
            found.append(f"{name} grew by {grown:.1f} from {before:.1f}")
    return found
