"""
Publish the demo's errands for ever, a few a second, so that a dashboard has something to show.

    python examples/publish_errands.py [EACH_SECOND]
"""

import itertools
import random
import sys
import time

from stage import a_redis

from reliq import PublishFailed
from reliq.cli.demo_jobs import ERRANDS, Errand, Mood

MOODS: list[Mood] = ["good", "slow", "flaky", "poison"]
WEIGHTS = [0.8, 0.1, 0.08, 0.02]


def main() -> None:
    """Publish until a signal comes."""
    each_second = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    with a_redis():
        print(f"Publishing to the queue {ERRANDS.name!r}; Ctrl-C ends it.", flush=True)
        for number in itertools.count():
            delay = random.choice([0, 0, random.uniform(1, 30)])
            try:
                ERRANDS.publish(Errand(number, random.choices(MOODS, WEIGHTS)[0]), delay=delay)
            except PublishFailed as error:
                print(error)
            time.sleep(random.expovariate(each_second))


if __name__ == "__main__":
    main()
