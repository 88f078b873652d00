"""The thread that holds the GIL of a process, found from outside: no other thread there can say so."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: A thread that computes has at least a twentieth of the time between two looks, on a busy machine too.
LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Activity:
    """
    The work of a thread since it began.

    Attributes:
        seconds: its CPU time.
        waits: how often it gave up the CPU by itself; a thread that waits for the GIL does so all the time.
    """

    seconds: float
    waits: int


def activities(pid: int) -> dict[int, Activity]:
    """Return the activity of each thread of a process; nothing where the system does not show it."""
    try:
        threads = psutil.Process(pid).threads()
    except (psutil.Error, NotImplementedError):
        return {}
    return {one.id: Activity(one.user_time + one.system_time, _waits(pid, one.id)) for one in threads}


def gil_holders(
    before: Mapping[int, Activity], after: Mapping[int, Activity], threads: Iterable[int], seconds: float
) -> set[int]:
    """
    Return those of `threads` that may hold the GIL, by their activity within `seconds`.

    A thread that computes holds it. Where none computes, one that sleeps does, and it does not wait for the GIL.
    """
    mine = set(threads)
    burnt = {one: after[one].seconds - before[one].seconds for one in after if one in before}
    most = max(burnt, key=burnt.__getitem__, default=0)
    if burnt.get(most, 0.0) >= LEAST_SHARE * seconds:
        return {most} & mine or mine
    return {one for one in mine if one in burnt and after[one].waits == before[one].waits} or mine


def _waits(pid: int, thread: int) -> int:
    """Return how often a thread gave up the CPU by itself; 0 where the system does not show it."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/task/{thread}/status").read_text("ascii", "replace").splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return 0
