"""`python -m tests.harness.rates`: a rate of 100/s with a burst of 5, over a minute and four processes of a real worker."""

import argparse
import sys
import time
from pathlib import Path

import redis

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "acceptance")]

from overheard import Overheard, claims_in, tokens_in  # noqa: E402
from ports import free_port  # noqa: E402
from waiting import eventually  # noqa: E402
from worker_process import Worker, environment_for  # noqa: E402

from reliq import Queue  # noqa: E402
from reliq.embedded import EmbeddedRedis  # noqa: E402

RATE, BURST, PROCESSES = 100, 5, 4


def main() -> int:
    """Print what was started, claimed and woken; return 1 when starts are 1 % off, or somebody claims in vain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with EmbeddedRedis(port=free_port()) as server, redis.Redis.from_url(server.url) as client:
        queue = Queue("limited", int, url=server.url, rate=f"{RATE}/s", burst=BURST)
        queue.publish_many(range(int(RATE * (seconds + 60))))
        options = ("--queue", "limited", "--processes", str(PROCESSES), "--concurrency", "4")
        worker = Worker(
            "jobs:consumer", TESTS / "acceptance", environment_for(TESTS / "acceptance", server.url), *options
        )

        def claimed() -> int:
            return int(client.hget(queue.keys.totals, "claimed") or 0)

        try:
            eventually(lambda: claimed() > 2 * RATE, "all processes work")
            overheard = Overheard(server.url)
            began, first = time.monotonic(), claimed()
            eventually(lambda: time.monotonic() - began >= seconds, "the time is over", seconds + 30)
            took, starts, lines = time.monotonic() - began, claimed() - first, overheard.all()
            overheard.close()
        finally:
            worker.close()
    claims, tokens = len(claims_in(lines)), len(tokens_in(lines, queue))
    print(f"{starts} starts in {took:.2f} s, {RATE * took:.0f} permitted; {claims} claims, {tokens} wake-ups")
    return int(abs(starts - RATE * took) > RATE * took / 100 + BURST or max(claims, tokens) > starts * 1.01)


if __name__ == "__main__":
    sys.exit(main())
