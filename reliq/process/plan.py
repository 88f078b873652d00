"""The agreement between a supervisor and its processes: a plan, exit codes, the time of a stop, the environment."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: The exit code of a process that cannot work as it is set up: another would fail, too (sysexits.h: EX_CONFIG).
EXIT_CONFIG = 78
EXIT_CRASHED = 1
#: The default of --stall: a handler may hold the interpreter for 30 s where others run beside it.
STALL_SECONDS = 30.0
#: A stop may take 10 s beyond its grace, to settle and to leave the lifespan.
STOP_MARGIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """
    The settings of a worker process, as its supervisor sends them in one line.

    Attributes:
        consumer: `module:name`.
        queues: some of the handlers' queues, none for all.
        board: the file in which the process writes what it runs.
        report: the file in which the process names what it could not finish.
        pulse: the file in which the process notes that it claims.
        metrics: whether the processes keep figures for their supervisor.
        figures: the folder in which they do.
    """

    consumer: str
    queues: tuple[str, ...]
    concurrency: int
    grace: float
    max_jobs: int | None
    burst: bool | Literal["delayed"]
    allow_eviction: bool
    log_level: str
    board: str = ""
    report: str = ""
    pulse: str = ""
    metrics: bool = False
    figures: str = ""
    log_format: str = "auto"
    log_error_text: bool = False

    def as_line(self) -> str:
        """Return the plan as it is sent."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> ChildPlan:
        """Return the plan in a line."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**{**fields, "queues": tuple(fields["queues"])})


def environment_of_children(folder: str | None = None) -> None:
    """Have children find modules in `folder`, by default the current one, and give memory back to the system."""
    folder = folder or os.getcwd()  # noqa: PTH109  the text is what PYTHONPATH wants
    if folder not in sys.path:
        sys.path.insert(0, folder)
    known = os.environ.get("PYTHONPATH", "")
    if folder not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (folder, known) if part)
    # glibc gives threads heaps of their own, up to eight for each core, and each keeps what it once took (mallopt(3)).
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
