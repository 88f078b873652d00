"""The figures of a benchmark, as values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

#: The parts of a benchmark, in the order in which they are measured.
PARTS = ("drain", "publish", "lateness", "pickup", "idle", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """
    One measured number.

    Attributes:
        part: which part of the benchmark it belongs to, such as `drain`.
        bare: what the same Redis does without reliq's engine, in the same unit; None where that means nothing.
    """

    part: str
    name: str
    value: float
    unit: str
    bare: float | None = None

    @property
    def share(self) -> float | None:
        """The value as a share of the bare one."""
        return None if not self.bare else self.value / self.bare


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """
    Everything that one run found.

    Attributes:
        redis: the server's version.
        place: its URL without the password.
    """

    redis: str
    place: str
    figures: list[Figure] = field(default_factory=list)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that `percent` of `values` do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
