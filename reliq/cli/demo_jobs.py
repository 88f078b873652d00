"""The handlers of `reliq demo`: some work at once, some fail at first, some fail always."""

import random
import time
from dataclasses import dataclass
from typing import Literal

from tenacity import wait_random

from reliq import Consumer, Job, Queue

Mood = Literal["good", "slow", "flaky", "poison"]


@dataclass(frozen=True)
class Errand:
    """A job of the demo: its number, and how it behaves."""

    number: int
    mood: Mood


#: A flaky errand fails this many times.
FAILURES = 2

ERRANDS = Queue("demo", Errand, retries=3)

consumer = Consumer()


@consumer.handler(ERRANDS, lease=2, backoff=wait_random(0.1, 0.5))
def run_errand(errand: Errand, job: Job[Errand]) -> None:
    """Work as the errand's mood says."""
    match errand.mood:
        case "slow":
            time.sleep(random.uniform(0.01, 0.05))
        case "flaky" if job.attempt is not None and job.attempt <= FAILURES:
            raise ConnectionError("the other side is not there yet")
        case "poison":
            raise ValueError("this errand cannot be run")
