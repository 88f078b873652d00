"""
Has every key of a benchmark or a demo removed, however that ends.

A process of its own does that. The benchmark or the demo and all their workers hold its standard input open; when that ends, all
of them have ended, by themselves or killed.
"""

import json
import os
import subprocess
from types import TracebackType
from typing import Self

from reliq.distribution import command_of
from reliq.errors import ReliqError

WAIT_SECONDS = 120.0


class Cleaner:
    """The process that removes the keys: it begins when the block is entered, and has removed them when it is left."""

    def __init__(self, url: str, queue: str) -> None:
        self._plan = json.dumps({"url": url, "queue": queue}) + "\n"
        self._queue = queue
        self._process: subprocess.Popen[bytes] | None = None
        self.lifeline = -1

    def __enter__(self) -> Self:
        command, env = command_of("reliq.bench.removal")
        theirs, self.lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(command, env=env, stdin=theirs, process_group=0)  # noqa: S603  ours
        finally:
            os.close(theirs)
        os.write(self.lifeline, self._plan.encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.lifeline)
        if self._process is not None and self._process.wait(WAIT_SECONDS) != 0 and kind is None:
            raise ReliqError(f"not every key of queue {self._queue!r} could be removed")
