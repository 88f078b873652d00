"""The relay's side of Redis: publishes the rows of calls, each in the shard where it belongs, and says what became of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from reliq.client.shards import Shards
from reliq.errors import RedisUnavailableError, ReliqError
from reliq.events import PublishEnded, notify, wanting
from reliq.publish.durability import Confirmer
from reliq.publish.orders import Order
from reliq.publish.registry import Registrar
from reliq.relay.lanes import RelayLanes
from reliq.text import count_of
from reliq.transport.connection import PUBLISH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.client.client import Clients
    from reliq.keys import Keys
    from reliq.relay.sending import Sending
    from reliq.transitions import AskStatus, PublishAnswer

logger = logging.getLogger(__name__)


class QueueParts(NamedTuple):
    """The parts of a relay that know one queue: its shards, its name in the registry, and its confirmations."""

    shards: Shards
    registrar: Registrar
    confirmer: Confirmer


class RowPublisher:
    """
    Publishes calls.

    Attributes:
        unanswered: calls that are to be made, or made again because Redis was away.
        sent: those that have an answer since the last time that they were noted.
        given_up: those that a shard has refused by a later map: their rows are to be taken anew.
        failed: those that Redis has refused or not confirmed since then.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients, self._watching = clients, wanting(clients.observers, PublishEnded)
        self.lanes = RelayLanes()
        self.unanswered: list[Sending] = []
        self.sent: list[Sending] = []
        self.given_up: list[Sending] = []
        self.failed: list[Sending] = []
        self._queues: dict[str, QueueParts] = {}

    def shards(self, keys: Keys) -> Shards:
        """Return the shards of the queue that has `keys`, as they are known; a queue that is new here has one."""
        return self._parts(keys).shards

    def look(self) -> None:
        """Read the maps of queues where that is due, or where a shard knew a later one."""
        stale = {one.keys.entry for one in self.given_up}
        for entry, parts in self._queues.items():
            if entry in stale:
                parts.shards.read(for_seconds=PUBLISH_SECONDS)
            else:
                parts.shards.refresh()

    def publish(self) -> int:
        """
        Make all calls that are to be made; return how many rows have an answer.

        Raises:
            RedisUnavailableError: Redis is away; the calls without an answer are made again next time.
        """
        self._look_for_shards()
        taken = self._taken()
        plain = [one for one in self.unanswered if one.terms.durability is None]
        calls, began = [one.call(taken[id(one)]) for one in plain], time.monotonic()
        answers = self._clients.blocking().run_all(calls, for_seconds=PUBLISH_SECONDS)
        for one, answer in zip(plain, answers, strict=True):
            self._answered(one, answer, began)
        while self.unanswered:
            began, one = time.monotonic(), self.unanswered[0]
            if any(one.keys.entry == other.keys.entry for other in self.failed):
                self._fail(one)  # unmade: the queue has held up the others once in this round
            else:
                self._answered(one, self._confirmed(one, taken[id(one)]), began)
        self._name_queues()
        return sum(len(one.rows) for one in self.sent)

    def _look_for_shards(self) -> None:
        """Give up rows with keys of a queue that has several shards: they are taken anew, and refused."""
        for one in [one for one in self.unanswered if one.terms.keyed]:
            shards = self.shards(one.keys)
            try:
                if not shards.is_keyed:
                    shards.read(for_seconds=PUBLISH_SECONDS)
            except RedisUnavailableError:
                raise
            except ReliqError as error:
                self._answered(one, error, time.monotonic())
                continue
            if shards.map.served > 1:
                self._give_up(one)

    def _taken(self) -> dict[int, set[str]]:
        """Return of each call the ids that their old home has; give those up that it refuses by a later map."""
        taken: dict[int, set[str]] = {id(one): set() for one in self.unanswered}
        asking = [(one, question) for one in self.unanswered if (question := one.question())]
        answers = self._clients.blocking().run_all([question for _, question in asking], for_seconds=PUBLISH_SECONDS)
        for (one, _), answer in zip(asking, answers, strict=True):
            if isinstance(answer, Exception):
                self._answered(one, answer, time.monotonic())
            elif "stale" in answer:
                self._give_up(one)
            else:
                words: Sequence[AskStatus] = answer
                taken[id(one)] = {row.id for row, word in zip(one.rows, words, strict=True) if word != "free"}
        return taken

    def _confirmed(self, one: Sending, taken: set[str]) -> PublishAnswer | Exception | None:
        """Make a call that must be confirmed; return None when that did not come in time."""
        orders = [Order(row.id, b"", None) for row in one.rows]  # type: ignore[arg-type]  # their ids alone are told
        try:
            answer, confirmed = self._parts(one.keys).confirmer.run(one.call(taken), orders, one.terms.confirmation)
        except RedisUnavailableError:
            raise
        except ReliqError as error:
            return error
        return answer if confirmed.durable or answer.is_stale else None

    def _answered(self, one: Sending, answer: PublishAnswer | Exception | None, began: float) -> None:
        """Note what became of a call; without an answer it is made again later, under its number."""
        if not isinstance(answer, Exception | None) and answer.is_stale:
            self._give_up(one)
            return
        outcomes: dict[str, int] = {"published": len(one.rows)}
        if isinstance(answer, Exception):
            self._fail(one)
            what = f"{count_of(len(one.rows), 'row')} of queue {one.keys.name} not published, to be tried again"
            logger.error("outbox: %s: %s", what, answer)
            outcomes = {"unknown" if getattr(answer, "maybe_ran", False) else "refused": len(one.rows)}
        elif answer is None:
            self._fail(one)
        else:
            self.unanswered.remove(one)
            self.sent.append(one)
            if one.lane:
                self.lanes.give_back(one.lane)
            outcomes = {"published": len(one.rows) - len(answer.refused), **Counter(answer.refused.values())}
        if self._watching:
            notify(self._watching, [PublishEnded(one.keys.name, time.monotonic() - began, outcomes)])

    def _fail(self, one: Sending) -> None:
        """Note that a call has no answer and its queue is to back off; the lane stays with the call."""
        self.unanswered.remove(one)
        self.failed.append(one)

    def _give_up(self, one: Sending) -> None:
        """Note that a call has published nothing; its number was not used."""
        self.unanswered.remove(one)
        self.given_up.append(one)
        if one.lane:
            self.lanes.give_back(one.lane)

    def _name_queues(self) -> None:
        for entry in [parts.registrar.due() for parts in self._queues.values()]:
            if entry:
                with suppress(ReliqError):
                    self._clients.blocking().run(entry)

    def _parts(self, keys: Keys) -> QueueParts:
        if keys.entry not in self._queues:
            first, clients = keys.of_shard(0) if keys.shard else keys, self._clients
            shards = Shards(first, clients)
            made = QueueParts(shards, Registrar(first, clients), Confirmer(first.name, clients))
            self._queues[keys.entry] = made
        return self._queues[keys.entry]
