"""The health of a worker: the pulse that each of its processes writes, and whether it is alive and ready by that."""

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


#: The page of figures and probes is served there, for this machine alone, unless another address is named.
DEFAULT_HOST = "127.0.0.1"
#: A process that has completed no claim round for 30 s hangs.
CLAIM_SECONDS = 30.0
#: A process that starts, or has found Redis away, has 5 minutes until the next sign of life, which is that it finds
#: Redis away again: a restart would not help it.
PATIENT_SECONDS = 300.0
#: The parts of a process whose tries to reach Redis are its signs of life: those that claim, or will.
CLAIMING = ("fetcher", "start")
#: The figures of a process are sampled twice a second.
SAMPLE_SECONDS = 0.5

#: At most so many bytes say why a process is not ready.
_UNREADY_BYTES = 200

_FIELDS = struct.Struct(f"dd??{_UNREADY_BYTES}s")
PULSE_BYTES = _FIELDS.size


@dataclass(frozen=True, slots=True)
class EngineStats:
    """
    The state of a worker process's engine at one moment.

    Attributes:
        last_claim_at: when its last claim round was completed, in monotonic seconds.
        is_broken: one of its parts has ended by itself.
        running, held: messages that handlers run, and messages that wait for a slot.
        longest_seconds: for how long the oldest running handler has run, 0.0 when none runs.
        slots: handlers that may run at once.
        busy_slots: how many run.
        hung_slots: how many of those overran their time and cannot be ended.
        unready: why the process is not ready although it has started; empty when it is.
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
    The facts that a process writes of itself for its supervisor; times are monotonic seconds of the machine.

    Args:
        memory: shared by both, the pulse is in it at `at`; None when the reader is the process itself.
        rounds: the name of its rounds, for complaints.
        seconds: after this time without a round a process hangs that is ready and has not found Redis away.
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
        """Go on from the pulse of an earlier process: one that dies again and again before it claims leaves an old pulse."""
        claimed_at, away_at, *_ = before._read()
        self._write(_Facts(claimed_at, away_at))

    def __call__(self, event: Event, /) -> None:
        """Note a try of a claiming part that found Redis away."""
        if isinstance(event, RedisUnavailable) and event.part in CLAIMING:
            with self._lock:
                self._write(self._read()._replace(away_at=time.monotonic()))

    def note(self, stats: EngineStats | None) -> None:
        """Note the state of the process's engine, None before its start and after its stop."""
        with self._lock:
            claimed_at, away_at, *_ = self._read()
            if stats is None:
                self._write(_Facts(claimed_at, away_at))
            else:
                unready = stats.unready.encode(errors="replace")
                claimed_at = max(claimed_at, stats.last_claim_at)
                self._write(_Facts(claimed_at, away_at, ready=True, broken=stats.is_broken, unready=unready))

    def beat(self) -> None:
        """Note that a round is over, and with the first one that the process is ready."""
        with self._lock:
            self._write(_Facts(time.monotonic(), ready=True))

    def complaint(self, now: float) -> str:
        """Return why the process should be restarted, empty when it should not."""
        claimed_at, away_at, ready, broken, _ = self._read()
        if broken:
            return "a part of it ended by itself"
        is_away = away_at > claimed_at
        age = now - max(claimed_at, away_at)
        if age <= (self._seconds if ready and not is_away else PATIENT_SECONDS):
            return ""
        return f"no {self._rounds}{', and no try to reach Redis,' if is_away else ''} for {age:.0f} s"

    @property
    def is_ready(self) -> bool:
        """Whether the process has entered its lifespan and claims."""
        return self._read().ready

    @property
    def unready(self) -> str:
        """Why the process is not ready although it has started; empty when it is."""
        return self._read().unready.rstrip(b"\0").decode(errors="replace")

    def _read(self) -> _Facts:
        return _Facts(*_FIELDS.unpack_from(self._memory, self._at))

    def _write(self, facts: _Facts) -> None:
        # In one piece: `pack_into` clears the memory first, and the other process may read at any moment.
        self._memory[self._at : self._at + PULSE_BYTES] = _FIELDS.pack(*facts)


def sampler(look: Callable[[], EngineStats | None], *notes: Callable[[EngineStats | None], None]) -> Loop:
    """Return the loop that hands what `look` returns to each of `notes`, twice a second."""

    def step() -> float:
        stats = look()
        for note in notes:
            with suppress(Exception):  # a figure that cannot be kept must not end the pulse
                note(stats)
        return SAMPLE_SECONDS

    return Loop("sampler", step)


def live(pulses: Iterable[Pulse]) -> str:
    """Return why a worker should be restarted, empty when it should not."""
    now = time.monotonic()
    complaints = [pulse.complaint(now) for pulse in pulses]
    return "; ".join(f"process {number}: {text}" for number, text in enumerate(complaints) if text)


def ready(pulses: Iterable[Pulse], redis_answers: Callable[[], bool]) -> str:
    """Return why a worker is not ready, empty when it is."""
    pulses = list(pulses)
    if starting := [str(number) for number, pulse in enumerate(pulses) if not pulse.is_ready]:
        return f"starting: process {', '.join(starting)}"
    if unready := [f"process {number}: {pulse.unready}" for number, pulse in enumerate(pulses) if pulse.unready]:
        return "; ".join(unready)
    return "" if redis_answers() else "Redis does not answer"
