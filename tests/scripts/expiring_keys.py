"""Model of the Redis keys that expire: bodies, deduplication windows, and the last reply of each lane."""

from dataclasses import dataclass
from math import inf

from held_clock import NOON

#: For how long a chosen id stays taken after its end, a publish's lane keeps its last answer, and a cancel is known.
WINDOW_MS, LANE_MS, FREED_MS = 45_000, 600_000, 60_000


@dataclass
class Body:
    """A message's body: its header fields and its expiry time."""

    text: str
    due: int
    until: float = inf


class ExpiringKeys:
    """
    The keys of a queue that expire, and the time by which they do.

    Args:
        keys_expire: whether Redis' own clock is held too, so that keys go when their time has passed.
    """

    def __init__(self, *, keys_expire):
        self.now = NOON  # in microseconds
        self.keys_expire = keys_expire
        self.lanes = {}  # lane -> until when Redis remembers its last call
        self.bodies = {}  # by id
        self.markers = {}  # id -> (why it is taken, until when)

    up = property(lambda self: -(-self.now // 1000))
    down = property(lambda self: self.now // 1000)

    @property
    def key_time(self):
        """Now, as far as keys that expire are concerned."""
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
        """Move a body's expiry on, and write the new due time into its header."""
        if body := self.bodies.get(id):
            body.due = due
            if by_ms and body.until > self.key_time:
                body.until = max(body.until + by_ms, self.key_time + 1)
