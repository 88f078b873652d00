"""
A worker process as its supervisor sees it: its start, its signs of life, its end, and its files.

A handler may hold the GIL, and its process then gives no sign of life: the supervisor compares the CPU time of its threads
to find the handler.
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
#: The variable of Prometheus' client that names that folder to the processes.
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
#: A folder is not swept in its first minute: it may not be locked yet.
YOUNG_SECONDS = 60.0
#: A thread that computes has at least a twentieth of the time between two looks, on a busy machine too.
LEAST_SHARE = 0.05
#: A process starts again after 1 s; one that dies at its start waits twice as long each time, up to 60 s.
RESTART_SECONDS = 1.0
SLOWEST_RESTART_SECONDS = 60.0
#: A handler has 1 s beyond its timeout, in which its own process may end it.
HARD_LIMIT_SECONDS = 1.0
#: At most 1 s of silence counts between two looks: the supervisor may have been paused together with its children.
LONGEST_GAP_SECONDS = 1.0
#: The supervisor begins to compare the threads of a process after 0.75 s of silence.
LOOK_CLOSER_SECONDS = 0.75
#: A process has 0.1 s to stand still: one that waits for a disk may take longer, and a supervisor has more to do.
STOPPED_SECONDS = 0.1
#: The signals by which a process ends itself; all others are sent from outside.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS)


class Folder:
    """
    A temporary folder of this process alone.

    Attributes:
        path: where it is; another folder after the first was cleaned away.

    Raises:
        ConfigurationError: there is no place for one.
    """

    def __init__(self) -> None:
        try:
            self._make()
        except OSError as error:
            raise ConfigurationError(
                f"a worker needs a folder for temporary files: {error}; set TMPDIR to one"
            ) from error
        for path in self.path.parent.glob(f"{PREFIX}*"):  # remove the folders of workers that were killed
            with suppress(OSError):  # it is in use, it is another user's, or has gone meanwhile
                stat = path.lstat()
                is_young = time.time() - stat.st_mtime < YOUNG_SECONDS
                if not (path.is_symlink() or stat.st_uid != os.geteuid() or is_young):
                    descriptor = _lock(path)
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(descriptor)

    def restore(self, within: str) -> None:
        """
        Make another folder if this one was cleaned away, and the folder `within` it.

        Another user may have made a folder of the same name since.
        """
        try:
            is_there = os.path.samestat(self.path.lstat(), self._made)
        except OSError:
            is_there = False
        if not is_there:
            Path(tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)
            before = self._lock
            self._make()  # when it fails, the lock is closed by the next try, once
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
    """Lock a folder against systemd-tmpfiles and other workers; return the lock's descriptor, raise OSError if it is taken."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Activity(NamedTuple):
    """
    The work of a thread since it began.

    Attributes:
        seconds: its CPU time.
        waits: how often it gave up the CPU by itself; a thread that waits for the GIL does so all the time. 0 where the
            system does not show it.
    """

    seconds: float
    waits: int


def activities(pid: int) -> dict[int, Activity]:
    """Return the activity of each thread of a process; nothing where the system does not show it."""
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
    """Starts the guard, and sends it the number of each process that begins or ends; its input ends with this process."""

    def __init__(self) -> None:
        # Isolated and without site, it imports nothing of the user's, and is small.
        self._process = subprocess.Popen(  # noqa: S603  ours
            [sys.executable, "-I", "-S", guard_main.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._process.wait()  # the guard is its child, and is not waited for

    def note(self, pid: int, *, begins: bool) -> None:
        """Have the guard watch a process that begins, and watch it no more when it has ended."""
        if self._process.stdin is not None:
            with suppress(OSError):  # the guard was killed
                self._process.stdin.write(f"{'+' if begins else '-'}{pid}\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """End the guard's input: the supervisor itself has ended its children."""
        self._process.communicate()


@dataclass(slots=True)
class HeartbeatMonitor:
    """
    The time for which the interpreter of a process has let no thread give a sign of life.

    Attributes:
        seconds: its length, 0.0 while there are signs.
        since: when it began, in monotonic seconds.
        helped_at: its length when the supervisor last renewed the leases.
        beat: when the last sign of life was given, in monotonic seconds.
    """

    seconds: float = 0.0
    since: float = 0.0
    helped_at: float = 0.0
    beat: float = 0.0
    _heard_at: float = 0.0
    _before: dict[int, Activity] = field(default_factory=dict)
    _looked_at: float = 0.0

    def hear(self, beat: float, now: float, pid: int) -> float:
        """Note the last sign of life; return the seconds since the last call, as far as the supervisor was awake."""
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
        Return those of `threads` that may hold the GIL, by their activity since the silence began.

        A thread that computes holds it. Where none computes, a thread that sleeps does, and it does not wait for the GIL.
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
    A process, or the place for one.

    Attributes:
        handlers: the handlers of the process, in its own order.
        has_worked: the process has entered its lifespan, and owes signs of life since.
        failures: how many processes in a row have died here at their start.
        crashes: how many of them ended by themselves; the others were killed from outside.
        complained: for how many seconds the process, awake, has made no claim round.
        overrun_seconds: for how long handlers have overrun their timeouts, as far as the supervisor was awake.
        done: no other process is to be started here.
        is_killed: the supervisor has killed the process.
        is_helped: the supervisor is about to renew its leases, or does so.
        end_reason: why the supervisor has ended the process, in one word; empty when it ended by itself.
        charged: the rows whose messages pay for its end; None when that is unknown, and all that had started pay.
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
        """The file in which the process names what it could not finish."""
        return self.folder / f"report-{self.number}"

    @property
    def pid(self) -> int:
        """The id of the process, 0 when there is none."""
        return 0 if self.process is None else self.process.pid

    def start(self, plan: ChildPlan) -> None:
        """Start a process with `plan`; its standard input stays open as long as the supervisor lives."""
        path = self.folder / f"board-{self.number}"
        self.board = ProcessStatusView(
            path, [handler.queue.name for handler in self.handlers], plan.settings.concurrency
        )
        self.board.pulse.follow(self.pulse)
        self.pulse = self.board.pulse
        command, environment = command_of("reliq.supervisor.main")
        if plan.metrics:
            environment[METRICS_VARIABLE] = str(self.folder / METRICS_FOLDER)
        # SIGUSR1 is held back until the process has a handler for it: its default is to end the process.
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
        """Count the end of a process at its start; one that has worked, if for a moment, begins the count anew."""
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
        """Have the process claim no more, let its handlers finish and end."""
        self.end_reason = reason
        if self.board is not None:
            self.board.ask_to_leave()

    def hear(self, now: float) -> list[Row]:
        """Note a sign of life, or a silence, once the process works; return the rows that overran their timeouts."""
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
        """Return what the process runs."""
        return [] if self.board is None else self.board.rows(is_silent=is_silent)

    @contextmanager
    def stopped(self) -> Iterator[bool]:
        """Let the process not run within a `with` block; yield whether it has stood still since its silence began."""
        self.signal(signal.SIGSTOP)
        until = time.monotonic() + STOPPED_SECONDS
        stands = False  # every thread of it does, a moment after SIGSTOP
        try:
            while not stands and self.process is not None and self.process.poll() is None and time.monotonic() < until:
                time.sleep(STOPPED_SECONDS / 100)
                stands = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
            stands = stands or self.process is None
            yield stands and self.board is not None and self.board.beat == self.silence.beat
        finally:
            self.signal(signal.SIGCONT)

    def overran(self, now: float, *, since: float = 0.0) -> list[Row]:
        """Return the rows that overran a timeout after `since`, and that the process had the time to end itself."""
        silent = self.silence.seconds > HARD_LIMIT_SECONDS
        return [
            row
            for row in self.rows(is_silent=silent)
            if row.timeout_at > since
            and now
            > row.timeout_at + HARD_LIMIT_SECONDS + (CANCEL_SECONDS if row.queue in self._async and not silent else 0)
        ]

    def is_half_lease_over(self, overran: Sequence[Row]) -> bool:
        """Return whether half of the shortest lease among `overran` has passed since a timeout was over."""
        queues = {row.queue for row in overran}
        leases = [handler.lease_seconds for handler in self.handlers if handler.queue.name in queues]
        shortest = min(leases, default=math.inf)
        return self.overrun_seconds + HARD_LIMIT_SECONDS > shortest / 2

    def gil_holders(self, now: float) -> list[Row]:
        """Return the rows whose handlers may hold the GIL, or overran their timeouts."""
        rows = self.rows(is_silent=True)
        late = self.overran(now)
        threads = self.silence.gil_holders(self.pid, {row.thread for row in rows}, now)
        return [row for row in rows if row.thread in threads or row in late]

    def has_started(self, rows: Sequence[Row], queue: str, id: str) -> bool:
        """Return whether a message is among `rows`, or may be: a row of coroutines or of a batch names no message."""
        if any(row.queue == queue and row.id in ("", id) for row in rows):
            return True
        return queue in self._async and any(not row.queue for row in rows)

    def kill(self, reason: str, charged: list[Row] | None = None) -> None:
        """Kill the process, and note why and which rows pay for it."""
        self.end_reason = reason
        self.charged = charged
        self.is_killed = True
        self.signal(signal.SIGKILL)

    def why(self, returncode: int) -> str:
        """Return in one word why the process ended, for the metrics."""
        if self.end_reason:
            return self.end_reason
        known = {0: "jobs", EXIT_REPLACE: "jobs", EXIT_HUNG: "hung"}
        return known.get(returncode, "killed" if returncode < 0 else "crashed")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process lives."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def collect(self) -> subprocess.Popen[str] | None:
        """Return the dead process, and kill whatever its handlers have started: all of it is in the process's group."""
        process = self.process
        self.process = None
        if process is None:
            return None
        with suppress(OSError):  # nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            with suppress(OSError):  # it may have died before it read its plan
                process.stdin.close()
        return process

    def remove_files(self) -> None:
        """Remove the files of a process that is dead."""
        for path in (self.folder / f"board-{self.number}", self.report, self.report.with_suffix(".half")):
            path.unlink(missing_ok=True)

    def memory_bytes(self) -> int:
        """Return the process's resident memory, 0 when it is gone."""
        try:
            return 0 if self.process is None else int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def note_work(self) -> None:
        """Note whether the process has come through its start."""
        self.has_worked = self.has_worked or self.pulse.is_ready or bool(self.rows())

    @property
    def _async(self) -> set[str]:
        """The queues whose handlers are coroutines."""
        return {handler.queue.name for handler in self.handlers if handler.is_async}
