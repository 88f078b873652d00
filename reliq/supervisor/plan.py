"""The agreement between a supervisor and its processes: a plan, exit codes, and the time of a stop."""

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
#: The folder for the figures of processes, beside their boards.
METRICS_FOLDER = "metrics"
#: The default of --gil-timeout: a handler may hold the interpreter for 30 s where others run beside it.
GIL_TIMEOUT_SECONDS = 30.0
#: A stop may take 10 s beyond its grace, to settle and to leave the lifespan.
STOP_MARGIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """
    The settings of a worker process, as its supervisor sends them in one line.

    Attributes:
        consumer: `module:name`.
        queues: some of the handlers' queues, none for all.
        settings: of each process.
        handlers: the fingerprint of the supervisor's handlers, empty when there is no supervisor.
        folder: where the modules of the application are, empty when they are installed.
        board: the file in which the process writes what it runs, and that it claims.
        report: the file in which the process names what it could not finish.
        metrics: whether the processes keep figures for their supervisor, in METRICS_FOLDER beside their boards.
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
        """Return the plan as it is sent."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> ChildPlan:
        """Return the plan in a line."""
        fields: dict[str, Any] = json.loads(line)
        own = {"queues": tuple(fields["queues"]), "settings": WorkerSettings(**fields["settings"])}
        return cls(**{**fields, **own})

    def find_modules(self) -> None:
        """Have this process find the modules of the application."""
        if self.folder and self.folder not in sys.path:
            sys.path.insert(0, self.folder)


def fingerprint(handlers: Sequence[Handler]) -> str:
    """Return a text that differs when reliq, or the handlers that a supervisor and its processes must agree on, differ."""
    from hashlib import sha256  # noqa: PLC0415  a command's --help needs none

    rows = sorted(
        (handler.queue.name, handler.is_async, handler.is_batch, handler.settings.lease) for handler in handlers
    )
    return sha256(repr((VERSION, rows)).encode()).hexdigest()
