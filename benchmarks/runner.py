"""One peer on one Redis: its environment, its steps and worker in processes of their own, and what is measured of it."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.catalogue import Peer

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = Path(__file__).parent / ".work" / "environments"
INSTALL_SECONDS = 300.0
STEP_SECONDS = 60.0
#: A worker that handles nothing for so long has failed.
STALL_SECONDS = 20.0
END_SECONDS = 1.0
SAMPLE_SECONDS = 0.02
#: The clock of a drain runs from when this share is done, when all processes handle messages, for at most DRAIN_SECONDS.
HEAD_SHARE = 0.15
DRAIN_SECONDS = 3.0
#: Messages that an idle worker handles before its times count.
WARM_UP = 5
LATE_RATE = 1000
LATE_SECONDS = 1
#: The first message is due so many seconds after the first publish.
LEAD_SECONDS = 3
ONE = 2500
BULK = 20_000
PICKUPS = 100


class PeerError(Exception):
    """A peer could not be installed, or one of its steps failed; the text is the last line of its output."""


class Runner:
    """One peer on the Redis that `client` is connected to; `folder` holds the output and the times of its worker."""

    def __init__(self, peer: Peer, client: Any, url: str, folder: Path) -> None:
        self.peer = peer
        self._client = client
        self._output = folder / "output"
        self._times = folder / "times"
        is_node = peer.module.endswith(".mjs")
        home = ENVIRONMENTS / peer.module.replace(".", "_")
        if peer.requirements:
            _install(peer, home, is_node=is_node)
        self._folder = home if is_node else ROOT  # Node finds its packages by the folder
        if is_node:
            self._command = ["node", str(ROOT / "benchmarks" / "peers" / peer.module)]
        else:
            python = str(home / "bin" / "python") if peer.requirements else sys.executable
            self._command = [python, "-m", "benchmarks.peers", peer.module]
        self._environment = {
            **os.environ,
            "BENCH_URL": url,
            "BENCH_LOG": str(self._times),
            "BENCH_SLOTS": str(peer.slots),
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        }

    def measure(self) -> Iterator[dict[str, float]]:
        """Yield the figures of each measure, by name; a measure that fails yields NaN and prints why."""
        measures = {"one": self._one, "bulk": self._bulk, "late": self._late, "slow": self._pickup}
        for step, measure in measures.items():
            if step not in self.peer.lacks:
                yield self._attempt(step, measure)
        for processes in (1, 2) if self.peer.backlog else (1,):
            yield self._attempt(f"drain {processes}", lambda number=processes: self._drain(number))

    def _attempt(self, name: str, measure: Any) -> dict[str, float]:
        try:
            self._client.flushall()
            figures: dict[str, float] = measure()
        except Exception as error:  # whatever a peer does, the others are measured
            print(f"  {name}: failed: {error}", flush=True)
            return {name: math.nan}
        print("  " + ", ".join(f"{key} {value:,.1f}" for key, value in figures.items()), flush=True)
        return figures

    def _one(self) -> dict[str, float]:
        return {"one": ONE / self._step("one", ONE)}

    def _bulk(self) -> dict[str, float]:
        return {"bulk": BULK / self._step("bulk", BULK)}

    def _late(self) -> dict[str, float]:
        """Have messages come due while a worker is idle."""
        with self._worker(1) as worker:
            self._step("slow", WARM_UP)
            self._read_times(worker, WARM_UP)
            self._step("late", LATE_RATE, LATE_SECONDS, LEAD_SECONDS)
            return _percentiles("late", self._read_times(worker, LATE_RATE * LATE_SECONDS))

    def _pickup(self) -> dict[str, float]:
        """Publish to an idle worker, one message after another."""
        with self._worker(1) as worker:
            for count in (WARM_UP, WARM_UP + PICKUPS):
                self._step("slow", count)
                times = self._read_times(worker, count)
        return _percentiles("pickup", times[WARM_UP:])

    def _drain(self, processes: int) -> dict[str, float]:
        """Handle a full queue."""
        if not self.peer.backlog:
            return {"drain 1": self.peer.drained / self._step("drain", self.peer.drained)}
        total = self.peer.drained
        self._step("one" if "bulk" in self.peer.lacks else "bulk", total)
        total = self._backlog()
        with self._worker(processes) as worker:
            first = (time.monotonic(), total, 0.0, 0.0)
            progress_at = time.monotonic()
            last = first
            while last[1] and (first[1] == total or last[0] - first[0] < DRAIN_SECONDS):
                time.sleep(SAMPLE_SECONDS)
                sample = (time.monotonic(), self._backlog(), *self._cpu_seconds(worker))
                if sample[1] != last[1]:
                    progress_at = sample[0]
                self._check(worker, progress_at, f"{sample[1]} of {total} messages are left")
                if first[1] == total and sample[1] < total * (1 - HEAD_SHARE):
                    first = sample
                last = sample
        done = first[1] - last[1]
        if not done:
            raise PeerError(f"the queue of {total} messages was empty before the clock started")
        return {
            f"drain {processes}": done / (last[0] - first[0]),
            f"worker cpu {processes}": (last[2] - first[2]) / done * 1e6,
            f"redis cpu {processes}": (last[3] - first[3]) / done * 1e6,
        }

    def _backlog(self) -> int:
        if callable(self.peer.backlog):
            return self.peer.backlog(self._client)
        return sum(self._client.execute_command(*command.split()) for command in self.peer.backlog)

    def _cpu_seconds(self, worker: subprocess.Popen[bytes]) -> tuple[float, float]:
        """Return what the processes of the worker and Redis have spent so far."""
        spent = 0.0
        parent = psutil.Process(worker.pid)
        for process in (parent, *parent.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue  # it ended meanwhile
            spent += times.user + times.system
        server = self._client.info("cpu")
        return spent, server["used_cpu_user"] + server["used_cpu_sys"]

    def _step(self, name: str, *numbers: int) -> float:
        """Do a step of the peer; return the seconds that it measured."""
        ended = subprocess.run(
            [*self._command, name, *map(str, numbers)],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=STEP_SECONDS,
            check=False,
        )
        if ended.returncode:
            raise PeerError(f"{name}: {_last_line(ended.stderr)}")
        return float(ended.stdout.split()[-1])

    @contextmanager
    def _worker(self, processes: int) -> Iterator[subprocess.Popen[bytes]]:
        """Run the peer's worker, then end all its processes."""
        with self._output.open("wb") as output:
            worker = subprocess.Popen(
                [*self._command, self.peer.worker, str(processes)],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield worker
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(worker.pid, signal.SIGTERM)
                time.sleep(END_SECONDS)
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()

    def _read_times(self, worker: subprocess.Popen[bytes], count: int) -> list[float]:
        """Return the ms that the timed handler wrote, once it has handled `count` messages."""
        began = time.monotonic()
        while True:
            rows = self._times.read_text().split() if self._times.exists() else []
            if len(rows) >= count:
                self._times.write_text("")
                return [float(row) * 1000 for row in rows]
            self._check(worker, began, f"only {len(rows)} of {count} messages were handled")
            time.sleep(SAMPLE_SECONDS)

    def _check(self, worker: subprocess.Popen[bytes], since: float, state: str) -> None:
        """Raise PeerError when the worker has ended, or nothing happened since then."""
        if worker.poll() is not None or time.monotonic() - since > STALL_SECONDS:
            raise PeerError(f"{state}: {_last_line(self._output.read_text(errors='replace'))}")


def run(peer: Peer, client: Any, url: str) -> dict[str, float]:
    """Measure one peer once; return its figures by name."""
    figures: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for measured in Runner(peer, client, url, Path(folder)).measure():
            figures |= measured
    return figures


def _percentiles(name: str, times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {f"{name} p{percent}": ordered[math.ceil(len(ordered) * percent / 100) - 1] for percent in (50, 99)}


def _install(peer: Peer, folder: Path, *, is_node: bool) -> None:
    """Make the peer's environment, unless one with the same requirements is there."""
    stamp = folder / "installed.txt"
    wanted = "\n".join(peer.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if is_node:
        commands = [["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder)]]
    else:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        commands = [[sys.executable, "-m", "venv", str(folder)], pip]
    commands[-1] += peer.requirements
    for command in commands:
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=True)
        except FileNotFoundError:
            raise PeerError(f"{command[0]} is not on this machine") from None
        except subprocess.CalledProcessError as error:
            raise PeerError(_last_line(error.stderr)) from None
    stamp.write_text(wanted)


def _last_line(text: str) -> str:
    """Return the last error that a process wrote, else its last line."""
    rows = [row.strip() for row in text.splitlines() if row.strip()]
    errors = [row for row in rows if "Error" in row and not row.startswith(("at ", "raise ", "File "))]
    return (errors or rows or ["it wrote nothing"])[-1][:200]
