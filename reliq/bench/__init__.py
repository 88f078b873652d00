"""`reliq bench`: measures this reliq on a Redis, beside the bare scripts on the same one."""

from typing import TYPE_CHECKING

from reliq.lazy_imports import names_of

if TYPE_CHECKING:
    from reliq.bench.bench import (
        FULL as FULL,
        PARTS as PARTS,
        QUICK as QUICK,
        Bench as Bench,
        Figure as Figure,
        Report as Report,
        Scale as Scale,
    )

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = names_of(
        __name__,
        {
            "reliq.bench.bench": "Bench",
            "reliq.bench.bench": "PARTS Figure Report",
            "reliq.bench.bench": "FULL QUICK Scale",
        },
    )
