"""Keeps the processes of a worker running: starts them, replaces the dead, ends those that hang, stops all in peace."""

from __future__ import annotations

import json
import logging
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from reliq import transitions
from reliq.child import BOARD_BYTES, EXIT_CONFIG, SETTLE_SECONDS, Plan
from reliq.connection import WORKER_TIMEOUT_SECONDS
from reliq.consumer import EXIT_HUNG, EXIT_REPLACE, EXIT_SECOND_SIGNAL
from reliq.doors.blocking import BlockingDoor
from reliq.errors import ReliqError
from reliq.events import ProcessEnded, notify
from reliq.health import Pulse
from reliq.message import Claimed
from reliq.settings import BATCH_LIMIT
from reliq.signals import SignalNotes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.consumer import Consumer
    from reliq.events import Observer

logger = logging.getLogger(__name__)

#: A child is not started again faster than this.
RESTART_SECONDS = 1.0
#: Between two looks at the children.
LOOK_SECONDS = 0.1
#: Between two looks at their memory.
MEMORY_SECONDS = 1.0
#: What a handler has beyond its timeout to let the child end it itself.
HARD_LIMIT_SECONDS = 1.0


@dataclass(slots=True)
class Child:
    """A place for one process: it may be taken by many in turn."""

    number: int
    folder: Path
    pulse: Pulse
    process: subprocess.Popen[str] | None = None
    started_at: float = -RESTART_SECONDS
    done: bool = False
    doomed: str = ""  # why we ended the process, empty when it ended by itself

    @property
    def board(self) -> Path:
        """The file in which the child says until when its handler may run."""
        return self.folder / f"board-{self.number}"

    @property
    def report(self) -> Path:
        """The file in which the child names what it could not finish."""
        return self.folder / f"report-{self.number}"

    def start(self, plan: Plan) -> None:
        """Start a process with `plan`; its standard input stays open as long as we live."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.board.write_bytes(bytes(BOARD_BYTES))
        self.report.unlink(missing_ok=True)
        self.pulse.note(None)
        self.doomed = ""
        command = [sys.executable, "-m", "reliq.child"]
        self.started_at = time.monotonic()
        # Held back until the child has a handler for it: its default is to end the process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, process_group=0)  # noqa: S603  ours
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.process.stdin is not None:
            self.process.stdin.write(self._own(plan).as_line())
            self.process.stdin.flush()

    def _own(self, plan: Plan) -> Plan:
        return replace(plan, board=str(self.board), report=str(self.report), pulse=str(self.pulse.path))

    def doom(self, number: signal.Signals, reason: str) -> None:
        """End the process, and remember why."""
        self.doomed = reason
        self.signal(number)

    def why(self, returncode: int) -> str:
        """Return why the process ended, in one word."""
        if self.doomed:
            return self.doomed
        known = {0: "jobs", EXIT_REPLACE: "jobs", EXIT_HUNG: "hung"}
        return known.get(returncode, "killed" if returncode < 0 else "crashed")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process lives."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def overruns(self) -> bool:
        """Say whether its handler is past the time at which the child itself would have ended it."""
        try:
            (until,) = struct.unpack("d", self.board.read_bytes())
        except (OSError, struct.error):
            return False  # somebody has cleaned up our folder
        return bool(until) and time.monotonic() > until + HARD_LIMIT_SECONDS

    def memory_bytes(self) -> int:
        """Return the process's resident memory, 0 when it is gone."""
        try:
            return 0 if self.process is None else int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0


class Supervisor:
    """
    Runs `processes` children by one plan.

    Args:
        max_memory: bytes of resident memory at which a child is replaced, None for no limit.
        observers: are told when a process has ended.
    """

    def __init__(self, consumer: Consumer, plan: Plan, *, processes: int, max_memory: int | None = None) -> None:
        self.observers: list[Observer] = []
        self._consumer, self._plan, self._max_memory = consumer, plan, max_memory
        self._folder = tempfile.TemporaryDirectory(prefix="reliq-")
        folder = self.folder
        self.children = [Child(number, folder, Pulse(folder / f"pulse-{number}")) for number in range(processes)]
        self._signals = SignalNotes()
        self._exit_code = 0
        self._memory_at = 0.0

    def run(self) -> int:
        """Keep the children running until a signal, or until all are done; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._signals.note)
        try:
            while not self._stopping and not all(child.done for child in self.children):
                self._look()
                self._signals.wait(LOOK_SECONDS)
            self._stop()
        finally:
            self._kill()
            self._folder.cleanup()
        return self._exit_code

    @property
    def folder(self) -> Path:
        """A folder that goes with the supervisor."""
        return Path(self._folder.name)

    def living(self) -> int:
        """Return how many processes run."""
        return sum(child.process is not None for child in self.children)

    def pulses(self) -> Sequence[Pulse]:
        """Return what each child that is to run notes of itself."""
        return [child.pulse for child in self.children if not child.done]

    @property
    def _stopping(self) -> bool:
        return self._asked > 0 or self._exit_code != 0

    @property
    def _asked(self) -> int:
        """How often we were asked to stop."""
        return sum(number != signal.SIGUSR1 for number in self._signals.numbers)

    def _look(self) -> None:
        """Look at every child once: replace the dead, end those that hang or have grown."""
        self._forward_stack_wish()
        for child in self.children:
            if child.process is not None and child.process.poll() is not None:
                self._bury(child)
            if child.process is None and not child.done and not self._stopping:
                if time.monotonic() - child.started_at >= RESTART_SECONDS:
                    self._start(child)
            elif self._plan.concurrency == 1 and child.process is not None and child.overruns():
                logger.warning("process %d: its handler overran its timeout; killed", child.process.pid)
                child.doom(signal.SIGKILL, "overran")
        self._look_at_memory()

    def _start(self, child: Child) -> None:
        """Start a process; one that the system does not let us start is tried again."""
        try:
            child.start(self._plan)
        except OSError:
            logger.exception("a process could not be started; trying again")
            child.signal(signal.SIGKILL)

    def _bury(self, child: Child) -> None:
        """Take note of a dead process and give back what its stop cut off."""
        process, child.process = child.process, None
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):  # it may have died before it read its plan
                process.stdin.close()
        reason = ""
        if process.returncode == EXIT_CONFIG:
            self._exit_code = EXIT_CONFIG
        elif process.returncode == 0 and self._plan.burst:
            child.done = True
        elif not self._stopping:
            reason = child.why(process.returncode)
            logger.warning("process %d ended with %d; starting another", process.pid, process.returncode)
        notify(self.observers, [ProcessEnded("", process.pid, reason)])
        self._give_back(child)

    def _give_back(self, child: Child) -> None:
        """Release, unspent, what a dead process could not finish within its grace: nobody runs it any more."""
        try:
            by_queue = _cut_off(child.report.read_text())
            child.report.unlink()
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            logger.exception("what a process could not finish is unknown; its leases will end")
            return
        keys = {handler.queue.name: handler.queue.keys for handler in self._consumer.handlers}
        for name, claimed in by_queue.items():
            try:
                door = BlockingDoor(self._consumer.connection(self._consumer.handlers).wire(WORKER_TIMEOUT_SECONDS))
                for at in reversed(range(0, len(claimed), BATCH_LIMIT)):  # the first at last, for it goes foremost
                    door.run(transitions.release(keys[name], claimed[at : at + BATCH_LIMIT]), for_seconds=1.0)
            except ReliqError as error:
                logger.warning("%s: could not give back %d message(s): %s", name, len(claimed), error)

    def _look_at_memory(self) -> None:
        now = time.monotonic()
        if self._max_memory is None or now - self._memory_at < MEMORY_SECONDS:
            return
        self._memory_at = now
        for child in self.children:
            if child.process is not None and not child.doomed and child.memory_bytes() > self._max_memory:
                logger.warning("process %d has grown over --max-memory; replacing it", child.process.pid)
                child.doom(signal.SIGTERM, "memory")

    def _stop(self) -> None:
        """Let every child stop in peace; a second signal ends them at once."""
        for child in self.children:
            child.signal(signal.SIGTERM)
        asked = self._asked
        until = time.monotonic() + self._plan.grace + SETTLE_SECONDS
        while any(child.process is not None for child in self.children) and time.monotonic() < until:
            if self._asked > max(1, asked):
                self._exit_code = EXIT_SECOND_SIGNAL
                return
            self._forward_stack_wish()
            for child in self.children:
                if child.process is not None and child.process.poll() is not None:
                    self._bury(child)
            self._signals.wait(LOOK_SECONDS / 2)

    def _kill(self) -> None:
        for child in self.children:
            child.signal(signal.SIGKILL)
            if child.process is not None:
                child.process.wait()
                self._bury(child)

    def _forward_stack_wish(self) -> None:
        while signal.SIGUSR1 in self._signals.numbers:
            self._signals.numbers.remove(signal.SIGUSR1)
            for child in self.children:
                child.signal(signal.SIGUSR1)


def _cut_off(report: str) -> dict[str, list[Claimed]]:
    """Return the receipts in a child's report, by queue."""
    by_queue: dict[str, list[Claimed]] = defaultdict(list)
    rows: list[dict[str, Any]] = json.loads(report)
    for row in rows:
        by_queue[row.pop("queue")].append(Claimed(**row))
    return by_queue


def environment_of_children(folder: str | None = None) -> None:
    """Let children import what a person starting `reliq` in this folder expects, the folder itself, and save memory."""
    folder = folder or os.getcwd()  # noqa: PTH109  the text is what PYTHONPATH wants
    if folder not in sys.path:
        sys.path.insert(0, folder)
    known = os.environ.get("PYTHONPATH", "")
    if folder not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (folder, known) if part)
    # glibc gives threads heaps of their own, up to eight for each core, and each keeps what it once took (mallopt(3)).
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
