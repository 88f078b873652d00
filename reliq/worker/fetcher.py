"""Claims messages for free slots, and waits in Redis when there are none."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reliq import commands
from reliq.errors import RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.ids import token
from reliq.worker.bodies import BodyReader
from reliq.worker.claims import FairOrder, QueueClaims, fair_shares
from reliq.worker.delivery import deliveries_of
from reliq.worker.loop import QueueBackoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.call import Command
    from reliq.client.client import Client
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.settlement import Outcome
    from reliq.worker.bodies import Read
    from reliq.worker.claims import Capacity
    from reliq.worker.delivery import HeldDelivery
    from reliq.worker.inflight import Inflight
    from reliq.worker.scheduler import Scheduler

    #: A queue, and how much of it can be claimed.
    Offer = tuple[QueueClaims, Capacity]

logger = logging.getLogger(__name__)

#: Every queue is polled this often, which bounds the delay after a lost wake token or a publish from Go.
POLL_SECONDS = 1.0
#: While other queues keep the worker busy, or lie in other slots of a Cluster, wake tokens of idle queues are taken this often.
GLANCE_SECONDS = 0.05
#: A wait in Redis lasts at least this long, because 0 would mean for ever.
SHORTEST_WAIT_SECONDS = 0.01
#: A wait that ends sooner shows that tokens come faster than one can be taken at a time.
RUSH_SECONDS = 0.001
#: Redis deletes a poke that nobody waits for after this time.
POKE_MS = 5000


class Fetcher:
    """
    Claims in rounds: of queues that are hot at once, else after waiting for a token.

    A round whose reply was lost is made again under the same numbers: Redis gives the same answer. When a wait for a
    token began without queues that had no room, `poke` ends it as soon as there is some (see `Inflight.watch`).

    Args:
        along: returns what is to go along with the wait of an idle second, if anything; its answers are not read.
    """

    def __init__(
        self,
        client: Client,
        handlers: Sequence[Handler],
        inflight: Inflight,
        scheduler: Scheduler,
        submit: Callable[[list[HeldDelivery]], None],
        settle: Callable[[list[HeldDelivery], Outcome], None],
        along: Callable[[], Sequence[Command[None]]],
    ) -> None:
        self._client, self._inflight, self._scheduler, self._along = client, inflight, scheduler, along
        self._queues = [QueueClaims(handler) for handler in handlers]
        self._name = token()
        self._poke_key = self._queues[0].keys.lane(f"{self._name}.poke")
        self._order, self._backoff = FairOrder(), QueueBackoff("fetcher", client.observers)
        self._reader = BodyReader(handlers, inflight, self._backoff, submit, settle)
        self._polled_at = self._glanced_at = time.monotonic()
        self._idle = False  # whether the last wait ended without a token
        self._apart = False  # whether the queues lie in several slots of a Cluster
        self.last_claim_at = time.monotonic()

    def step(self) -> float:
        """Make one round; return 0: the waiting is done in Redis, or for a slot."""
        waits = self._backoff.waits
        queues = [one for one in self._queues if not waits(one.keys)] if self._backoff.until else self._queues
        hot, reads = self._hot_with_room(queues), self._reader.next_reads()
        if hot or reads:
            self._claim(hot, reads)
        elif not queues:
            return self._backoff.seconds()
        else:
            self._look_around(queues)
        self.last_claim_at = time.monotonic()
        return 0.0

    def _hot_with_room(self, queues: list[QueueClaims]) -> list[Offer]:
        """Return the hot queues that have room; none when it is time to look at the others."""
        now = time.monotonic()
        hot = [one for one in queues if one.hot]
        if not hot or now - self._polled_at >= POLL_SECONDS:
            return []
        if len(hot) < len(queues) and now - self._glanced_at >= GLANCE_SECONDS:
            return []
        found = self._inflight.wait_for_capacity(hot, 0.0)
        return [offer for offer in zip(hot, found, strict=True) if offer[0].is_to_be_asked(offer[1])]

    def _look_around(self, queues: list[QueueClaims]) -> None:
        """Find out which queues have work, claim of it, or wait for some; first for a slot, if all are taken."""
        found = self._inflight.wait_for_capacity(queues, POLL_SECONDS / 2)
        offers = list(zip(queues, found, strict=True))
        reached = [(one, capacity) for one, capacity in offers if one.has_room(capacity) or capacity.crowded]
        self._find_hot(reached)
        if hot := [offer for offer in reached if offer[0].is_to_be_asked(offer[1])]:
            self._claim(hot, [])
        elif opened := [one for one, capacity in offers if one.has_room(capacity)]:
            self._wait(opened, [one for one, capacity in offers if not one.can_claim(capacity)])

    def poke(self) -> None:
        """End the wait in Redis when there is more to claim than at its start; other threads call this."""
        if self._inflight.wait_is_over():
            self._client.run_all(commands.poke(self._poke_key, POKE_MS))

    def hand_on(self) -> None:
        """Pass this process' wake tokens and watches on to other processes, because it ends."""
        requests: list[Any] = []
        for one in self._queues:
            watches = self._scheduler.watches(one.keys)
            if watches:
                requests.append(commands.drop_watch(one.keys))
            if watches or one.hot:
                requests += commands.push_wake_token(one.keys)
        if requests:
            with suppress(ReliqError):
                self._client.run_all(requests)

    def _find_hot(self, offers: list[Offer]) -> None:
        """Look at every queue once a second, and at those that wait for a suspect when one has ended."""
        poll = time.monotonic() - self._polled_at >= POLL_SECONDS
        if poll:
            self._polled_at = time.monotonic()
        for one, capacity in offers:
            one.unsure = one.unsure or poll
            if poll or (one.waits_for_suspect and one.suspect_has_ended(capacity)):
                one.hot = True
        self._glance([one for one, _ in offers])

    def _glance(self, queues: list[QueueClaims]) -> None:
        """Now and then, while others are hot, see whether a token has come for those that are not."""
        cold = [one for one in queues if not one.hot]
        if len(cold) in (0, len(queues)) or time.monotonic() - self._glanced_at < GLANCE_SECONDS:
            return
        self._take_tokens(cold)

    def _take_tokens(self, queues: list[QueueClaims]) -> None:
        """Take the wake tokens of `queues` without waiting."""
        self._glanced_at = time.monotonic()
        tokens = self._client.run_all([commands.wake_token_at_once(one.keys) for one in queues])
        for one, token_there in zip(queues, tokens, strict=True):
            one.hot = token_there is True

    def _wait(self, opened: list[QueueClaims], others: list[QueueClaims]) -> None:
        """Wait in Redis for a token of `opened`, the time to look at all, or until there is room for one of `others`."""
        if self._apart and len(opened) > 1:
            time.sleep(GLANCE_SECONDS)
            self._take_tokens(opened)
            return
        rest = max(SHORTEST_WAIT_SECONDS, POLL_SECONDS - (time.monotonic() - self._polled_at))
        request = commands.first_wake_token(self._poke_key, [one.keys for one in opened], rest)
        # In an idle second the look at every queue, and what else is due, go along with the wait: one round trip for all.
        looks = [one.look(self._name) for one in opened] if self._idle else []
        along = self._along() if self._idle else []
        if not self._inflight.watch(others):
            return
        began = time.monotonic()
        try:
            woken, *answers = self._client.run_all([request, *looks, *along])
        finally:
            self._inflight.unwatch()
        if isinstance(woken, Exception):
            self._find_the_culprit(opened, woken, rest)
            return
        self._idle = woken is None
        if woken is not None and time.monotonic() - began < RUSH_SECONDS:
            self._glanced_at = 0.0
        self._note_looks(opened, answers[: len(looks)], all_seen=len(opened) == len(self._queues))
        for one in opened:
            one.hot = one.hot or one.keys.wake == woken

    def _note_looks(self, queues: list[QueueClaims], answers: list[Any], *, all_seen: bool) -> None:
        """Update queues from the answers of looks, if any were made; a look that failed is made again at the next poll."""
        at = time.monotonic()
        for one, answer in zip(queues, answers, strict=False):
            if not isinstance(answer, Exception):
                self._backoff.over(one.keys)
                self._scheduler.note(one.keys, answer, at)
                one.looked(answer)
        if answers and all_seen and not any(isinstance(answer, Exception) for answer in answers):
            self._polled_at = at

    def _find_the_culprit(self, queues: list[QueueClaims], error: Exception, seconds: float) -> None:
        """Mark every queue for a claim, because the error of a common wait does not name the queue at fault."""
        if not isinstance(error, RedisRefusedError):
            raise error
        if "hash to the same slot" in str(error):  # CROSSSLOT
            self._apart = True
            logger.warning(
                "%d queues lie in several slots of the Cluster, where nobody can wait for all of them: an idle worker "
                "looks for their messages every %.0f ms; a worker for each queue has them at once",
                len(queues),
                GLANCE_SECONDS * 1000,
            )
            return
        time.sleep(seconds)
        for one in queues:
            one.hot = True

    def _claim(self, hot: list[Offer], reads: list[Read]) -> None:
        """Claim from `hot` and make `reads` of earlier claims in one round trip; then submit what has its body."""
        asked = self._offered(hot) if hot else []  # only rounds with claims count
        requests = [one.claim(part, self._name) for one, part in asked]
        sent_at = time.monotonic()
        answers = self._client.run_all([*self._reader.requests(reads), *requests])
        failures = self._claimed(asked, answers[len(reads) :], sent_at)
        failures += self._reader.take(reads, answers[: len(reads)])
        self._reader.start()
        for keys, failure in failures:
            self._failed(keys, failure)

    def _failed(self, keys: Keys, error: Exception) -> None:
        """Leave a shard alone for a while; while its server is away no lease of it can be renewed, so none is taken."""
        self._backoff.note(keys, error)
        if isinstance(error, RedisUnavailableError):
            self._scheduler.spare(keys)

    def _offered(self, hot: list[Offer]) -> list[Offer]:
        """Divide the free slots by the weights of the queues; a claim that has no answer yet is made again."""
        places = self._order.order([one.name for one, _ in hot])
        if len(hot) == 1:
            return hot
        weights = [one.handler.settings.weight for one, _ in hot]
        parts = fair_shares([capacity for _, capacity in hot], weights, list(places.values()))
        offered = [(one, part) for (one, _), part in zip(hot, parts, strict=True)]
        return [(one, part) for one, part in offered if one.has_room(part) or one.unsure]

    def _claimed(self, asked: list[Offer], answers: Sequence[Any], sent_at: float) -> list[tuple[Keys, Exception]]:
        """Update queues from the answers of claims; return those that failed."""
        at = time.monotonic()
        failures: list[tuple[Keys, Exception]] = []
        for (one, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Exception):
                failures.append((one.keys, answer))
                continue
            if self._backoff.until:
                self._backoff.over(one.keys)
            self._scheduler.note(one.keys, answer, at)
            one.answered(answer)
            self._order.took(one.name, len(answer.claimed) / one.handler.batch, one.handler.settings.weight)
            self._reader.add(deliveries_of(answer.claimed, one.handler, sent_at, one.keys))
        return failures
