"""Run `reliq` commands as processes; tests read their output and their processes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.waiting import with_patience


def environment_for(folder: Path, url: str) -> dict[str, str]:
    """Return a user's environment, with the jobs in `folder` and the Redis at `url`."""
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "RELIQ_URL": url, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


#: Replace a dead process immediately, not a second after its start, for tests with many deaths.
AT_ONCE = "import reliq.supervisor.child as child; child.RESTART_SECONDS = 0.05"


class Command:
    """
    A `reliq` command that runs in `folder`, with all lines of its output.

    `change` is Python code that its process runs first. `program` replaces `-m reliq`.
    """

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        *words: str,
        change: str = "",
        program: Sequence[str] = ("-m", "reliq"),
    ) -> None:
        if change:
            program = ["-c", f"{change}; import reliq.cli.app as app; app.main()"]
        command = [sys.executable, *program, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # A killed process may leave a part of a character.
        self.process = subprocess.Popen(command, cwd=folder, env=environment, text=True, errors="replace", **pipes)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def children(self) -> list[psutil.Process]:
        """Return its worker processes, without the guard, which is a child for a moment."""
        try:
            return [one for one in psutil.Process(self.process.pid).children() if works(one)]
        except psutil.NoSuchProcess:
            return []

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    @property
    def output_ended(self) -> bool:
        """Return whether no process has the command's output open any more."""
        return not self._reader.is_alive()

    def wait(self, seconds: float = 120.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def stop(self, number: int = signal.SIGTERM, seconds: float = 120.0) -> int:
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        return self.wait(seconds)

    def close(self) -> None:
        children = self.children()
        self.process.kill()
        for child in children:
            with_patience(child)
        self.process.wait()
        self._reader.join(5)
        if self.process.stdout:
            self.process.stdout.close()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line)
        if folder := os.environ.get("RELIQ_TEST_LOGS"):  # tests/messages.py reads these files
            with Path(folder, f"{self.process.pid}.log").open("a") as log:
                log.writelines(self.lines)


class Worker(Command):
    """A `reliq worker` of the consumer at `place`."""

    def __init__(self, place: str, folder: Path, environment: dict[str, str], *options: str, change: str = "") -> None:
        super().__init__(folder, environment, "worker", place, *options, change=change)


def works(process: psutil.Process) -> bool:
    try:
        return "reliq.supervisor.main" in process.cmdline()
    except psutil.Error:
        return False
