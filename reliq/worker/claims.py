"""How many messages each queue may claim, in which order, and when a claim is worth its round trip."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from reliq import transitions
from reliq.ids import token
from reliq.settings import BATCH_LIMIT
from reliq.transitions import CallNumber, Suspects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.call import Call
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.transitions import ClaimAnswer

#: Every fourth claim of a queue begins with its retries, so that neither list starves the other.
RETRY_FIRST = 4
#: A claim looks behind at most this many suspects for messages that may start.
PASS_OVER_LIMIT = 5000


_NONE = Suspects(1, 0, 1)


class Capacity(NamedTuple):
    """
    How many more messages of a queue can be claimed.

    Attributes:
        slots: free slots that its calls may have.
        ahead: how many messages may be queued besides, for slots that come free soon.
        crowded: it has no free slot although it keeps to its own limit: others have them all.
        batch: how many messages one slot takes.
        rest: how many more the batch takes that is being gathered.
        suspects: what there is of its suspects already.
    """

    slots: int
    ahead: int
    crowded: bool = False
    batch: int = 1
    rest: int = 0
    suspects: Suspects = _NONE

    @property
    def direct(self) -> int:
        """How many messages can start at once."""
        return self.slots * self.batch + self.rest

    @property
    def messages(self) -> int:
        """How many messages can be claimed."""
        return self.direct + self.ahead

    def part(self, messages: int) -> Capacity:
        """Return as much of it as so many messages need."""
        rest = min(self.rest, messages)
        slots = min(self.slots, -((rest - messages) // self.batch))
        ahead = min(self.ahead, max(0, messages - rest - slots * self.batch))
        return self._replace(slots=slots, rest=rest, ahead=ahead)

    def without(self, part: Capacity) -> Capacity:
        """Return what is left beside `part`; no suspect is claimed with it, for the others may bring some."""
        slots, rest, ahead = self.slots - part.slots, self.rest - part.rest, self.ahead - part.ahead
        return self._replace(slots=slots, rest=rest, ahead=ahead, suspects=replace(self.suspects, narrowest=0))


#: A queue, or a shard of one, and how much of it can be claimed.
Offer = tuple["QueueClaims", Capacity]


class FairOrder:
    """Each queue's place in the round: the further along, the later its turn; a weight of two goes half as far."""

    def __init__(self) -> None:
        self._place: dict[str, float] = {}
        self._in_the_round: set[str] = set()

    def order(self, names: Sequence[str]) -> dict[str, float]:
        """Return the places of queues that have work; one that had none for a while gets no credit for it."""
        going_on = [self._place[name] for name in names if name in self._in_the_round]
        start = min(going_on) if going_on else max(self._place.values(), default=0.0)
        for name in names:
            if name not in self._in_the_round:
                self._place[name] = max(self._place.get(name, 0.0), start)
        self._in_the_round = set(names)
        return {name: self._place[name] for name in names}

    def took(self, name: str, slots: float, weight: int) -> None:
        """Move a queue back in the round by the slots that it took."""
        self._place[name] += slots / weight


def fair_shares(capacities: Sequence[Capacity], weights: Sequence[int], places: Sequence[float]) -> list[Capacity]:
    """Return how much of its capacity each queue may use, so that together they take no more slots than are free."""
    given = [0] * len(capacities)
    places = list(places)
    for _ in range(max((one.slots for one in capacities), default=0)):
        wanting = [at for at, one in enumerate(capacities) if given[at] < one.slots]
        if not wanting:
            break
        turn = min(wanting, key=places.__getitem__)
        given[turn] += 1
        places[turn] += 1 / weights[turn]
    total = sum(weights)
    return [
        one._replace(slots=slots, ahead=max(min(one.ahead, 1), one.ahead * weight // total))
        for one, slots, weight in zip(capacities, given, weights, strict=True)
    ]


class QueueClaims:
    """
    The claims of one handler's queue, or of one shard of it.

    Attributes:
        hot: worth a claim without waiting for its token.
        unsure: nobody said that it has work, but it is time to look.
        is_watched_here: this process waits for its next due time.
        look_at: until then nobody need look whether it has work: another process does.
        waits_for_suspect: it holds messages that may be claimed once a suspect that is here has ended.
        asked: the limit of a claim whose answer has not come; it is made again under the same number.
        behind: how many messages were left by the last claim or look.
        turn: the higher, the later its turn among the shards of its queue.
        keyed: its messages may have keys or be limited. They are claimed into free slots alone: what is claimed counts
            as started.
    """

    def __init__(self, handler: Handler, keys: Keys | None = None, lane: str = "") -> None:
        self.handler = handler
        self.name = handler.queue.name
        self.keys = keys or handler.queue.keys
        self.hot = self.unsure = True
        self.is_watched_here, self.look_at = False, 0.0
        self.waits_for_suspect = False
        self.asked = self.behind = self.turn = 0
        self._suspects_held = 0  # when the last claim was made
        self._takes_suspects = True  # the last claim did, if there was room
        self._turn = CallNumber(lane or token(), 1)
        self._claims = count(1)
        self._passed_over = 0  # suspects that were sent to the far end of their list, since something was taken
        self._careful = False  # there may be messages that must not wait in a buffer
        self.keyed = self._asks_keyed = False  # and whether the claim that has no answer yet was made so

    def serve_keys(self, *, keyed: bool) -> None:
        """Claim with regard to keys from now on, or without."""
        if keyed != self.keyed:
            self.keyed = self._careful = keyed
            self.hot = True

    def limit(self, capacity: Capacity) -> int:
        """Return how many to claim of what can be; where there may be keys, it looks first unless somebody said there is work."""
        if self.keyed and self.unsure:  # a claim would take what a rate permits from whoever is woken for it
            return self.asked
        ahead = 0 if self._careful else capacity.ahead
        return self.asked or min(BATCH_LIMIT, capacity.direct + ahead)

    def has_room(self, capacity: Capacity) -> bool:
        """Return whether a message that comes can be claimed."""
        ahead = 0 if self._careful else capacity.ahead
        return self.asked > 0 or capacity.slots > 0 or capacity.rest > 0 or ahead > 0

    def can_claim(self, capacity: Capacity) -> bool:
        """Return whether a claim can bring anything: there is room, also for a suspect if only suspects wait."""
        return self.has_room(capacity) and (not self.waits_for_suspect or self.suspect_has_ended(capacity))

    def suspect_has_ended(self, capacity: Capacity) -> bool:
        """Return whether a suspect has ended since the last claim."""
        return capacity.suspects.held < self._suspects_held

    def is_to_be_asked(self, capacity: Capacity) -> bool:
        """Return whether a claim is worth its round trip."""
        return self.unsure or bool(self.asked) or (self.hot and self.has_room(capacity))

    def starves(self, capacity: Capacity) -> bool:
        """Return whether messages wait that cannot be held ahead, while other queues have every slot."""
        return capacity.crowded and self.hot and not self.unsure and not self.has_room(capacity)

    def claim(self, capacity: Capacity, watcher: str) -> Call[ClaimAnswer]:
        """Return the claim to be made now; one that has no answer yet is made again."""
        self._asks_keyed = self._asks_keyed if self.asked else self.keyed
        self.asked, self._suspects_held = self.limit(capacity), capacity.suspects.held
        self._takes_suspects = capacity.suspects.narrowest > 0
        return transitions.claim(
            self.keys,
            self._turn,
            limit=self.asked,
            lease_ms=self.handler.lease_ms,
            first="retry" if next(self._claims) % RETRY_FIRST == 0 else "ready",
            direct=capacity.slots,
            suspects=capacity.suspects,
            watcher=watcher,
            keyed=self._asks_keyed,
            spread=-(-self.asked // capacity.batch) or None if self.handler.settings.batch_by_key else None,
        )

    def look(self, watcher: str) -> Call[ClaimAnswer]:
        """Return a claim that takes nothing, and needs no number: it says what is there, and who watches."""
        lease_ms = self.handler.lease_ms
        return transitions.claim(self.keys, self._turn, limit=0, lease_ms=lease_ms, watcher=watcher, keyed=self.keyed)

    def looked(self, answer: ClaimAnswer) -> None:
        """Update what is known of the queue from a look."""
        self.hot, self.unsure, self.behind = answer.behind > 0, False, answer.behind

    def answered(self, answer: ClaimAnswer) -> None:
        """Update what is known of the queue from a claim; the next claim gets a new number, unless this was a look."""
        claimed, limit, self.asked = answer.claimed, self.asked, 0
        if not limit:
            self.looked(answer)
            return
        self.unsure, self.behind = False, answer.behind
        self._turn = CallNumber(self._turn.lane, self._turn.number + 1)
        self._careful = self.keyed or (answer.behind > 0 and len(claimed) < limit)  # some were passed over
        for one in claimed:
            self._careful = self._careful or one.deaths > 0 or one.left <= 0
        # Nothing taken though something is there: the queue is paused, or what is there are suspects.
        self.waits_for_suspect = not claimed and answer.behind > 0 and self._suspects_held > 0
        self._passed_over = self._passed_over + limit if self.waits_for_suspect else 0
        others_may_follow = 0 < self._passed_over < min(answer.behind, PASS_OVER_LIMIT)
        self.hot = answer.behind > 0 and (bool(claimed) or others_may_follow or not self._takes_suspects)
