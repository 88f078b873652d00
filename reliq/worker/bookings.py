"""
Book the starts of messages in queues with shared limits.

In Redis Cluster, a shared limit and a queue are in different hash slots, so one script cannot claim messages and also
count their starts. Therefore the worker first books starts at the limit. At the booked time it claims messages, at most
one for each booked start.

If a limit counts costs, the worker must know the costs before it books. So it first claims the messages of one handler
call, then books a start with their costs. Until the booked time, these messages wait in the process without a slot.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

from reliq.lua import transitions
from reliq.settings import BATCH_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.limits import Limit
    from reliq.lua.transitions import Booking
    from reliq.redis.commands import Call
    from reliq.worker.slots import HeldDelivery

#: A worker may send a claim until this many seconds after the booked time. After that, it must book again.
LATE_SECONDS = 0.1
#: If Redis' reply to a claim arrives more than this many seconds after the booked time, return the claimed messages to
#: Redis, because Redis may have run the claim too late.
VOID_SECONDS = 1.0


class _Booked(NamedTuple):
    """
    Starts that are booked at one limit, all for the same time.

    Attributes:
        starts: the number of booked starts.
        at_us: the booked time by the clock of the limit's Redis server, in Unix microseconds.
        at: the booked time as monotonic time, counted from the arrival of Redis' reply. It is exact or a little late.
        since: the booked time as monotonic time, counted from the sending of the script call. It is exact or a little
            early.
        slack: extra seconds for which the booking is valid, because booking at the other limits takes round trips.
    """

    starts: int
    at_us: int
    at: float
    since: float
    slack: float


class Bookings:
    """
    The message starts that this process has booked for one shard, at each shared limit of the queue.

    Attributes:
        rests_until: the monotonic time until which the fetcher does not claim from the shard.
        by_cost: whether a limit counts the costs of messages.
        held: if a limit counts costs, the claimed messages that have not started. The fetcher claims no more messages
            from the shard before these messages start.
    """

    def __init__(self, limits: Sequence[Limit], shard: str) -> None:
        self._limits = limits
        self._shard = shard
        self._booked: dict[Limit, _Booked] = {}
        self._unused: list[Call[Booking]] = []
        self._asked = limits[0]
        self._next_at = 0.0  # the monotonic time from which the limits may permit another start
        self.rests_until = 0.0
        self.by_cost = any(limit.costs for limit in limits)
        self.held: list[HeldDelivery] = []
        self._group: list[HeldDelivery] = []  # the messages of `held` for which a start is being booked
        self._most_starts = min((limit.starts for limit in limits if limit.starts), default=BATCH_LIMIT)
        self._most_costs = min((limit.costs for limit in limits if limit.costs), default=0)

    def is_late(self, seconds: float) -> bool:
        """Return whether a booked time is more than `seconds` ago. After a slow reply of Redis, allow more time."""
        now = time.monotonic()
        return any(now > max(one.since + seconds, one.at + seconds / 4 + one.slack) for one in self._booked.values())

    def starts(self) -> int:
        """Return how many messages may start now; 0 if starts are not booked at all limits, or a booking is too old."""
        if self.is_late(LATE_SECONDS):
            self.end(0)
        return min(one.starts for one in self._booked.values()) if len(self._booked) == len(self._limits) else 0

    def book(self, most: int, backlog: int = 10**9) -> Call[Booking]:
        """
        Return the script call that books up to `most` starts at the next limit without a booking.

        It books no time that is earlier than the times booked at the other limits. `backlog` is the number of messages
        that wait in the shard.
        """
        self._asked = next(limit for limit in self._limits if limit not in self._booked)
        most = min([most, *(one.starts for one in self._booked.values())])
        after = max([0.0, *(one.at - time.monotonic() for one in self._booked.values())])
        return transitions.book(
            *(self._asked, most, _cost(self._group)),
            after_us=round(after * 1_000_000),
            queue=self._shard,
            backlog=backlog,
        )

    def book_held(self) -> Call[Booking] | None:
        """
        Return the script call that books a start for messages of `held`; None if no booking is needed now.

        Book for the first messages of `held`, as many as the limits permit to start together.
        """
        self.held = [one for one in self.held if not one.settling]
        if self._booked and any(one.settling for one in self._group):
            self.end(0)
        is_read = self.held and all(one.is_read for one in self.held)
        if not is_read or self.rests_until or len(self._booked) == len(self._limits):
            return None
        if not self._booked:
            self._group = self.held[: self._most_starts]
            while len(self._group) > 1 and _cost(self._group) > self._most_costs:
                self._group.pop()
        return self.book(len(self._group))

    @property
    def is_due(self) -> bool:
        """Whether messages of `held` may start now."""
        return bool(self.held) and len(self._booked) == len(self._limits) and not self.rests_until

    def take(self) -> list[HeldDelivery]:
        """Remove from `held` the messages that may start now; return these messages."""
        for one in self._group:
            one.booked = [(limit, booked.at_us) for limit, booked in self._booked.items() if limit.costs]
        self.held = self.held[len(self._group) :]
        for one in self.held:
            one.held_since = math.inf
        self.end(len(self._group))
        return self._group

    def answered(self, answer: Booking, sent_at: float) -> None:
        """
        Store Redis' reply to the script call of `book`.

        If the limit permits no start, give back the bookings at the other limits.

        Args:
            answer: the reply.
            sent_at: the monotonic time just before the script call was sent.
        """
        wait_seconds = answer.wait_us / 1_000_000
        at = time.monotonic() + wait_seconds
        if not answer.starts:
            self.end(0)
            self.rests_until = at
            return
        self._next_at = max(self._next_at, time.monotonic() + answer.next_us / 1_000_000)
        slack = min(VOID_SECONDS, len(self._limits) * (time.monotonic() - sent_at))
        self._booked[self._asked] = _Booked(answer.starts, answer.at_us, at, sent_at + wait_seconds, slack)
        for limit, one in list(self._booked.items()):
            # The new booking is for a later time than this booking. Give this booking back, and book the limit again.
            if one.at < at - LATE_SECONDS / 2 - slack:
                del self._booked[limit]
                self._give_back(limit, one, one.starts)
        if len(self._booked) == len(self._limits):
            self.rests_until = max(one.at for one in self._booked.values())
            for held in self.held:
                held.held_since = self.rests_until

    def end(self, used: int) -> None:
        """End all bookings after `used` messages have started; give back the unused starts."""
        for limit, one in self._booked.items():
            self._give_back(limit, one, one.starts - used)
        self._booked.clear()
        self.rests_until = self._next_at

    def unused(self) -> list[Call[Booking]]:
        """
        Return the script calls that give back unused starts to their limits.

        Send each of them only once, because Redis would give back the starts again at each repetition.
        """
        calls, self._unused = self._unused, []
        return calls

    def _give_back(self, limit: Limit, one: _Booked, starts: int) -> None:
        if starts > 0:
            unused = transitions.book(limit, -starts, -_cost(self._group), after_us=one.at_us, queue=self._shard)
            self._unused.append(unused)


def _cost(group: Sequence[HeldDelivery]) -> int:
    return sum(one.delivery.header.cost for one in group)
