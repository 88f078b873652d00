"""Model of a queue with keys in plain Python: living messages, their order, and when each may start."""

from math import inf

from keyed_state import check_rate

from reliq.wire_format import is_key


class Oracle:
    """
    The messages of a queue, and their starts so far.

    Attributes:
        now: unix us.
        key_of: id -> the key of its last publish, empty without a key.
        alive: ids that have not ended; `cancelled` ids end when a claim or promote meets them.
        order: id -> its due time if delayed, else 0, and its number among equal due times. Of one key and due time, the
            message with the lower number starts first. None without a promised order.
        limits: the fields of the hash `limits`.
    """

    def __init__(self, now):
        self.now = now
        self.key_of, self.alive, self.order, self.cancelled, self.garbage = {}, set(), {}, set(), set()
        self.published, self.limits = 0, {}
        self.forget_starts()

    def forget_starts(self):
        """Count starts from zero, because the limits have changed or the clock went back."""
        self.starts, self.starts_of, self.started = [], {}, {}

    def take_back(self, id):
        """Remove the start of a claimed message from the count, because the message had expired."""
        key, at = self.started.pop(id)
        self.starts.remove(at)
        if is_key(key):
            self.starts_of[key].remove(at)

    def number(self, name, default=0):
        return int(self.limits.get(name, default))

    @property
    def per_key(self):
        return 1 if self.ordered else self.number("per_key")

    @property
    def ordered(self):
        return bool(self.number("ordered"))

    def is_shut(self, state):
        """Return whether the queue is paused, or all its slots are taken."""
        most = self.number("concurrency")
        return state.paused or (bool(most) and state.running >= most)

    def may_start(self, state):
        """Return whether limits and rates allow the next claim to take a message."""
        keys = [key for key in state.ring if key and (not is_key(key) or self.permits(state, key, "key_") >= 1)]
        waits = state.ready or state.retry or keys
        sleeps = state.asleep.get("", 0) > self.now // 1000
        return bool(waits) and not self.is_shut(state) and not sleeps and self.permits(state, "") >= 1

    def waits_for_rate(self, state):
        """Return whether the rate of the queue is the only reason why messages without a key wait."""
        return bool(state.ready) and not self.is_shut(state) and "" not in state.asleep and not self.may_start(state)

    def permits(self, state, key, prefix=""):
        """Return how many messages of a key, or of the queue, may start now by its rate."""
        every, burst = self.number(f"{prefix}rate_us"), self.number(f"{prefix}burst", 1)
        full = min(max(state.rates.get(key, 0), self.now), self.now + every * burst)
        return burst - (full - self.now) / every + 1e-6 if every else inf

    def change_limits(self, fields):
        if fields.get("ordered") and not self.ordered:
            self.order = dict.fromkeys(self.order)
        self.limits = fields
        self.forget_starts()

    def enter(self, id, key, *, in_order, due=0):
        self.published += 1
        self.alive.add(id)
        self.cancelled.discard(id)
        self.garbage.discard(id)
        self.key_of[id], self.order[id] = key, (due, self.published) if in_order else None

    def end(self, id):
        self.alive.discard(id)
        self.cancelled.discard(id)

    def bury(self, id):
        self.end(id)
        self.garbage.add(id)

    def start(self, ids):
        """Record the starts of claimed ids, in this order."""
        for id in ids:
            assert id in self.alive, id
            assert id not in self.cancelled, id
            self._check_order(id)
            self.starts.append(self.now)
            self.started[id] = self.key_of[id], self.now
            if self.number("rate_us"):
                check_rate(self.starts, self.number("rate_us"), self.number("burst", 1))
            if is_key(key := self.key_of[id]):
                starts = self.starts_of.setdefault(key, [])
                starts.append(self.now)
                if self.number("key_rate_us"):
                    check_rate(starts, self.number("key_rate_us"), self.number("key_burst", 1))

    def _check_order(self, id):
        key, order = self.key_of[id], self.order[id]
        if self.ordered and is_key(key) and order:
            due, number = order
            same = [self.order[one] for one in self.alive - self.cancelled - {id} if self.key_of[one] == key]
            assert not [other for other in same if other and other[0] == due and other[1] < number], id
