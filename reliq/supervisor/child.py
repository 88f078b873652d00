"""
A worker process as its supervisor sees it: start, signs of life, end and files.

If a handler holds the GIL, its process gives no sign of life. The supervisor then reads the CPU times of the threads to
find the thread of this handler.
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
#: The environment variable with which the Prometheus client finds the folder for the metrics of all processes.
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
#: Do not remove folders younger than this many seconds, because a new worker may not have locked its folder yet.
YOUNG_SECONDS = 60.0
#: A thread counts as computing if its CPU time is at least this share of the time between two checks.
#: The share is small, because the machine may be busy.
LEAST_SHARE = 0.05
#: A process that ended is replaced at the earliest RESTART_SECONDS after its start.
#: If processes die while they start, this time doubles with each death, up to SLOWEST_RESTART_SECONDS.
RESTART_SECONDS = 1.0
SLOWEST_RESTART_SECONDS = 60.0
#: The supervisor acts this many seconds after a handler's timeout; until then, the worker process may end the handler.
HARD_LIMIT_SECONDS = 1.0
#: Count at most this many seconds of silence between two checks: a pause of the machine must not count as silence.
LONGEST_GAP_SECONDS = 1.0
#: After this many seconds without a sign of life, the supervisor first reads the CPU times of a process's threads.
LOOK_CLOSER_SECONDS = 0.75
#: How long to wait at most until SIGSTOP has stopped all threads of a process.
STOPPED_SECONDS = 0.1
#: A process that one of these signals ended counts as crashed. Other signals, such as SIGKILL, come from outside.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS)


class Folder:
    """
    A private temporary folder for the metrics of the processes.

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
        for path in self.path.parent.glob(f"{PREFIX}*"):  # remove the folders of workers that were killed
            with suppress(OSError):  # the folder is in use, has another owner, or is already removed
                stat = path.lstat()
                is_young = time.time() - stat.st_mtime < YOUNG_SECONDS
                if not (path.is_symlink() or stat.st_uid != os.geteuid() or is_young):
                    descriptor = _lock(path)
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(descriptor)

    def restore(self) -> None:
        """
        Create a new folder, at a new path, if the folder of this process was removed.

        A different folder that has the old path now is left alone, because it may belong to another user.
        """
        try:
            is_there = os.path.samestat(self.path.lstat(), self._made)
        except OSError:
            is_there = False
        if not is_there:
            Path(tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)
            before = self._lock
            self._make()  # if no folder can be created, the next call of `restore` tries again
            with suppress(OSError):
                os.close(before)

    def _make(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._made = self.path.lstat()
        self._lock = -1
        with suppress(OSError):  # not every file system has locks
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
        OSError: another process has the lock, or the file system has no locks.
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
        waits: the number of voluntary context switches: a thread that waits for the GIL makes many. 0 if the system does
            not report this number.
    """

    seconds: float
    waits: int


def activities(pid: int) -> dict[int, Activity]:
    """
    Return the activity of each thread of a process, by thread id.

    The result is empty if the system does not report the activity.
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
    with suppress(psutil.Error):  # macOS has no waitid before Python 3.13
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


class OrphanKiller:
    """
    Start the guard process, and send it the id of each worker process that starts or ends.

    If this process dies, the guard's standard input ends, and the guard kills the remaining worker processes.
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
        self._process.wait()  # the started process forks the guard and ends at once

    def note(self, pid: int, *, begins: bool) -> None:
        """Notify the guard that a worker process starts (`begins`) or has ended."""
        if self._process.stdin is not None:
            with suppress(OSError):  # the guard was killed
                self._process.stdin.write(f"{'+' if begins else '-'}{pid}\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """End the guard, after the supervisor has ended all worker processes itself."""
        self._process.communicate()


@dataclass(slots=True)
class HeartbeatMonitor:
    """
    Measure how long a process has been silent, that is, without a sign of life.

    A process is silent for example if a handler holds the GIL.

    Attributes:
        seconds: how long the process has been silent, in seconds; 0.0 if it is not silent.
        since: the monotonic time at which the silence began.
        helped_at: how long the process had been silent when the supervisor last renewed its leases; 0.0 if never.
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
        Update the silence of a process.

        Args:
            beat: the monotonic time of its last sign of life.
            now: the current monotonic time.
            pid: its process id.

        Returns:
            The seconds since the previous call, at most LONGEST_GAP_SECONDS.
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
        Return which of `threads` may hold the GIL, by their activity since the silence began.

        A thread that computes holds the GIL. If no thread computes, return the threads without context switches: a
        thread that waits for the GIL switches contexts often. If the activity is unknown, return all of `threads`.
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
    A worker process as the supervisor sees it; the process may not be started yet.

    Attributes:
        board: the status that the process writes.
        handlers: the handlers that the process runs.
        pulse: the health data of the process; before its start, the health data of the dead process that it replaces.
        process: the process; None before the start and after the end.
        silence: measures the time without a sign of life.
        started_at: the monotonic time of the last start.
        failures: how many predecessors in a row died while they started.
        crashes: how many of these predecessors crashed; a kill from outside and wrong settings do not count.
        complained: for how many seconds `pulse` has shown a problem although the process gives signs of life.
        overrun_seconds: seconds since a handler exceeded its timeout, without the time when the machine was paused.
        has_worked: whether the process has completed its start.
        done: whether the process has finished its work, so that no other process is started in its place.
        is_killed: whether the supervisor has killed the process.
        is_helped: whether the supervisor is renewing the leases of the process.
        end_reason: why the supervisor has ended the process, in one word; empty if the process ended by itself.
        charged: the status rows of the messages that lose a retry when the process is killed; None for all messages
            that had started.
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
        """The process id; 0 without a process."""
        return 0 if self.process is None else self.process.pid

    def start(self, plan: ChildPlan) -> None:
        """Start the process and send it `plan`; its standard input ends when the supervisor ends."""
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
        Increase `failures`, and after a crash also `crashes`, if the process ended while it started.

        If the process had completed its start, reset `failures` and `crashes` to 0.
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
        """Ask the process to stop claiming and to end when its handlers have finished; store the reason."""
        self.end_reason = reason
        self.board.ask_to_leave()

    def hear(self, now: float) -> list[Row]:
        """
        Update the signs of life of a started process.

        Returns:
            The status rows of handler calls that exceeded their timeouts, see `overran`.
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

        The block gets a boolean: whether the process is paused and has sent no heartbeat since its parent last checked.
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

        Leave out calls that the process may still end itself, for example by a cancellation.

        Args:
            now: the current monotonic time.
            since: ignore timeouts before this monotonic time.
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
        Return whether half of a lease has passed since the first timeout of the handler calls `overran`.

        The lease is the shortest lease of these handlers.
        """
        queues = {row.queue for row in overran}
        leases = [handler.lease_seconds for handler in self.handlers if handler.queue.name in queues]
        shortest = min(leases, default=math.inf)
        return self.overrun_seconds + HARD_LIMIT_SECONDS > shortest / 2

    def gil_holders(self, now: float) -> list[Row]:
        """
        Return the status rows of handler calls that may hold the GIL.

        Handler calls that exceeded their timeouts are included.
        """
        rows = self.board.rows(is_silent=True)
        late = self.overran(now)
        threads = self.silence.gil_holders(self.pid, {row.thread for row in rows}, now)
        return [row for row in rows if row.thread in threads or row in late]

    def has_started(self, rows: Sequence[Row], queue: str, id: str) -> bool:
        """
        Return whether the handler of a message may have started, according to status rows.

        A row of a batch, or the common row of all coroutines, has no message id, so it may stand for any message.
        """
        if any(row.queue == queue and row.id in ("", id) for row in rows):
            return True
        return queue in self._async and any(not row.queue for row in rows)

    def kill(self, reason: str, charged: list[Row] | None = None) -> None:
        """Kill the process; store the reason, and the status rows of messages that lose a retry."""
        self.end_reason = reason
        self.charged = charged
        self.is_killed = True
        self.signal(signal.SIGKILL)

    def why(self, returncode: int) -> str:
        """Return the reason for the end of the process, as one word for metrics."""
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
        with suppress(OSError):  # the process group is empty
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            with suppress(OSError):  # the process may have died before it read its plan
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
