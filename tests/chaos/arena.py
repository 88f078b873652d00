"""Everything that runs: a Redis and a proxy of our own, producers and consumers in processes that can be killed."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from reliq.embedded import EmbeddedRedis, find_server
from tests.chaos.consumer import note_stalls
from tests.chaos.history import Journal
from tests.chaos.schedule import CONSUMERS, PRODUCERS
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
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
        command = [sys.executable, "-m", f"tests.chaos.{self._module}", str(journal), *self._arguments]
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


class Proxy:
    """The proxy's process."""

    def __init__(self, server_port: int) -> None:
        command = [sys.executable, "-m", "tests.chaos.proxy", str(server_port)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.url = f"redis://127.0.0.1:{int(self._process.stdout.readline())}/0"

    def order(self, line: str) -> None:
        """Tell the proxy what to do."""
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Arena:
    """
    The processes of one run.

    Attributes:
        folder: where every process writes its history.
        journal: ours.
    """

    def __init__(self, folder: Path, seed: int, *, server: Path | None = None) -> None:
        self.folder, self._seed = folder, seed
        self.journal = Journal(folder / "arena.jsonl")
        self._stack = ExitStack()
        path = server or find_server()
        data = folder / "redis"
        data.mkdir()
        options = {"appendonly": "yes", "appendfsync": "always", "auto-aof-rewrite-min-size": "16mb"}
        if version_of(path) >= (7,):
            options["enable-debug-command"] = "local"
        self.server = EmbeddedRedis(server=path, options=options, folder=data, port=free_port())
        self.proxy: Proxy
        self.consumers: list[Member] = []
        self.producers: list[Member] = []

    def __enter__(self) -> Self:
        self._stack.enter_context(self.server)
        over = threading.Event()
        threading.Thread(target=note_stalls, args=(self.journal, over), daemon=True).start()
        self._stack.callback(over.set)
        self.proxy = Proxy(self.server.port)
        self._stack.callback(self.proxy.close)
        return self

    def __exit__(self, *_: object) -> None:
        for member in (*self.producers, *self.consumers):
            member.send(signal.SIGCONT)
            member.end(signal.SIGKILL)
        with suppress(OSError, RuntimeError):
            os.kill(self.server.pid, signal.SIGCONT)
        self._stack.close()

    def start_consumers(self) -> None:
        """Start the consumers, every second one behind the proxy."""
        for number, url in enumerate(self._urls(CONSUMERS)):
            self.consumers.append(Member(f"consumer-{number}", self, url, "consumer", str(self._seed), str(SLOTS)))
            self.consumers[-1].start()

    def start_producers(self, rate: float, until: float) -> None:
        """Start the producers, every second one behind the proxy, to publish `rate` a second together."""
        share = str(rate / PRODUCERS)
        for number, url in enumerate(self._urls(PRODUCERS)):
            arguments = (str(self._seed), share, str(until))
            self.producers.append(Member(f"producer-{number}", self, url, "producer", *arguments))
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

    def _urls(self, count: int) -> Iterator[str]:
        return (self.server.url if number % 2 else self.proxy.url for number in range(count))


def version_of(server: Path) -> tuple[int, ...]:
    """Return the version of a redis-server, such as (7, 0, 15)."""
    said = subprocess.run([str(server), "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in said.partition(" v=")[2].split(" ")[0].split("."))
