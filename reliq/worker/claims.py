"""
Decide from which shards a worker process claims messages, how many, and in which order.

`ServedQueues` stores the shard map of each queue, and whether Redis has the limits that the code declares for the
queue. `QueueClaims` decides when to claim from a shard and how many messages. `shared_out` divides the free slots among
queues by weight, and then the slots of each queue among its shards.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reliq.errors import ProtocolError, RedisRefusedError, RedisUnavailableError
from reliq.keys import Keys, token
from reliq.lua import transitions
from reliq.lua.transitions import Booking, CallNumber, ClaimAnswer, Suspects
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
from reliq.worker.bookings import Bookings

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reliq.handlers.handler import Handler
    from reliq.queue import Queue
    from reliq.redis.client import Client
    from reliq.redis.commands import Call, Command


logger = logging.getLogger("reliq")

#: How often to read the fences of a queue without a shard map. A fence is a Redis key (`epoch`) of each shard that
#: contains a short copy of the shard map. Publishers with a newer map overwrite the copy.
FENCES_SECONDS = 60.0
#: The Redis lists from which four successive claims take messages first, in a random order. So neither list starves,
#: even if a limit permits only one message in each claim. In a fixed order, the limit could permit a message always
#: when it is the turn of the same list.
TAKES_FIRST: tuple[Literal["ready", "retry"], ...] = ("retry", "ready", "ready", "ready")
#: Suspects are messages that may have killed their process. If claims find only suspects that must not start now, they
#: search at most this many messages for a message that may start.
PASS_OVER_LIMIT = 5000
#: The longest interval between two polls of a shard that another process watches.
#: With few worker processes the interval is shorter, so that together they poll each shard about once per second.
LONGEST_POLL_SECONDS = 20.0
#: Each worker process adds this many seconds to the interval between two polls.
SECONDS_PER_WORKER = 4 / 3
#: reliq has its own random generator, so that an application that seeds the module `random` gets the expected numbers.
_chance = random.SystemRandom()


class ServedQueues:
    """
    The shards of the queues that this worker serves; an unsharded queue has one shard.

    Args:
        handlers: the handlers of this worker.
        maps: the known shard maps, by the name that the queue has in the queue registry. This class updates them.

    Attributes:
        has_changed: whether a shard map has changed since the fetcher last reset this attribute.
    """

    def __init__(self, handlers: Sequence[Handler], maps: dict[str, KnownMap] | None = None) -> None:
        self.handlers = handlers
        self.has_changed = False
        self._known = {} if maps is None else maps
        self._entries = {handler.queue.name: handler.queue.keys.entry for handler in handlers}
        # The queues whose shard maps the last commands of `questions` read, each with a flag: whether these commands
        # read the fences of the queue too.
        self._asked: list[tuple[Queue[Any], bool]] = []
        self._fences_at = float("-inf")
        self._limits = {
            handler.queue.name: handler.queue.own_limits for handler in handlers if handler.queue.own_limits
        }
        self._unwritten = set(self._limits)  # the names of queues whose limits this process has not written yet
        self._in_redis: dict[str, str | None] = {}  # by queue name, the declared limits that Redis stores

    def shards(self) -> dict[Keys, Handler]:
        """Return the keys of every shard, each with the handler of its queue."""
        return {
            handler.queue.known_shards.keys(number): handler
            for handler in self.handlers
            for number in range(self._map(handler.queue.name).served)
        }

    def is_sharded(self, name: str) -> bool:
        """Return whether a queue has several shards."""
        return self._map(name).served > 1

    def is_changing(self, name: str) -> bool:
        """Return whether a change of the queue's number of shards is in progress."""
        map = self._map(name)
        return map.was != map.n

    def read(self, client: Client) -> None:
        """
        Read the shard maps of the queues when the worker starts.

        If Redis does not permit to read the map of a queue, assume one shard.

        If a node of a Redis Cluster is unavailable, the worker serves the queues on the other nodes. The heartbeat
        reads the missing maps later.

        Raises:
            ConfigurationError: the number of shards differs from `shards=`, or a queue has limits and several shards.
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
        Return the commands that read the shard maps and declared limits. Pass the replies of Redis to `take`.

        Once a minute, these commands also read the fences of queues without a map. A fence is a short copy of the map
        in each shard. After Redis has lost its data, publishers that know the lost map write it to the fences again.
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
        """
        Store the replies of Redis to the commands that `questions` returned.

        Returns:
            For each queue, its shard map, or the error of the command that reads the map.
        """
        rest = iter(answers)
        found = []
        for queue, has_fences in self._asked:
            answer = next(rest)
            fences = list(islice(rest, WITNESSES)) if has_fences else []
            found.append(answer)
            known = map = self._map(queue.name)
            if isinstance(answer, ProtocolError):
                answer = UNSHARDED  # treat a corrupt map like a missing map
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
        Write the limits that the code declares to Redis, once after the start and again if Redis has lost them.

        If an operator has changed a limit in Redis, the change stays until the code declares other limits. Log each
        change.

        Returns:
            The errors for queues whose limits Redis refused to write.
        """
        queues = [
            (handler.queue, handler.queue.own_limits)
            for handler in self.handlers
            if handler.queue.own_limits
            and (handler.queue.name in self._unwritten or not self._in_redis.get(handler.queue.name, "unread"))
        ]
        calls = [
            transitions.limit(queue.keys, limits.fields(), declared=limits.declaration) for queue, limits in queues
        ]
        refused: list[RedisRefusedError] = []
        for (queue, limits), answer in zip(queues, client.run_all(calls) if calls else (), strict=True):
            if isinstance(answer, RedisRefusedError):
                refused.append(answer)
                logger.error(
                    "queue %s: cannot write the declared limits, so Redis keeps the limits that it has: %s",
                    queue.name,
                    answer,
                )
            elif not isinstance(answer, Exception):
                self._unwritten.discard(queue.name)
                self._in_redis[queue.name] = limits.declaration
                if answer:
                    values = {field.name: getattr(limits, field.name) for field in fields(limits)}
                    text = ", ".join(f"{name}={value}" for name, value in values.items() if value)
                    logger.info("queue %s: limits written to Redis: %s", queue.name, printable(text))
        return refused

    def declare_shared(self, client: Client) -> None:
        """
        Write the shared limits that the code declares to Redis, in place of the limits of an earlier worker.

        Raises:
            RedisRefusedError: Redis refuses to write a limit.
        """
        limits = list(dict.fromkeys(limit for handler in self.handlers for limit in handler.queue.limits))
        for limit, answer in zip(limits, client.run_all([transitions.book(one, 0) for one in limits]), strict=True):
            if isinstance(answer, RedisRefusedError):
                raise answer
            if isinstance(answer, Booking) and answer.before:  # other errors are logged when starts are booked
                logger.warning(
                    "limit %s: rate=%s, burst=%s replace %s in Redis and hold for all workers; declare the limit in one "
                    "place, so that the last worker to start does not change it",
                    *(limit.name, *limit.declared[:2], printable(answer.before)),
                )


class Capacity(NamedTuple):
    """
    How many messages of a queue this process can claim now.

    Attributes:
        slots: the number of free slots that the queue may use.
        ahead: the number of messages to prefetch, for slots that become free soon.
        crowded: whether the queue may use more slots, but all slots of the process are in use.
        batch: the largest number of messages in one handler call.
        rest: the number of messages that are missing to complete a batch of messages in this process.
        suspects: how many suspects of the queue (messages that may have killed a process) this process has, and how
            many suspects may run together.
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
        """The number of messages that can be claimed, including messages to prefetch."""
        return self.direct + self.ahead

    def part(self, messages: int) -> Capacity:
        """Return the part of this capacity that is needed to claim `messages` messages."""
        rest = min(self.rest, messages)
        slots = min(self.slots, -((rest - messages) // self.batch))
        ahead = min(self.ahead, max(0, messages - rest - slots * self.batch))
        return self._replace(slots=slots, rest=rest, ahead=ahead)

    def without(self, part: Capacity) -> Capacity:
        """
        Return the capacity that is left after a claim that uses `part` of it.

        The returned capacity permits no suspects (messages that may have killed a process), because the claim with
        `part` may already get all suspects that may run together.
        """
        return self._replace(
            slots=self.slots - part.slots,
            rest=self.rest - part.rest,
            ahead=self.ahead - part.ahead,
            suspects=replace(self.suspects, narrowest=0),
        )


#: A shard from which this process could claim messages, and how many messages it can claim.
Offer = tuple["QueueClaims", Capacity]


class FairOrder:
    """
    Weighted fair queuing: share the slots of a process among its queues by their weights.

    Each queue has a virtual time, called its place. It grows by 1/weight with each slot that the queue uses. The queue
    with the lowest virtual time gets the next slot.
    """

    def __init__(self) -> None:
        self._place: dict[str, float] = {}
        self._in_the_round: set[str] = set()

    def order(self, names: Sequence[str]) -> dict[str, float]:
        """
        Return the place (virtual time) of each queue in `names`, the queues that have messages now.

        A queue that had no messages gets at least the lowest place of the other queues, so that its idle time gives it
        no advantage.
        """
        places = [self._place[name] for name in names if name in self._in_the_round]
        start = min(places) if places else max(self._place.values(), default=0.0)
        for name in names:
            if name not in self._in_the_round:
                self._place[name] = max(self._place.get(name, 0.0), start)
        self._in_the_round = set(names)
        return {name: self._place[name] for name in names}

    def took(self, name: str, slots: float, weight: int) -> None:
        """Advance the place (virtual time) of a queue that has used `slots` slots."""
        self._place[name] += slots / weight


def fair_shares(capacities: Sequence[Capacity], weights: Sequence[int], places: Sequence[float]) -> list[Capacity]:
    """
    Divide the free slots among queues by weight, and return the reduced capacity of each queue.

    Args:
        capacities: the capacity of each queue if it could use all free slots alone.
        weights: the weight of each queue.
        places: the place (virtual time) of each queue in the `FairOrder`.
    """
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
    Decide when to claim from one shard, and how many messages.

    The decisions use Redis' replies to the previous claims. Each reply contains the number of messages that are left.

    Attributes:
        handler: the handler of the queue.
        name: the name of the queue.
        keys: the Redis keys of the shard.
        place: a value that is equal for shards that can share one blocking wait for wake-ups.
        hot: whether to claim without waiting for a wake-up, because messages probably wait in the shard.
        must_poll: whether it is time to poll, although no wake-up came.
        must_only_poll: whether the next poll must not claim messages with keys; the process that got the wake-up claims
            these messages.
        is_watched_here: whether this process is the watcher of the shard, which waits for the shard's next due time.
        look_at: the monotonic time of the next poll, if another process is the watcher.
        waits_for_suspect: whether no more messages can be claimed until a suspect (a message that may have killed its
            process) has ended in this process.
        asked: the number of messages that the last claim asked for; 0 after Redis has replied to it.
        behind: the number of messages that were left in Redis after the last claim.
        turn: a number that orders the shards of a queue. The shard with the lowest number gets slots first.
        bookings: the booked starts, if the queue has shared limits; otherwise None.
    """

    def __init__(self, handler: Handler, keys: Keys | None = None, lane: str = "") -> None:
        self.handler = handler
        self.name = handler.queue.name
        self.keys = keys or handler.queue.keys
        self.place: Hashable = None
        self.hot = True
        self.must_poll = self.must_only_poll = True
        self.is_watched_here = False
        self.look_at = 0.0
        self.waits_for_suspect = False
        self.asked = 0
        self.behind = 0
        self.turn = 0
        shared = handler.queue.limits
        self.bookings = Bookings(shared, f"{self.name}#{self.keys.shard}") if shared else None
        self._asked_keyed = 0  # how many messages the last claim asked for if the queue has message keys
        self._suspects_held = 0  # how many suspects (see `waits_for_suspect`) this process had at the last claim
        self._takes_suspects = True  # whether the last claim permitted suspects
        self._number = CallNumber(lane or token(), 1)
        # About how many messages Redis has searched since it last returned a message. None of them may start now.
        self._passed_over = 0
        self._first: list[Literal["ready", "retry"]] = []  # the items of TAKES_FIRST that are left for the next claims
        self._careful = False  # if True, do not prefetch, because the next messages may have to start at once

    def has_room(self, capacity: Capacity) -> bool:
        """Return whether this process has room for another message, or must repeat a claim that got no reply."""
        ahead = 0 if self._careful or self.bookings else capacity.ahead
        return self.asked > 0 or capacity.slots > 0 or capacity.rest > 0 or ahead > 0

    def can_claim(self, capacity: Capacity) -> bool:
        """
        Return whether a claim could return messages.

        This process must have room, and must not wait for the end of a suspect (see `waits_for_suspect`).
        """
        return self.has_room(capacity) and (not self.waits_for_suspect or self.suspect_has_ended(capacity))

    def suspect_has_ended(self, capacity: Capacity) -> bool:
        """Return whether a suspect (a message that may have killed a process) has ended here since the last claim."""
        return capacity.suspects.held < self._suspects_held

    def is_to_be_asked(self, capacity: Capacity) -> bool:
        """
        Return whether to claim now.

        Claim if a poll is due, if the last claim got no reply, or if messages wait and this process has room for them.
        """
        return self.must_poll or bool(self.asked) or (self.hot and self.has_room(capacity))

    def starves(self, capacity: Capacity) -> bool:
        """Return whether messages of this queue wait in Redis while other queues use all slots."""
        return capacity.crowded and self.hot and not self.must_poll and not self.has_room(capacity)

    def claim(self, capacity: Capacity, watcher: str) -> Call[ClaimAnswer] | Call[Booking]:
        """
        Return the script call of the next claim, or of the last claim again if it got no reply.

        In a queue with shared limits, a claim takes at most one message for each start that is booked for now. If no
        starts are booked, return a poll, which claims nothing. If the poll finds messages, the next script call books
        starts. If a limit counts costs, a claim takes the messages of one handler call. Their start is booked later.

        Args:
            capacity: how many messages this process can claim.
            watcher: the name that Redis stores if this process becomes the watcher of the shard's due times.
        """
        if not self.asked:
            ahead = 0 if self._careful else capacity.ahead
            self.asked = min(BATCH_LIMIT, capacity.direct + ahead)
            # With message keys, do not prefetch, because each claimed message counts against the limits of its key.
            # A poll without a wake-up claims no messages with keys: it would use up the rate limit of the process that
            # got the wake-up.
            self._asked_keyed = 0 if self.must_only_poll else min(BATCH_LIMIT, capacity.direct)
            if self.bookings and self.bookings.by_cost:
                self.asked = min(self.asked, capacity.batch)
                self._asked_keyed = min(self._asked_keyed, capacity.batch)
            elif self.bookings:
                most = min(self.behind, BATCH_LIMIT, capacity.direct)
                self.asked = self._asked_keyed = min(most, self.bookings.starts())
                if most and not self.asked and not self.must_poll:
                    return self.bookings.book(most, self.behind)
        self._suspects_held = capacity.suspects.held
        self._takes_suspects = capacity.suspects.narrowest > 0
        self._first = self._first or _chance.sample(TAKES_FIRST, len(TAKES_FIRST))
        return transitions.claim(
            self.keys,
            self._number,
            limit=self.asked,
            lease_ms=self.handler.lease_ms,
            keyed_limit=self._asked_keyed,
            first=self._first.pop(),
            direct=capacity.slots,
            suspects=capacity.suspects,
            watcher=watcher,
            spread=-(-self._asked_keyed // capacity.batch) or None if self.handler.settings.batch_by_key else None,
        )

    def looked(self, answer: ClaimAnswer) -> None:
        """Update the state, except the call number, from Redis' reply to a claim or poll."""
        self.hot = answer.behind > 0
        self.must_poll = self.must_only_poll = False
        self._careful = self._careful or answer.keyed
        # In a queue with message keys, `answer.behind` is the number of keys that have messages.
        self.behind = BATCH_LIMIT * answer.behind if answer.keyed and self.bookings else answer.behind

    def answered(self, answer: ClaimAnswer) -> None:
        """
        Update the state from Redis' reply to a claim.

        Increase the call number after a claim, but not after a poll, which is a claim with limit 0.
        """
        claimed = answer.claimed
        limit = self._asked_keyed if answer.keyed else self.asked
        self.asked = 0
        self.looked(answer)
        if self.bookings and limit:
            self.bookings.end(len(claimed))
            # If the claim returned no messages, the queue may be paused. Poll it before booking the next start.
            self.behind = self.behind if claimed else 0
        if not limit:
            return
        self._number = self._number.next()
        # If Redis returned fewer messages than requested although more messages wait, it has skipped some of them.
        self._careful = answer.keyed or (answer.behind > 0 and len(claimed) < limit)
        for message in claimed:
            self._careful = self._careful or message.deaths > 0 or message.left <= 0
        # If messages wait but Redis returned none, the queue is paused, or the messages are suspects that must not
        # start before a suspect in this process has ended.
        self.waits_for_suspect = not claimed and answer.behind > 0 and self._suspects_held > 0
        self._passed_over = self._passed_over + limit if self.waits_for_suspect else 0
        others_may_follow = 0 < self._passed_over < min(answer.behind, PASS_OVER_LIMIT)
        self.hot = answer.behind > 0 and (bool(claimed) or others_may_follow or not self._takes_suspects)


def shared_out(hot: Sequence[Offer], order: FairOrder) -> list[Offer]:
    """
    Divide the free slots among the queues by weight, and then among the shards.

    Returns:
        The shards to claim from, each with its part of the capacity. Shards whose last claim got no reply are included.
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
    Divide the capacity of a queue among `shards`, which may have messages.

    A claim of many messages takes little more time than a claim of one message. So if the first shard has enough
    messages, it gets the whole capacity, and the other shards get their turns in the next rounds. Shards with an
    unknown backlog get equal parts.
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
    # Only the first shard may claim suspects. So reverse the order, to let another shard be first in the next round.
    for turn, claims in enumerate(reversed(claimed), ordered[-1].turn + 1):
        claims.turn = turn
    return parts


class PollJitter:
    """
    Choose random times at which this process polls the shards that other processes watch.

    All these shards are polled at the same time, in one round trip.

    Args:
        workers: returns the number of worker processes.
    """

    def __init__(self, workers: Callable[[], int]) -> None:
        self._workers = workers
        self._next_at = 0.0

    def next(self, now: float) -> float:
        """Return the monotonic time of the next poll."""
        if self._next_at <= now:
            seconds = min(LONGEST_POLL_SECONDS, max(1.0, (self._workers() - 1) * SECONDS_PER_WORKER))
            self._next_at = now + seconds * _chance.uniform(0.75, 1.25)
        return self._next_at
