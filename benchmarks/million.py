"""
A million keys: what they take while they wait, and what stays when they are drained.

    python -m benchmarks.million                      # 1,000,000 messages, each of a key of its own
    python -m benchmarks.million --noisy              # 1,000,000 of one key, beside 50 others with three each
    python -m benchmarks.million --messages 20000     # a short look

A private Redis on loopback; real workers drain it. Prints `used_memory` and how many of each structure there are: at the
start (scripts are loaded, one message has been worked), full, and at the end.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import redis

from benchmarks.server import private_server
from reliq import Consumer, Outgoing, Queue

TENANTS = Queue("tenants", int, url=os.environ.get("BENCH_URL", "redis://127.0.0.1:1/0"))
QUIET, EACH = 50, 3
#: How many are taken at a time while turns are looked at.
TAKEN = 10
#: How to ask for the size of a structure, by its type.
SIZES = {"list": "LLEN", "hash": "HLEN", "zset": "ZCARD", "set": "SCARD", "stream": "XLEN", "string": "STRLEN"}
#: Redis gives the room of a large table back in steps, while it has nothing else to do.
SETTLE_SECONDS = 15.0

consumer = Consumer()


@consumer.handler(TENANTS)
def nothing(body: int) -> None:
    """Return at once."""


def main() -> int:
    """Fill, look, drain, look; return 1 when something is left that was not there before."""
    given = _options()
    with private_server() as server, redis.Redis.from_url(server.url) as client:
        queue = Queue("tenants", int, url=server.url)
        queue.publish(0, key="first")
        _drain(server.url, given.processes)
        start = _told(client, "start", given.messages)
        began = time.monotonic()
        keys = ("noisy" if given.noisy else f"key-{number:07d}" for number in range(given.messages))
        queue.publish_many(Outgoing(body=number, key=key) for number, key in enumerate(keys))
        print(f"published {given.messages:,} in {time.monotonic() - began:.0f} s", flush=True)
        if given.noisy:
            queue.publish_many(Outgoing(body=0, key=f"quiet-{number % QUIET}") for number in range(QUIET * EACH))
            print(f"the last of {QUIET * EACH} messages of {QUIET} quiet keys starts as number {_last(queue)}")
        _told(client, "full", given.messages)
        began = time.monotonic()
        _drain(server.url, given.processes)
        print(f"drained by {given.processes} processes in {time.monotonic() - began:.0f} s", flush=True)
        time.sleep(SETTLE_SECONDS)
        end = _told(client, "end", given.messages)
    more = {name: size for name, size in end.items() if name not in start}
    print(f"left beside what was there at the start: {more or 'nothing'}")
    return int(bool(more))


def _drain(url: str, processes: int) -> None:
    """Run a worker until nothing is left."""
    words = ("worker", f"{__spec__.name}:consumer", "--burst", "--processes", str(processes), "--log-level", "error")
    environment = os.environ | {"BENCH_URL": url}
    subprocess.run([sys.executable, "-m", "reliq", *words], env=environment, stderr=subprocess.DEVNULL, check=True)


def _last(queue: Queue[int]) -> int:
    """Take messages until all quiet ones have been had; return how many were started by then."""
    started = seen = last = 0
    while seen < QUIET * EACH:
        with queue.receive(limit=TAKEN) as jobs:
            for job in jobs:
                started += 1
                if (job.key or "").startswith("quiet"):
                    seen, last = seen + 1, started
    return last


def _told(client: redis.Redis, when: str, messages: int) -> dict[str, int]:
    """Print and return what there is: the size of each structure, and how many there are of what each message has."""
    used = int(client.info("memory")["used_memory"])
    found = _structures(client)
    print(f"{when}: used_memory {used:,} bytes, {used / messages:.1f} a message; ", end="")
    print(", ".join(f"{name} {size:,}" for name, size in sorted(found.items())), flush=True)
    return found


def _structures(client: redis.Redis) -> dict[str, int]:
    """Return the sizes of structures by the ends of their names; of lines, bodies and the like, how many there are."""
    found: Counter[str] = Counter()
    for key in client.scan_iter(count=10_000):
        name = key.decode().partition("}:")[2]
        kind, colon, _ = name.partition(":")
        if colon:
            found[f"{kind}:*"] += 1
        else:
            found[name or key.decode()] += _size(client, key)
    return dict(found)


def _size(client: redis.Redis, key: bytes) -> int:
    kind: Any = client.type(key)
    ask: Any = client.execute_command
    return int(ask(SIZES[kind.decode()], key))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--noisy", action="store_true", help="all of one key, beside 50 quiet ones")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
