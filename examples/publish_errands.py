"""
Publish the demo's jobs ("errands") without end, so that a dashboard has data to show.

    python examples/publish_errands.py [EACH_SECOND] [ADDRESS]

EACH_SECOND is the number of messages a second. At ADDRESS, such as 127.0.0.1:9466, the program serves its metrics.
"""

import itertools
import random
import sys
import time

from prometheus_client import start_http_server
from stage import a_redis

from reliq import PublishFailed, Queue
from reliq.cli.demo_jobs import ERRANDS, Errand, Mood
from reliq.metrics import PublishMetrics

MOODS: list[Mood] = ["good", "slow", "flaky", "poison"]
WEIGHTS = [0.8, 0.1, 0.08, 0.02]


def main() -> None:
    """Publish until a signal comes."""
    each_second = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    errands = Queue(ERRANDS.name, Errand, observers=[PublishMetrics()])
    if len(sys.argv) > 2:
        host, _, port = sys.argv[2].rpartition(":")
        start_http_server(int(port), host)
    with a_redis():
        print(f"Publishing to the queue {errands.name!r}; Ctrl-C ends it.", flush=True)
        for number in itertools.count():
            delay = random.choice([0, 0, random.uniform(1, 30)])
            try:
                errands.publish(Errand(number, random.choices(MOODS, WEIGHTS)[0]), delay=delay)
            except PublishFailed as error:
                print(error)
            time.sleep(random.expovariate(each_second))


if __name__ == "__main__":
    main()
