"""The handler of `reliq demo`: some jobs take time, some fail at first, some fail always."""

import logging
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tenacity import wait_random

from reliq import Consumer, Job, Queue

Mood = Literal["good", "slow", "flaky", "poison"]
#: `reliq demo` sets this variable to its folder. Each run of a handler writes its start and its end to the journal there.
FOLDER_VARIABLE = "RELIQ_DEMO_FOLDER"
#: Names of files in the folder.
JOURNAL = "journal"
LOG = "log"


@dataclass(frozen=True)
class Errand:
    """A job of the demo: its number, and how it behaves."""

    number: int
    mood: Mood


#: A flaky errand fails this many times.
FAILURES = 2

ERRANDS = Queue("demo", Errand, retries=3)

consumer = Consumer()

_journal = None
if _folder := os.environ.get(FOLDER_VARIABLE):
    _journal = os.open(Path(_folder, JOURNAL), os.O_WRONLY | os.O_APPEND)
    # The failures are part of the demo: they go to a file.
    logging.basicConfig(filename=Path(_folder, LOG), level=logging.ERROR)


@consumer.handler(ERRANDS, lease=2, backoff=wait_random(0.1, 0.5))
def run_errand(errand: Errand, job: Job[Errand]) -> None:
    """Behave according to the mood; write the start and the end of this run to the journal."""
    _write(errand, job, "began")
    outcome = "failed"
    try:
        match errand.mood:
            case "slow":
                time.sleep(random.uniform(0.2, 0.6))
            case "flaky" if job.attempt is not None and job.attempt <= FAILURES:
                raise ConnectionError("the other side is not there yet")
            case "poison":
                raise ValueError("this errand cannot be run")
        outcome = "done"
    finally:  # does not run after SIGKILL
        _write(errand, job, outcome)


def _write(errand: Errand, job: Job[Errand], event: str) -> None:
    if _journal is not None:
        os.write(_journal, f"{os.getpid()} {errand.number} {job.attempt} {event}\n".encode())
