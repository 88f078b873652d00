"""The record that each worker process keeps of itself in Redis, and the commands that write and read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from reliq.call import Command
from reliq.foreign import LAST_SECOND
from reliq.keys import WORKERS_KEY, worker_key

#: Between two writes of a record.
BEAT_SECONDS = 5.0
#: A record whose worker was killed goes by itself.
RECORD_MS = 15_000
#: A worker that has been silent for so long leaves the index too.
FORGET_SECONDS = 3600
#: The most running handlers that a record names.
SLOTS_LIMIT = 200
#: The most workers that are read.
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
    What a worker process says of itself, at most BEAT_SECONDS ago. Times are unix seconds by its clock.

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


_decoder = msgspec.json.Decoder(Worker)


def beat(worker: Worker) -> list[Command[None]]:
    """Write a worker's record and its place in the index; drop from the index who was silent for an hour."""
    return [
        Command(("SET", worker_key(worker.id), msgspec.json.encode(worker), "PX", RECORD_MS), _nothing),
        Command(("ZADD", WORKERS_KEY, round(worker.seen), worker.id), _nothing),
        Command(("ZREMRANGEBYSCORE", WORKERS_KEY, "-inf", round(worker.seen) - FORGET_SECONDS), _nothing),
    ]


def leave(id: str) -> list[Command[None]]:
    """Remove a worker's record and its place in the index."""
    return [
        Command(("DEL", worker_key(id)), _nothing),
        Command(("ZREM", WORKERS_KEY, id), _nothing),
    ]


def index() -> Command[list[str]]:
    """Return the workers that wrote a record in the last hour, the latest first; not all of them are alive."""
    return Command(
        ("ZREVRANGE", WORKERS_KEY, 0, WORKERS_LIMIT - 1),
        lambda reply: [one.decode("utf-8", "replace") for one in reply],
    )


def records(ids: Sequence[str]) -> list[Command[Worker | None]]:
    """Read each worker's record; None for one that is not alive, or whose record is none of ours."""
    return [Command(("GET", worker_key(id)), _worker) for id in ids]


def _worker(reply: bytes | None) -> Worker | None:
    if reply is None:
        return None
    try:
        return _decoder.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _nothing(_reply: object) -> None:
    """Read nothing from the reply."""
