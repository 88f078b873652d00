"""`reliq bench`: measures this reliq on a Redis, beside the bare scripts on the same one."""

from typing import TYPE_CHECKING

from reliq.lazily import names_of

if TYPE_CHECKING:
    from reliq.bench.bench import Bench as Bench
    from reliq.bench.report import PARTS as PARTS, Figure as Figure, Report as Report
    from reliq.bench.stage import FULL as FULL, QUICK as QUICK, Scale as Scale

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = names_of(
        __name__,
        {
            "reliq.bench.bench": "Bench",
            "reliq.bench.report": "PARTS Figure Report",
            "reliq.bench.stage": "FULL QUICK Scale",
        },
    )
