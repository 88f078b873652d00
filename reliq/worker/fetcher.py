"""The fetcher of a worker: claim messages of all queues, read their bodies, and wait for new messages."""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from reliq.errors import RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.handlers.settlement import EXPIRED, RELEASED, HandlerOutcome
from reliq.keys import Keys, token
from reliq.lua.transitions import NOT_WATCHING
from reliq.receive.bodies import BodyReader, Read
from reliq.redis import commands
from reliq.text import join_first
from reliq.worker.claims import FairOrder, Offer, PollJitter, QueueClaims, ServedQueues, shared_out
from reliq.worker.loop import REPLY_LAG_SECONDS, QueueBackoff
from reliq.worker.slots import HeldDelivery, Inflight, deliveries_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reliq.redis.client import Client
    from reliq.redis.wakeups import WakeTokens
    from reliq.worker.upkeep import Scheduler

logger = logging.getLogger(__name__)


#: How often every queue is polled; this bounds the delay after a lost wake-up or a publish by the Go library.
POLL_SECONDS = 1.0
#: How often wake-ups of idle queues are checked while other queues are busy.
GLANCE_SECONDS = 0.05
#: If a wait ends sooner, wake-ups come faster than the fetcher takes them.
RUSH_SECONDS = 0.001
#: Log a warning if no slot became free for this long while messages wait.
HELD_SECONDS = 30.0


class Fetcher:
    """
    Claim messages in rounds: at once from queues known to have messages (hot), else after a wake-up.

    A round without a reply is repeated with the same call numbers, and Redis returns the same answer. A wait for
    wake-ups also ends when a queue without free slots gets one (see `Inflight.watch`).

    Args:
        client: the client for all calls.
        served: the queues and their shards.
        inflight: the deliveries and slots of this process.
        scheduler: gets the due times that claims return.
        submit: called with deliveries that have their bodies.
        settle: called with deliveries and an outcome.
        workers: returns the number of worker processes.

    Attributes:
        last_claim_at: the monotonic time of the last completed round.
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
        self._tokens: WakeTokens  # set in the first step
        self._places: dict[Hashable, list[Keys]] = {}
        self._has_shared_waits = False  # whether several queues share a wait
        self._served_at = float("-inf")  # when the shards were last updated
        self._name = token()
        self._poll_jitter = PollJitter(workers)
        self._order = FairOrder()
        self._backoff = QueueBackoff("fetcher", client.observers)
        self._submit = submit
        self._settle = settle

        def expect(queue: str, messages: int) -> None:
            inflight.queues[queue].read_limit = messages  # bounds the number of prefetched messages

        max_body = {handler.queue.name: handler.queue.settings.max_body for handler in served.handlers}
        self._reader: BodyReader[HeldDelivery] = BodyReader(max_body, self._backoff.until, expect)
        self._polled_at = self._glanced_at = time.monotonic()
        self._held_slots_logged = False  # whether the warning about busy slots is logged
        self.last_claim_at = time.monotonic()

    def step(self) -> float:
        """Make one round; return 0, because the round itself waits in Redis or for a slot."""
        if self._served.has_changed or time.monotonic() - self._served_at >= POLL_SECONDS:
            self._serve()
        waits = self._backoff.waits
        queues = [queue for queue in self._queues if not waits(queue.keys)] if self._backoff.until else self._queues
        hot = self._hot_with_room(queues)
        reads = self._reader.next_reads()
        if hot and (self._tokens.standing or len(self._places) > 1):
            self._expect(queues, beside_hot=True)
            self._note_tokens(0.0)
        if hot or reads:
            self._claim(hot, reads)
        elif not queues:
            return self._backoff.seconds()
        else:
            self._look_around(queues)
        self.last_claim_at = time.monotonic()
        return 0.0

    @property
    def refusal(self) -> str:
        """The reason why the claims of all queues fail; empty if one succeeds."""
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
            # All shards of a queue use the same call sequence name, each with its own numbers.
            self._claims = {
                keys: known.get(keys) or QueueClaims(handler, keys, self._lanes[keys.name])
                for keys, handler in handlers.items()
            }
            self._queues = list(self._claims.values())
            self._places = self._tokens.serve(self._claims)
            self._has_shared_waits = len(self._places) < len(self._claims)
            for place, shards in self._places.items():
                for keys in shards:
                    self._claims[keys].place = place
            for keys in gone:
                self._scheduler.forget(keys)

    def _hot_with_room(self, queues: list[QueueClaims]) -> list[Offer]:
        """Return the hot queues that have room; none if it is time to check the other queues."""
        now = time.monotonic()
        hot = [queue for queue in queues if queue.hot]
        if not hot or now - self._polled_at >= POLL_SECONDS:
            return []
        if self._has_shared_waits and len(hot) < len(queues) and now - self._glanced_at >= GLANCE_SECONDS:
            return []
        capacities = self._inflight.wait_for_capacity(hot, 0.0)
        return [offer for offer in zip(hot, capacities, strict=True) if offer[0].is_to_be_asked(offer[1])]

    def _look_around(self, queues: list[QueueClaims]) -> None:
        """Check all queues, then claim messages or wait for a wake-up; if no slot is free, wait for a slot first."""
        capacities = self._inflight.wait_for_capacity(queues, 0.0 if self._tokens.standing else POLL_SECONDS / 2)
        offers = list(zip(queues, capacities, strict=True))
        reached = [(queue, capacity) for queue, capacity in offers if queue.has_room(capacity) or capacity.crowded]
        self._log_held_slots([queue.name for queue, capacity in reached if queue.starves(capacity)])
        self._find_hot(reached)
        if hot := [offer for offer in reached if offer[0].is_to_be_asked(offer[1])]:
            self._claim(hot, [])
            return
        if any(queue.has_room(capacity) for queue, capacity in offers):
            self._expect(queues)
        elif not self._tokens.standing:
            return
        rest = max(0.0, POLL_SECONDS - (time.monotonic() - self._polled_at))
        if self._backoff.until:
            rest = min(rest, self._backoff.seconds())
        if self._inflight.watch([queue for queue, capacity in offers if not queue.can_claim(capacity)]):
            try:
                self._note_tokens(rest)
            finally:
                self._inflight.unwatch()

    def _log_held_slots(self, waiting: list[str]) -> None:
        """Log once which queue uses the slots if no slot became free for long while messages wait."""
        runs = self._inflight.runs() if waiting else []
        until = time.monotonic() - HELD_SECONDS
        is_held = len(runs) >= self._inflight.concurrency and all(run.started_at <= until for run in runs)
        if is_held and not self._held_slots_logged:
            ((name, slots),) = Counter(run.handler.queue.name for run in runs).most_common(1)
            logger.warning(
                "all %d slots have been held for %.0f s, %d of them by queue %s, while messages "
                "wait in %s: give its handler "
                "a shorter timeout or a concurrency= limit, or run a separate worker for its queue",
                *(len(runs), HELD_SECONDS, slots, name, join_first(list(dict.fromkeys(waiting)))),
            )
        self._held_slots_logged = is_held

    def hand_on(self) -> None:
        """Pass wake-ups and watches of this process on to other processes at shutdown."""
        if self._queues:
            self._tokens.close()
        requests: list[Any] = []
        for queue in self._queues:
            # Other processes poll a shard rarely while they assume that this process watches it.
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
        """Mark the queues to claim from: all once a second, and queues with a wake-up or an ended suspect."""
        now = time.monotonic()
        is_time = now - self._polled_at >= POLL_SECONDS
        if is_time:
            self._polled_at = now
        for queue, capacity in offers:
            poll = is_time and queue.look_at <= now
            queue.must_poll = queue.must_poll or poll
            if poll or (queue.waits_for_suspect and queue.suspect_has_ended(capacity)):
                queue.hot = True
        if not self._has_shared_waits or now - self._glanced_at < GLANCE_SECONDS:
            return
        # No wait is open for queues that share it with a hot queue: check their wake-ups without waiting.
        waiting = [queue for queue, _ in offers if not queue.hot and queue.place not in self._tokens.standing]
        cold = [queue for queue in waiting if any(self._claims[keys].hot for keys in self._places[queue.place])]
        if cold:
            self._glanced_at = time.monotonic()
            tokens = self._client.run_all([commands.wake_token_at_once(queue.keys) for queue in cold])
            for queue, token_there in zip(cold, tokens, strict=True):
                queue.hot = token_there is True

    def _expect(self, queues: list[QueueClaims], *, beside_hot: bool = False) -> None:
        """Open waits for wake-ups of the queues that are not hot; with `beside_hot`, only waits without a hot queue."""
        cold: dict[Hashable, list[Keys]] = {}
        for queue in queues:
            if not queue.hot:
                cold.setdefault(queue.place, []).append(queue.keys)
        for place, shards in cold.items():
            if not beside_hot or len(shards) == len(self._places[place]):
                self._tokens.expect(place, shards)

    def _note_tokens(self, seconds: float) -> None:
        """Wait for wake-ups; pass wake-ups of queues without room on to other processes."""
        began = time.monotonic()
        came, failed = self._tokens.came(seconds)
        # The wait covered all queues, so the next check can wait, unless wake-ups come very fast.
        now = time.monotonic()
        self._glanced_at = 0.0 if came and now - began < RUSH_SECONDS else now
        heard = [self._claims[keys] for keys in came if keys in self._claims]
        for queue in [*heard, *(self._claims[keys] for keys in failed if keys in self._claims)]:
            queue.hot = True  # the next claim raises the error of a failed wait
        if heard:
            capacities = self._inflight.wait_for_capacity(heard, 0.0)
            self._tokens.pass_on(
                queue.keys for queue, capacity in zip(heard, capacities, strict=True) if not queue.has_room(capacity)
            )

    def _claim(self, hot: list[Offer], reads: list[Read[HeldDelivery]]) -> None:
        """Claim from `hot` and send `reads` of earlier claims in one round trip; then submit complete deliveries."""
        asked = shared_out(hot, self._order) if len(hot) > 1 else hot
        if len(hot) == 1:  # count only rounds with claims
            self._order.order([hot[0][0].name])
        requests = [queue.claim(part, self._name) for queue, part in asked]
        sent_at = time.monotonic()
        try:
            answers = self._client.run_all([*(read.request for read in reads), *requests])
        except RedisUnavailableError:
            self._tokens.restart()
            raise
        failures = self._claimed(asked, answers[len(reads) :], sent_at)
        reader = self._reader
        for read, failure in reader.take(reads, answers[: len(reads)]):
            if isinstance(failure, RedisRefusedError):
                self._settle(self._inflight.withdraw(read.group), RELEASED)
            failures.append((read.keys, failure))
        if reader.gone:
            self._settle(self._inflight.withdraw(reader.gone), EXPIRED)
            reader.gone = []
        if reader.ready:  # messages that must start at once come first
            self._submit(sorted(reader.ready, key=attrgetter("must_start"), reverse=True))
            reader.ready = []
        for keys, failure in failures:
            self._backoff.note(keys, failure)
            if isinstance(failure, RedisUnavailableError):
                self._scheduler.spare(keys)  # other workers could not renew their leases there either

    def _claimed(self, asked: list[Offer], answers: Sequence[Any], sent_at: float) -> list[tuple[Keys, Exception]]:
        """Update the queues from the answers of claims; return the failures."""
        at = min(time.monotonic(), sent_at + REPLY_LAG_SECONDS)
        failures: list[tuple[Keys, Exception]] = []
        for (queue, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Exception):
                failures.append((queue.keys, answer))
                continue
            if self._backoff.until:
                self._backoff.over(queue.keys)
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
                self._reader.add(queue.keys, deliveries)
        return failures
