"""
Has every key of a benchmark removed, however the benchmark ends.

A process of its own does that. The benchmark and all its workers hold its standard input open; when that ends, all of
them have ended, by themselves or killed.
"""

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Self

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
        theirs, self.lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "reliq.bench.removal"], stdin=theirs, process_group=0
            )
        finally:
            os.close(theirs)
        os.write(self.lifeline, self._plan.encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.lifeline)
        if self._process is not None and self._process.wait(WAIT_SECONDS) != 0 and kind is None:
            raise ReliqError(f"not every key of the benchmark's queue {self._queue!r} could be removed")
