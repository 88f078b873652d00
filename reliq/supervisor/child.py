"""
The supervisor's view of a worker process: its start, its signs of life and its end, and the folder for metrics.

While a handler holds the GIL, its process cannot give signs of life. The supervisor then reads the CPU times of the
process' threads to find the thread that runs this handler.
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
from reliq.worker.slots import CANCEL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.handlers.handler import Handler
    from reliq.supervisor.plan import ChildPlan
    from reliq.supervisor.status import ProcessStatusView, Row
    from reliq.worker.health import Pulse

PREFIX = "reliq-worker-"
#: The environment variable in which prometheus_client expects the path of the folder for the metrics of all processes.
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
#: A worker that starts removes old metrics folders, but no folder that is younger than this many seconds.
#: Another worker may have created this folder, and may not have locked it yet.
YOUNG_SECONDS = 60.0
#: A thread counts as computing if it used at least this share of the elapsed time as CPU time.
#: The share is small, because on a busy machine a computing thread may get little CPU time.
LEAST_SHARE = 0.05
#: A process that ended is replaced at the earliest RESTART_SECONDS after its start.
#: If processes die while they start, this delay doubles with each death, up to SLOWEST_RESTART_SECONDS.
RESTART_SECONDS = 1.0
SLOWEST_RESTART_SECONDS = 60.0
#: When a handler has exceeded its timeout, the supervisor waits this many seconds before it acts.
#: During this time, the worker process itself may end the handler.
HARD_LIMIT_SECONDS = 1.0
#: Between two checks, the supervisor counts at most this many seconds as time without a sign of life.
#: So if the whole machine was paused, the processes do not count as silent for the time of the pause.
LONGEST_GAP_SECONDS = 1.0
#: If a process gives no sign of life for this many seconds, the supervisor first reads the CPU times of its threads.
LOOK_CLOSER_SECONDS = 0.75
#: After it has sent SIGSTOP, the supervisor waits at most this many seconds until all threads of the process stop.
STOPPED_SECONDS = 0.1
#: A process counts as crashed if one of these signals ended it.
#: Other signals, such as SIGKILL, are usually sent to the process from outside.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS)


class Folder:
    """
    A private temporary folder in which the worker processes store their metrics.

    Attributes:
        path: the path of the folder; it changes if `restore` creates a new folder.

    Raises:
        ConfigurationError: no temporary folder can be created.
    """

    def __init__(self) -> None:
        try:
            self._make()
        except OSError as error:
            raise ConfigurationError(
                f"a worker needs a folder for its metrics: {error}; set TMPDIR to a writable folder"
            ) from error
        for path in self.path.parent.glob(f"{PREFIX}*"):  # remove folders that killed workers left behind
            with suppress(OSError):  # skip a folder that is locked, not accessible or already removed
                stat = path.lstat()
                is_young = time.time() - stat.st_mtime < YOUNG_SECONDS
                if not (path.is_symlink() or stat.st_uid != os.geteuid() or is_young):
                    descriptor = _lock(path)
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(descriptor)

    def restore(self) -> None:
        """
        Create a new folder, at a new path, if the folder of this process was removed.

        If a different folder has the old path now, do not touch it, because it may belong to another user.
        """
        try:
            is_there = os.path.samestat(self.path.lstat(), self._made)
        except OSError:
            is_there = False
        if not is_there:
            Path(tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)
            before = self._lock
            self._make()  # if this fails, the next call of `restore` tries again
            with suppress(OSError):
                os.close(before)

    def _make(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._made = self.path.lstat()
        self._lock = -1
        with suppress(OSError):  # the file system may not support locks
            self._lock = _lock(self.path)

    def close(self) -> None:
        """Remove the folder and its content."""
        with suppress(OSError):
            os.close(self._lock)
        self._lock = -1
        shutil.rmtree(self.path, ignore_errors=True)


def _lock(path: Path) -> int:
    """
    Lock a folder, so that systemd-tmpfiles and other workers do not remove it.

    Returns:
        The file descriptor that holds the lock.

    Raises:
        OSError: another process has the lock, or the file system does not support locks.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Activity(NamedTuple):
    """
    The CPU time and context switches of a thread since its start.

    Attributes:
        seconds: the CPU time in seconds.
        waits: the number of voluntary context switches; 0 if the system does not report it. A thread that waits for the
            GIL makes many context switches.
    """

    seconds: float
    waits: int


def activities(pid: int) -> dict[int, Activity]:
    """
    Return the CPU time and the context switches of each thread of a process, by thread id.

    The result is empty if the system does not report them.
    """
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


def has_stopped(pid: int) -> bool:
    """Return whether all threads of a child process have stopped after SIGSTOP."""
    if hasattr(os, "waitid"):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    with suppress(psutil.Error):  # on macOS, `os.waitid` exists since Python 3.13
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


class OrphanKiller:
    """
    Start the guard process, and send it the pid of each worker process that has started or ended.

    If the supervisor dies, the standard input of the guard ends. Then the guard kills the remaining worker processes.
    """

    def __init__(self) -> None:
        # With the options -I and -S, Python imports nothing of the application, so the guard needs little memory.
        self._process = subprocess.Popen(  # noqa: S603  ours
            [sys.executable, "-I", "-S", guard_main.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._process.wait()  # the started process only forks the guard process, and then ends

    def note(self, pid: int, *, begins: bool) -> None:
        """Notify the guard that the worker process `pid` has started, if `begins` is True, or has ended."""
        if self._process.stdin is not None:
            with suppress(OSError):  # the guard process may have been killed
                self._process.stdin.write(f"{'+' if begins else '-'}{pid}\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """End the guard process; call this after all worker processes have ended."""
        self._process.communicate()


@dataclass(slots=True)
class HeartbeatMonitor:
    """
    Measure how long a process has given no sign of life.

    Such a process is called silent. A process is silent, for example, while a handler holds the GIL.

    Attributes:
        seconds: how long the process has been silent, in seconds; 0.0 if it is not silent.
        since: the monotonic time at which the silence began.
        helped_at: the value of `seconds` when the supervisor last renewed the leases of the process; 0.0 if the
            supervisor has not renewed them since the last sign of life.
        beat: the monotonic time of the last sign of life.
    """

    seconds: float = 0.0
    since: float = 0.0
    helped_at: float = 0.0
    beat: float = 0.0
    _heard_at: float = 0.0
    _before: dict[int, Activity] = field(default_factory=dict)
    _looked_at: float = 0.0

    def hear(self, beat: float, now: float, pid: int) -> float:
        """
        Update how long a process has been silent.

        Args:
            beat: the monotonic time of the last sign of life of the process.
            now: the current monotonic time.
            pid: the process id.

        Returns:
            The seconds since the previous call of `hear`, at most LONGEST_GAP_SECONDS.
        """
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
        Return which of the thread ids `threads` belong to threads that may hold the GIL.

        The thread that used the most CPU time during the silence holds the GIL, if it used enough to count as computing
        (see LEAST_SHARE). If no thread computes, return the threads without context switches, because a thread that
        waits for the GIL switches contexts often. If this finds none of `threads`, return all of them.
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
    The supervisor's view of one worker process, which may not have started yet.

    Attributes:
        board: the status that the process writes to shared memory.
        handlers: the handlers that the process runs.
        pulse: the health data of the process; before its start, the health data of the dead process that it replaces.
        process: the process; None before the start and after the end.
        silence: measures how long the process has given no sign of life.
        started_at: the monotonic time of the last start.
        failures: how many earlier processes in a row died while they started.
        crashes: how many of these earlier processes crashed, without processes that were killed from outside or that
            had wrong settings.
        complained: for how many seconds `pulse` has shown a problem although the process gives signs of life.
        overrun_seconds: for how many seconds a handler has exceeded its timeout, without pauses of the machine; 0.0 if
            no handler has exceeded its timeout.
        has_worked: whether the process has completed its start.
        done: whether the process has finished its work, so that no other process is started in its place.
        is_killed: whether the supervisor has killed the process.
        is_helped: whether the supervisor is renewing the leases of the process.
        end_reason: why the supervisor has ended the process, in one word; empty if the process ended by itself.
        charged: the status rows of the messages that lose a retry because the process was killed; None if all messages
            whose handlers had started lose a retry.
    """

    board: ProcessStatusView
    handlers: Sequence[Handler]
    pulse: Pulse = field(init=False)
    process: subprocess.Popen[str] | None = None
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

    def __post_init__(self) -> None:
        self.pulse = self.board.pulse

    @property
    def pid(self) -> int:
        """The process id; 0 before the start and after the end of the process."""
        return 0 if self.process is None else self.process.pid

    def start(self, plan: ChildPlan) -> None:
        """Start the process, and send it `plan` through a pipe that closes when the supervisor ends."""
        self.board.pulse.follow(self.pulse)
        self.pulse = self.board.pulse
        command, environment = command_of("reliq.supervisor.main")
        if plan.metrics:
            environment[METRICS_VARIABLE] = plan.metrics
        # Block SIGUSR1 in the new process, because this signal would end it before its signal handler is installed.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            self.process = subprocess.Popen(  # noqa: S603  ours
                command,
                stdin=subprocess.PIPE,
                text=True,
                process_group=0,
                env=environment,
                pass_fds=[self.board.descriptor],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.process.stdin is not None:
            self.process.stdin.write(replace(plan, board=self.board.descriptor).as_line())
            self.process.stdin.flush()

    def note_end(self, returncode: int) -> None:
        """
        If the process ended while it started, increase `failures`; if it crashed, also increase `crashes`.

        If the process had completed its start, set `failures` and `crashes` to 0.
        """
        self.note_work()
        if self.has_worked:
            self.failures = self.crashes = 0
            return
        self.failures += 1
        self.crashes += (returncode > 0 and returncode != EXIT_CONFIG) or -returncode in CRASHES

    def may_start(self) -> bool:
        """Return whether enough time has passed since the last start to start the process again."""
        wait = min(RESTART_SECONDS * float(2 ** max(0, self.failures - 1)), SLOWEST_RESTART_SECONDS)
        return time.monotonic() >= self.started_at + wait

    def ask_to_leave(self, reason: str) -> None:
        """Ask the process to stop claiming, and to end when its handlers have finished; store `reason`."""
        self.end_reason = reason
        self.board.ask_to_leave()

    def hear(self, now: float) -> list[Row]:
        """
        Read the signs of life and the health data of the process, and update the attributes of this object.

        Do nothing until the process has completed its start.

        Returns:
            The status rows of handler calls that exceeded their timeouts; see `overran`.
        """
        self.note_work()
        if not self.has_worked:
            return []
        gap = self.silence.hear(self.board.beat, now, self.pid)
        overran = self.overran(now)
        self.overrun_seconds = self.overrun_seconds + gap if overran else 0.0
        complains = self.pulse.is_ready and not self.board.leaves and self.pulse.complaint(now)
        self.complained = self.complained + gap if complains and not self.silence.seconds > HARD_LIMIT_SECONDS else 0.0
        return overran

    @contextmanager
    def stopped(self) -> Iterator[bool]:
        """
        Pause the process by SIGSTOP within a `with` block.

        The context manager yields True if the process is paused, and has given no sign of life since the supervisor
        last checked it.
        """
        self.signal(signal.SIGSTOP)
        until = time.monotonic() + STOPPED_SECONDS
        stands = False  # whether SIGSTOP has stopped all threads of the process
        try:
            while not stands and self.process is not None and self.process.poll() is None and time.monotonic() < until:
                time.sleep(STOPPED_SECONDS / 100)
                stands = has_stopped(self.pid)
            stands = stands or self.process is None
            yield stands and self.board.beat == self.silence.beat
        finally:
            self.signal(signal.SIGCONT)

    def overran(self, now: float, *, since: float = 0.0) -> list[Row]:
        """
        Return the status rows of handler calls that exceeded their timeout.

        Leave out calls that the worker process may still end itself, for example by cancelling a coroutine.

        Args:
            now: the current monotonic time.
            since: leave out calls that exceeded their timeout before this monotonic time.
        """
        silent = self.silence.seconds > HARD_LIMIT_SECONDS
        return [
            row
            for row in self.board.rows(is_silent=silent)
            if row.timeout_at > since
            and now
            > row.timeout_at + HARD_LIMIT_SECONDS + (CANCEL_SECONDS if row.queue in self._async and not silent else 0)
        ]

    def is_half_lease_over(self, overran: Sequence[Row]) -> bool:
        """
        Return whether half of the shortest lease has passed since the first call in `overran` exceeded its timeout.

        Only the leases of the queues of these calls count.
        """
        queues = {row.queue for row in overran}
        leases = [handler.lease_seconds for handler in self.handlers if handler.queue.name in queues]
        shortest = min(leases, default=math.inf)
        return self.overrun_seconds + HARD_LIMIT_SECONDS > shortest / 2

    def gil_holders(self, now: float) -> list[Row]:
        """
        Return the status rows of handler calls that may hold the GIL, or that exceeded their timeouts.

        `now` is the monotonic time.
        """
        rows = self.board.rows(is_silent=True)
        late = self.overran(now)
        threads = self.silence.gil_holders(self.pid, {row.thread for row in rows}, now)
        return [row for row in rows if row.thread in threads or row in late]

    def has_started(self, rows: Sequence[Row], queue: str, id: str) -> bool:
        """
        Return whether the handler of a message may have started, according to the status rows `rows`.

        The row of a batch and the row that all coroutines share contain no message id. So each of these rows may stand
        for any message of its queues.
        """
        if any(row.queue == queue and row.id in ("", id) for row in rows):
            return True
        return queue in self._async and any(not row.queue for row in rows)

    def kill(self, reason: str, charged: list[Row] | None = None) -> None:
        """Kill the process and store `reason`. The messages with the status rows `charged` lose a retry."""
        self.end_reason = reason
        self.charged = charged
        self.is_killed = True
        self.signal(signal.SIGKILL)

    def why(self, returncode: int) -> str:
        """Return why the process ended, as one word for metrics."""
        if self.end_reason:
            return self.end_reason
        known = {0: "jobs", EXIT_REPLACE: "jobs", EXIT_HUNG: "hung"}
        return known.get(returncode, "killed" if returncode < 0 else "crashed")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process is alive."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def collect(self) -> subprocess.Popen[str] | None:
        """
        Return the process that has ended, and set `process` to None.

        Also kill the programs that its handlers started, if they are still in its process group.
        """
        process = self.process
        self.process = None
        if process is None:
            return None
        with suppress(OSError):  # the process group has no processes any more
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            with suppress(OSError):  # `close` fails if the process died before it read its plan
                process.stdin.close()
        return process

    def memory_bytes(self) -> int:
        """Return the resident memory of the process in bytes; 0 if it has ended."""
        try:
            return 0 if self.process is None else int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def note_work(self) -> None:
        """Set `has_worked` if the process has completed its start."""
        self.has_worked = self.has_worked or self.pulse.is_ready or bool(self.board.rows())

    @property
    def _async(self) -> set[str]:
        """The names of the queues with coroutine handlers."""
        return {handler.queue.name for handler in self.handlers for each in handler.each if each.is_async}
