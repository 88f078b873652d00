"""The queue and handler of `reliq demo`: some jobs are slow, some fail at first, some always fail."""

import os
import random
import time
from dataclasses import dataclass
from typing import Literal

from tenacity import wait_random

from reliq import Consumer, Job, Queue

Mood = Literal["good", "slow", "flaky", "poison"]
#: Environment variable with the path of the journal, a file to which each run of a job writes its start and end.
JOURNAL_VARIABLE = "RELIQ_DEMO_JOURNAL"
#: How many times a flaky job fails before it succeeds.
FAILURES = 2


@dataclass(frozen=True)
class Errand:
    """A job of the demo: its number, and how it behaves."""

    number: int
    mood: Mood


ERRANDS = Queue("demo", Errand, retries=3)

consumer = Consumer()


def mood_of(number: int) -> Mood:
    """Return the mood of a job: 9 % of the jobs are slow, 10 % are flaky and fail twice, 1 % always fail."""
    if number % 100 == 50:  # noqa: PLR2004
        return "poison"
    return "slow" if number % 10 == 0 else "flaky" if number % 10 == 1 else "good"


@consumer.handler(ERRANDS, lease=2, backoff=wait_random(0.1, 0.5))
def run_errand(errand: Errand, job: Job[Errand]) -> None:
    """Succeed, wait or fail, depending on the job's mood; write the start and end of the run to the journal."""
    _write(errand, job, "began")
    outcome = "failed"
    try:
        match errand.mood:
            case "slow":
                time.sleep(random.uniform(0.1, 0.3))
            case "flaky" if job.attempt is not None and job.attempt <= FAILURES:
                raise ConnectionError("the service is not available yet")
            case "poison":
                raise ValueError("this errand cannot be run")
        outcome = "done"
    finally:  # not reached in a process that gets SIGKILL
        _write(errand, job, outcome)


def _write(errand: Errand, job: Job[Errand], event: str) -> None:
    if path := os.environ.get(JOURNAL_VARIABLE):
        with open(path, "ab", buffering=0) as journal:  # noqa: PTH123  quicker than a Path
            journal.write(f"{os.getpid()} {errand.number} {job.attempt} {event}\n".encode())
