"""
Which shards a process works on, how many messages it claims of each, and in which order.

`ServedQueues` has what was read last of each queue: its shards, and whether Redis has the limits that it declares.
`QueueClaims` says when a claim of a shard is worth its round trip. `shared_out` divides the free slots by the weights of the
queues, and what a queue gets among its shards.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import fields, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from reliq.errors import ProtocolError, RedisRefusedError, RedisUnavailableError
from reliq.keys import Keys, token
from reliq.lua import transitions
from reliq.lua.transitions import CallNumber, ClaimAnswer, Suspects
from reliq.redis.shards import (
    MAP_SECONDS,
    UNREAD,
    UNSHARDED,
    WITNESSES,
    KnownMap,
    ShardMap,
    believed,
    declaration,
    shard_map,
    witnesses,
)
from reliq.settings import BATCH_LIMIT
from reliq.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reliq.handlers.handler import Handler
    from reliq.queue import Queue
    from reliq.redis.client import Client
    from reliq.redis.commands import Call, Command


logger = logging.getLogger("reliq")

#: The fences of a queue without a map are read this often.
FENCES_SECONDS = 60.0
#: Every fourth claim of a queue begins with its retries, so that neither list starves the other.
RETRY_FIRST = 4
#: A claim looks behind at most this many suspects for messages that may start.
PASS_OVER_LIMIT = 5000
#: A shard that another process watches is polled every twenty seconds where there are many workers, and more often
#: where there are few: in each second at least one of them polls it, and about two.
LONGEST_POLL_SECONDS = 20.0
SECONDS_PER_WORKER = 4 / 3
#: An application that seeds `random` keeps its numbers: this one has none of its state.
_chance = random.SystemRandom()


class ServedQueues:
    """
    The shards of the handlers' queues in the Redis of the worker; a queue that is not sharded has one.

    Args:
        maps: what this process knows of maps there.

    Attributes:
        has_changed: what was read last is not what was known; the fetcher resets it.
    """

    def __init__(self, handlers: Sequence[Handler], maps: dict[str, KnownMap] | None = None) -> None:
        self.handlers = handlers
        self.has_changed = False
        self._known = {} if maps is None else maps
        self._entries = {handler.queue.name: handler.queue.keys.entry for handler in handlers}
        self._asked: list[tuple[Queue[Any], bool]] = []  # queues whose maps are asked for, and whether fences are too
        self._fences_at = float("-inf")
        self._limits = {handler.queue.name: handler.queue.limits for handler in handlers if handler.queue.limits}
        self._unwritten = set(self._limits)  # queues whose limits this process has not yet written
        self._in_redis: dict[str, str | None] = {}  # the latest answers to `declaration`

    def shards(self) -> dict[Keys, Handler]:
        """Return every shard with its handler."""
        return {
            handler.queue.known_shards.keys(number): handler
            for handler in self.handlers
            for number in range(self._map(handler.queue.name).served)
        }

    def is_sharded(self, name: str) -> bool:
        """Return whether the queue of a name has several shards."""
        return self._map(name).served > 1

    def is_changing(self, name: str) -> bool:
        """Return whether the queue of a name is about to have more shards, or fewer."""
        map = self._map(name)
        return map.was != map.n

    def read(self, client: Client) -> None:
        """
        Read how many shards the queues have; a process that may not read it works on one of each.

        The heartbeat asks again for a queue whose node is away: the worker serves the others meanwhile.

        Raises:
            ConfigurationError: a queue has not as many as it must have, or several although it declares limits.
            RedisUnavailableError: no node can be asked.
        """
        found = self.take(client.run_all(self.questions()))
        away = [answer for answer in found if isinstance(answer, RedisUnavailableError)]
        if away and len(away) == len(found) and all(self._map(queue.name) == UNSHARDED for queue, _ in self._asked):
            raise away[0]
        for (queue, _), answer in zip(self._asked, found, strict=True):
            if not isinstance(answer, RedisUnavailableError):
                queue.known_shards.check(self._map(queue.name))
            if queue.name in self._limits:
                self._map(queue.name).check_is_one(queue.name)

    def questions(self) -> list[Command[Any]]:
        """
        Return the commands that read shard maps and declared limits, for `take`; once a minute also those of fences.

        A publisher that knows the map of a queue goes on with it after Redis has lost everything, and writes it with the
        fences.
        """
        now = time.monotonic()
        reads_fences = now >= self._fences_at
        if reads_fences:
            self._fences_at = now + FENCES_SECONDS
        queues = [handler.queue for handler in self.handlers if not handler.queue.keys.bare]
        self._asked = [(queue, reads_fences and not self._map(queue.name).epoch) for queue in queues]
        questions: list[Command[Any]] = []
        for queue, has_fences in self._asked:
            questions += [shard_map(queue.keys), *(witnesses(queue.keys) if has_fences else ())]
        return [*questions, *(declaration(queue.keys) for queue in queues if queue.name in self._limits)]

    def take(self, answers: Sequence[Any]) -> list[Any]:
        """Take the answers to `questions`; return those for maps."""
        rest = iter(answers)
        found = []
        for queue, has_fences in self._asked:
            answer = next(rest)
            fences = list(islice(rest, WITNESSES)) if has_fences else []
            found.append(answer)
            known = map = self._map(queue.name)
            if isinstance(answer, ProtocolError):
                answer = UNSHARDED  # a corrupt map is a lost one
            if isinstance(answer, ShardMap):
                map = believed(queue.name, known, answer, fences)
            elif fences:
                map = known.or_later(fences)
            if isinstance(answer, ShardMap) or map != known:
                self._known[queue.keys.entry] = KnownMap(map, time.monotonic() + MAP_SECONDS)
            self.has_changed = self.has_changed or map != known
        declared = [queue.name for queue, _ in self._asked if queue.name in self._limits]
        for name, answer in zip(declared, rest, strict=True):
            if not isinstance(answer, Exception):
                self._in_redis[name] = answer
        return found

    def _map(self, name: str) -> ShardMap:
        return self._known.get(self._entries[name], UNREAD).map

    def write_limits(self, client: Client) -> list[RedisRefusedError]:
        """
        Write the declared limits that Redis may not have, and log them; return the errors of what Redis refused.

        Limits are written once after the start, and again when Redis has lost them. What an operator changed since the
        same limits were declared stays as it is: only another declaration writes over it.
        """
        queues = [
            (handler.queue, handler.queue.limits)
            for handler in self.handlers
            if handler.queue.limits
            and (handler.queue.name in self._unwritten or not self._in_redis.get(handler.queue.name, "unread"))
        ]
        calls = [
            transitions.limit(queue.keys, limits.fields(), declared=limits.declaration) for queue, limits in queues
        ]
        refused: list[RedisRefusedError] = []
        for (queue, limits), answer in zip(queues, client.run_all(calls) if calls else (), strict=True):
            if isinstance(answer, RedisRefusedError):
                refused.append(answer)
                logger.error("queue %s: its limits cannot be written to Redis: %s", queue.name, answer)
            elif not isinstance(answer, Exception):
                self._unwritten.discard(queue.name)
                self._in_redis[queue.name] = limits.declaration
                if answer:
                    values = {field.name: getattr(limits, field.name) for field in fields(limits)}
                    text = ", ".join(f"{name}={value}" for name, value in values.items() if value)
                    logger.info("%s: limits written: %s", queue.name, printable(text))
        return refused


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
    suspects: Suspects = Suspects(1, 0, 1)

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
        return self._replace(
            slots=self.slots - part.slots,
            rest=self.rest - part.rest,
            ahead=self.ahead - part.ahead,
            suspects=replace(self.suspects, narrowest=0),
        )


#: The claims of a shard, and how much of it can be claimed.
Offer = tuple["QueueClaims", Capacity]


class FairOrder:
    """Each queue's place in the round: the further along, the later its turn; a weight of two goes half as far."""

    def __init__(self) -> None:
        self._place: dict[str, float] = {}
        self._in_the_round: set[str] = set()

    def order(self, names: Sequence[str]) -> dict[str, float]:
        """Return the places of queues that have work; a queue that had none for a while gets no credit for it."""
        places = [self._place[name] for name in names if name in self._in_the_round]
        start = min(places) if places else max(self._place.values(), default=0.0)
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
    for _ in range(max((capacity.slots for capacity in capacities), default=0)):
        wanting = [at for at, capacity in enumerate(capacities) if given[at] < capacity.slots]
        if not wanting:
            break
        turn = min(wanting, key=places.__getitem__)
        given[turn] += 1
        places[turn] += 1 / weights[turn]
    total = sum(weights)
    return [
        capacity._replace(slots=slots, ahead=max(min(capacity.ahead, 1), capacity.ahead * weight // total))
        for capacity, slots, weight in zip(capacities, given, weights, strict=True)
    ]


class QueueClaims:
    """
    The claims of one handler's queue, or of one shard of it.

    Attributes:
        place: what it has in common with shards that may share a wait for their tokens.
        hot: worth a claim without waiting for its token.
        must_poll: no wake token announced work, but it is time to poll.
        is_watched_here: this process waits for its next due time.
        look_at: when this process polls it next; another process watches it until then.
        waits_for_suspect: it holds messages that may be claimed once a suspect that is here has ended.
        asked: the limit of a claim whose answer has not come; it is made again under the same number.
        behind: how many messages were left by the last claim or look.
        turn: the higher, the later its turn among the shards of its queue.
    """

    def __init__(self, handler: Handler, keys: Keys | None = None, lane: str = "") -> None:
        self.handler = handler
        self.name = handler.queue.name
        self.keys = keys or handler.queue.keys
        self.place: Hashable = None
        self.hot = True
        self.must_poll = True
        self.is_watched_here = False
        self.look_at = 0.0
        self.waits_for_suspect = False
        self.asked = 0
        self.behind = 0
        self.turn = 0
        self._asked_keyed = 0  # the limit of the same claim where the queue has keys
        self._suspects_held = 0  # when the last claim was made
        self._takes_suspects = True  # the last claim did, if there was room
        self._number = CallNumber(lane or token(), 1)
        self._claims = count(1)
        self._passed_over = 0  # suspects that were sent to the far end of their list, since something was taken
        self._careful = False  # there may be messages that must not wait in a buffer

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
        return self.must_poll or bool(self.asked) or (self.hot and self.has_room(capacity))

    def starves(self, capacity: Capacity) -> bool:
        """Return whether messages wait that cannot be held ahead, while other queues have every slot."""
        return capacity.crowded and self.hot and not self.must_poll and not self.has_room(capacity)

    def claim(self, capacity: Capacity, watcher: str) -> Call[ClaimAnswer]:
        """Return the claim to be made now; a claim that has no answer yet is made again."""
        if not self.asked:
            ahead = 0 if self._careful else capacity.ahead
            self.asked = min(BATCH_LIMIT, capacity.direct + ahead)
            # Into free slots alone: what is claimed where there are keys counts as started. And a claim that no token
            # announced would take what a rate permits from the process it is due to: it only looks.
            self._asked_keyed = 0 if self.must_poll else min(BATCH_LIMIT, capacity.direct)
        self._suspects_held = capacity.suspects.held
        self._takes_suspects = capacity.suspects.narrowest > 0
        return transitions.claim(
            self.keys,
            self._number,
            limit=self.asked,
            lease_ms=self.handler.lease_ms,
            keyed_limit=self._asked_keyed,
            first="retry" if next(self._claims) % RETRY_FIRST == 0 else "ready",
            direct=capacity.slots,
            suspects=capacity.suspects,
            watcher=watcher,
            spread=-(-self._asked_keyed // capacity.batch) or None if self.handler.settings.batch_by_key else None,
        )

    def looked(self, answer: ClaimAnswer) -> None:
        """Update what is known of the queue from a look."""
        self.hot = answer.behind > 0
        self.must_poll = False
        self._careful = self._careful or answer.keyed
        self.behind = answer.behind

    def answered(self, answer: ClaimAnswer) -> None:
        """Update what is known of the queue from a claim; the next claim gets a new number, unless this was a look."""
        claimed = answer.claimed
        limit = self._asked_keyed if answer.keyed else self.asked
        self.asked = 0
        self.looked(answer)
        if not limit:
            return
        self._number = self._number.next()
        self._careful = answer.keyed or (answer.behind > 0 and len(claimed) < limit)  # some were passed over
        for message in claimed:
            self._careful = self._careful or message.deaths > 0 or message.left <= 0
        # Nothing taken though something is there: the queue is paused, or what is there are suspects.
        self.waits_for_suspect = not claimed and answer.behind > 0 and self._suspects_held > 0
        self._passed_over = self._passed_over + limit if self.waits_for_suspect else 0
        others_may_follow = 0 < self._passed_over < min(answer.behind, PASS_OVER_LIMIT)
        self.hot = answer.behind > 0 and (bool(claimed) or others_may_follow or not self._takes_suspects)


def shared_out(hot: Sequence[Offer], order: FairOrder) -> list[Offer]:
    """
    Divide the free slots by the weights of the queues, and what a queue gets among its shards.

    A claim that has no answer yet is made again.
    """
    queues: dict[str, list[Offer]] = {}
    for offer in hot:
        queues.setdefault(offer[0].name, []).append(offer)
    places = order.order(list(queues))
    parts = [offers[0][1] for offers in queues.values()]
    if len(queues) > 1:
        weights = [offers[0][0].handler.settings.weight for offers in queues.values()]
        parts = fair_shares(parts, weights, list(places.values()))
    parts_of_shards: list[Offer] = []
    for offers, part in zip(queues.values(), parts, strict=True):
        shards = [claims for claims, _ in offers]
        parts_of_shards += taken_in_turn(shards, part) if len(shards) > 1 else [(shards[0], part)]
    return [(claims, part) for claims, part in parts_of_shards if claims.has_room(part) or claims.must_poll]


def taken_in_turn(shards: Sequence[QueueClaims], capacity: Capacity) -> list[Offer]:
    """
    Divide what can be claimed of a queue among those of its shards that may have work.

    A script costs nearly the same for one message as for many, so one shard that has enough gets all, and the others
    have their turns in the next rounds. Where it is unknown how much there is, all get the same.
    """
    parts: list[Offer] = []
    left = capacity
    ordered = sorted(shards, key=lambda claims: claims.turn)
    for at, claims in enumerate(ordered):
        same = -(-left.messages // (len(ordered) - at))
        part = left.part(min(claims.asked or claims.behind or same, left.messages, BATCH_LIMIT))
        parts.append((claims, part))
        left = left.without(part)
    claimed = [claims for claims, part in parts if part.messages]
    for turn, claims in enumerate(reversed(claimed), ordered[-1].turn + 1):
        claims.turn = turn  # of these the last comes first next time: it took no suspects
    return parts


class PollJitter:
    """
    When one process polls shards that others watch: all of them in one round, so that they share round trips.

    Args:
        workers: returns how many processes there are.
    """

    def __init__(self, workers: Callable[[], int]) -> None:
        self._workers = workers
        self._next_at = 0.0

    def next(self, now: float) -> float:
        """Return the time of the next round."""
        if self._next_at <= now:
            seconds = min(LONGEST_POLL_SECONDS, max(1.0, (self._workers() - 1) * SECONDS_PER_WORKER))
            self._next_at = now + seconds * _chance.uniform(0.75, 1.25)
        return self._next_at
