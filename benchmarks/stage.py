"""One peer on one Redis: its queue emptied and filled, its worker run, its times read."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.catalogue import Peer
from benchmarks.server import CountedRedis
from benchmarks.steps import StepError, last_line, step, worker
from benchmarks.works import Work

LOOK_SECONDS = 0.02
START_SECONDS = 20.0
ALONE_SECONDS = 10.0

#: Raises StepError when the worker has ended.
Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Running:
    """A worker at work."""

    process: subprocess.Popen[bytes]
    check: Check


class Stage:
    """
    One peer on one Redis.

    Args:
        folder: holds what the worker says, and the times that its handlers write.
        settings: how the peer's worker is set for each kind of work; what is not named runs as the peer's module says.
    """

    def __init__(self, peer: Peer, client: CountedRedis, url: str, folder: Path, settings: dict[Work, str]) -> None:
        self.peer, self.client = peer, client
        self._url, self._settings = url, settings
        self._log, self._times = folder / "worker.log", folder / "times.txt"

    def step(self, name: str, *numbers: float, work: Work = "nothing") -> float:
        """Do one step and return the seconds that it measured."""
        return step(self.peer, name, *numbers, environment=self._environment(work))

    @contextmanager
    def worker(self, processes: int, work: Work = "nothing", *, setting: str = "") -> Iterator[Running]:
        """Run the worker, with a setting of its own or that of the work."""
        environment = self._environment(work, setting)
        with worker(self.peer, processes, environment=environment, log=self._log) as process:

            def check() -> None:
                if process.poll() is not None:
                    raise StepError(f"worker ended with {process.returncode}: {self.worker_says()}")

            yield Running(process, check)

    def worker_says(self) -> str:
        """Return the last error of the worker, else its last line."""
        return last_line(self._log.read_text(errors="replace"))

    def fill(self, count: int, work: Work = "nothing") -> None:
        """Publish messages by the fastest way there is."""
        self.step("one" if "bulk" in self.peer.lacks else "bulk", count, work=work)

    def empty(self) -> None:
        """Leave no key, once nobody is connected who may still write one."""
        self.wait_until_alone()
        self.client.flushall()

    def wait_until_alone(self) -> None:
        """Wait until the connections of the last step are gone: they take memory, and may still take messages."""
        until = time.monotonic() + ALONE_SECONDS
        while int(self.client.info("clients")["connected_clients"]) > 1:
            if time.monotonic() > until:
                raise StepError("connections of an earlier step are still open")
            time.sleep(LOOK_SECONDS)

    def forget_times(self) -> None:
        """Have the times begin anew."""
        self._times.write_text("")

    def times(self, count: int, check: Check) -> list[float]:
        """Return what the timed handler wrote, in ms, once it has run so often."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            lines = self._times.read_text().split() if self._times.exists() else []
            if len(lines) >= count:
                return [float(line) * 1000 for line in lines]
            check()
            time.sleep(LOOK_SECONDS)
        raise StepError(f"only {len(lines)} of {count} messages were handled: {self.worker_says()}")

    def _environment(self, work: Work, setting: str = "") -> dict[str, str]:
        setting = setting or self._settings.get(work, "")
        return {"BENCH_URL": self._url, "BENCH_LOG": str(self._times), "BENCH_WORK": work, "BENCH_SETTING": setting}
