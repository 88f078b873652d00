"""
The status of a worker process, in memory that the process shares with its supervisor.

The status contains the last sign of life of the process, its health data and its running handler calls.

A process updates its status before each handler call. So even if a handler holds the GIL, the supervisor can read which
messages have started, and when the process gave its last sign of life.
"""

from __future__ import annotations

import gc
import json
import logging
import mmap
import os
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from reliq.wire_format import lane_of
from reliq.worker.health import PULSE_BYTES, Pulse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.consumer import Consumer
    from reliq.handlers.handler import Handler
    from reliq.worker.slots import HandlerCall


logger = logging.getLogger(__name__)

#: The interval in seconds at which a process writes a sign of life and removes ended handler calls from its status.
BOARD_SECONDS = 0.25

#: The threshold of the garbage collector's youngest generation in a worker process; Python's default is 700.
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
# The fields of a row: start time (0 if no handler call runs), time of the timeout, thread id, queue number,
# length of the message id, message id.
_ROW = struct.Struct("<ddqHH480s")
_TIMES = struct.Struct("<dd")  # start time and timeout: the first two fields of a row
_ID_BYTES = 480
_LANE = struct.Struct("<48s")
#: The queue number that marks the row that all coroutines share.
_COROUTINES = 0xFFFF


def board_bytes(concurrency: int, queues: int) -> int:
    """
    Return the size of the status in bytes.

    The status contains:
    - the time of the last sign of life, flags, and the health data (pulse)
    - a row for each slot, and a row that all coroutines share
    - for each slot, a row for a coroutine that hangs after its timeout
    - a row for the coroutine that the event loop runs now
    - for each queue, the name that the process uses to claim messages
    """
    return _lanes_at(concurrency) + _LANE.size * queues


def _hung_at(concurrency: int) -> int:
    """Return the offset of the rows for coroutines that exceeded their timeouts and cannot be cancelled."""
    return _ROWS_AT + _ROW.size * (concurrency + 1)


def _step_at(concurrency: int) -> int:
    """Return the offset of the row for the coroutine that the event loop runs now."""
    return _hung_at(concurrency) + _ROW.size * concurrency


def _lanes_at(concurrency: int) -> int:
    return _step_at(concurrency) + _ROW.size


@dataclass(frozen=True, slots=True)
class Row:
    """
    A row of the status: a handler call that runs in the process, or the row that all coroutines share.

    Attributes:
        thread: the native id of the thread that runs the handler; 0 for a coroutine that hangs after its timeout.
        queue: the name of the queue; empty for the row that all coroutines share.
        id: the message id; empty for a batch, for a very long id, and for the row that all coroutines share.
        started_at: the monotonic time at which the handler started. In the row of the coroutine that runs in the
            event loop now, it is the time at which the current step of the coroutine started.
        timeout_at: the monotonic time at which the handler exceeds its timeout; 0.0 for no timeout.
    """

    thread: int
    queue: str
    id: str
    started_at: float
    timeout_at: float

    def __str__(self) -> str:
        """Return the queue and the message id, for log lines."""
        return f"{self.queue} {ascii(self.id)[1:-1]}".strip() if self.queue else "coroutines"


@dataclass(slots=True, eq=False)
class _Cell:
    """
    The worker process' own record of a row in its status.

    Attributes:
        place: the offset of the row in the status.
        thread: the native id of the thread whose handler calls the row shows.
        run: the handler call that runs in this thread; None if no call runs.
    """

    place: int
    thread: int
    run: HandlerCall | None = None


class ProcessStatus:
    """
    Write the status of this process for its supervisor.

    `begins` writes a row before each handler call. The thread of `keep_up` removes the rows of ended calls.

    Args:
        descriptor: the descriptor of the file in memory that the supervisor has created.
        consumer: the consumer that runs in this process.
        handlers: the handlers that this process runs.
        concurrency: the number of slots.
    """

    def __init__(self, descriptor: int, consumer: Consumer, handlers: Sequence[Handler], concurrency: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, board_bytes(concurrency, len(handlers)))
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
        """Call `look` repeatedly and forever. If an error occurs, for example a lack of memory, log it and continue."""
        while True:
            try:
                self.look()
            except Exception:
                with suppress(BaseException):
                    logger.exception("worker process: could not update the status that the supervisor reads; retrying")
            time.sleep(BOARD_SECONDS)

    def report(self, rows: Sequence[Mapping[str, object]]) -> None:
        """
        Write the unfinished messages to the file in memory, after the status.

        The supervisor reads these messages when this process has ended.
        """
        os.pwrite(self._descriptor, json.dumps(rows).encode(), len(self._memory))

    def begins(self, run: HandlerCall) -> None:
        """
        Write the row of a handler call that is about to begin.

        The thread of the handler calls this method before it calls the handler. If the handler then holds the GIL, the
        supervisor can still read the row.
        """
        queue = run.deliveries[0].queue
        if queue not in self._lanes:
            self._note_lanes()
        cell = self._cells.get(run.thread) or self._new_cell(run.thread)
        if self._concurrency == 1 or not run.handler.is_async:  # this thread runs one call at a time
            with self._lock:
                cell.run = run
                self._write(cell.place, run, run.started_at, cell.thread)
        elif cell.run is None:
            cell.run = run
            self._loop_thread = cell.thread
            _ROW.pack_into(self._memory, cell.place, run.started_at, 0.0, cell.thread, _COROUTINES, 0, b"")

    def steps(self, run: HandlerCall | None) -> HandlerCall | None:
        """
        Write which handler call the event loop runs now, and return the handler call that it ran before.

        `run` is the handler call whose coroutine runs now, until it waits for something. None means that the event loop
        runs no handler call.
        """
        before = self._stepping
        self._stepping = run
        if run is None:
            _TIMES.pack_into(self._memory, self._step_at, 0.0, 0.0)
            return before
        self._write(self._step_at, run, time.monotonic(), self._loop_thread)
        return before

    def _write(self, place: int, run: HandlerCall, since: float, thread: int) -> None:
        """Write the row of a handler call at the offset `place`; omit the id of a batch, and a very long message id."""
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
        """
        Write a sign of life, update the rows, and read the requests of the supervisor from shared memory.

        The update of the rows writes changed timeouts and removes the rows of ended handler calls.
        """
        self._consumer.must_stay = bool(self._memory[_MUST_STAY_AT])
        if self._memory[_LEAVE_ASKED_AT]:
            self._consumer.leave()
        self._memory[_LEAVES_AT] = self._consumer.is_leaving
        now = time.monotonic()
        running = self._consumer.running()
        # With one slot, `begins` has already written the row of a coroutine that hangs. With several slots, `begins`
        # writes only the row that all coroutines share, so write a row for each coroutine that hangs.
        hung = [run for run in running if self._concurrency > 1 and run.handler.is_async and run.hangs]
        hung = hung[: self._concurrency]
        if hung != self._hung:
            self._hung = hung
            for at, run in enumerate(hung):
                self._write(_hung_at(self._concurrency) + at * _ROW.size, run, run.started_at, 0)
            _COUNT.pack_into(self._memory, _HUNG_COUNT_AT, len(hung))
        going_on = set(running)
        for cell in list(self._cells.values()):
            noted = cell.run  # read `run` only once, because the thread may begin another call at any time
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
        """
        Write the start time and the timeout of the handler call `known` to its row; 0.0 removes the call.

        Do nothing if the row shows another handler call now.
        """
        with self._lock:
            if cell.run is known:
                cell.run = known if started_at else None
                _TIMES.pack_into(self._memory, cell.place, started_at, timeout_at)

    def _note_lanes(self) -> None:
        """
        For each queue, write the name that this process uses to claim messages.

        With these names, the supervisor finds the leases of this process in Redis.
        """
        deliveries = self._consumer.deliveries()
        with self._lock:
            for held in deliveries:
                self._lanes.setdefault(held.queue, lane_of(held.delivery.claimed.nonce))
            for queue, lane in self._lanes.items():
                place = _lanes_at(self._concurrency) + self._numbers[queue] * _LANE.size
                _LANE.pack_into(self._memory, place, lane.encode())


class ProcessStatusView:
    """
    Read the status of a worker process in the supervisor.

    The status is a file in memory. It needs no folder, and disappears when the processes that use it have ended.

    Attributes:
        descriptor: the descriptor of the file, which the worker process inherits.

    Args:
        queues: the names of the handlers' queues, in any order.
        concurrency: the number of slots.
    """

    def __init__(self, queues: Sequence[str], concurrency: int) -> None:
        size = board_bytes(concurrency, len(queues))
        self.descriptor = _file_without_a_name()
        os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        self.pulse = Pulse(self._memory, _PULSE_AT)
        self._queues = sorted(queues)
        self._concurrency = concurrency

    def __del__(self) -> None:
        os.close(self.descriptor)

    @property
    def report(self) -> bytes:
        """The unfinished messages that the process reported before it ended, as JSON; empty if it reported nothing."""
        start = len(self._memory)
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size - start, start)

    @property
    def beat(self) -> float:
        """
        The monotonic time of the last sign of life; 0.0 before the first sign of life.

        The start of a handler counts too, because on a busy machine the thread that writes signs of life may be late.
        """
        (at,) = _BEAT.unpack_from(self._memory, 0)
        return max([float(at), *(row.started_at for row in self.rows())])

    @property
    def lanes(self) -> Mapping[str, str]:
        """For each queue, the name that the process uses to claim messages; its leases in Redis contain this name."""
        raw = self._memory[_lanes_at(self._concurrency) :]
        lanes = (lane.rstrip(b"\0").decode() for (lane,) in _LANE.iter_unpack(raw))
        return {queue: lane for queue, lane in zip(self._queues, lanes, strict=True) if lane}

    @property
    def leaves(self) -> bool:
        """Whether the process has stopped claiming and lets its handlers finish."""
        return bool(self._memory[_LEAVES_AT])

    def ask_to_leave(self) -> None:
        """Request that the process stops claiming and ends when its handlers have finished."""
        self._memory[_LEAVE_ASKED_AT] = 1

    def let_stay(self, stays: bool) -> None:
        """Set whether the process must continue after --max-jobs jobs, because its replacement cannot start yet."""
        self._memory[_MUST_STAY_AT] = stays

    def rows(self, *, is_silent: bool = False) -> list[Row]:
        """
        Return the rows of handler calls that run, or that have ended a moment ago.

        If `is_silent` is True and a coroutine blocks the event loop, return the row of this coroutine instead of the
        row that all coroutines share.
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


def _file_without_a_name() -> int:
    """Create a file in memory, or on macOS a temporary file, and return its descriptor."""
    if sys.platform == "linux":
        return os.memfd_create("reliq-status")
    with TemporaryFile() as file:
        return os.dup(file.fileno())


def spare_the_collector() -> None:
    """
    Make the garbage collector check fewer objects and run less often, because a full collection pauses all handlers.

    The collector ignores all objects that exist now, after the imports, because they live as long as the process. reliq
    creates no reference cycles later. Cycles that handlers create are collected a little later than by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
