"""The published messages and the behaviour of their handlers, decided by the seed."""

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from reliq import Queue
from reliq.keys import Keys

LEASE_SECONDS = 2.0
#: Queue -> retries. With 20 retries, no message becomes a dead letter by chance. In one queue, the second failure is final.
RETRIES = {"sturdy": 20, "frail": 1, "south": 20, "spread": 20, "inorder": 20, "narrow": 20}
#: The queue with message keys, and how many messages of each key may run at once.
ORDERED = "inorder"
PER_KEY = {ORDERED: 1, "narrow": 2}
#: The queues with a rate by cost: how much may start in a second, and at once.
COSTS = {"narrow": (2500, 100)}
_LIMITS = {
    ORDERED: {"ordered": True},
    "narrow": {"per_key": PER_KEY["narrow"], "concurrency": 24, "rate": "2500/s by cost", "burst": 100},
}
#: The queues whose results are kept, for longer than a run.
KEEP_SECONDS = {"sturdy": 86_400, "frail": 86_400}
QUEUES: dict[str, Queue[dict[str, Any]]] = {
    name: Queue(name, dict, retries=retries, dedup=30, **_LIMITS.get(name, {})) for name, retries in RETRIES.items()
}
#: The share of long jobs, and the seconds of each of their items.
WALKS, ITEM_SECONDS = 0.005, 0.25
#: Message keys.
KEYS = tuple(f"key-{number}" for number in range(16))
#: Kind of run -> its queues and each queue's share of the publishes. In a Cluster of three nodes, the first three
#: queues are on one node each, and the shards of the last queue on all nodes.
GROWING = "spread"
SHARES = {
    "server": {"sturdy": 9, "frail": 1},
    "keys": {ORDERED: 4, "narrow": 4, "sturdy": 2},
    "cluster": {"sturdy": 3, "frail": 2, "south": 3, "spread": 4},
}


def place_keys(place: str) -> Keys:
    """Return the Redis keys of a queue or a shard by its name in histories: `spread`, `spread#3`."""
    name, _, shard = place.partition("#")
    return QUEUES[name].keys.of_shard(int(shard or 0))


def wish(seed: int, producer: str, number: int, shares: Mapping[str, int]) -> SimpleNamespace:
    """
    Return what `producer` publishes in step `number`; `shares` are the queues' shares of the publishes.

    Attributes:
        names: of the messages; several are published by one call.
        chosen: whether the names are also the ids.
        cancels: which of the last messages to cancel afterwards, 1 for the last; 0 for none.
        waits: whether the publish waits for a replica, if there are replicas.
        key: of the messages; empty in queues without keys.
        cost, spent: the expected cost of each message, and the cost that its handler reports.
    """
    chance = random.Random(f"{seed} {producer} {number}")
    many = 10 if chance.random() < 0.05 else 1
    queue = chance.choices(list(shares), list(shares.values()))[0]
    return SimpleNamespace(
        names=tuple(f"{producer}.{number}.{index}" for index in range(many)),
        queue=queue,
        delay=chance.choices([0.0, 0.2, 1.5], [6, 2, 2])[0],
        padding=chance.choices([100, 64_000], [99, 1])[0],
        chosen=many > 1 or chance.random() < 0.8,
        cancels=chance.randint(1, 5) if chance.random() < 0.02 else 0,
        waits=chance.random() < 0.75,
        key=chance.choice(KEYS) if queue in PER_KEY else "",
        cost=(cost := chance.choices([1, 10, 50], [6, 3, 1])[0] if queue in COSTS else 1),
        spent=int(cost * chance.choice([0.5, 1, 2])),
    )


def walk_of(seed: int, name: str) -> int:
    """Return the number of items of a long job, which makes a checkpoint after each item; 0 for most messages."""
    return 8 if random.Random(f"{seed} {name} walk").random() < WALKS else 0


def conduct(seed: int, name: str, attempt: int, *, put_off: bool) -> tuple[float, str]:
    """Return the handler's duration and answer for attempt `attempt` of message `name`; it snoozes at most once."""
    chance = random.Random(f"{seed} {name} {attempt}")
    roll = chance.random()
    if roll < 0.003:
        seconds = 1.3 * LEASE_SECONDS
    elif attempt > 1:
        seconds = chance.uniform(0.2, 0.5)  # long enough for a late call with the previous receipt
    else:
        seconds = chance.uniform(0, 0.02)
    answer = chance.choices(["ack", "nack", "raise", "snooze", "reject"], [96.5, 2, 0.5, 0.8, 0.2])[0]
    return seconds, "ack" if put_off and answer == "snooze" else answer
