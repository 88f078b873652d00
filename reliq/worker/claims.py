"""The limits that queues declare, written to Redis: at a start, and when Redis has lost them."""

from __future__ import annotations

import logging
import random
import time
from contextlib import suppress
from dataclasses import fields, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from reliq.errors import RedisRefusedError, RedisUnavailableError
from reliq.keys import token
from reliq.lua import transitions
from reliq.lua.transitions import CallNumber, Suspects
from reliq.redis.shards import UNSHARDED, WITNESSES, ShardMap, believed, declaration, shard_map, witnesses
from reliq.settings import BATCH_LIMIT
from reliq.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.lua.transitions import ClaimAnswer
    from reliq.queue import Queue
    from reliq.redis.client import Client
    from reliq.redis.commands import Call, Command
    from reliq.settings import Limits


logger = logging.getLogger("reliq")


def write_limits(client: Client, served: ServedQueues) -> list[RedisRefusedError]:
    """
    Write the limits of those queues for which Redis has others, and say so; return what it refused.

    What was changed since the same limits were declared stays as it is: only another declaration writes over it.
    """
    refused: list[RedisRefusedError] = []
    if not (asked := served.undeclared()):
        return refused
    calls = [transitions.limit(queue.keys, limits.fields(), declared=limits.declared) for queue, limits in asked]
    for (queue, limits), answer in zip(asked, client.run_all(calls), strict=True):
        if isinstance(answer, RedisRefusedError):
            refused.append(answer)
            logger.error("queue %s: its limits cannot be written to Redis: %s", queue.name, answer)
        elif not isinstance(answer, Exception):
            served.declared(queue.name, limits)
            if answer:
                logger.info("%s: limits written: %s", queue.name, printable(_told(limits)))
    return refused


def _told(limits: Limits) -> str:
    """Return what limits a queue has, as its declaration says it."""
    said = {one.name: getattr(limits, one.name) for one in fields(limits)}
    return ", ".join(f"{name}={value}" for name, value in said.items() if value)


#: Whether queues have keys by now is asked at most this often when a wake token brought nothing.
KEY_CHECK_SECONDS = 1.0
#: The fences of a queue without a map are read this often.
FENCES_SECONDS = 60.0


class ServedQueues:
    """
    The shards of the handlers' queues in the Redis of the worker; a queue that is not sharded has one.

    Whoever runs `questions` by a client of that Redis brings it up to date.

    Attributes:
        has_changed: what was read last is not what was known; whoever has taken it up says so.
        must_check_keys: a wake token has brought nothing: what it was for may have a key, which nobody here knows of.
    """

    def __init__(self, handlers: Sequence[Handler]) -> None:
        self.handlers = handlers
        self.has_changed = self.must_check_keys = False
        self._keys_checked_at, self._fences_at = float("-inf"), time.monotonic()
        self._maps = {handler.queue.name: UNSHARDED for handler in handlers}
        self._limits = {handler.queue.name: handler.queue.limits for handler in handlers if handler.queue.limits}
        self._unwritten = set(self._limits)  # whose limits Redis may not have from this process' start
        self._declared: dict[str, str | None] = {}  # as `declaration` has answered; without an answer nothing

    def shards(self) -> dict[Keys, Handler]:
        """Return every shard with its handler."""
        return {
            handler.queue.known_shards.keys(number): handler
            for handler in self.handlers
            for number in range(self._maps[handler.queue.name].served)
        }

    def is_sharded(self, name: str) -> bool:
        """Return whether the queue of a name has several shards."""
        return self._maps[name].served > 1

    def is_changing(self, name: str) -> bool:
        """Return whether the queue of a name is about to have more shards, or fewer."""
        return self._maps[name].was != self._maps[name].n

    def is_keyed(self, name: str) -> bool:
        """Return whether messages of a queue may have keys, or are limited: it declares limits, or Redis has some."""
        return name in self._limits or self._declared.get(name) is not None

    def read(self, client: Client) -> None:
        """
        Read how many shards the queues have, and which have keys; who may not read it works on one of each.

        A queue whose node is away is asked again by the heartbeat: it keeps the worker from no other.

        Raises:
            ConfigurationError: a queue has not as many as it must have, or several although it declares limits.
            RedisUnavailableError: no node can be asked.
        """
        asked = [handler.queue for handler in self.handlers if not handler.queue.keys.bare]
        answers = client.run_all(self.questions())
        fences = client.run_all([one for queue in asked for one in witnesses(queue.keys)])
        away = [answer for answer in answers if isinstance(answer, RedisUnavailableError)]
        if away and len(away) == len(answers) and UNSHARDED.or_later(fences) == UNSHARDED:
            raise away[0]
        told = iter(fences)
        for queue, answer in zip(asked, answers[: len(asked)], strict=True):
            map, of_queue = self._maps[queue.name], list(islice(told, WITNESSES))
            is_read = isinstance(answer, ShardMap)
            self._maps[queue.name] = believed(queue.name, map, answer, of_queue) if is_read else map.or_later(of_queue)
            if not isinstance(answer, RedisUnavailableError):
                queue.known_shards.check(self._maps[queue.name])
            if queue.limits:
                self._maps[queue.name].check_is_one(queue.name)

    def questions(self) -> list[Command[Any]]:
        """Return what asks how many shards there are, and which queues have keys; it is noted when a client reads the answers."""
        keys = [handler.queue.keys for handler in self.handlers if not handler.queue.keys.bare]
        return [*map(self._map_question, keys), *self._key_questions(), *self._fence_questions(keys)]

    def key_checks(self) -> list[Command[Any]]:
        """Return what asks which queues have keys by now, because a wake token has brought nothing; once a second at most."""
        now = time.monotonic()
        if now - self._keys_checked_at < KEY_CHECK_SECONDS:
            return []
        self.must_check_keys, self._keys_checked_at = False, now
        return self._key_questions()

    def undeclared(self) -> list[tuple[Queue[Any], Limits]]:
        """Return queues whose limits Redis may not have: none was written since the start, or Redis has lost them."""
        return [
            (handler.queue, handler.queue.limits)
            for handler in self.handlers
            if handler.queue.limits and (handler.queue.name in self._unwritten or self._has_lost(handler.queue.name))
        ]

    def declared(self, name: str, limits: Limits) -> None:
        """Note that Redis has the limits of a queue."""
        self._unwritten.discard(name)
        self._declared[name] = limits.declared

    def _has_lost(self, name: str) -> bool:
        return name in self._declared and not self._declared[name]

    def _map_question(self, keys: Keys) -> Command[Any]:
        question = shard_map(keys)

        def noted(reply: Any) -> ShardMap:
            found, known = UNSHARDED, self._maps[keys.name]
            with suppress(ValueError):  # a corrupt map is a lost one
                found = question.parse(reply)
            self._maps[keys.name] = believed(keys.name, known, found)
            self.has_changed = self.has_changed or self._maps[keys.name] != known
            return found

        return replace(question, parse=noted)

    def _fence_questions(self, keys: Sequence[Keys]) -> list[Command[Any]]:
        """
        Return, once a minute, what reads the fences of queues without a map.

        A publisher that knows the map goes on with it after Redis has lost everything, and writes it with the fences.
        """
        now = time.monotonic()
        if now < self._fences_at + FENCES_SECONDS:
            return []
        self._fences_at = now
        unsharded = [one for one in keys if self._maps[one.name].epoch == 0]
        return [self._fence_question(one, question) for one in unsharded for question in witnesses(one)]

    def _fence_question(self, keys: Keys, question: Command[Any]) -> Command[Any]:
        def noted(reply: Any) -> ShardMap | None:
            fence: ShardMap | None = question.parse(reply)
            known = self._maps[keys.name]
            self._maps[keys.name] = believed(keys.name, known, known, [fence])
            self.has_changed = self.has_changed or self._maps[keys.name] != known
            return fence

        return replace(question, parse=noted)

    def _key_questions(self) -> list[Command[Any]]:
        """Return what asks which queues have keys: those with one shard, for others have none."""
        served = [handler.queue.keys for handler in self.handlers]
        return [self._key_question(keys) for keys in served if not (keys.bare or self.is_sharded(keys.name))]

    def _key_question(self, keys: Keys) -> Command[Any]:
        question = declaration(keys)

        def noted(reply: Any) -> str | None:
            found = question.parse(reply)
            self.has_changed = self.has_changed or found != self._declared.get(keys.name)
            self._declared[keys.name] = found
            return found

        return replace(question, parse=noted)


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
        must_poll: nobody said that it has work, but it is time to look.
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
        self.hot = self.must_poll = True
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
        if self.keyed and self.must_poll:  # a claim would take what a rate permits from whoever is woken for it
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
        return self.must_poll or bool(self.asked) or (self.hot and self.has_room(capacity))

    def starves(self, capacity: Capacity) -> bool:
        """Return whether messages wait that cannot be held ahead, while other queues have every slot."""
        return capacity.crowded and self.hot and not self.must_poll and not self.has_room(capacity)

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
        self.hot, self.must_poll, self.behind = answer.behind > 0, False, answer.behind

    def answered(self, answer: ClaimAnswer) -> None:
        """Update what is known of the queue from a claim; the next claim gets a new number, unless this was a look."""
        claimed, limit, self.asked = answer.claimed, self.asked, 0
        if not limit:
            self.looked(answer)
            return
        self.must_poll, self.behind = False, answer.behind
        self._turn = CallNumber(self._turn.lane, self._turn.number + 1)
        self._careful = self.keyed or (answer.behind > 0 and len(claimed) < limit)  # some were passed over
        for one in claimed:
            self._careful = self._careful or one.deaths > 0 or one.left <= 0
        # Nothing taken though something is there: the queue is paused, or what is there are suspects.
        self.waits_for_suspect = not claimed and answer.behind > 0 and self._suspects_held > 0
        self._passed_over = self._passed_over + limit if self.waits_for_suspect else 0
        others_may_follow = 0 < self._passed_over < min(answer.behind, PASS_OVER_LIMIT)
        self.hot = answer.behind > 0 and (bool(claimed) or others_may_follow or not self._takes_suspects)


#: An application that seeds `random` keeps its numbers: this one has none of its state.
_chance = random.SystemRandom()
#: A shard that another process watches is looked at every twenty seconds where there are many workers, and more often
#: where there are few: in each second at least one look is made at it, and about two.
SELDOM_SECONDS, SECONDS_PER_WORKER = 20.0, 4 / 3


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
    asked: list[Offer] = []
    for offers, part in zip(queues.values(), parts, strict=True):
        shards = [one for one, _ in offers]
        asked += taken_in_turn(shards, part) if len(shards) > 1 else [(shards[0], part)]
    return [(one, part) for one, part in asked if one.has_room(part) or one.must_poll]


def taken_in_turn(shards: Sequence[QueueClaims], capacity: Capacity) -> list[Offer]:
    """
    Divide what can be claimed of a queue among those of its shards that may have work.

    A script costs nearly the same for one message as for many, so one shard that has enough gets all, and the others
    have their turns in the next rounds. Where nobody knows how much there is, all get the same.
    """
    asked: list[Offer] = []
    left = capacity
    ordered = sorted(shards, key=lambda one: one.turn)
    for at, one in enumerate(ordered):
        same = -(-left.messages // (len(ordered) - at))
        part = left.part(min(one.asked or one.behind or same, left.messages, BATCH_LIMIT))
        asked.append((one, part))
        left = left.without(part)
    claimed = [one for one, part in asked if part.messages]
    for turn, one in enumerate(reversed(claimed), ordered[-1].turn + 1):
        one.turn = turn  # of these the last comes first next time: it took no suspects
    return asked


def seconds_between_looks(workers: int) -> float:
    """Return after how many seconds one of so many processes looks again at a shard that another one watches."""
    seconds = min(SELDOM_SECONDS, max(1.0, (workers - 1) * SECONDS_PER_WORKER))
    return seconds * _chance.uniform(0.75, 1.25)


class PollJitter:
    """
    When one process looks at shards that others watch: at all of them in one round, so that they share round trips.

    Args:
        workers: returns how many processes there are.
    """

    def __init__(self, workers: Callable[[], int]) -> None:
        self._workers, self._next_at = workers, 0.0

    def next(self, now: float) -> float:
        """Return the time of the next round."""
        if self._next_at <= now:
            self._next_at = now + seconds_between_looks(self._workers())
        return self._next_at
