"""
Histories: each process records its events in an append-only file.

Each event is one `os.write`, so that SIGKILL leaves whole lines. Times are CLOCK_MONOTONIC, which all
processes of a machine share.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Event:
    """An event that process `who` wrote at time `t`; `facts` depend on the kind."""

    t: float
    who: str
    kind: str
    facts: dict[str, Any]


class Journal:
    """The history file of one process; its threads may write at the same time."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def write(self, kind: str, **facts: Any) -> None:
        """Record an event of this kind, now."""
        os.write(self._file, msgspec.json.encode([time.monotonic(), kind, facts]) + b"\n")


def read(folder: Path) -> list[Event]:
    """Return all events of all processes, in the order of their times."""
    events = [event for path in folder.glob("*.jsonl") for event in _events(path)]
    return sorted(events, key=lambda event: event.t)


def _events(path: Path) -> Iterator[Event]:
    for line in path.read_bytes().split(b"\n")[:-1]:
        t, kind, facts = msgspec.json.decode(line)
        yield Event(t, path.stem, kind, facts)
