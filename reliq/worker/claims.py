"""The claims of one queue: when one is worth its round trip, and what its answer says of the next."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from reliq import transitions
from reliq.client.lanes import Lane
from reliq.ids import token
from reliq.settings import BATCH_LIMIT

if TYPE_CHECKING:
    from reliq.call import Call
    from reliq.handlers.handler import Handler
    from reliq.transitions import ClaimAnswer
    from reliq.worker.capacity import Capacity

#: Every so many claims of a queue begin with its retries, so that neither list starves the other.
RETRY_FIRST = 4
#: The most suspects that are passed over at once to find out whether others are behind them.
PASS_OVER_LIMIT = 5000


class QueueClaims:
    """
    The claims of one handler's queue.

    Attributes:
        hot: worth a claim without waiting for its token.
        unsure: nobody said so, but it is time to look.
        waits_for_suspect: it holds messages that may be claimed once a suspect that is here has ended.
        asked: the limit of a claim whose answer has not come; it is made again under the same number.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.name = handler.queue.name
        self.keys = handler.queue.keys
        self.hot = self.unsure = True
        self.waits_for_suspect = False
        self.asked = 0
        self._suspects_held = 0  # when the last claim was made
        self._lane = Lane(token())
        self._turn = self._lane.next()
        self._claims = count(1)
        self._passed_over = 0  # suspects that were sent to the far end of their list, since something was taken
        self._careful = False  # there may be messages that must not wait in a buffer

    def limit(self, capacity: Capacity) -> int:
        """Return how many to claim of what can be."""
        ahead = 0 if self._careful else capacity.ahead
        return self.asked or min(BATCH_LIMIT, capacity.direct + ahead)

    def has_room(self, capacity: Capacity) -> bool:
        """Say whether a message that comes can be claimed."""
        return self.limit(capacity) > 0

    def can_claim(self, capacity: Capacity) -> bool:
        """Say whether a claim can bring anything: there is room, also for a suspect if only such ones wait."""
        return self.has_room(capacity) and (not self.waits_for_suspect or self.suspect_has_ended(capacity))

    def suspect_has_ended(self, capacity: Capacity) -> bool:
        """Say whether there is room for another suspect than when the last claim was made."""
        return capacity.suspects.held < self._suspects_held

    def is_to_be_asked(self, capacity: Capacity) -> bool:
        """Say whether a claim is worth its round trip."""
        return self.unsure or bool(self.asked) or (self.hot and self.has_room(capacity))

    def starves(self, capacity: Capacity) -> bool:
        """Say whether messages wait that cannot be held ahead, while others have every slot."""
        return self.hot and not self.unsure and capacity.crowded and not self.has_room(capacity)

    def claim(self, capacity: Capacity, watcher: str) -> Call[ClaimAnswer]:
        """Return the claim to be made now; one that has no answer yet is made again."""
        self.asked, self._suspects_held = self.limit(capacity), capacity.suspects.held
        return transitions.claim(
            self.keys,
            self._turn,
            limit=self.asked,
            lease_ms=self.handler.settings.lease_ms,
            first="retry" if next(self._claims) % RETRY_FIRST == 0 else "ready",
            direct=capacity.slots,
            suspects=capacity.suspects,
            watcher=watcher,
        )

    def look(self, watcher: str) -> Call[ClaimAnswer]:
        """Return a claim that takes nothing, and needs no number: it says what is there, and who watches."""
        lease_ms = self.handler.settings.lease_ms
        return transitions.claim(self.keys, self._turn, limit=0, lease_ms=lease_ms, watcher=watcher)

    def looked(self, answer: ClaimAnswer) -> None:
        """Take over what a look has found."""
        self.hot, self.unsure = answer.behind > 0, False

    def answered(self, answer: ClaimAnswer) -> None:
        """Take over what the last claim was told; the next gets a number of its own, unless that was only a look."""
        claimed, limit, self.asked = answer.claimed, self.asked, 0
        if not limit:
            self.looked(answer)
            return
        self.unsure = False
        self._turn = self._lane.next()
        passed_over = answer.behind > 0 and len(claimed) < limit
        self._careful = passed_over or any(one.suspect or one.left <= 0 for one in claimed)
        # Nothing taken though something is there: the queue is paused, or what is there are suspects.
        self.waits_for_suspect = not claimed and answer.behind > 0 and self._suspects_held > 0
        self._passed_over = self._passed_over + limit if self.waits_for_suspect else 0
        others_may_follow = 0 < self._passed_over < min(answer.behind, PASS_OVER_LIMIT)
        self.hot = answer.behind > 0 and (bool(claimed) or others_may_follow)
