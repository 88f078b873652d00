"""What `reliq bench` measures: this reliq on that Redis, beside what the bare scripts do there."""

from reliq.bench.bench import PARTS, Bench
from reliq.bench.report import Figure, Report
from reliq.bench.stage import FULL, QUICK, Scale

__all__ = ["FULL", "PARTS", "QUICK", "Bench", "Figure", "Report", "Scale"]
