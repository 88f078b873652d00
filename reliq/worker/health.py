"""The health data (pulse) that each worker process writes, and the health checks."""

from __future__ import annotations

import mmap
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reliq.events import Event, RedisUnavailable
from reliq.worker.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


#: The default address of the server for metrics and health checks: reachable from this machine only.
DEFAULT_HOST = "127.0.0.1"
#: A process without a completed claim round for this long counts as hung.
CLAIM_SECONDS = 30.0
#: A process that is starting, or that cannot reach Redis, counts as hung after this long.
#: While Redis is unavailable, each new attempt to reach it counts as a sign of life, because a restart would not help.
PATIENT_SECONDS = 300.0
#: Only attempts of these parts to reach Redis count as signs of life, because these parts claim messages.
CLAIMING = ("fetcher", "start")
#: How often a process reads its own state, for its pulse and its metrics.
SAMPLE_SECONDS = 0.5

#: The most bytes of the text that explains why a process is not ready.
_UNREADY_BYTES = 200

_FIELDS = struct.Struct(f"dd??{_UNREADY_BYTES}s")
PULSE_BYTES = _FIELDS.size


@dataclass(frozen=True, slots=True)
class EngineStats:
    """
    The state of a worker process at one moment.

    Attributes:
        last_claim_at: the monotonic time of the last completed claim round.
        is_broken: whether a part has stopped unexpectedly.
        running: the number of messages in running handlers.
        held: the number of prefetched messages.
        longest_seconds: the run time of the oldest running call in seconds; 0.0 if none runs.
        slots: the number of slots.
        busy_slots: the number of slots in use.
        hung_slots: the number of slots used by handlers that exceeded their timeout and cannot be cancelled.
        unready: the reason why a started process is not ready; empty if it is ready.
    """

    last_claim_at: float
    is_broken: bool
    running: int
    held: int
    longest_seconds: float
    slots: int
    busy_slots: int
    hung_slots: int
    unready: str = ""


class _Facts(NamedTuple):
    claimed_at: float
    away_at: float = 0.0
    ready: bool = False
    broken: bool = False
    unready: bytes = b""


class Pulse:
    """
    The health data that a process writes for its supervisor; times are monotonic seconds.

    Args:
        memory: memory shared with the supervisor; None if only this process reads the pulse.
        at: the offset of the pulse in `memory`, in bytes.
        rounds: the name of the rounds in the error text about a hung process, for example "claim round".
        seconds: how long a ready process may go without a completed round before it counts as hung.
    """

    kinds = (RedisUnavailable,)

    def __init__(
        self,
        memory: mmap.mmap | None = None,
        at: int = 0,
        *,
        rounds: str = "claim round",
        seconds: float = CLAIM_SECONDS,
    ) -> None:
        self._rounds = rounds
        self._seconds = seconds
        self._lock = threading.Lock()
        self._memory = mmap.mmap(-1, PULSE_BYTES) if memory is None else memory
        self._at = at
        if not self._read().claimed_at:
            self._write(_Facts(time.monotonic()))

    def follow(self, before: Pulse) -> None:
        """
        Copy the times of the last claim round and the last failed Redis call from the replaced process.

        So if processes die again and again while they start, the worker counts as hung.
        """
        claimed_at, away_at, *_ = before._read()
        self._write(_Facts(claimed_at, away_at))

    def __call__(self, event: Event, /) -> None:
        """Observe an event: store the time of a failed attempt to reach Redis."""
        if isinstance(event, RedisUnavailable) and event.part in CLAIMING:
            with self._lock:
                self._write(self._read()._replace(away_at=time.monotonic()))

    def note(self, stats: EngineStats | None) -> None:
        """Write the state of the engine; pass None before the engine starts and after it stops."""
        with self._lock:
            claimed_at, away_at, *_ = self._read()
            if stats is None:
                self._write(_Facts(claimed_at, away_at))
            else:
                unready = stats.unready.encode(errors="replace")
                claimed_at = max(claimed_at, stats.last_claim_at)
                self._write(_Facts(claimed_at, away_at, ready=True, broken=stats.is_broken, unready=unready))

    def beat(self) -> None:
        """Record a completed round; after its first round the process counts as ready."""
        with self._lock:
            self._write(_Facts(time.monotonic(), ready=True))

    def complaint(self, now: float) -> str:
        """
        Return the reason to restart the process; empty if it is healthy.

        `now` is the monotonic time.
        """
        claimed_at, away_at, ready, broken, _ = self._read()
        if broken:
            return "one of its parts stopped unexpectedly"
        is_away = away_at > claimed_at
        age = now - max(claimed_at, away_at)
        if age <= (self._seconds if ready and not is_away else PATIENT_SECONDS):
            return ""
        return f"no {self._rounds}{', and no try to reach Redis,' if is_away else ''} for {age:.0f} s"

    @property
    def is_ready(self) -> bool:
        """Whether the process has entered its lifespan and started to claim."""
        return self._read().ready

    @property
    def unready(self) -> str:
        """The reason why a started process is not ready; empty if it is ready."""
        return self._read().unready.rstrip(b"\0").decode(errors="replace")

    def _read(self) -> _Facts:
        return _Facts(*_FIELDS.unpack_from(self._memory, self._at))

    def _write(self, facts: _Facts) -> None:
        # Write all bytes at once: `pack_into` would clear the memory first, and the supervisor may read at any moment.
        self._memory[self._at : self._at + PULSE_BYTES] = _FIELDS.pack(*facts)


def sampler(look: Callable[[], EngineStats | None], *notes: Callable[[EngineStats | None], None]) -> Loop:
    """Return a loop that calls `look` twice a second, and passes the state that `look` returns to `notes`."""

    def step() -> float:
        stats = look()
        for note in notes:
            with suppress(Exception):  # a failing metric must not stop the pulse
                note(stats)
        return SAMPLE_SECONDS

    return Loop("sampler", step)


def live(pulses: Iterable[Pulse]) -> str:
    """Return the reason to restart a worker; empty if the worker is healthy."""
    now = time.monotonic()
    complaints = [pulse.complaint(now) for pulse in pulses]
    return "; ".join(f"process {number}: {text}" for number, text in enumerate(complaints) if text)


def ready(pulses: Iterable[Pulse], redis_answers: Callable[[], bool]) -> str:
    """Return the reason why a worker is not ready; empty if it is ready."""
    pulses = list(pulses)
    if starting := [str(number) for number, pulse in enumerate(pulses) if not pulse.is_ready]:
        return f"starting: process {', '.join(starting)}"
    if unready := [f"process {number}: {pulse.unready}" for number, pulse in enumerate(pulses) if pulse.unready]:
        return "; ".join(unready)
    return "" if redis_answers() else "Redis does not answer"
