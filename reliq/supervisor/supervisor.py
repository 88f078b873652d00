"""
The supervisor of `reliq worker`: start, watch, replace and stop the worker processes.

`ServiceManager` notifies systemd that a worker or relay is ready, alive or stopping; see sd_notify(3).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from reliq.consumer import EXIT_SECOND_SIGNAL, STOPS, Consumer, SignalNotes, handle_signal
from reliq.errors import EXIT_CONFIG, ConfigurationError
from reliq.events import Observer, ProcessEnded, notify
from reliq.logs import Background
from reliq.settings import seconds
from reliq.supervisor.child import HARD_LIMIT_SECONDS, Child, Folder, OrphanKiller
from reliq.supervisor.plan import GIL_TIMEOUT_SECONDS, STOP_MARGIN_SECONDS, ChildPlan, fingerprint
from reliq.supervisor.recovery import Recovery, reap_orphans
from reliq.supervisor.status import ProcessStatusView
from reliq.worker import health

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.supervisor.status import Row
    from reliq.worker.health import Pulse


logger = logging.getLogger(__name__)

#: While the worker starts, it asks systemd every EXTEND_EVERY_SECONDS for EXTEND_SECONDS more time to start.
#: The start may take long, because Redis may be unavailable.
EXTEND_EVERY_SECONDS = 5.0
EXTEND_SECONDS = 30.0
EXTENSION = "EXTEND_TIMEOUT_USEC={:.0f}"
#: How many signs of life the worker sends to systemd in each period of systemd's watchdog.
SIGNS = 2
#: After the shutdown, atexit functions and the removal of files may take this many seconds.
EXIT_SECONDS = 5.0
#: The worker exits with EXIT_NO_START if all processes have crashed this many times in a row while they started.
START_TRIES = 4
EXIT_NO_START = 1
#: The supervisor checks the processes every WATCH_SECONDS, and their memory every MEMORY_SECONDS.
WATCH_SECONDS = 0.1
MEMORY_SECONDS = 1.0
#: A process that gives signs of life is killed if its health data shows a problem for this many seconds.
COMPLAINT_SECONDS = 5.0
#: During a shutdown, a process that is starting gets SIGTERM again at this interval, in seconds.
#: A signal can be lost, because Python drops exceptions that a signal handler raises within a `__del__`.
AGAIN_SECONDS = 1.0
#: How many seconds to wait until a killed process has ended.
KILL_SECONDS = 5.0
#: Before it exits, the supervisor takes at most this many seconds to return the messages of dead processes.
#: After a second stop signal, it takes at most HASTY_SECONDS.
GIVE_BACK_SECONDS = 2.0
HASTY_SECONDS = 0.5


class ServiceManager:
    """
    Notify systemd that the worker is ready, alive or stopping.

    If systemd did not start the worker, do nothing.

    The constructor removes systemd's variables from the environment, so that programs that handlers start cannot send
    notifications to systemd.
    """

    def __init__(self) -> None:
        # The address is a path, or the name of an abstract socket, which begins with @.
        address = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address if address.startswith("/") else ""
        microseconds = os.environ.pop("WATCHDOG_USEC", "")
        is_meant = os.environ.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self._sign_seconds = int(microseconds) / 1e6 / SIGNS if is_meant and microseconds.isdecimal() else 0.0
        self._is_ready = False
        self._extended_at = self._alive_at = float("-inf")

    def look(self, pulses: Sequence[Pulse]) -> None:
        """
        Notify systemd when all processes have started, and send signs of life to systemd's watchdog.

        While the processes start without a problem, ask systemd for more time to start.
        """
        if not self._address:
            return
        now = time.monotonic()
        if not self._is_ready:
            reason = health.ready(pulses, lambda: True)
            if not reason:
                self._is_ready = self._send("READY=1", f"STATUS=processes: {len(pulses)}")
            elif now - self._extended_at >= EXTEND_EVERY_SECONDS and not health.live(pulses):
                self._extended_at = now
                self._send(EXTENSION.format(EXTEND_SECONDS * 1e6), f"STATUS={reason}")
        if self._sign_seconds and now - self._alive_at >= self._sign_seconds and self._send("WATCHDOG=1"):
            self._alive_at = now

    def stop(self, seconds: float) -> None:
        """Notify systemd that the worker is stopping, and that this may take `seconds`."""
        if self._address:
            self._send("STOPPING=1", EXTENSION.format((seconds + EXIT_SECONDS) * 1e6), "STATUS=stopping")

    def _send(self, *lines: str) -> bool:
        """Send lines to systemd without blocking; return whether they were sent."""
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), self._address)
            return True
        return False


class Supervisor:
    """
    Start worker processes, watch them, and replace the processes that end.

    The thread of `run` starts, signals and reaps processes. It never waits for Redis: another thread calls Redis.

    Attributes:
        observers: functions that are called with a `ProcessEnded` event when a process has ended.
        children: a `Child` for each process that should run.

    Args:
        consumer: the consumer that the processes load; the supervisor uses its queues and its Redis connection.
        plan: the settings of the processes.
        processes: the number of processes to run.
        max_memory: bytes of resident memory after which a process is replaced; None for no limit.
        gil_timeout: seconds without a sign of life after which a process with several slots is killed.
        folder: the folder for the metrics of the processes; None for no metrics.
    """

    def __init__(
        self,
        consumer: Consumer,
        plan: ChildPlan,
        *,
        processes: int,
        max_memory: int | None = None,
        gil_timeout: float = GIL_TIMEOUT_SECONDS,
        folder: Folder | None = None,
    ) -> None:
        self.observers: list[Observer] = []
        self._plan = replace(plan, handlers=fingerprint(consumer.handlers))
        self._concurrency = plan.settings.concurrency
        self._grace = seconds("grace", plan.settings.grace)
        self._max_memory = max_memory
        self._gil_timeout = gil_timeout
        self._handlers = consumer.chosen(plan.queues) if consumer.handlers else []
        self._folder = folder
        self.children = [self._place() for _ in range(processes)]
        self._leaving: list[Child] = []  # replaced processes whose last handlers still run
        self._recovery = Recovery(consumer, self._concurrency)
        self._background = Background("reliq-recovery")
        self._has_worked = False  # whether any process has completed its start
        self._guard: OrphanKiller | None = None
        self._signals = SignalNotes()
        self._exit_code = 0
        self._memory_at = 0.0

    def run(self) -> int:
        """Run the processes until a stop signal arrives or all processes have finished; return the exit code."""
        for number in (*STOPS, signal.SIGHUP, signal.SIGUSR1):
            handle_signal(number, self._signals.note)
        manager = ServiceManager()
        self._guard = OrphanKiller()
        try:
            while not self._stopping and not all(child.done for child in self.children):
                self._look()
                manager.look(self.pulses())
                self._signals.wait(WATCH_SECONDS)
            manager.stop(self._grace + STOP_MARGIN_SECONDS)
            self._stop()
        finally:
            self._kill()
            self._background.wait(HASTY_SECONDS if self._exit_code == EXIT_SECOND_SIGNAL else GIVE_BACK_SECONDS)
            self._background.close()
            self._guard.close()
        return self._exit_code

    def stop(self) -> bool:
        """
        Start the same graceful shutdown as SIGTERM. Any thread may call this method.

        Returns:
            False if the shutdown has already begun; otherwise True.
        """
        if self._stopping:
            return False
        self._signals.note(signal.SIGTERM)
        return True

    def pids(self) -> dict[str, int]:
        """
        Return the pids of the supervisor and of its running processes, by the labels that metrics use.

        A process that replaces another process gets the same label.
        """
        places = {str(at): child.pid for at, child in enumerate(self.children)}
        leaving = {f"leaving-{at}": child.pid for at, child in enumerate(self._leaving)}
        running = {label: pid for label, pid in (places | leaving).items() if pid}
        return {"supervisor": os.getpid(), **running}

    def pulses(self) -> Sequence[Pulse]:
        """Return the health data (pulses) of all processes that should run, also before they have started."""
        return [child.pulse for child in self.children if not child.done]

    @property
    def _all(self) -> list[Child]:
        return [*self.children, *self._leaving]

    @property
    def _stopping(self) -> bool:
        return self._asked > 0 or self._exit_code != 0

    @property
    def _asked(self) -> int:
        """The number of stop signals received so far."""
        return sum(number != signal.SIGUSR1 for number in self._signals.numbers)

    @contextmanager
    def _guarded(self, child: Child) -> Iterator[None]:
        """Log unexpected errors in a `with` block and continue, because the supervisor must watch other processes."""
        try:
            yield
        except ConfigurationError:
            raise
        except Exception:
            logger.exception("process %d: internal error in its supervisor; retrying", child.pid)

    def _place(self) -> Child:
        queues = [handler.queue.name for handler in self._handlers]
        return Child(ProcessStatusView(queues, self._concurrency), self._handlers)

    def _replace(self, child: Child, place: Child) -> None:
        """In `children`, replace `child` by `place`, which will start the next process."""
        place.started_at = child.started_at
        place.failures = child.failures
        place.crashes = child.crashes
        if child.process is None:  # until the next start, health checks read the health data of the dead process
            place.pulse = child.pulse
        self.children[self.children.index(child)] = place

    def _look(self) -> None:
        """Check every process once: replace processes that ended, are ending, hang or need too much memory."""
        self._forward_stack_requests()
        reap_orphans([child.pid for child in self._all])
        self._look_at_each()
        is_full = len(self._leaving) >= len(self.children)
        max_memory = None
        if not is_full and time.monotonic() - self._memory_at >= MEMORY_SECONDS:
            self._memory_at = time.monotonic()
            max_memory = self._max_memory
        for child in list(self.children):
            with self._guarded(child):
                if child.process is None:
                    if not (child.done or self._stopping) and child.may_start():
                        self._start(child)
                elif child.board.leaves:
                    self._replace(child, self._place())
                    self._leaving.append(child)
                else:
                    child.board.let_stay(is_full)
                    if max_memory is not None and not child.end_reason and child.memory_bytes() > max_memory:
                        logger.warning(
                            "process %d has grown over --max-memory; replacing it after its handlers finish", child.pid
                        )
                        child.ask_to_leave("memory")

    def _look_at_each(self) -> None:
        for child in self._all:
            with self._guarded(child):
                if child.process is not None and child.process.poll() is not None:
                    self._reap(child)
                elif child.process is not None and not child.is_killed:
                    self._check(child)

    def _check(self, child: Child) -> None:
        """
        Check a running process. Kill it if a handler hangs, and renew its leases if it is silent.

        If a handler in a thread exceeds its timeout, only the end of the process can stop the handler. With several
        slots, the process stops claiming, a new process starts, and the other handlers may finish within half of a
        lease. Then the supervisor kills the old process. At this time, the lease of the handler's message has not
        expired, so the message never runs in two processes.
        """
        now = time.monotonic()
        overran = child.hear(now)
        self._has_worked = self._has_worked or child.has_worked
        silent = child.silence.seconds
        has_neighbours = self._concurrency > 1
        if overran and not has_neighbours:
            self._end(child, "overran", "its handler exceeded its timeout", overran)
        elif has_neighbours and silent > HARD_LIMIT_SECONDS and child.overran(now, since=child.silence.since):
            why = "a handler that holds the GIL exceeded its timeout"
            self._end(child, "overran", why, child.gil_holders(now))
        elif has_neighbours and silent > self._gil_timeout:
            self._end(child, "hung", f"a handler has held the GIL for {silent:.0f} s", child.gil_holders(now))
        elif overran and child.is_half_lease_over(overran) and not self._stopping:
            self._end(child, "overran", "a handler exceeded its timeout", overran)
        else:
            if overran and not (child.end_reason or self._stopping):
                ran = ", ".join(map(str, overran))
                logger.warning("process %d: a handler exceeded its timeout: %s; replacing the process", child.pid, ran)
                child.ask_to_leave("overran")
            if child.complained > COMPLAINT_SECONDS:
                self._end(child, "hung", child.pulse.complaint(now))
            elif silent and not child.is_helped:
                child.is_helped = True
                self._background.put(lambda: self._help(child))

    def _help(self, child: Child) -> None:
        try:
            self._recovery.help(child)
        except Exception:
            logger.exception("process %d: could not renew the leases of this silent process; retrying", child.pid)
        finally:
            child.is_helped = False

    def _end(self, child: Child, reason: str, why: str, charged: list[Row] | None = None) -> None:
        """
        Kill a process; log the reason and the running messages.

        Args:
            child: the process.
            reason: the reason in one word, for metrics.
            why: the reason as a sentence, for the log.
            charged: the status rows of messages that lose a retry; None if all messages that had started lose a retry.
        """
        running = child.board.rows() if charged is None else charged
        logger.warning(
            "process %d: %s; killed. Running messages: %s", child.pid, why, ", ".join(map(str, running)) or "none"
        )
        child.kill(reason, charged)

    def _start(self, child: Child) -> None:
        """Start a process. If this fails, log the error; the next check of the processes retries."""
        child.started_at = time.monotonic()
        plan = self._plan
        try:
            if self._folder is not None:
                self._folder.restore()
                plan = replace(plan, metrics=str(self._folder.path))
            child.start(plan)
        except OSError as error:
            child.signal(signal.SIGKILL)
            logger.warning("worker: could not start a process; retrying: %s", error)
        if self._guard is not None and child.pid:
            self._guard.note(child.pid, begins=True)

    def _reap(self, child: Child) -> None:
        """
        Handle the end of a process: replace the process, or end the worker.

        The background thread returns the messages of the process to their queues.
        """
        place = self._place()  # raises OSError if no file descriptor is free; the next check retries
        process = child.collect()
        if process is None:
            return
        code = process.returncode
        has_reported = bool(child.board.report)
        child.note_work()
        self._has_worked = self._has_worked or child.has_worked
        self._background.put(lambda: self._recover(child, process.pid))
        if self._guard is not None:
            self._guard.note(process.pid, begins=False)
        reason = ""
        if code == EXIT_CONFIG and not self._has_worked:
            self._exit_code = EXIT_CONFIG
        elif code == 0 and self._plan.settings.burst and has_reported:
            child.done = True  # if there is no report, a handler has called os._exit(0)
        elif not self._stopping:
            reason = child.why(code)
            level = logging.INFO if reason == "jobs" else logging.WARNING
            logger.log(level, "process %d ended with exit code %d (%s); starting another", process.pid, code, reason)
            child.note_end(code)
            if all(other.crashes >= START_TRIES for other in self.children):
                logger.error(
                    "worker: all processes failed to start %d times; exiting with code %d, see the errors above",
                    *(START_TRIES, EXIT_NO_START),
                )
                self._exit_code = EXIT_NO_START
        if child in self._leaving:
            self._leaving.remove(child)
        elif not child.done:
            self._replace(child, place)
        notify(self.observers, [ProcessEnded("", process.pid, reason)])

    def _recover(self, child: Child, pid: int) -> None:
        try:
            self._recovery.give_back(child, pid)
        except Exception:
            logger.exception(
                "process %d: could not return its messages; they are redelivered when their leases expire", pid
            )

    def _stop(self) -> None:
        """
        Shut all processes down gracefully, and return their unfinished messages to their queues.

        A second stop signal kills all processes.
        """
        for child in self._all:
            child.signal(signal.SIGTERM)
        asked = self._asked
        signalled_at = time.monotonic()
        until = signalled_at + self._grace + STOP_MARGIN_SECONDS - GIVE_BACK_SECONDS
        while time.monotonic() < until:
            if time.monotonic() >= signalled_at + AGAIN_SECONDS:
                signalled_at += AGAIN_SECONDS
                for child in self._all:
                    if not child.has_worked:
                        child.signal(signal.SIGTERM)
            if self._asked > max(1, asked):
                self._exit_code = EXIT_SECOND_SIGNAL
                for child in self._all:
                    child.kill("stopped", charged=[])
                return
            if all(child.process is None for child in self._all) and self._background.wait(WATCH_SECONDS / 2):
                return
            self._forward_stack_requests()
            self._look_at_each()
            self._signals.wait(WATCH_SECONDS / 2)

    def _kill(self) -> None:
        for child in self._all:
            child.signal(signal.SIGKILL)
        for child in self._all:
            with self._guarded(child):
                if child.process is not None:
                    with suppress(subprocess.TimeoutExpired):
                        child.process.wait(KILL_SECONDS)
                    self._reap(child)

    def _forward_stack_requests(self) -> None:
        """Forward each SIGUSR1 to the worker processes, which then log the stacks of their handlers."""
        while signal.SIGUSR1 in self._signals.numbers:
            self._signals.numbers.remove(signal.SIGUSR1)
            for child in self._all:
                child.signal(signal.SIGUSR1)
