"""The processes of a run: producers and consumers that can be killed and replaced."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.harness.chaos.consumer import note_stalls
from tests.harness.chaos.grounds import ROOT, Ground
from tests.harness.chaos.history import Journal
from tests.worker_process import environment_for

#: A consumer has its grace period and some time to settle messages.
STOP_SECONDS = 20.0


class Member:
    """A numbered position in which processes run one after another. Hold its lock to end the process and start the next."""

    def __init__(self, arena: "Arena", role: str, number: int, arguments: tuple[object, ...]) -> None:
        self.lock = threading.Lock()
        self._arena, self._role, self._number = arena, role, number
        self._arguments = [str(one) for one in arguments]
        self._times = 0
        self.start()

    def start(self) -> None:
        """Start the next process in this position."""
        self._who = f"{self._role}-{self._number}.{self._times}"
        self._times += 1
        self._history = self._arena.folder / f"{self._who}.jsonl"
        command = [sys.executable, "-m", f"tests.harness.chaos.{self._role}", str(self._history), *self._arguments]
        environment = environment_for(ROOT, self._arena.ground.url(self._number))
        with self._history.with_suffix(".log").open("wb") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
            )
        self._is_noted = False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it is alive."""
        if not self.has_ended():
            self._process.send_signal(number)

    def wait(self) -> None:
        """Wait until the process has ended and record its end; kill a process that does not stop in time."""
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if not self._is_noted:
            self._is_noted = True
            self._arena.journal.write("died", of=self._who, code=code)

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def has_written(self) -> bool:
        """Return whether the process has written anything into its history."""
        return self._history.exists() and self._history.stat().st_size > 0

    def replace(self, how: signal.Signals) -> None:
        """End the process, then start another process."""
        with self._disturbed("stopped"):
            self.send(how)
            self.wait()
            self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the process while the block runs."""
        with self._disturbed("paused"):
            self.send(signal.SIGSTOP)
            yield
            self.send(signal.SIGCONT)

    @contextmanager
    def _disturbed(self, how: str) -> Iterator[None]:
        # The arena records the pause: the process may be killed before it can, or has finished writing.
        with self.lock:
            who, since = self._who, time.monotonic()
            yield
            self._arena.journal.write("trouble", of=how, at=who, since=since)


class Arena:
    """
    The processes of one run.

    Attributes:
        folder: the folder of the processes' histories.
        ground: the Redis server or Cluster of the run.
        journal: the history that the arena writes.
    """

    def __init__(self, folder: Path, ground: Ground) -> None:
        self.folder, self.ground = folder, ground
        self.journal = Journal(folder / "arena.jsonl")
        self._over = threading.Event()
        self.consumers: list[Member] = []
        self.producers: list[Member] = []

    def __enter__(self) -> Self:
        threading.Thread(target=note_stalls, args=(self.journal, self._over), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for member in (*self.producers, *self.consumers):
            member.send(signal.SIGCONT)
            member.send(signal.SIGKILL)
            member.wait()
        self._over.set()

    def start(self, role: str, count: int, *arguments: object) -> list[Member]:
        """Start `count` processes of one role."""
        return [Member(self, role, number, (*arguments, self.ground.kind)) for number in range(count)]

    def revive(self) -> None:
        """Restart the consumers that ended without a request."""
        for member in self.consumers:
            if member.lock.acquire(blocking=False):
                try:
                    if member.has_ended():
                        member.wait()
                        member.start()
                finally:
                    member.lock.release()
