"""Model of the Redis keys that expire: bodies, deduplication windows, and the last reply of each lane."""

from dataclasses import dataclass
from math import inf

from held_clock import NOON

#: How long a chosen id stays taken, a lane keeps its last reply, and a cancel is remembered.
WINDOW_MS, LANE_MS, FREED_MS = 45_000, 600_000, 60_000


@dataclass
class Body:
    """A message's body: its header fields and its expiry time."""

    text: str
    due: int
    until: float = inf


class ExpiringKeys:
    """
    The expiring Redis keys of a queue, with their expiry times.

    Args:
        keys_expire: whether the test also moves the clock of Redis, so that Redis keys expire.
    """

    def __init__(self, *, keys_expire):
        self.now = NOON  # in microseconds
        self.keys_expire = keys_expire
        self.lanes = {}  # lane -> expiry of its last reply
        self.bodies = {}  # id -> body
        self.markers = {}  # id -> (reason, expiry)

    up = property(lambda self: -(-self.now // 1000))
    down = property(lambda self: self.now // 1000)

    @property
    def key_time(self):
        """Return the current time for expiring Redis keys."""
        return self.down if self.keys_expire else NOON // 1000

    def due_in(self, delay_ms):
        return self.up + delay_ms if delay_ms else self.down

    def pass_time(self, us):
        self.now += us
        self.lanes = {lane: until for lane, until in self.lanes.items() if until >= self.key_time}
        self.markers = {id: mark for id, mark in self.markers.items() if mark[1] >= self.key_time}
        self.bodies = {id: body for id, body in self.bodies.items() if body.until >= self.key_time}

    def mark(self, id, why, for_ms=WINDOW_MS):
        self.markers[id] = why, self.key_time + for_ms

    def postpone(self, id, by_ms, due):
        """Extend a body's expiry, and write the new due time into its header."""
        if body := self.bodies.get(id):
            body.due = due
            if by_ms and body.until > self.key_time:
                body.until = max(body.until + by_ms, self.key_time + 1)
