"""The worker processes of a benchmark, seen from the parent."""

import json
import select
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any, Self

from reliq.distribution import command_of
from reliq.errors import ReliqError

WORKER_START_SECONDS = 60.0
WORKER_ANSWER_SECONDS = 60.0
END_SECONDS = 10.0


class Workers:
    """
    Processes that run one of the benchmark's handlers; a `with` block starts and ends them.

    Args:
        lifeline: a file descriptor that every process holds open as long as it lives.
    """

    def __init__(self, *, url: str, queue: str, kind: str, processes: int, lifeline: int) -> None:
        self._plan = json.dumps({"url": url, "queue": queue, "kind": kind}) + "\n"
        self._number = processes
        self._lifeline = lifeline
        self._processes: list[subprocess.Popen[str]] = []
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed on leaving

    def __enter__(self) -> Self:
        try:
            for _ in range(self._number):
                self._processes.append(self._started())
            for process in self._processes:
                self._answer(process, WORKER_START_SECONDS)
        except BaseException:
            self._end(peaceful=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(peaceful=kind is None)

    def look(self) -> list[dict[str, Any]]:
        """Return what each process has noted since the last look: `rows`, and `round_trips` since its start."""
        for process in self._processes:
            self._send(process, "\n")
        return [self._answer(process, WORKER_ANSWER_SECONDS) for process in self._processes]

    def check(self) -> None:
        """Raise ReliqError when a process has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise ReliqError(f"a worker process of the benchmark ended with {process.returncode}: {self._words()}")

    def _started(self) -> subprocess.Popen[str]:
        command, env = command_of("reliq.bench.child")
        process = subprocess.Popen(  # noqa: S603  ours
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,  # Ctrl-C is for the parent
            pass_fds=(self._lifeline,),
        )
        self._send(process, self._plan)
        return process

    def _send(self, process: subprocess.Popen[str], line: str) -> None:
        if process.stdin is None:
            raise ReliqError("a worker process of the benchmark has no input")
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError as error:
            raise ReliqError(f"a worker process of the benchmark is gone: {self._words()}") from error

    def _answer(self, process: subprocess.Popen[str], for_seconds: float) -> dict[str, Any]:
        stdout: Any = process.stdout
        readable, _, _ = select.select([stdout], [], [], for_seconds)
        line = stdout.readline() if readable else ""
        if not line:
            raise ReliqError(f"a worker process of the benchmark does not answer: {self._words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _words(self) -> str:
        """Return the last line that a process wrote to its error output."""
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _end(self, *, peaceful: bool) -> None:
        for process in self._processes:
            if not peaceful:
                process.kill()
            if process.stdin is not None and not process.stdin.closed:
                _close(process.stdin)
        until = time.monotonic() + END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._errors.close()


def _close(stream: Any) -> None:
    try:
        stream.close()
    except OSError:
        return  # the process was gone first
