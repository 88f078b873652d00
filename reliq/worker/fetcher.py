"""The fetcher of a worker: claims messages of every queue that has room, reads their bodies, and waits for work."""

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


#: Every queue is polled this often, which bounds the delay after a lost wake token or a publish from Go.
POLL_SECONDS = 1.0
#: While other queues keep the worker busy, wake tokens of idle queues are taken this often.
GLANCE_SECONDS = 0.05
#: A wait that ends sooner shows that tokens come faster than one can be taken at a time.
RUSH_SECONDS = 0.001
#: The log says so when no slot has come free for 30 s and messages wait in a queue that has none.
HELD_SECONDS = 30.0


class Fetcher:
    """
    Claims in rounds: of queues that are hot at once, else after waiting for a token.

    A round whose reply was lost is made again under the same numbers: Redis gives the same answer. When a wait for a
    token began without queues that had no room, it ends as soon as there is some (see `Inflight.watch`).

    Args:
        workers: returns how many worker processes there are.
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
        self._tokens: WakeTokens  # from the first step on
        self._places: dict[Hashable, list[Keys]] = {}
        self._has_shared_waits = False  # several queues lie at one place
        self._served_at = float("-inf")  # when the shards were last taken up
        self._name = token()
        self._poll_jitter = PollJitter(workers)
        self._order = FairOrder()
        self._backoff = QueueBackoff("fetcher", client.observers)
        self._submit = submit
        self._settle = settle

        def expect(queue: str, messages: int) -> None:
            inflight.queues[queue].read_limit = messages  # no more are claimed ahead than three reads bring

        max_body = {handler.queue.name: handler.queue.settings.max_body for handler in served.handlers}
        self._reader: BodyReader[HeldDelivery] = BodyReader(max_body, self._backoff.until, expect)
        self._polled_at = self._glanced_at = time.monotonic()
        self._held_slots_logged = False  # the log has said who holds all slots
        self.last_claim_at = time.monotonic()

    def step(self) -> float:
        """Make one round; return 0: the waiting is done in Redis, or for a slot."""
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
        """Why the claims of all queues fail; empty when a claim goes well."""
        queues = self._queues
        return self._backoff.last_error if queues and all(self._backoff.has(queue.keys) for queue in queues) else ""

    def _serve(self) -> None:
        """Take up the shards that the queues have by now, and leave those that they have no more."""
        self._served_at = time.monotonic()
        self._served.has_changed = False
        handlers = self._served.shards()
        if handlers.keys() != self._claims.keys():
            gone = self._claims.keys() - handlers.keys()
            known = self._claims
            if not known:
                self._tokens = self._client.wake_tokens()
                self._inflight.poke = self._tokens.poke
            # The claims of all shards of a queue go by one name, each with numbers of its own.
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
        """Return the hot queues that have room; none when it is time to look at the others."""
        now = time.monotonic()
        hot = [queue for queue in queues if queue.hot]
        if not hot or now - self._polled_at >= POLL_SECONDS:
            return []
        if self._has_shared_waits and len(hot) < len(queues) and now - self._glanced_at >= GLANCE_SECONDS:
            return []
        capacities = self._inflight.wait_for_capacity(hot, 0.0)
        return [offer for offer in zip(hot, capacities, strict=True) if offer[0].is_to_be_asked(offer[1])]

    def _look_around(self, queues: list[QueueClaims]) -> None:
        """Find out which queues have work, claim of it, or wait for some; first for a slot, if all are taken."""
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
        """Log once which queue holds the slots when none has come free for long while messages wait in others."""
        runs = self._inflight.runs() if waiting else []
        until = time.monotonic() - HELD_SECONDS
        is_held = len(runs) >= self._inflight.concurrency and all(run.started_at <= until for run in runs)
        if is_held and not self._held_slots_logged:
            ((name, slots),) = Counter(run.handler.queue.name for run in runs).most_common(1)
            logger.warning(
                "all %d slots have been held for %.0f s, %d of them by %s, while messages wait in %s: give its handler a "
                "shorter timeout or concurrency=, or its queue a worker of its own",
                *(len(runs), HELD_SECONDS, slots, name, join_first(list(dict.fromkeys(waiting)))),
            )
        self._held_slots_logged = is_held

    def hand_on(self) -> None:
        """Pass this process' wake tokens and watches on to other processes, because it ends."""
        if self._queues:
            self._tokens.close()
        requests: list[Any] = []
        for queue in self._queues:
            # Others look at a shard of many but rarely while they believe that it is watched.
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
        Find the queues that are to be claimed from.

        They are all once a second, those that wait for a suspect when one has ended, and those with a token.
        """
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
        # Others at the place of some queues are hot, so that no wait for their tokens stands.
        waiting = [queue for queue, _ in offers if not queue.hot and queue.place not in self._tokens.standing]
        cold = [queue for queue in waiting if any(self._claims[keys].hot for keys in self._places[queue.place])]
        if cold:
            self._glanced_at = time.monotonic()
            tokens = self._client.run_all([commands.wake_token_at_once(queue.keys) for queue in cold])
            for queue, token_there in zip(cold, tokens, strict=True):
                queue.hot = token_there is True

    def _expect(self, queues: list[QueueClaims], *, beside_hot: bool = False) -> None:
        """Wait for tokens of the queues that are not hot; `beside_hot` not at places where some are."""
        cold: dict[Hashable, list[Keys]] = {}
        for queue in queues:
            if not queue.hot:
                cold.setdefault(queue.place, []).append(queue.keys)
        for place, shards in cold.items():
            if not beside_hot or len(shards) == len(self._places[place]):
                self._tokens.expect(place, shards)

    def _note_tokens(self, seconds: float) -> None:
        """Wait so long for tokens; where there is no room for what they announce, another process gets them."""
        began = time.monotonic()
        came, failed = self._tokens.came(seconds)
        # The wait was for all of them: a glance at the others is too soon, but in a rush.
        now = time.monotonic()
        self._glanced_at = 0.0 if came and now - began < RUSH_SECONDS else now
        heard = [self._claims[keys] for keys in came if keys in self._claims]
        for queue in [*heard, *(self._claims[keys] for keys in failed if keys in self._claims)]:
            queue.hot = True  # a claim finds out why a wait has failed
        if heard:
            capacities = self._inflight.wait_for_capacity(heard, 0.0)
            self._tokens.pass_on(
                queue.keys for queue, capacity in zip(heard, capacities, strict=True) if not queue.has_room(capacity)
            )

    def _claim(self, hot: list[Offer], reads: list[Read[HeldDelivery]]) -> None:
        """Claim from `hot` and make `reads` of earlier claims in one round trip; then submit what has its body."""
        asked = shared_out(hot, self._order) if len(hot) > 1 else hot
        if len(hot) == 1:  # rounds without claims do not count
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
        if reader.ready:  # what must not wait comes first
            self._submit(sorted(reader.ready, key=attrgetter("must_start"), reverse=True))
            reader.ready = []
        for keys, failure in failures:
            self._backoff.note(keys, failure)
            if isinstance(failure, RedisUnavailableError):
                self._scheduler.spare(keys)  # no lease could be renewed there

    def _claimed(self, asked: list[Offer], answers: Sequence[Any], sent_at: float) -> list[tuple[Keys, Exception]]:
        """Update queues from the answers of claims; return those that failed."""
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
