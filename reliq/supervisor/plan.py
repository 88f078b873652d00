"""The protocol between a supervisor and its processes: plan, exit codes, and time limits."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reliq.distribution import VERSION
from reliq.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.handlers.handler import Handler

EXIT_CRASHED = 1
#: The folder for the metrics of the processes, next to their status files.
METRICS_FOLDER = "metrics"
#: The default of --gil-timeout: how long a handler may hold the GIL in a process with several slots.
GIL_TIMEOUT_SECONDS = 30.0
#: How long a shutdown may take after the grace period, to settle and to leave the lifespan.
STOP_MARGIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """
    The settings of a worker process, as its supervisor sends them in one line.

    Attributes:
        consumer: `module:name`.
        queues: the queues to serve; empty for all.
        settings: the settings of each process.
        log_level: the log level.
        handlers: the fingerprint of the supervisor's handlers; empty without a supervisor.
        folder: the folder of the application's modules; empty if they are installed.
        board: the file for the status that the process writes.
        report: the file for the unfinished messages at the end.
        metrics: whether the processes write metrics to METRICS_FOLDER, next to their status files.
        log_format: the format of log lines, as in `reliq worker --log-format`.
    """

    consumer: str
    queues: tuple[str, ...]
    settings: WorkerSettings
    log_level: str
    handlers: str = ""
    folder: str = ""
    board: str = ""
    report: str = ""
    metrics: bool = False
    log_format: str = "auto"

    def as_line(self) -> str:
        """Return the plan as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> ChildPlan:
        """Parse a line of `as_line`."""
        fields: dict[str, Any] = json.loads(line)
        own = {"queues": tuple(fields["queues"]), "settings": WorkerSettings(**fields["settings"])}
        return cls(**{**fields, **own})

    def find_modules(self) -> None:
        """Add the folder of the application to sys.path."""
        if self.folder and self.folder not in sys.path:
            sys.path.insert(0, self.folder)


def fingerprint(handlers: Sequence[Handler]) -> str:
    """Return a text that changes if the version of reliq, or an essential setting of a handler, changes."""
    from hashlib import sha256  # noqa: PLC0415  a command's --help needs none

    rows = sorted(
        (handler.queue.name, handler.is_async, handler.is_batch, handler.settings.lease) for handler in handlers
    )
    return sha256(repr((VERSION, rows)).encode()).hexdigest()
