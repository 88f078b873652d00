"""Real worker processes on a real Redis, and ways to wait for them."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import with_patience

HERE = Path(__file__).parent


@pytest.fixture
def environment(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a person whose jobs are here and whose Redis is the test's."""
    monkeypatch.setenv("RELIQ_URL", url)
    monkeypatch.syspath_prepend(str(HERE))
    paths = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Worker:
    """A `reliq worker` of the acceptance jobs."""

    def __init__(self, environment: dict[str, str], *options: str) -> None:
        command = [sys.executable, "-m", "reliq", "worker", "jobs:consumer", *options]
        self.process = subprocess.Popen(
            command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def wait(self, seconds: float = 40.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

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


@pytest.fixture
def worker(environment: dict[str, str]) -> Iterator[Callable[..., Worker]]:
    """Start workers that end with the test."""
    started: list[Worker] = []

    def start(*options: str) -> Worker:
        started.append(Worker(environment, *options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def jobs(environment: dict[str, str]):
    """The module whose handlers the workers run."""
    import jobs

    return jobs
