"""The queue and the handler of `reliq demo`. Some jobs are slow, some fail at first, and some always fail."""

import os
import random
import time
from dataclasses import dataclass
from typing import Literal

from tenacity import wait_random

from reliq import Consumer, Job, Queue

Mood = Literal["good", "slow", "flaky", "poison"]
#: The environment variable with the path of the journal. Each run of a job writes a line to this file at its start and
#: at its end.
JOURNAL_VARIABLE = "RELIQ_DEMO_JOURNAL"
#: The number of attempts of a flaky job that fail before it succeeds.
FAILURES = 2


@dataclass(frozen=True)
class Errand:
    """The body of a message of the demo: the number of the job, and how its handler behaves."""

    number: int
    mood: Mood


ERRANDS = Queue("demo", Errand, retries=3)

consumer = Consumer()


def mood_of(number: int) -> Mood:
    """Return how the handler of a job behaves: 9 % of the jobs are slow, 10 % fail twice, and 1 % always fail."""
    if number % 100 == 50:  # noqa: PLR2004
        return "poison"
    return "slow" if number % 10 == 0 else "flaky" if number % 10 == 1 else "good"


@consumer.handler(ERRANDS, lease=2, backoff=wait_random(0.1, 0.5))
def run_errand(errand: Errand, job: Job[Errand]) -> None:
    """Succeed, wait or fail, depending on `mood` in the body. Write the start and the end of the run to the journal."""
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
    finally:  # does not run in a process that is killed by SIGKILL
        _write(errand, job, outcome)


def _write(errand: Errand, job: Job[Errand], event: str) -> None:
    if path := os.environ.get(JOURNAL_VARIABLE):
        with open(path, "ab", buffering=0) as journal:  # noqa: PTH123  quicker than a Path
            journal.write(f"{os.getpid()} {errand.number} {job.attempt} {event}\n".encode())
