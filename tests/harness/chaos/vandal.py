"""Write hostile messages into the queues of a run, and count them in a separate total."""

import random

import redis

from reliq.keys import Keys
from tests.harness.chaos.workload import QUEUES, SHARES
from tests.security.worker_vandal import SCORES, Vandal

#: Prefix of the ids of hostile messages.
MARK = "evil~"
#: Name under which the queue's totals count hostile messages, which no producer published.
FOREIGN = "foreign"
MESSAGES, FAR = 20, 3
#: Retry counts of hostile messages: at most one retry, or text that reliq reads as no retry, so that the messages end soon.
COUNTS = ["0", "1", "2", "-1", "x", "", "-" + "9" * 4300, "1e300", "\u00b2"]
TAILS = ["", " ", "\t", "*", "\u202e", "\x1b[2J", "{x}", "%s", "i" * 3000]


def write(client: redis.Redis, seed: int, victim: int) -> list[str]:
    """Write hostile messages to a queue and count them in its totals; return the ids of messages that are never due."""
    chance = random.Random(f"{seed} vandal")
    keys, vandal = _keys(victim), Vandal(client, chance)
    ids = [f"{MARK}{seed}-{number}{chance.choice(TAILS)}" for number in range(MESSAGES)]
    with client.pipeline(transaction=True) as pipe:
        for number, id in enumerate(ids):
            pipe.set(keys.msg(id), vandal.value(), px=600_000)
            pipe.hset(keys.retries_left, id, chance.choice(COUNTS))
            if number < FAR:
                pipe.zadd(keys.pending, {id: max(9.3e9, abs(chance.choice(SCORES)))})
            elif chance.random() < 0.2:
                pipe.zadd(keys.pending, {id: chance.choice([0.0, -1e300, float("-inf")])})
            else:
                pipe.lpush(chance.choice([keys.ready, keys.ready, keys.retry]), id)
        pipe.hincrby(keys.totals, FOREIGN, len(ids))
        pipe.execute()
    return ids[:FAR]


def take_back(client: redis.Redis, victim: int, ids: list[str]) -> None:
    """Remove these messages, which are never due, from the queue."""
    keys = _keys(victim)
    with client.pipeline(transaction=True) as pipe:
        pipe.zrem(keys.pending, *ids).hdel(keys.retries_left, *ids).unlink(*keys.msgs(ids))
        pipe.hincrby(keys.totals, FOREIGN, -len(ids))
        pipe.execute()


def _keys(victim: int) -> Keys:
    names = list(SHARES["server"])
    return QUEUES[names[victim % len(names)]].keys
