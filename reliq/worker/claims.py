"""
Decide from which shards a process claims, how many messages, and in which order.

`ServedQueues` stores the shard map of each queue, and whether Redis has its declared limits. `QueueClaims` decides when
a claim from a shard is worth a round trip. `shared_out` divides the free slots among queues by weight, then among
shards.
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

#: How often the fences of a queue without a shard map are read.
FENCES_SECONDS = 60.0
#: Every fourth claim starts with retry instead of ready, so that neither list starves the other.
RETRY_FIRST = 4
#: A claim skips at most this many suspects to find messages that may start.
PASS_OVER_LIMIT = 5000
#: The longest interval in which a process polls a shard that another process watches. With few workers it is shorter:
#: together they poll each shard once or twice per second.
LONGEST_POLL_SECONDS = 20.0
SECONDS_PER_WORKER = 4 / 3
#: A separate generator, so that an application that seeds `random` gets its expected numbers.
_chance = random.SystemRandom()


class ServedQueues:
    """
    The queues of the handlers with their shards; an unsharded queue has one shard.

    Args:
        handlers: the handlers of this worker.
        maps: the shard maps known to this process; updated here.

    Attributes:
        has_changed: whether a shard map has changed; the fetcher resets it.
    """

    def __init__(self, handlers: Sequence[Handler], maps: dict[str, KnownMap] | None = None) -> None:
        self.handlers = handlers
        self.has_changed = False
        self._known = {} if maps is None else maps
        self._entries = {handler.queue.name: handler.queue.keys.entry for handler in handlers}
        self._asked: list[tuple[Queue[Any], bool]] = []  # queue, and whether its fences are read
        self._fences_at = float("-inf")
        self._limits = {handler.queue.name: handler.queue.limits for handler in handlers if handler.queue.limits}
        self._unwritten = set(self._limits)  # queues with limits that this process has not yet written
        self._in_redis: dict[str, str | None] = {}  # the latest answers to `declaration`

    def shards(self) -> dict[Keys, Handler]:
        """Return every shard with its handler."""
        return {
            handler.queue.known_shards.keys(number): handler
            for handler in self.handlers
            for number in range(self._map(handler.queue.name).served)
        }

    def is_sharded(self, name: str) -> bool:
        """Return whether a queue has several shards."""
        return self._map(name).served > 1

    def is_changing(self, name: str) -> bool:
        """Return whether the number of shards of a queue is being changed."""
        map = self._map(name)
        return map.was != map.n

    def read(self, client: Client) -> None:
        """
        Read the shard maps of the queues at the start; without read permission, assume one shard.

        If a node is unavailable, the heartbeat reads its queues later; the worker serves the others meanwhile.

        Raises:
            ConfigurationError: a queue has another number of shards than `shards=`, or limits and several shards.
            RedisUnavailableError: no node is available.
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
        Return the commands that read shard maps and limits; pass their answers to `take`.

        Once a minute they include the fences of queues without a map. After Redis has lost its data, publishers still
        use the old map and write it to the fences.
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
        """Store the answers to `questions`; return the answers for shard maps."""
        rest = iter(answers)
        found = []
        for queue, has_fences in self._asked:
            answer = next(rest)
            fences = list(islice(rest, WITNESSES)) if has_fences else []
            found.append(answer)
            known = map = self._map(queue.name)
            if isinstance(answer, ProtocolError):
                answer = UNSHARDED  # treat a corrupt map as missing
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
        Write the declared limits that Redis may not have, and log them; return the refusals.

        Limits are written after the start, and again if Redis has lost them. Changes by an operator stay until the code
        declares other limits.
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
                logger.error("queue %s: cannot write the declared limits to Redis: %s", queue.name, answer)
            elif not isinstance(answer, Exception):
                self._unwritten.discard(queue.name)
                self._in_redis[queue.name] = limits.declaration
                if answer:
                    values = {field.name: getattr(limits, field.name) for field in fields(limits)}
                    text = ", ".join(f"{name}={value}" for name, value in values.items() if value)
                    logger.info("queue %s: limits written to Redis: %s", queue.name, printable(text))
        return refused


class Capacity(NamedTuple):
    """
    The number of messages of a queue that can be claimed now.

    Attributes:
        slots: the free slots that the queue may use.
        ahead: the messages that may be prefetched for slots that become free soon.
        crowded: whether other queues use all slots, and the queue is below its own limit.
        batch: the messages of one call.
        rest: the messages missing to fill the current batch.
        suspects: the suspects of the queue that this process has.
    """

    slots: int
    ahead: int
    crowded: bool = False
    batch: int = 1
    rest: int = 0
    suspects: Suspects = Suspects(1, 0, 1)

    @property
    def direct(self) -> int:
        """The number of messages that can start immediately."""
        return self.slots * self.batch + self.rest

    @property
    def messages(self) -> int:
        """The number of messages that can be claimed."""
        return self.direct + self.ahead

    def part(self, messages: int) -> Capacity:
        """Return the part of this capacity that `messages` messages need."""
        rest = min(self.rest, messages)
        slots = min(self.slots, -((rest - messages) // self.batch))
        ahead = min(self.ahead, max(0, messages - rest - slots * self.batch))
        return self._replace(slots=slots, rest=rest, ahead=ahead)

    def without(self, part: Capacity) -> Capacity:
        """Return the rest without `part`; it allows no suspects, because the claims for `part` may return some."""
        return self._replace(
            slots=self.slots - part.slots,
            rest=self.rest - part.rest,
            ahead=self.ahead - part.ahead,
            suspects=replace(self.suspects, narrowest=0),
        )


#: The claims of a shard, and its capacity.
Offer = tuple["QueueClaims", Capacity]


class FairOrder:
    """Weighted fair queuing: queues take turns by their place; a queue with weight 2 advances half as far per slot."""

    def __init__(self) -> None:
        self._place: dict[str, float] = {}
        self._in_the_round: set[str] = set()

    def order(self, names: Sequence[str]) -> dict[str, float]:
        """Return the places of queues that have work; idle time gives a queue no advantage."""
        places = [self._place[name] for name in names if name in self._in_the_round]
        start = min(places) if places else max(self._place.values(), default=0.0)
        for name in names:
            if name not in self._in_the_round:
                self._place[name] = max(self._place.get(name, 0.0), start)
        self._in_the_round = set(names)
        return {name: self._place[name] for name in names}

    def took(self, name: str, slots: float, weight: int) -> None:
        """Move a queue back by the slots that it used."""
        self._place[name] += slots / weight


def fair_shares(capacities: Sequence[Capacity], weights: Sequence[int], places: Sequence[float]) -> list[Capacity]:
    """Return the capacity that each queue may use, so that together they use only free slots."""
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
    The claims of one queue or shard.

    Attributes:
        handler: the handler of the queue.
        name: the name of the queue.
        keys: the shard.
        place: equal for shards that can share one blocking wait for wake-ups.
        hot: whether to claim without waiting for a wake-up.
        must_poll: whether it is time to poll, although no wake-up came.
        is_watched_here: whether this process waits for the shard's next due time.
        look_at: the monotonic time of the next poll, if another process watches the shard.
        waits_for_suspect: whether the remaining messages can only be claimed after a suspect here has ended.
        asked: the limit of a claim without an answer, which is repeated with the same number; 0 without.
        behind: the messages left after the last claim.
        turn: the order among the shards of a queue; the smallest is next.
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
        self._asked_keyed = 0  # the limit of the same claim if the queue has keys
        self._suspects_held = 0  # at the last claim
        self._takes_suspects = True  # whether the last claim allowed suspects
        self._number = CallNumber(lane or token(), 1)
        self._claims = count(1)
        self._passed_over = 0  # suspects moved to the end of their list since the last claimed message
        self._careful = False  # do not prefetch: there may be messages that must start at once

    def has_room(self, capacity: Capacity) -> bool:
        """Return whether a new message could be claimed."""
        ahead = 0 if self._careful else capacity.ahead
        return self.asked > 0 or capacity.slots > 0 or capacity.rest > 0 or ahead > 0

    def can_claim(self, capacity: Capacity) -> bool:
        """Return whether a claim could return messages: there is room, also for a suspect if only suspects wait."""
        return self.has_room(capacity) and (not self.waits_for_suspect or self.suspect_has_ended(capacity))

    def suspect_has_ended(self, capacity: Capacity) -> bool:
        """Return whether a suspect has ended since the last claim."""
        return capacity.suspects.held < self._suspects_held

    def is_to_be_asked(self, capacity: Capacity) -> bool:
        """Return whether a claim is worth its round trip."""
        return self.must_poll or bool(self.asked) or (self.hot and self.has_room(capacity))

    def starves(self, capacity: Capacity) -> bool:
        """Return whether messages wait in Redis while other queues use all slots."""
        return capacity.crowded and self.hot and not self.must_poll and not self.has_room(capacity)

    def claim(self, capacity: Capacity, watcher: str) -> Call[ClaimAnswer]:
        """Return the next claim; repeat the previous claim if it has no answer."""
        if not self.asked:
            ahead = 0 if self._careful else capacity.ahead
            self.asked = min(BATCH_LIMIT, capacity.direct + ahead)
            # With keys, do not prefetch: each claimed message counts against its limits. A poll without a wake-up
            # claims nothing, because it could take the permission of a rate limit from the process that got the
            # wake-up.
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
        """Update the state from the answer of a claim or poll."""
        self.hot = answer.behind > 0
        self.must_poll = False
        self._careful = self._careful or answer.keyed
        self.behind = answer.behind

    def answered(self, answer: ClaimAnswer) -> None:
        """Update the state from the answer of a claim, and number the next claim; a poll (limit 0) keeps the number."""
        claimed = answer.claimed
        limit = self._asked_keyed if answer.keyed else self.asked
        self.asked = 0
        self.looked(answer)
        if not limit:
            return
        self._number = self._number.next()
        self._careful = answer.keyed or (answer.behind > 0 and len(claimed) < limit)  # some messages were skipped
        for message in claimed:
            self._careful = self._careful or message.deaths > 0 or message.left <= 0
        # Messages wait, but none was claimed: the queue is paused, or all of them are suspects.
        self.waits_for_suspect = not claimed and answer.behind > 0 and self._suspects_held > 0
        self._passed_over = self._passed_over + limit if self.waits_for_suspect else 0
        others_may_follow = 0 < self._passed_over < min(answer.behind, PASS_OVER_LIMIT)
        self.hot = answer.behind > 0 and (bool(claimed) or others_may_follow or not self._takes_suspects)


def shared_out(hot: Sequence[Offer], order: FairOrder) -> list[Offer]:
    """
    Divide the free slots among the queues by weight, and the share of each queue among its shards.

    Claims without an answer are repeated.
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
    Divide the capacity of a queue among its shards that may have work.

    A claim of many messages costs little more than a claim of one. So a shard with enough messages gets everything, and
    the others follow in the next rounds. Shards with an unknown backlog get equal parts.
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
        claims.turn = turn  # the last shard comes first next time, because it was allowed no suspects
    return parts


class PollJitter:
    """
    Choose when this process polls the shards that others watch: all together, to share round trips.

    Args:
        workers: returns the number of worker processes.
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
