"""
The board of a worker process: memory, shared with its supervisor, that says what the process runs.

A handler may hold the interpreter, and its process then says nothing more: the board was written before. From it the
supervisor knows since when the process is silent, what had started, and under which names its leases stand in Redis.
"""

from __future__ import annotations

import gc
import logging
import mmap
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.wire_format import lane_of
from reliq.worker.health import PULSE_BYTES, Pulse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from reliq.consumer import Consumer
    from reliq.handlers.handler import Handler
    from reliq.worker.slots import HandlerCall


logger = logging.getLogger(__name__)

#: A process gives a sign of life, and clears what has ended, four times a second.
BOARD_SECONDS = 0.25

#: The collector looks at the young objects when there are 10,000 more of them; Python's own threshold is 700.
COLLECT_AFTER = 10_000

_BEAT = struct.Struct("<d")
_COUNT = struct.Struct("<I")
_COUNT_AT = 8
_HUNG_COUNT_AT = 12
_LEAVES_AT = 16
_LEAVE_ASKED_AT = 17
_MUST_STAY_AT = 18
_PULSE_AT = 64
_ROWS_AT = _PULSE_AT + PULSE_BYTES
_ROW = struct.Struct("<ddqHH480s")  # since when (0: nothing), until when, thread, queue, bytes of the id, the id
_TIMES = struct.Struct("<dd")  # the first two of a row
_ID_BYTES = 480
_LANE = struct.Struct("<48s")
#: The number of no queue: the row is that of the coroutines, which share a thread.
_COROUTINES = 0xFFFF


def board_bytes(concurrency: int, queues: int) -> int:
    """
    Return the bytes of a board.

    It has a pulse, a row for each slot, one for the coroutines, one for each that may hang, one for the coroutine that takes a
    step, and a lane for each queue.
    """
    return _lanes_at(concurrency) + _LANE.size * queues


def _hung_at(concurrency: int) -> int:
    """Return where the rows of the coroutines begin that overran their timeouts and cannot be ended."""
    return _ROWS_AT + _ROW.size * (concurrency + 1)


def _step_at(concurrency: int) -> int:
    """Return where the row begins of the coroutine that takes a step in the event loop."""
    return _hung_at(concurrency) + _ROW.size * concurrency


def _lanes_at(concurrency: int) -> int:
    return _step_at(concurrency) + _ROW.size


@dataclass(frozen=True, slots=True)
class Row:
    """
    One thread of a process, and what it runs; or a coroutine that overran its timeout and goes on.

    Attributes:
        thread: its number for the system, 0 for such a coroutine.
        queue: empty for the row of the coroutines, which share their thread.
        id: the message; empty for a batch, which may have all that is held of the queue.
        started_at, timeout_at: monotonic seconds; 0.0 for no limit.
    """

    thread: int
    queue: str
    id: str
    started_at: float
    timeout_at: float

    def __str__(self) -> str:
        """Return queue and id, for a log line."""
        return f"{self.queue} {ascii(self.id)[1:-1]}".strip() if self.queue else "coroutines"


@dataclass(slots=True, eq=False)
class _Cell:
    """One thread's row, as its own process knows it; `run` is the call that it tells of, None when that has ended."""

    place: int
    thread: int
    run: HandlerCall | None = None


class ProcessStatus:
    """
    The board as its process writes it: when a handler begins, and by a thread that clears what has ended.

    Args:
        path: a file of `board_bytes(concurrency)` bytes.
    """

    def __init__(self, path: Path, consumer: Consumer, handlers: Sequence[Handler], concurrency: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), board_bytes(concurrency, len(handlers)))
        self.pulse = Pulse(self._memory, _PULSE_AT)
        self._consumer = consumer
        self._concurrency = concurrency
        names = sorted(handler.queue.name for handler in handlers)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._lanes: dict[str, str] = {}
        self._cells: dict[int, _Cell] = {}
        self._hung: list[HandlerCall] = []
        self._stepping: HandlerCall | None = None
        self._loop_thread = 0
        self._step_at = _step_at(concurrency)
        self._lock = threading.Lock()

    def keep_up(self) -> None:
        """Look again and again, for ever, whatever goes wrong: a handler may have taken all memory for a moment."""
        while True:
            try:
                self.look()
            except Exception:
                with suppress(BaseException):
                    logger.exception("the board of this process could not be brought up to date; trying again")
            time.sleep(BOARD_SECONDS)

    def begins(self, run: HandlerCall) -> None:
        """Write what a thread begins, which is the caller: its handler may never let another thread run."""
        queue = run.deliveries[0].queue
        if queue not in self._lanes:
            self._note_lanes()
        cell = self._cells.get(run.thread) or self._new_cell(run.thread)
        if self._concurrency == 1 or not run.handler.is_async:  # its thread runs nothing else at the same time
            with self._lock:
                cell.run = run
                self._write(cell.place, run, run.started_at, cell.thread)
        elif cell.run is None:
            cell.run = run
            self._loop_thread = cell.thread
            _ROW.pack_into(self._memory, cell.place, run.started_at, 0.0, cell.thread, _COROUTINES, 0, b"")

    def steps(self, run: HandlerCall | None) -> HandlerCall | None:
        """Write which coroutine takes a step in the event loop, None after the step; return the coroutine before."""
        before = self._stepping
        self._stepping = run
        if run is None:
            _TIMES.pack_into(self._memory, self._step_at, 0.0, 0.0)
            return before
        self._write(self._step_at, run, time.monotonic(), self._loop_thread)
        return before

    def _write(self, place: int, run: HandlerCall, since: float, thread: int) -> None:
        """Write a row; of a batch, and of a message whose id is too long, without the id."""
        raw = b""
        if not run.handler.is_batch:
            raw = run.deliveries[0].delivery.claimed.id.encode("utf-8", "surrogateescape")
            if len(raw) > _ID_BYTES:
                raw = b""
        number = self._numbers[run.handler.queue_name]
        _ROW.pack_into(self._memory, place, since, run.timeout_at or 0.0, thread, number, len(raw), raw)

    def _new_cell(self, thread: int) -> _Cell:
        with self._lock:
            place = _ROWS_AT + len(self._cells) * _ROW.size
            cell = self._cells[thread] = _Cell(place, threading.get_native_id())
            _COUNT.pack_into(self._memory, _COUNT_AT, len(self._cells))
        return cell

    def look(self) -> None:
        """Write a sign of life and changed timeouts, clear rows that have ended, and read the supervisor's requests."""
        self._consumer.must_stay = bool(self._memory[_MUST_STAY_AT])
        if self._memory[_LEAVE_ASKED_AT]:
            self._consumer.leave()
        self._memory[_LEAVES_AT] = self._consumer.is_leaving
        now = time.monotonic()
        running = self._consumer.running()
        # A coroutine that is alone in its process has its row from its start.
        hung = [run for run in running if self._concurrency > 1 and run.handler.is_async and run.hangs]
        hung = hung[: self._concurrency]
        if hung != self._hung:
            self._hung = hung
            for at, run in enumerate(hung):
                self._write(_hung_at(self._concurrency) + at * _ROW.size, run, run.started_at, 0)
            _COUNT.pack_into(self._memory, _HUNG_COUNT_AT, len(hung))
        going_on = set(running)
        for cell in list(self._cells.values()):
            noted = cell.run  # read once: its thread may begin something else at any moment
            if noted is None or noted.started_at >= now or (self._concurrency > 1 and noted.handler.is_async):
                continue
            until = noted.timeout_at or 0.0
            if noted not in going_on:
                self._change(cell, noted, 0.0, 0.0)
            elif _TIMES.unpack_from(self._memory, cell.place) != (noted.started_at, until):
                self._change(cell, noted, noted.started_at, until)
        if len(self._lanes) < len(self._numbers):
            self._note_lanes()
        _BEAT.pack_into(self._memory, 0, time.monotonic())

    def _change(self, cell: _Cell, known: HandlerCall, started_at: float, timeout_at: float) -> None:
        """Write the times of `cell`, unless it has begun something else since."""
        with self._lock:
            if cell.run is known:
                cell.run = known if started_at else None
                _TIMES.pack_into(self._memory, cell.place, started_at, timeout_at)

    def _note_lanes(self) -> None:
        """Write the names under which this process claims: by them the supervisor finds its leases in Redis."""
        deliveries = self._consumer.deliveries()
        with self._lock:
            for held in deliveries:
                self._lanes.setdefault(held.queue, lane_of(held.delivery.claimed.nonce))
            for queue, lane in self._lanes.items():
                place = _lanes_at(self._concurrency) + self._numbers[queue] * _LANE.size
                _LANE.pack_into(self._memory, place, lane.encode())


class ProcessStatusView:
    """
    The board as the supervisor reads it.

    Args:
        path: the file, which is made anew.
        queues: the names of the handlers' queues, in any order.
    """

    def __init__(self, path: Path, queues: Sequence[str], concurrency: int) -> None:
        size = board_bytes(concurrency, len(queues))
        # A process that still maps the old file would be killed if that file shrank, so the new file replaces it.
        fresh = path.with_suffix(".new")
        fresh.write_bytes(bytes(size))  # a page that a full disk has no room for kills each process that writes to it
        with fresh.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        fresh.replace(path)
        self.pulse = Pulse(self._memory, _PULSE_AT)
        self._queues = sorted(queues)
        self._concurrency = concurrency

    @property
    def beat(self) -> float:
        """
        The last sign of life, in monotonic seconds; 0.0 before the first.

        A handler that has begun since the last look is one too: on a busy machine the thread that looks may wait long.
        """
        (at,) = _BEAT.unpack_from(self._memory, 0)
        return max([float(at), *(row.started_at for row in self.rows())])

    @property
    def lanes(self) -> Mapping[str, str]:
        """The name under which the process claims, by queue."""
        raw = self._memory[_lanes_at(self._concurrency) :]
        lanes = (lane.rstrip(b"\0").decode() for (lane,) in _LANE.iter_unpack(raw))
        return {queue: lane for queue, lane in zip(self._queues, lanes, strict=True) if lane}

    @property
    def leaves(self) -> bool:
        """Whether the process claims no more and lets its handlers finish."""
        return bool(self._memory[_LEAVES_AT])

    def ask_to_leave(self) -> None:
        """Have the process claim no more and end when its handlers have finished."""
        self._memory[_LEAVE_ASKED_AT] = 1

    def let_stay(self, stays: bool) -> None:
        """Have the process claim on after its last job of --max-jobs, until there is room for another beside it."""
        self._memory[_MUST_STAY_AT] = stays

    def rows(self, *, is_silent: bool = False) -> list[Row]:
        """
        Return what the process runs, or has run until a moment ago.

        With `is_silent`, the coroutine in whose step the process stands still replaces the row of all coroutines.
        """
        (count,) = _COUNT.unpack_from(self._memory, _COUNT_AT)
        (hung,) = _COUNT.unpack_from(self._memory, _HUNG_COUNT_AT)
        places = [_ROWS_AT + at * _ROW.size for at in range(count)]
        places += [_hung_at(self._concurrency) + at * _ROW.size for at in range(hung)]
        rows = [row for place in places if (row := self._row(place))]
        step = self._row(_step_at(self._concurrency)) if is_silent else None
        return rows if step is None else [step, *(row for row in rows if row.queue)]

    def _row(self, place: int) -> Row | None:
        started_at, until, thread, number, length, raw = _ROW.unpack_from(self._memory, place)
        if not started_at:
            return None
        queue = "" if number == _COROUTINES else self._queues[number]
        return Row(thread, queue, raw[:length].decode("utf-8", "surrogateescape"), started_at, until)


def spare_the_collector() -> None:
    """
    Have the garbage collector look at fewer objects, and less often.

    The objects of modules stay as long as the process: a full collection, a pause for every handler, need not look
    through them. The objects of a message have no cycles and go without a collection; a handler's own cycles are
    collected a little later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
