"""`reliq bench`: measures this reliq on a Redis, beside the bare scripts on the same one."""

from reliq.bench.bench import PARTS, Bench
from reliq.bench.report import Figure, Report
from reliq.bench.stage import FULL, QUICK, Scale

__all__ = ["FULL", "PARTS", "QUICK", "Bench", "Figure", "Report", "Scale"]
