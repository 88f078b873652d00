"""The health data (pulse) that each worker process writes to shared memory, and the health checks that read it."""

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
#: A process counts as hung if it has not completed a claim round for this long.
CLAIM_SECONDS = 30.0
#: A process that is starting, or that cannot reach Redis, counts as hung only after this longer time.
#: While Redis is unavailable, each new attempt to reach it counts like a claim round, because a restart would not help.
PATIENT_SECONDS = 300.0
#: Only attempts of these components to reach Redis count, because the other components do not claim messages.
CLAIMING = ("fetcher", "start")
#: How often a process reads its own state, for its pulse and its metrics.
SAMPLE_SECONDS = 0.5

#: The maximum length of the text that explains why a process is not ready, in bytes.
_UNREADY_BYTES = 200

_FIELDS = struct.Struct(f"dd??{_UNREADY_BYTES}s")
PULSE_BYTES = _FIELDS.size


@dataclass(frozen=True, slots=True)
class EngineStats:
    """
    The state of a worker process at one moment.

    Attributes:
        last_claim_at: the monotonic time of the last completed claim round.
        is_broken: whether a component of the process has stopped unexpectedly.
        running: the number of messages in running handlers.
        held: the number of prefetched messages.
        longest_seconds: how long the oldest running handler call has been running, in seconds; 0.0 if none runs.
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
    The health data that a process writes for its supervisor. All times are monotonic seconds.

    Args:
        memory: memory shared with the supervisor; None if only this process reads the pulse.
        at: the offset of the pulse in `memory`, in bytes.
        rounds: what the process repeats, for the error text about a hung process, for example "claim round".
        seconds: how much time a ready process may need for a round before it counts as hung.
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
        Copy the times of the last claim round and of the last failure to reach Redis from the replaced process' pulse.

        So if the replacing processes die again and again while they start, the worker counts as hung.
        """
        claimed_at, away_at, *_ = before._read()
        self._write(_Facts(claimed_at, away_at))

    def __call__(self, event: Event, /) -> None:
        """If the event reports a failed attempt to reach Redis, store the time of the attempt."""
        if isinstance(event, RedisUnavailable) and event.part in CLAIMING:
            with self._lock:
                self._write(self._read()._replace(away_at=time.monotonic()))

    def note(self, stats: EngineStats | None) -> None:
        """Write the state of the engine to the pulse; None before the engine has started and after it has stopped."""
        with self._lock:
            claimed_at, away_at, *_ = self._read()
            if stats is None:
                self._write(_Facts(claimed_at, away_at))
            else:
                unready = stats.unready.encode(errors="replace")
                claimed_at = max(claimed_at, stats.last_claim_at)
                self._write(_Facts(claimed_at, away_at, ready=True, broken=stats.is_broken, unready=unready))

    def beat(self) -> None:
        """Write that the process has completed a round. After its first round, the process counts as ready."""
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
        # Write all bytes at once, because the supervisor may read them at any time. `pack_into` would clear them first.
        self._memory[self._at : self._at + PULSE_BYTES] = _FIELDS.pack(*facts)


def sampler(look: Callable[[], EngineStats | None], *notes: Callable[[EngineStats | None], None]) -> Loop:
    """Return a loop that twice a second calls `look`, and passes the state that it returns to each of `notes`."""

    def step() -> float:
        stats = look()
        for note in notes:
            with suppress(Exception):  # a failing metric must not stop the pulse
                note(stats)
        return SAMPLE_SECONDS

    return Loop("sampler", step)


def live(pulses: Iterable[Pulse]) -> str:
    """Return the reason to restart a worker, from the pulses of its processes; empty if the worker is healthy."""
    now = time.monotonic()
    complaints = [pulse.complaint(now) for pulse in pulses]
    return "; ".join(f"process {number}: {text}" for number, text in enumerate(complaints) if text)


def ready(pulses: Iterable[Pulse], redis_answers: Callable[[], bool]) -> str:
    """
    Return the reason why a worker is not ready; empty if it is ready.

    Args:
        pulses: the pulses of its processes.
        redis_answers: returns whether Redis can be reached.
    """
    pulses = list(pulses)
    if starting := [str(number) for number, pulse in enumerate(pulses) if not pulse.is_ready]:
        return f"starting: process {', '.join(starting)}"
    if unready := [f"process {number}: {pulse.unready}" for number, pulse in enumerate(pulses) if pulse.unready]:
        return "; ".join(unready)
    return "" if redis_answers() else "Redis does not answer"
