"""Everything that runs on a ground: producers and consumers in processes that can be killed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from tests.harness.chaos.consumer import note_stalls
from tests.harness.chaos.grounds import ROOT, Ground
from tests.harness.chaos.history import Journal
from tests.harness.chaos.schedule import CONSUMERS, PRODUCERS

#: Messages that a consumer handles at once.
SLOTS = 8
#: A consumer has its grace and some time to settle.
STOP_SECONDS = 20.0


class Member:
    """A place for one process; whoever holds its lock may end it and start the next."""

    def __init__(self, name: str, arena: "Arena", url: str, module: str, *arguments: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self._arena, self._url, self._module, self._arguments = arena, url, module, arguments
        self._times = 0
        self._who = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def who(self) -> str:
        """The process's name in the history."""
        return self._who

    def start(self) -> None:
        """Start the next process in this place."""
        self._who = f"{self.name}.{self._times}"
        self._times += 1
        journal = self._arena.folder / f"{self._who}.jsonl"
        command = [sys.executable, "-m", f"tests.harness.chaos.{self._module}", str(journal), *self._arguments]
        errors = (self._arena.folder / f"{self._who}.log").open("wb")
        with errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment(), stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
            )
        self._arena.journal.write("born", of=self._who, pid=self._process.pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it lives."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def end(self, number: signal.Signals) -> None:
        """End the process and wait until it is gone."""
        self.send(number)
        self.wait()

    def wait(self) -> None:
        """Wait until the process is gone; one that does not stop in good time is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self._arena.journal.write("died", of=self._who, code=code)

    def has_ended(self) -> bool:
        """Say whether the process ended."""
        return self._process is None or self._process.poll() is not None

    def has_written(self) -> bool:
        """Say whether the process has written anything into its history."""
        path = self._arena.folder / f"{self._who}.jsonl"
        return path.exists() and path.stat().st_size > 0

    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        return {**os.environ, "RELIQ_URL": self._url, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Arena:
    """
    The processes of one run.

    Attributes:
        folder: where every process writes its history.
        ground: what they work on.
        journal: ours.
    """

    def __init__(self, folder: Path, seed: int, ground: Ground) -> None:
        self.folder, self.ground, self._seed = folder, ground, seed
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
            member.end(signal.SIGKILL)
        self._over.set()

    def start_consumers(self) -> None:
        """Start the consumers."""
        for number in range(CONSUMERS):
            arguments = (str(self._seed), str(SLOTS), self.ground.kind)
            self.consumers.append(Member(f"consumer-{number}", self, self.ground.url(number), "consumer", *arguments))
            self.consumers[-1].start()

    def start_producers(self, rate: float, until: float) -> None:
        """Start the producers, to publish `rate` a second together."""
        for number in range(PRODUCERS):
            arguments = (str(self._seed), str(rate / PRODUCERS), str(until), self.ground.kind)
            self.producers.append(Member(f"producer-{number}", self, self.ground.url(number), "producer", *arguments))
            self.producers[-1].start()

    def revive(self) -> None:
        """Start anew the consumers that ended without being asked."""
        for member in self.consumers:
            if member.lock.acquire(blocking=False):
                try:
                    if member.has_ended():
                        member.wait()
                        member.start()
                finally:
                    member.lock.release()

    def stop(self, members: list[Member]) -> None:
        """Stop processes in peace."""
        for member in members:
            member.send(signal.SIGTERM)
        for member in members:
            member.wait()
