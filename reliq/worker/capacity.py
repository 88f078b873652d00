"""How free slots go round over the queues that have work."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reliq.transitions import Suspects

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        """Note that a queue took so much."""
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
