"""The fetcher of a worker process claims messages, reads their bodies, and waits for new messages."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from reliq.errors import RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.handlers.settlement import EXPIRED, LOOP_BLOCKED, RELEASED, HandlerOutcome
from reliq.keys import Keys, token
from reliq.lua.transitions import NOT_WATCHING, Booking, ClaimAnswer
from reliq.receive.bodies import BodyReader, Read
from reliq.redis import commands
from reliq.text import join_first
from reliq.worker.bookings import LATE_SECONDS, VOID_SECONDS
from reliq.worker.claims import FairOrder, Offer, PollJitter, QueueClaims, ServedQueues, shared_out
from reliq.worker.loop import REPLY_LAG_SECONDS, QueueBackoff
from reliq.worker.slots import HeldDelivery, Inflight, deliveries_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reliq.redis.client import Client
    from reliq.redis.commands import Call
    from reliq.redis.wakeups import WakeTokens
    from reliq.worker.bookings import Bookings
    from reliq.worker.upkeep import Scheduler

logger = logging.getLogger(__name__)

#: reliq has its own random generator, so that an application that seeds the module `random` gets the expected numbers.
_chance = random.SystemRandom()


#: How often the fetcher polls each queue. So messages start soon even if a wake-up is lost, or if the Go library
#: published them, which sends no wake-ups.
POLL_SECONDS = 1.0
#: How often the fetcher checks the wake-ups of idle queues while it is busy with other queues.
GLANCE_SECONDS = 0.05
#: If a wait for wake-ups ends within this time, wake-ups probably arrive faster than the fetcher reads them.
RUSH_SECONDS = 0.001
#: After a process has claimed a message with a task that it does not know, it leaves half of the queue's wake-ups to
#: other processes for this time.
UNKNOWN_SECONDS = 30.0
#: Log a warning if no slot became free for this long while messages wait.
HELD_SECONDS = 30.0


class Fetcher:
    """
    Claim messages in rounds.

    A queue is hot while messages probably wait in it. A round claims from hot queues immediately. It claims from other
    queues after a wake-up: a token in Redis that announces new messages.

    If Redis does not reply in a round, the next round sends the same claims with the same call numbers. Then Redis
    returns the messages that it has already claimed for this process.

    The wait for wake-ups also ends when a queue that had no free slot can use a slot again (see `Inflight.watch`).

    Args:
        client: the client for all commands.
        served: the queues and their shards.
        inflight: the deliveries and slots of this process.
        scheduler: the scheduler; it gets the next due times, which Redis returns with each claim.
        submit: called with deliveries that have their bodies, to run their handlers.
        settle: called with deliveries and their common outcome, to settle them in Redis.
        workers: returns the number of worker processes.

    Attributes:
        last_claim_at: the monotonic time of the last completed claim round.
    """

    def __init__(
        self,
        client: Client,
        served: ServedQueues,
        inflight: Inflight,
        scheduler: Scheduler,
        submit: Callable[[list[HeldDelivery]], None],
        settle: Callable[[list[HeldDelivery], HandlerOutcome], None],
        workers: Callable[[], int],
    ) -> None:
        self._client = client
        self._served = served
        self._inflight = inflight
        self._scheduler = scheduler
        self._lanes = {handler.queue.name: token() for handler in served.handlers}
        self._claims: dict[Keys, QueueClaims] = {}
        self._queues: list[QueueClaims] = []
        self._bookings: list[Bookings] = []  # the booked starts of shards with shared limits
        self._by_cost: list[tuple[QueueClaims, Bookings]] = []  # shards of queues that share a rate limit by cost
        self._tokens: WakeTokens  # created by the first `step`
        self._places: dict[Hashable, list[Keys]] = {}
        self._has_shared_waits = False  # whether one blocking wait for wake-ups serves several shards
        self._has_tasks = any(handler.routes is not None for handler in served.handlers)
        # The time until which this process leaves half of a shard's wake-ups to other processes, because it claimed a
        # message whose task it does not have. Without this, it could claim the same message again and again.
        self._unknown_until: dict[Keys, float] = {}
        self._served_at = float("-inf")  # when the list of served shards was last updated
        self._name = token()
        self._poll_jitter = PollJitter(workers)
        self._order = FairOrder()
        self._backoff = QueueBackoff("fetcher", client.observers)
        self._submit = submit
        self._settle = settle

        def expect(queue: str, messages: int) -> None:
            inflight.queues[queue].read_limit = messages  # limits the number of prefetched messages

        max_body = {handler.queue.name: handler.queue.settings.max_body for handler in served.handlers}
        self._reader: BodyReader[HeldDelivery] = BodyReader(max_body, self._backoff.until, expect)
        self._polled_at = self._glanced_at = time.monotonic()
        self._held_slots_logged = False  # whether the warning that handlers hold all slots is logged
        self.last_claim_at = time.monotonic()

    def step(self) -> float:
        """
        Make one claim round; return the seconds until the next round.

        Usually the result is 0, because the round itself waits for a wake-up or for a free slot.
        """
        if self._served.has_changed or time.monotonic() - self._served_at >= POLL_SECONDS:
            self._serve()
        waits = self._backoff.waits
        queues = [queue for queue in self._queues if not waits(queue.keys)] if self._backoff.until else self._queues
        for bookings in self._bookings:
            if bookings.rests_until <= time.monotonic():
                bookings.rests_until = 0.0
        self._start_held()
        if self._bookings:
            resting = {one for one in self._bookings if one.rests_until or one.held}
            queues = [queue for queue in queues if queue.bookings not in resting]
        hot = self._hot_with_room(queues)
        reads = self._reader.next_reads()
        booked = [(queue, call) for queue, one in self._by_cost if not waits(queue.keys) and (call := one.book_held())]
        if hot and (self._tokens.standing or len(self._places) > 1):
            self._expect(queues, beside_hot=True)
            self._note_tokens(0.0)
        if hot or reads or booked:
            self._claim(hot, reads, booked)
        elif queues:
            self._look_around(queues)
        elif any(one.rests_until for one in self._bookings):
            self.last_claim_at = time.monotonic()
            return min(POLL_SECONDS, self._rest_seconds())
        else:
            return self._backoff.seconds()
        self.last_claim_at = time.monotonic()
        return 0.0

    def _start_held(self) -> None:
        """
        Start the messages that were claimed for a booked start, if the booked time has come.

        Until then, these messages wait without a slot. Return a message to Redis if it missed its booked time, was
        cancelled or lost its lease, so that another process may run it.
        """
        for queue, bookings in self._by_cost:
            is_late = bookings.is_due and bookings.is_late(LATE_SECONDS)
            if gone := [one for one in bookings.held if is_late or one.lost or one.cancelled]:
                self._settle(self._inflight.withdraw(gone), RELEASED)
            elif bookings.is_due:
                self._submit(bookings.take())
            elif bookings.rests_until or self._backoff.waits(queue.keys):
                self._inflight.park(bookings.held)

    def _rest_seconds(self) -> float:
        """
        Return the seconds until the first waiting shard may be claimed from again; infinite if no shard waits.

        A shard waits after an error, or for the time at which its limits permit the next start.
        """
        rests = [self._backoff.seconds()] if self._backoff.until else []
        now = time.monotonic()
        rests += [max(0.0, one.rests_until - now) for one in self._bookings if one.rests_until]
        return min(rests, default=math.inf)

    @property
    def refusal(self) -> str:
        """The last error if the claims of all queues fail; empty if the claim of any queue succeeds."""
        queues = self._queues
        return self._backoff.last_error if queues and all(self._backoff.has(queue.keys) for queue in queues) else ""

    def _serve(self) -> None:
        """Start to claim from new shards, and stop claiming from removed shards."""
        self._served_at = time.monotonic()
        self._served.has_changed = False
        handlers = self._served.shards()
        if handlers.keys() != self._claims.keys():
            gone = self._claims.keys() - handlers.keys()
            known = self._claims
            if not known:
                self._tokens = self._client.wake_tokens()
                self._inflight.poke = self._tokens.poke
            # The call numbers of all shards of a queue contain the same random name, but each shard counts its own
            # claims.
            self._claims = {
                keys: known.get(keys) or QueueClaims(handler, keys, self._lanes[keys.name])
                for keys, handler in handlers.items()
            }
            self._queues = list(self._claims.values())
            self._bookings = [queue.bookings for queue in self._queues if queue.bookings]
            self._by_cost = [(queue, one) for queue in self._queues if (one := queue.bookings) and one.by_cost]
            self._places = self._tokens.serve(self._claims)
            self._has_shared_waits = len(self._places) < len(self._claims)
            for place, shards in self._places.items():
                for keys in shards:
                    self._claims[keys].place = place
            for keys in gone:
                self._scheduler.forget(keys)
                if bookings := known[keys].bookings:
                    self._settle(self._inflight.withdraw(bookings.held), RELEASED)

    def _hot_with_room(self, queues: list[QueueClaims]) -> list[Offer]:
        """
        Return the hot queues to claim from now, each with its capacity.

        The list is empty if it is time to check the queues that are not hot, too.
        """
        now = time.monotonic()
        hot = [queue for queue in queues if queue.hot]
        if not hot or now - self._polled_at >= POLL_SECONDS:
            return []
        if self._has_shared_waits and len(hot) < len(queues) and now - self._glanced_at >= GLANCE_SECONDS:
            return []
        capacities = self._inflight.wait_for_capacity(hot, 0.0)
        return [offer for offer in zip(hot, capacities, strict=True) if offer[0].is_to_be_asked(offer[1])]

    def _look_around(self, queues: list[QueueClaims]) -> None:
        """
        Claim messages from all queues that are due for a claim. If there are none, wait for a wake-up.

        If all slots are in use, first wait at most half a second for a free slot.
        """
        most = 0.0 if self._tokens.standing else min(POLL_SECONDS / 2, self._rest_seconds())
        capacities = self._inflight.wait_for_capacity(queues, most)
        offers = list(zip(queues, capacities, strict=True))
        reached = [(queue, capacity) for queue, capacity in offers if queue.has_room(capacity) or capacity.crowded]
        self._log_held_slots([queue.name for queue, capacity in reached if queue.starves(capacity)])
        self._find_hot(reached)
        if hot := [offer for offer in reached if offer[0].is_to_be_asked(offer[1])]:
            self._claim(hot, [], [])
            return
        rest = max(0.0, POLL_SECONDS - (time.monotonic() - self._polled_at))
        if any(queue.has_room(capacity) for queue, capacity in offers):
            if not self._expect(queues):
                rest = 0.0
        elif not self._tokens.standing:
            return
        rest = min(rest, self._rest_seconds())
        if self._inflight.watch([queue for queue, capacity in offers if not queue.can_claim(capacity)]):
            try:
                self._note_tokens(rest)
            finally:
                self._inflight.unwatch()

    def _log_held_slots(self, waiting: list[str]) -> None:
        """
        Warn once if handlers hold all slots for HELD_SECONDS while messages wait.

        `waiting` contains the names of the queues in which messages wait.
        """
        runs = self._inflight.runs() if waiting else []
        until = time.monotonic() - HELD_SECONDS
        is_held = len(runs) >= self._inflight.concurrency and all(run.started_at <= until for run in runs)
        if is_held and not self._held_slots_logged:
            ((name, slots),) = Counter(run.handler.queue.name for run in runs).most_common(1)
            logger.warning(
                "worker: all %d slots have been held for %.0f s, %d of them by queue %s, while messages wait in %s: "
                "give the handler of %s a shorter timeout or a concurrency= limit, or run a separate worker for %s",
                *(len(runs), HELD_SECONDS, slots, name, join_first(list(dict.fromkeys(waiting))), name, name),
            )
        self._held_slots_logged = is_held

    def hand_on(self) -> None:
        """At shutdown, let other processes take over the due times and wake-ups that this process waits for."""
        if self._queues:
            self._tokens.close()
        requests: list[Any] = []
        for queue in self._queues:
            if queue.bookings and not queue.asked:
                queue.bookings.end(0)
                requests += queue.bookings.unused()
            # While this process is registered as the watcher of a shard, other processes poll the shard only rarely.
            watches = self._scheduler.watches(queue.keys) or (
                queue.is_watched_here and self._served.is_sharded(queue.name)
            )
            if watches:
                requests.append(commands.drop_watch(queue.keys))
            if watches or queue.hot:
                requests += commands.push_wake_token(queue.keys)
        with suppress(ReliqError):
            self._client.run_all(requests)

    def _find_hot(self, offers: list[Offer]) -> None:
        """
        Mark queues as hot, so that the next round claims from them.

        Once a second, mark all queues that are due for a poll. If no messages of a queue could be claimed until a
        suspect (a message that may have killed its process) had ended, mark the queue when the suspect has ended.
        """
        now = time.monotonic()
        is_time = now - self._polled_at >= POLL_SECONDS
        if is_time:
            self._polled_at = now
        for queue, capacity in offers:
            poll = is_time and queue.look_at <= now
            queue.must_poll = queue.must_poll or poll
            # In a hot queue, polls claim messages with keys too. Otherwise these messages would starve if each round
            # takes longer than a second, because then each claim from the queue is a poll.
            queue.must_only_poll = queue.must_only_poll or (poll and not queue.hot)
            if poll or (queue.waits_for_suspect and queue.suspect_has_ended(capacity)):
                queue.hot = True
        if not self._has_shared_waits or now - self._glanced_at < GLANCE_SECONDS:
            return
        # While a queue is hot, the queues that share a blocking wait with it do not wait for wake-ups. Read their
        # wake-ups without blocking.
        waiting = [queue for queue, _ in offers if not queue.hot and queue.place not in self._tokens.standing]
        cold = [queue for queue in waiting if any(self._claims[keys].hot for keys in self._places[queue.place])]
        if cold:
            self._glanced_at = time.monotonic()
            tokens = self._client.run_all([commands.wake_token_at_once(queue.keys) for queue in cold])
            for queue, token_there in zip(cold, tokens, strict=True):
                queue.hot = token_there is True

    def _expect(self, queues: list[QueueClaims], *, beside_hot: bool = False) -> bool:
        """
        Start to wait for the wake-ups of all queues that are not hot.

        With `beside_hot`, leave out the queues that share a blocking wait with a hot queue.

        Returns:
            False if a slow Redis node took so long that some waits were not started. The next round starts them.
        """
        began = time.monotonic()
        cold: dict[Hashable, list[Keys]] = {}
        for queue in queues:
            if not queue.hot:
                cold.setdefault(queue.place, []).append(queue.keys)
        for place, shards in cold.items():
            if not beside_hot or len(shards) == len(self._places[place]):
                self._tokens.expect(place, shards)
                if time.monotonic() - began > GLANCE_SECONDS:
                    return False
        return True

    def _note_tokens(self, seconds: float) -> None:
        """
        Wait for wake-ups and mark their queues as hot.

        If this process has no room for messages of a queue, pass the wake-up on to other processes.
        """
        began = time.monotonic()
        came, failed = self._tokens.came(seconds)
        # `came` has checked the wake-ups of all queues. If wake-ups arrive very fast, let the next round check again.
        now = time.monotonic()
        self._glanced_at = 0.0 if came and now - began < RUSH_SECONDS else now
        if self._unknown_until:
            left = [keys for keys in came if self._unknown_until.get(keys, now) > now and _chance.random() < 1 / 2]
            self._tokens.pass_on(left)
            came = [keys for keys in came if keys not in left]
        heard = [self._claims[keys] for keys in came if keys in self._claims]
        for queue in [*heard, *(self._claims[keys] for keys in failed if keys in self._claims)]:
            queue.hot = True  # if the wait for its wake-ups failed, the next claim reports the error
        if heard:
            capacities = self._inflight.wait_for_capacity(heard, 0.0)
            self._tokens.pass_on(
                queue.keys for queue, capacity in zip(heard, capacities, strict=True) if not queue.has_room(capacity)
            )

    def _claim(
        self, hot: list[Offer], reads: list[Read[HeldDelivery]], booked: list[tuple[QueueClaims, Call[Booking]]]
    ) -> None:
        """
        In one round trip, claim from `hot`, read bodies of messages from earlier claims, and book starts.

        Then pass the deliveries whose bodies are complete to `submit`, which runs their handlers.
        """
        asked = shared_out(hot, self._order) if len(hot) > 1 else hot
        if len(hot) == 1:  # for several queues, `shared_out` has called `order`
            self._order.order([hot[0][0].name])
        requests = [*(queue.claim(part, self._name) for queue, part in asked), *(call for _, call in booked)]
        sent_at = time.monotonic()
        try:
            answers = self._client.run_all([*(read.request for read in reads), *requests])
        except RedisUnavailableError:
            self._tokens.restart()
            raise
        failures = self._claimed([*asked, *booked], answers[len(reads) :], sent_at)
        reader = self._reader
        for read, failure in reader.take(reads, answers[: len(reads)]):
            if isinstance(failure, RedisRefusedError):
                self._settle(self._inflight.withdraw(read.group), RELEASED)
            failures.append((read.keys, failure))
        if reader.gone:
            self._settle(self._inflight.withdraw(reader.gone), EXPIRED)
            reader.gone = []
        if reader.ready:  # first submit the messages that must start at once
            ready = self._routed(reader.ready) if self._has_tasks else reader.ready
            if held := {one for _, bookings in self._by_cost for one in bookings.held}:
                for one in held.intersection(ready):
                    one.is_read, one.held_since = True, math.inf
                ready = [one for one in ready if one not in held]
            self._submit(sorted(ready, key=attrgetter("must_start"), reverse=True))
            reader.ready = []
        for keys, failure in failures:
            self._backoff.note(keys, failure)
            if isinstance(failure, RedisUnavailableError):
                self._scheduler.spare(
                    keys
                )  # other workers cannot renew their leases now, so do not reclaim their messages
        if unused := [call for one in self._bookings for call in one.unused()]:
            self._client.run_all(unused)

    def _routed(self, ready: list[HeldDelivery]) -> list[HeldDelivery]:
        """
        Assign to each message the handler of its task, and return the messages that may start now.

        In a queue with plain and coroutine tasks, snooze the messages of coroutine tasks while the event loop is
        blocked. A snoozed message is delivered again later.
        """
        queues = self._inflight.queues
        now = time.monotonic()
        for held in ready:
            task = held.handler.of(held.delivery.header)
            if task is held.handler and task.routes is not None:
                self._unknown_until[held.keys] = now + UNKNOWN_SECONDS
            held.handler = task
        blocked = [held for held in ready if held.handler.is_async and queues[held.queue].is_partly_stalled]
        self._settle(self._inflight.withdraw(blocked), LOOP_BLOCKED)
        return [held for held in ready if not held.settling]

    def _claimed(
        self, asked: Sequence[tuple[QueueClaims, object]], answers: Sequence[Any], sent_at: float
    ) -> list[tuple[Keys, Exception]]:
        """
        Update the state of each shard from Redis' replies to claims and bookings.

        Returns:
            The shards whose claims or bookings failed, each with its error.
        """
        at = min(time.monotonic(), sent_at + REPLY_LAG_SECONDS)
        failures: list[tuple[Keys, Exception]] = []
        for (queue, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Exception):
                failures.append((queue.keys, answer))
                continue
            one = queue.bookings
            is_poll = isinstance(answer, ClaimAnswer) and one and not one.by_cost and answer.behind
            # A poll that found messages does not end the backoff, because the following booking may fail.
            if self._backoff.until and not is_poll:
                self._backoff.over(queue.keys)
            if queue.bookings and isinstance(answer, Booking):
                queue.bookings.answered(answer, sent_at)
                queue.behind = queue.behind if answer.starts else 0  # if no start was booked, poll before booking again
                if not answer.starts:
                    self._settle(self._inflight.withdraw(queue.bookings.held), RELEASED)
                continue
            is_void = queue.bookings and queue.bookings.is_late(VOID_SECONDS)
            self._scheduler.note(queue.keys, answer, at)
            queue.is_watched_here = answer.promote_in_ms != NOT_WATCHING
            queue.look_at = 0.0
            if not queue.is_watched_here and self._served.is_sharded(queue.name):
                queue.look_at = self._poll_jitter.next(at)
            queue.answered(answer)
            self._order.took(queue.name, len(answer.claimed) / queue.handler.batch, queue.handler.settings.weight)
            if answer.claimed:
                deliveries = deliveries_of(answer.claimed, queue.handler, sent_at, queue.keys)
                self._inflight.add(deliveries)
                if queue.bookings and queue.bookings.by_cost:
                    queue.bookings.held = deliveries
                if is_void:
                    self._settle(self._inflight.withdraw(deliveries), RELEASED)
                else:
                    self._reader.add(queue.keys, deliveries)
        return failures
