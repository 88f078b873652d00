"""The settings that the supervisor sends to its worker processes, and constants that both use."""

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
#: The default of --gil-timeout: how long a handler may hold the GIL in a process with several slots.
GIL_TIMEOUT_SECONDS = 30.0
#: After the grace period, a shutdown may take this many seconds longer.
#: In this time, the process sends the last outcomes to Redis, and the application's lifespan ends.
STOP_MARGIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """
    The settings of a worker process, which the supervisor sends to it as one line of JSON.

    Attributes:
        consumer: the consumer to load, as `module:name` or `module`.
        queues: the names of the queues to serve; empty for all queues with handlers.
        settings: the worker settings of each process.
        log_level: the log level.
        handlers: the `fingerprint` of the supervisor's handlers. If the code has changed since the start of the
            supervisor, the handlers of a new process have another fingerprint, and the process exits. Empty for no
            check.
        folder: the folder of the application's modules, which is added to sys.path; empty if the modules are installed.
        board: the descriptor of the file in memory to which the process writes its status.
        metrics: the folder for the metrics that the processes write; empty for no metrics.
        log_format: the format of log lines, as in `reliq worker --log-format`.
    """

    consumer: str
    queues: tuple[str, ...]
    settings: WorkerSettings
    log_level: str
    handlers: str = ""
    folder: str = ""
    board: int = -1
    metrics: str = ""
    log_format: str = "auto"

    def as_line(self) -> str:
        """Return the plan as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> ChildPlan:
        """Return the plan from a line of JSON that `as_line` has created."""
        fields: dict[str, Any] = json.loads(line)
        own = {"queues": tuple(fields["queues"]), "settings": WorkerSettings(**fields["settings"])}
        return cls(**{**fields, **own})

    def find_modules(self) -> None:
        """Add the folder of the application to sys.path."""
        if self.folder and self.folder not in sys.path:
            sys.path.insert(0, self.folder)


def fingerprint(handlers: Sequence[Handler]) -> str:
    """Return a hash of reliq's version, and of the queue, kind and lease of each handler."""
    from hashlib import sha256  # noqa: PLC0415  not imported for `--help`

    rows = sorted(
        (handler.queue.name, handler.is_async, handler.is_batch, handler.settings.lease) for handler in handlers
    )
    return sha256(repr((VERSION, rows)).encode()).hexdigest()
