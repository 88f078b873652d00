"""
What the scripts cost on the server, a message: without keys, and with 1, 1,000 and 100,000 of them.

    python -m benchmarks.keys                # this version
    python -m benchmarks.keys ../before      # beside another one, of which that is the working tree

A server on loopback runs nothing else. The versions take turns, round by round; the least of the rounds counts, for what
else the machine does only adds. Times are those of the server for EVALSHA, in microseconds a message.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from benchmarks.server import private_server
from reliq.keys import Keys
from reliq.lua import transitions as t

ROUNDS = 9
#: Name -> messages, of how many keys (None: none, by the rules of a queue without keys), limits, messages a call.
KINDS: dict[str, tuple[int, int | None, dict[str, str], int]] = {
    "no keys, single calls": (1500, None, {}, 1),
    "no keys, calls of 10": (3000, None, {}, 10),
    "no keys, calls of 100": (6000, None, {}, 100),
    "1 key, calls of 100": (6000, 1, {}, 100),
    "1,000 keys, calls of 100": (6000, 1000, {}, 100),
    "100,000 keys, calls of 100": (100_000, 100_000, {}, 100),
    "1,000 keys in order, calls of 100": (6000, 1000, {"ordered": "1"}, 100),
    "1,000 keys in order, single calls": (1500, 1000, {"ordered": "1"}, 1),
    "limits of the queue alone, calls of 100": (
        6000,
        0,
        {"rate_us": "0.01", "burst": "100000", "concurrency": "5000"},
        100,
    ),
}


def main() -> None:
    """Run the rounds of each version, and print the least of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="the working tree of another version")
    parser.add_argument("--round", metavar="PORT", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="measure the kinds alone whose names begin so")
    asked = parser.parse_args()
    if asked.round:
        kinds = {name: kind for name, kind in KINDS.items() if name.startswith(asked.only) and _is_known(kind[1])}
        print(json.dumps({name: measure(asked.round, *kind) for name, kind in kinds.items()}))
        return
    trees = {"now": Path.cwd()} | ({"before": asked.before.resolve()} if asked.before else {})
    least: dict[tuple[str, str, str], float] = defaultdict(lambda: float("inf"))
    with private_server() as server:
        for _ in range(asked.rounds):
            for version, tree in trees.items():
                for name, verbs in _round(
                    tree, int(server.url.rpartition(":")[2].partition("/")[0]), asked.only
                ).items():
                    for verb, us in verbs.items():
                        least[version, name, verb] = min(us, least[version, name, verb])
    print(f"{'us a message':<42}{'version':<10}" + "".join(f"{verb:>9}" for verb in ("publish", "claim", "ack")))
    for name in KINDS:
        for version in trees:
            row = [least[version, name, verb] for verb in ("publish", "claim", "ack") if (version, name, verb) in least]
            if row:
                print(f"{name:<42}{version:<10}" + "".join(f"{us:>9.2f}" for us in row))


def _round(tree: Path, port: int, only: str) -> Any:
    """Measure all kinds once with the package of a tree."""
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{Path(__file__).parents[1]}"}
    command = [sys.executable, __file__, "--round", str(port), "--only", only]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, cwd=tree).stdout)


def _is_known(keys: int | None) -> bool:
    return keys is None or hasattr(t, "limit")


def measure(port: int, messages: int, key_count: int | None, limits: dict[str, str], size: int) -> dict[str, float]:
    """Publish, claim and ack messages; return the microseconds of each verb, a message."""
    client: Any = redis.Redis(port=port)
    keys, spent = Keys("measured"), {}
    client.flushall()
    keyed: dict[str, Any] = {} if key_count is None else {"keyed": True}
    if limits:
        client.execute_command(*t.limit(keys, limits).command_in_full)
    calls = list(_publishes(keys, messages, key_count, size))
    spent["publish"] = _spent(client, calls, messages)
    spent["claim"] = spent["ack"] = 0.0
    # Of 1,000 keys in order no more than 1,000 messages run at once.
    for at in range(0, len(calls), 10):
        numbers = [t.CallNumber("w", one + 1) for one in range(at, min(at + 10, len(calls)))]
        claims = [t.claim(keys, one, limit=size, lease_ms=3_600_000, **keyed) for one in numbers]
        held: list[Any] = []
        spent["claim"] += _spent(client, claims, messages, held)
        acks = [t.ack(keys, [(one, None) for one in answer.claimed]) for answer in held if answer.claimed]
        spent["ack"] += _spent(client, acks, messages)
    if left := client.zcard(keys.unack) + client.llen(keys.ready) + client.hlen(keys.retries_left):
        raise RuntimeError(f"{left} messages are left")
    return spent


def _publishes(keys: Keys, messages: int, key_count: int | None, size: int) -> Iterator[Any]:
    for at in range(0, messages, size):
        items = [(f"{at + one:022d}", b',"r":3}\n' + b"x" * 100) for one in range(size)]
        names = [f"tenant-{(at + one) % key_count:08d}" if key_count else "" for one in range(size)]
        options: dict[str, Any] = {} if key_count is None else {"message_keys": names}
        yield t.publish(keys, items, t.CallNumber("p", at + 1), ttl_ms=3_600_000, retries=3, **options)


def _spent(client: Any, calls: list[Any], messages: int, answers: list[Any] | None = None) -> float:
    """Make calls; return the server's time for them in us, a message."""
    client.script_load(calls[0].script.text)
    client.config_resetstat()
    with client.pipeline(transaction=False) as pipe:
        for call in calls:
            pipe.execute_command(*call.command)
        replies = pipe.execute()
    if answers is not None:
        answers += [call.read(reply) for call, reply in zip(calls, replies, strict=True)]
    return float(client.info("commandstats")["cmdstat_evalsha"]["usec"]) / messages


if __name__ == "__main__":
    main()
