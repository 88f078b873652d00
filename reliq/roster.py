"""The record that each worker process keeps of itself in Redis."""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from reliq.foreign import LAST_SECOND

#: Seconds between two writes of a record.
BEAT_SECONDS = 5.0
#: A record expires this many ms after its worker was killed.
RECORD_MS = 15_000
#: A worker that is silent for this many seconds leaves the index too.
FORGET_SECONDS = 3600
#: Running handlers that a record names at most.
SLOTS_LIMIT = 200
#: Workers that are read at most.
WORKERS_LIMIT = 10_000


#: A record with other numbers is none of ours.
_Number = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Moment = Annotated[float, msgspec.Meta(ge=0, le=LAST_SECOND)]


@dataclass(frozen=True, slots=True)
class Slot:
    """
    A handler that runs.

    Attributes:
        attempt: 1 for the first delivery; None for a bare body.
        started: when it began, in unix seconds by its worker's clock.
    """

    queue: str
    id: str
    attempt: _Number | None
    started: _Moment


@dataclass(frozen=True, slots=True)
class Worker:
    """
    The record of a worker process, at most BEAT_SECONDS old. Times are unix seconds by its clock.

    Attributes:
        version: of reliq.
        queues: what it claims from.
        slots: how many handlers it runs at once.
        busy: how many run.
        started: since when it works.
        last_claim: when its last round of claims was completed.
        seen: when it said this.
        running: the handlers that run, the longest running first; at most SLOTS_LIMIT.
    """

    id: str
    host: str
    pid: _Number
    version: str
    queues: tuple[str, ...]
    slots: _Number
    busy: _Number
    started: _Moment
    last_claim: _Moment
    seen: _Moment
    running: tuple[Slot, ...] = ()
