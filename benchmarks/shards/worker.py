"""One worker process: it is up when it says so, and for each line that it reads it says what was picked up how late."""

import json
import sys
import time

from benchmarks.shards.ground import QUEUE
from reliq import Consumer, Queue, WorkerSettings

CONCURRENCY = 16


def main(url: str) -> None:
    """Work until standard input ends."""
    late: list[float] = []
    consumer = Consumer(url=url)

    @consumer.handler(Queue(QUEUE, float, url=url))
    def note(published: float) -> None:
        """Note how long a message was on its way; one of a full queue says 0."""
        if published:
            late.append(1000 * (time.time() - published))

    consumer.start(WorkerSettings(concurrency=CONCURRENCY))
    print("up", flush=True)
    for _ in sys.stdin:
        print(json.dumps(late), flush=True)
        late.clear()
    consumer.stop(grace=1)


if __name__ == "__main__":
    main(sys.argv[1])
