"""
The figures that a process keeps in memory which its supervisor reads: numbers in one file for each process.

A file begins with how many bytes of it are in use. Series follow, each written once: the length of its key, how many
numbers it has, its key, and the numbers, which alone change. A reader that has seen a series before knows where they are.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Name of a metric and the values of its labels.
Key = tuple[str, ...]
#: A key, and the numbers of one series.
Series = tuple[Key, Sequence[float]]

#: Numbers take eight bytes, and everything else as many times eight.
_WORD = 8
_USED, _HEAD = struct.Struct("Q"), struct.Struct("II")
#: A file begins with so many bytes and doubles when it is full.
FIRST_BYTES = 1 << 16


class Figures:
    """
    The figures of this process; safe to use from any thread.

    Args:
        path: the file that another process reads, None for memory of this process alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._places: dict[Key, int] = {}
        self._used = _USED.size
        if path is not None:
            path.unlink(missing_ok=True)  # of a dead process with the same number
            path.touch(mode=0o600)
        self._map(FIRST_BYTES)

    def place(self, key: Key, *first: float) -> int:
        """Return where the numbers of a series begin; a new one has the values `first`, an old one keeps its own."""
        with self._lock:
            if key not in self._places:
                self._places[key] = self._append(json.dumps(key).encode(), first)
            return self._places[key]

    def add(self, place: int, number: float = 1.0) -> None:
        """Add to a counter."""
        with self._lock:
            self._numbers[place] += number

    def set(self, place: int, number: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._numbers[place] = number

    def observe(self, place: int, bounds: Sequence[float], number: float) -> None:
        """Count `number` in a histogram, which has a count for each bucket and one above all bounds, and the sum."""
        with self._lock:
            self._numbers[place + bisect_left(bounds, number)] += 1
            self._numbers[place + len(bounds) + 1] += number

    def raw(self) -> bytes:
        """Return what the file holds."""
        with self._lock:
            return self._memory[: self._used]

    def _append(self, name: bytes, first: Sequence[float]) -> int:
        name += b" " * (-len(name) % _WORD)
        at = self._used + _HEAD.size + len(name)
        end = at + _WORD * len(first)
        if end > len(self._memory):
            self._grow(end)
        _HEAD.pack_into(self._memory, self._used, len(name), len(first))
        self._memory[at - len(name) : at] = name
        self._numbers[at // _WORD : end // _WORD] = memoryview(struct.pack(f"{len(first)}d", *first)).cast("d")
        self._used = end
        _USED.pack_into(self._memory, 0, end)  # at last: a reader sees a whole series, or none of it
        return at // _WORD

    def _grow(self, least: int) -> None:
        size = len(self._memory)
        while size < least:
            size *= 2
        held = self._memory[: self._used]
        self._map(size)
        self._memory[: len(held)] = held

    def _map(self, size: int) -> None:
        if self._path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            with self._path.open("r+b") as file:
                file.truncate(size)
                self._memory = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._memory).cast("d")


class FiguresReader:
    """Reads what a `Figures` holds, again and again; the keys are read once."""

    def __init__(self) -> None:
        self._known: list[tuple[Key, int, int]] = []
        self._seen = _USED.size

    def series(self, raw: bytes) -> Iterator[Series]:
        """Yield each series with its numbers; nothing of a file that its process did not come to fill."""
        if len(raw) < _USED.size:
            return
        (used,) = _USED.unpack_from(raw)
        while self._seen < used:
            length, count = _HEAD.unpack_from(raw, self._seen)
            at = self._seen + _HEAD.size + length
            key = tuple(json.loads(raw[at - length : at]))
            self._known.append((key, at // _WORD, at // _WORD + count))
            self._seen = at + _WORD * count
        numbers = struct.unpack_from(f"{used // _WORD}d", raw)
        for key, start, end in self._known:
            yield key, numbers[start:end]
