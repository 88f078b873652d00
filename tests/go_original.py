"""
The commands that the Go original, HDT3213/delayqueue, sends to Redis: a publish and an ack are three commands each.

Other clients may run between two commands of a process, so each step is a separate function.
"""

from dataclasses import dataclass
from itertools import count
from uuid import UUID

from reliq.keys import Keys

HOUR_SECONDS = 3600
_numbers = count()


def new_id() -> str:
    """Return an id as the original's publishers make it: a random UUID."""
    return str(UUID(int=next(_numbers), version=4))


@dataclass(frozen=True)
class GoProgram:
    """A Go program with the original's queue, on a redis-py client."""

    client: object
    keys: Keys

    def publishing(self, body=b"body", *, due, retries=3, id=None):
        """Return the steps of SendScheduleMsg, with times in whole seconds."""
        id = id or new_id()
        return [
            lambda: self.client.set(self.keys.msg(id), body, ex=HOUR_SECONDS),
            lambda: self.client.hset(self.keys.retries_left, id, retries),
            lambda: self.client.zadd(self.keys.pending, {id: int(due)}),
        ], id

    def publish(self, body=b"body", **options):
        """SendScheduleMsg, all steps at once."""
        steps, id = self.publishing(body, **options)
        for step in steps:
            step()
        return id

    def promote(self, now):
        """The original's script from pending to ready: moves messages that are due by its own clock."""
        if ids := self.client.zrangebyscore(self.keys.pending, 0, int(now)):
            self.client.lpush(self.keys.ready, *ids)
            self.client.zremrangebyscore(self.keys.pending, 0, int(now))

    def claim(self, now, seconds=5, *, again=False):
        """The original's script from ready, or retry, to unack; it writes no state word."""
        id = self.client.rpop(self.keys.retry if again else self.keys.ready)
        if id is None:
            return None
        self.client.zadd(self.keys.unack, {id: int(now) + seconds})
        return id.decode()

    def acking(self, id):
        """Return the steps of the original's ack."""
        return [
            lambda: self.client.zrem(self.keys.unack, id),
            lambda: self.client.delete(self.keys.msg(id)),
            lambda: self.client.hdel(self.keys.retries_left, id),
        ]

    def ack(self, id):
        """The original's ack, all steps at once."""
        for step in self.acking(id):
            step()

    def nack(self, id, now, delay=0):
        """The original's nack: sets the redelivery time as score, without checking the holder of the message."""
        self.client.zadd(self.keys.unack, {id: int(now) + delay})

    def reclaim(self, now):
        """The original's script from unack to retry, or to garbage without a retry left."""
        ids = self.client.zrangebyscore(self.keys.unack, 0, int(now))
        for id in ids:
            if int(self.client.hget(self.keys.retries_left, id) or 0) > 0:
                self.client.hincrby(self.keys.retries_left, id, -1)
                self.client.lpush(self.keys.retry, id)
            else:
                self.client.hdel(self.keys.retries_left, id)
                self.client.sadd(self.keys.garbage, id)
        self.client.zremrangebyscore(self.keys.unack, 0, int(now))

    def intercept(self, id):
        """The original's TryIntercept; return whether it reports that the message will not be delivered."""
        for removed in (
            lambda: self.client.lrem(self.keys.ready, 0, id),
            lambda: self.client.zrem(self.keys.pending, id),
        ):
            if removed():
                self.client.delete(self.keys.msg(id))
                self.client.hdel(self.keys.retries_left, id)
                return True
        self.client.hdel(self.keys.retries_left, id)
        self.client.lrem(self.keys.retry, 0, id)
        return False
