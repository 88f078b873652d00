"""What handlers do in a measure, and the settings that a peer is tried with for each."""

from typing import Literal

Work = Literal["nothing", "wait", "compute"]

#: Worker processes for each: what returns at once shows one process, the others a machine of two cores.
WORKS: dict[Work, int] = {"nothing": 1, "wait": 2, "compute": 2}
#: No more messages than these are needed to watch a drain long enough; a peer's own number is for `nothing`.
MOST: dict[Work, int] = {"wait": 40_000, "compute": 3000}

Tries = dict[Work, tuple[str, ...]]

THREADS = (8, 16, 32, 64)
TASKS = (8, 16, 32, 64, 128)
#: More at once do not help what computes: one, and one that keeps others ready.
COMPUTING = (1, 16)


def threads(*more: str) -> Tries:
    """Return the settings of a peer that runs handlers in threads; `more` are other pools."""
    usual = (*(f"{number} threads" for number in THREADS), *more)
    return {"nothing": usual, "wait": usual, "compute": (*_labels(COMPUTING, "thread"), *more)}


def tasks() -> Tries:
    """Return the settings of a peer that runs handlers on an event loop."""
    usual = tuple(f"{number} at once" for number in TASKS)
    return {"nothing": usual, "wait": usual, "compute": tuple(f"{number} at once" for number in COMPUTING)}


def processes() -> Tries:
    """Return the settings of a peer that does one thing at a time, so that whoever waits takes more processes."""
    return {"nothing": ("1 process",), "wait": _labels((1, 2, 4), "process"), "compute": ("1 process",)}


def _labels(numbers: tuple[int, ...], unit: str) -> tuple[str, ...]:
    plural = f"{unit}es" if unit.endswith("s") else f"{unit}s"
    return tuple(f"{number} {unit if number == 1 else plural}" for number in numbers)
