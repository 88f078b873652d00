"""
A worker process as its supervisor sees it: start, signs of life, end and files.

If a handler holds the GIL, its process gives no sign of life. The supervisor then finds the handler by the CPU time of
the threads.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from reliq.consumer import EXIT_HUNG, EXIT_REPLACE
from reliq.distribution import command_of
from reliq.errors import EXIT_CONFIG, ConfigurationError
from reliq.supervisor import guard_main
from reliq.supervisor.plan import METRICS_FOLDER, ChildPlan
from reliq.supervisor.status import ProcessStatusView, Row
from reliq.worker.slots import CANCEL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.handlers.handler import Handler
    from reliq.worker.health import Pulse

PREFIX = "reliq-worker-"
#: The variable of the Prometheus client with the folder for the metrics of all processes.
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
#: Do not remove a folder in its first minute, because it may not be locked yet.
YOUNG_SECONDS = 60.0
#: A computing thread uses at least this share of the time between two checks, even on a busy machine.
LEAST_SHARE = 0.05
#: A process is restarted after 1 s. If it dies at its start, this time doubles, up to 60 s.
RESTART_SECONDS = 1.0
SLOWEST_RESTART_SECONDS = 60.0
#: How long after a timeout the process itself may end the handler, before the supervisor acts.
HARD_LIMIT_SECONDS = 1.0
#: The most silence counted between two checks, because supervisor and children may have been paused together.
LONGEST_GAP_SECONDS = 1.0
#: The supervisor starts to compare the threads of a process after this silence.
LOOK_CLOSER_SECONDS = 0.75
#: How long to wait until SIGSTOP has stopped a process.
STOPPED_SECONDS = 0.1
#: Signals of crashes; other signals are sent by other processes.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS)


class Folder:
    """
    A private temporary folder of this process.

    Attributes:
        path: its path; it changes if the folder was removed and created again.

    Raises:
        ConfigurationError: no temporary folder can be created.
    """

    def __init__(self) -> None:
        try:
            self._make()
        except OSError as error:
            raise ConfigurationError(
                f"a worker needs a folder for temporary files: {error}; set TMPDIR to a writable folder"
            ) from error
        for path in self.path.parent.glob(f"{PREFIX}*"):  # remove the folders of workers that were killed
            with suppress(OSError):  # in use, owned by another user, or already removed
                stat = path.lstat()
                is_young = time.time() - stat.st_mtime < YOUNG_SECONDS
                if not (path.is_symlink() or stat.st_uid != os.geteuid() or is_young):
                    descriptor = _lock(path)
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(descriptor)

    def restore(self, within: str) -> None:
        """
        Create the folder again if it was removed, and create the folder `within` in it.

        A folder of the same name does not count, because another user may have created it.
        """
        try:
            is_there = os.path.samestat(self.path.lstat(), self._made)
        except OSError:
            is_there = False
        if not is_there:
            Path(tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)
            before = self._lock
            self._make()  # if this raises, the next attempt closes the old lock
            with suppress(OSError):
                os.close(before)
        (self.path / within).mkdir(mode=0o700, exist_ok=True)

    def _make(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._made = self.path.lstat()
        self._lock = -1
        with suppress(OSError):  # not every file system has locks
            self._lock = _lock(self.path)

    def remove(self) -> None:
        """Remove the folder with its content."""
        with suppress(OSError):
            os.close(self._lock)
        self._lock = -1
        shutil.rmtree(self.path, ignore_errors=True)


def _lock(path: Path) -> int:
    """Lock a folder against systemd-tmpfiles and other workers; return the descriptor, or raise OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Activity(NamedTuple):
    """
    The activity of a thread since its start.

    Attributes:
        seconds: the CPU time.
        waits: the number of voluntary context switches; a thread that waits for the GIL makes many. 0 if the system
            does not report it.
    """

    seconds: float
    waits: int


def activities(pid: int) -> dict[int, Activity]:
    """Return the activity of each thread of a process; empty if the system does not report it."""
    try:
        threads = psutil.Process(pid).threads()
    except (psutil.Error, NotImplementedError):
        return {}
    found = {}
    for thread in threads:
        waits = 0
        with suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/task/{thread.id}/status").read_text("ascii", "replace").splitlines():
                if line.startswith("voluntary_ctxt_switches:"):
                    waits = int(line.split()[1])
        found[thread.id] = Activity(thread.user_time + thread.system_time, waits)
    return found


class OrphanKiller:
    """Start the guard, and send it the id of each process that starts or ends; its input ends with this process."""

    def __init__(self) -> None:
        # -I and -S: import nothing of the application, and stay small.
        self._process = subprocess.Popen(  # noqa: S603  ours
            [sys.executable, "-I", "-S", guard_main.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._process.wait()  # the guard itself is a child of this process, which ends at once

    def note(self, pid: int, *, begins: bool) -> None:
        """Send to the guard that a process begins or has ended."""
        if self._process.stdin is not None:
            with suppress(OSError):  # the guard was killed
                self._process.stdin.write(f"{'+' if begins else '-'}{pid}\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """End the guard, because the supervisor has ended its children itself."""
        self._process.communicate()


@dataclass(slots=True)
class HeartbeatMonitor:
    """
    Measure how long a process has given no sign of life, for example because a handler holds the GIL.

    Attributes:
        seconds: the length of the silence; 0.0 without silence.
        since: when the silence began, in monotonic seconds.
        helped_at: the length of the silence when the supervisor last renewed the leases.
        beat: the last sign of life, in monotonic seconds.
    """

    seconds: float = 0.0
    since: float = 0.0
    helped_at: float = 0.0
    beat: float = 0.0
    _heard_at: float = 0.0
    _before: dict[int, Activity] = field(default_factory=dict)
    _looked_at: float = 0.0

    def hear(self, beat: float, now: float, pid: int) -> float:
        """Store the last sign of life; return the seconds since the last call, at most LONGEST_GAP_SECONDS."""
        gap = min(now - self._heard_at, LONGEST_GAP_SECONDS)
        self._heard_at = now
        if beat != self.beat:
            self.beat = beat
            self.since = beat
            self.seconds = 0.0
            self.helped_at = 0.0
            self._before = {}
        else:
            self.seconds += gap
        if self.seconds > LOOK_CLOSER_SECONDS and not self._before:
            self._before = activities(pid)
            self._looked_at = now
        return gap

    def gil_holders(self, pid: int, threads: set[int], now: float) -> set[int]:
        """
        Return the threads that may hold the GIL, by their activity since the silence began.

        If a thread computes, it holds the GIL. Otherwise a thread that sleeps without waiting for the GIL holds it.
        """
        before = self._before
        after = activities(pid)
        burnt = {thread: after[thread].seconds - before[thread].seconds for thread in after if thread in before}
        busiest = max(burnt, key=burnt.__getitem__, default=0)
        if burnt.get(busiest, 0.0) >= LEAST_SHARE * max(0.0, now - self._looked_at):
            return {busiest} & threads or threads
        return {
            thread for thread in threads if thread in burnt and after[thread].waits == before[thread].waits
        } or threads


@dataclass(slots=True)
class Child:
    """
    A worker process, or the place for the next one.

    Attributes:
        number: the number of this place, used in file names.
        folder: the folder of its files.
        pulse: its pulse.
        handlers: its handlers.
        process: the process; None before the start and after the end.
        board: its status; None before the start.
        silence: measures the time without a sign of life.
        started_at: the monotonic time of the last start.
        failures: the number of processes in a row that died here at their start.
        crashes: the number of these that were not killed from outside.
        complained: seconds without a claim round although the process is awake.
        overrun_seconds: seconds since a handler exceeded its timeout, without pauses of the supervisor.
        has_worked: whether the process has completed its start.
        done: whether no other process is to be started here.
        is_killed: whether the supervisor has killed the process.
        is_helped: whether the supervisor is renewing its leases.
        end_reason: why the supervisor has ended the process, in one word; empty if it ended by itself.
        charged: the status rows of messages that lose a retry by its end; None if unknown: all started messages do.
    """

    number: int
    folder: Path
    pulse: Pulse
    handlers: Sequence[Handler]
    process: subprocess.Popen[str] | None = None
    board: ProcessStatusView | None = None
    silence: HeartbeatMonitor = field(default_factory=HeartbeatMonitor)
    started_at: float = -RESTART_SECONDS
    failures: int = 0
    crashes: int = 0
    complained: float = 0.0
    overrun_seconds: float = 0.0
    has_worked: bool = False
    done: bool = False
    is_killed: bool = False
    is_helped: bool = False
    end_reason: str = ""
    charged: list[Row] | None = None

    @property
    def report(self) -> Path:
        """The file in which the process lists its unfinished messages."""
        return self.folder / f"report-{self.number}"

    @property
    def pid(self) -> int:
        """The process id; 0 without a process."""
        return 0 if self.process is None else self.process.pid

    def start(self, plan: ChildPlan) -> None:
        """Start a process with `plan`; its standard input ends when the supervisor ends."""
        path = self.folder / f"board-{self.number}"
        self.board = ProcessStatusView(
            path, [handler.queue.name for handler in self.handlers], plan.settings.concurrency
        )
        self.board.pulse.follow(self.pulse)
        self.pulse = self.board.pulse
        command, environment = command_of("reliq.supervisor.main")
        if plan.metrics:
            environment[METRICS_VARIABLE] = str(self.folder / METRICS_FOLDER)
        # Block SIGUSR1 until the process has a handler for it, because its default action ends the process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            self.process = subprocess.Popen(  # noqa: S603  ours
                command, stdin=subprocess.PIPE, text=True, process_group=0, env=environment
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.process.stdin is not None:
            own = replace(plan, board=str(path), report=str(self.report))
            self.process.stdin.write(own.as_line())
            self.process.stdin.flush()

    def note_end(self, returncode: int) -> None:
        """Count failures at the start; a process that has completed its start resets the count."""
        self.note_work()
        if self.has_worked:
            self.failures = self.crashes = 0
            return
        self.failures += 1
        self.crashes += (returncode > 0 and returncode != EXIT_CONFIG) or -returncode in CRASHES

    def may_start(self) -> bool:
        """Return whether it is time to start a process."""
        wait = min(RESTART_SECONDS * float(2 ** max(0, self.failures - 1)), SLOWEST_RESTART_SECONDS)
        return time.monotonic() >= self.started_at + wait

    def ask_to_leave(self, reason: str) -> None:
        """Request a graceful shutdown of the process."""
        self.end_reason = reason
        if self.board is not None:
            self.board.ask_to_leave()

    def hear(self, now: float) -> list[Row]:
        """Update the signs of life of a started process; return the rows that exceeded their timeouts."""
        self.note_work()
        if self.board is None or not self.has_worked:
            return []
        gap = self.silence.hear(self.board.beat, now, self.pid)
        overran = self.overran(now)
        self.overrun_seconds = self.overrun_seconds + gap if overran else 0.0
        complains = self.pulse.is_ready and not self.board.leaves and self.pulse.complaint(now)
        self.complained = self.complained + gap if complains and not self.silence.seconds > HARD_LIMIT_SECONDS else 0.0
        return overran

    def rows(self, *, is_silent: bool = False) -> list[Row]:
        """Return the handler calls that the process runs."""
        return [] if self.board is None else self.board.rows(is_silent=is_silent)

    @contextmanager
    def stopped(self) -> Iterator[bool]:
        """Stop the process by SIGSTOP within a `with` block; yield whether it has stayed silent."""
        self.signal(signal.SIGSTOP)
        until = time.monotonic() + STOPPED_SECONDS
        stands = False  # whether all its threads have stopped
        try:
            while not stands and self.process is not None and self.process.poll() is None and time.monotonic() < until:
                time.sleep(STOPPED_SECONDS / 100)
                stands = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
            stands = stands or self.process is None
            yield stands and self.board is not None and self.board.beat == self.silence.beat
        finally:
            self.signal(signal.SIGCONT)

    def overran(self, now: float, *, since: float = 0.0) -> list[Row]:
        """Return the rows that exceeded a timeout after `since`, and that the process did not end itself in time."""
        silent = self.silence.seconds > HARD_LIMIT_SECONDS
        return [
            row
            for row in self.rows(is_silent=silent)
            if row.timeout_at > since
            and now
            > row.timeout_at + HARD_LIMIT_SECONDS + (CANCEL_SECONDS if row.queue in self._async and not silent else 0)
        ]

    def is_half_lease_over(self, overran: Sequence[Row]) -> bool:
        """Return whether half of the shortest lease of `overran` has passed since the first timeout."""
        queues = {row.queue for row in overran}
        leases = [handler.lease_seconds for handler in self.handlers if handler.queue.name in queues]
        shortest = min(leases, default=math.inf)
        return self.overrun_seconds + HARD_LIMIT_SECONDS > shortest / 2

    def gil_holders(self, now: float) -> list[Row]:
        """Return the rows that may hold the GIL or have exceeded their timeouts."""
        rows = self.rows(is_silent=True)
        late = self.overran(now)
        threads = self.silence.gil_holders(self.pid, {row.thread for row in rows}, now)
        return [row for row in rows if row.thread in threads or row in late]

    def has_started(self, rows: Sequence[Row], queue: str, id: str) -> bool:
        """Return whether a message has, or may have, started; rows of coroutines and batches contain no message id."""
        if any(row.queue == queue and row.id in ("", id) for row in rows):
            return True
        return queue in self._async and any(not row.queue for row in rows)

    def kill(self, reason: str, charged: list[Row] | None = None) -> None:
        """Kill the process; store the reason, and the rows of messages that lose a retry."""
        self.end_reason = reason
        self.charged = charged
        self.is_killed = True
        self.signal(signal.SIGKILL)

    def why(self, returncode: int) -> str:
        """Return why the process ended, in one word for metrics."""
        if self.end_reason:
            return self.end_reason
        known = {0: "jobs", EXIT_REPLACE: "jobs", EXIT_HUNG: "hung"}
        return known.get(returncode, "killed" if returncode < 0 else "crashed")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process is alive."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def collect(self) -> subprocess.Popen[str] | None:
        """Return the dead process, and kill programs that its handlers started, by their process group."""
        process = self.process
        self.process = None
        if process is None:
            return None
        with suppress(OSError):  # the group is empty
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            with suppress(OSError):  # it may have died before it read its plan
                process.stdin.close()
        return process

    def remove_files(self) -> None:
        """Remove the files of a dead process."""
        for path in (self.folder / f"board-{self.number}", self.report, self.report.with_suffix(".half")):
            path.unlink(missing_ok=True)

    def memory_bytes(self) -> int:
        """Return the resident memory of the process in bytes; 0 if it has ended."""
        try:
            return 0 if self.process is None else int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def note_work(self) -> None:
        """Store whether the process has completed its start."""
        self.has_worked = self.has_worked or self.pulse.is_ready or bool(self.rows())

    @property
    def _async(self) -> set[str]:
        """The queues with coroutine handlers."""
        return {handler.queue.name for handler in self.handlers if handler.is_async}
