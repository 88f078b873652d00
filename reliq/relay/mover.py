"""One relay at work: takes rows, publishes them, notes them as sent, and cleans."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError, RedisUnavailableError, ReliqError
from reliq.events import DatabaseAway, DatabaseBack, OutboxSeen, PublishEnded, notify, wanting
from reliq.ids import check_id
from reliq.outbox.database import database
from reliq.outbox.missing import missing
from reliq.outbox.store import AGAIN, Store, StoredRow
from reliq.outbox.tables import Tables
from reliq.publish.durability import Confirmer
from reliq.publish.orders import Order
from reliq.publish.registry import Registrar
from reliq.relay.lanes import RelayLanes, remember
from reliq.relay.sending import STALE, Sending, checked, left_ms, number_text, parse_number, pieces
from reliq.retry import RECONNECT, seconds_after
from reliq.settings import milliseconds, seconds
from reliq.transport.connection import PUBLISH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.client.client import Clients
    from reliq.events import Observer
    from reliq.keys import Keys
    from reliq.outbox.rows import RowTerms
    from reliq.relay.relay import Relay
    from reliq.transitions import PublishAnswer

logger = logging.getLogger(__name__)

#: Rows whose call was made so long ago and has no answer are sent under its number by whichever relay meets them first.
OVERDUE_SECONDS = 10.0
#: How often a relay looks for such rows, and cleans.
OVERDUE_EVERY_SECONDS, CLEAN_EVERY_SECONDS = 5.0, 60.0
#: How often it says how much waits.
LOOK_EVERY_SECONDS = 15.0


class OutboxMover:
    """
    Moves rows of one outbox; a part of a worker or a process of its own. One thread calls `step` or `move_all`.

    A round takes rows under the numbers of calls and commits, publishes them, and notes them as sent with the next
    taking. Redis remembers each number, so that rows whose round was cut off are sent again without harm, by this relay
    or by another.
    """

    def __init__(self, relay: Relay, clients: Clients, observers: Sequence[Observer] = ()) -> None:
        self._relay, self._clients, self._observers = relay, clients, observers
        self._watching = wanting(observers, PublishEnded)
        self.store = Store(database(relay.database), relay.prefix)
        self._keep_ms = milliseconds(relay.keep)
        self._lanes = RelayLanes()
        self._unanswered: list[Sending] = []
        self._sent: list[Sending] = []
        self._took_new = False
        self._blocked = set[
            str
        ]()  # queues with a call that Redis refused: no more of theirs is taken before its answer
        self._due = dict.fromkeys(("overdue", "clean", "look"), 0.0)
        self._of_queue: dict[str, tuple[Registrar, Confirmer]] = {}
        self._failures = 0

    def check(self) -> None:
        """
        Look whether the tables are there.

        Raises:
            ConfigurationError: they are not.
        """
        try:
            self.store.look()
        except Exception as error:
            self.store.database.close()
            if why := missing(error, Tables.of(self._relay.prefix).outbox):
                raise why from error
            raise

    def step(self) -> float:
        """Move rows, or wait a while for some; return the seconds to wait before the next step."""
        try:
            moved = self.move()
            self._look_after()
            if not (moved or self._took_new):
                self.store.wait(seconds("poll", self._relay.poll))
        except self.store.database.away as error:
            return self._database_away(error)
        self._database_back()
        return 0.0

    def move(self, *, overdue_seconds: float = OVERDUE_SECONDS) -> int:
        """
        Make one round; return how many rows Redis has answered for.

        Raises:
            RedisUnavailableError: Redis is away; the round is made again next time.
        """
        if not self._unanswered:
            self._take(overdue_seconds)
        return self._publish()

    def move_all(self) -> int:
        """Move every row there is, those that another relay has left too; return how many."""
        count = 0
        while True:
            self._due["overdue"] = 0.0
            moved = self.move(overdue_seconds=0.0)
            count += moved
            if not (moved or self._took_new):
                return count

    def poke(self) -> None:
        """End a wait for rows, of another thread."""
        self.store.database.poke()

    def close(self) -> None:
        """Note what was sent, and close the connection to the database; another relay finds nothing left over."""
        with suppress(*self.store.database.away):
            if self._sent:
                self.store.begin()
                self._note_sent()
                self.store.commit()
        self.store.database.close()

    def _take(self, overdue_seconds: float) -> None:
        """Note what was sent, and take the rows of the next round."""
        is_due = time.monotonic() >= self._due["overdue"]
        self.store.begin()
        self._note_sent()
        earlier = self._earlier(milliseconds(overdue_seconds)) if is_due else []
        new = self._new(self.store.waiting(self._relay.batch, sorted(self._blocked)))
        self.store.note_calls({number_text(one.number): one.seqs for one in new})
        self.store.commit()
        self._sent, self._unanswered, self._took_new = [], earlier + new, bool(new)
        if is_due:
            self._due["overdue"] = time.monotonic() + OVERDUE_EVERY_SECONDS

    def _note_sent(self) -> None:
        calls = [number_text(one.number) for one in self._sent]
        self.store.note_sent(calls, [seq for one in self._sent for seq in one.seqs], keep=self._keep_ms > 0)

    def _earlier(self, overdue_ms: int) -> list[Sending]:
        """Return the calls, of whichever relay, that have had no answer for too long: to be made again as they were."""
        made = []
        for text, rows in self.store.overdue(overdue_ms).items():
            number = parse_number(text)
            if number is None or not rows:
                self.store.note_sent([text], [], keep=True)
                continue
            try:
                keys, terms = checked(rows[0])
            except ConfigurationError as error:
                logger.warning("outbox: the call %s waits for a relay that understands its rows: %s", text, error)
                continue
            made.append(Sending(keys, terms, max(left_ms(terms, row.age_ms) for row in rows), True, rows, number))
        return made

    def _new(self, rows: list[StoredRow]) -> list[Sending]:
        """Return the calls for rows that none has; those of a call share queue, terms and when they are due."""
        groups: defaultdict[tuple[str, str, int, str], list[StoredRow]] = defaultdict(list)
        known: dict[tuple[str, str], tuple[Keys, RowTerms]] = {}
        for row in rows:
            try:
                check_id(row.id)
                facts = known.get((row.queue, row.terms)) or checked(row)
            except ConfigurationError as error:
                self._refuse(row, error)
                continue
            known[row.queue, row.terms] = facts
            groups[row.queue, row.terms, left_ms(facts[1], row.age_ms), row.note].append(row)
        return [
            self._sending(*known[queue, terms], left, piece, again=note == AGAIN)
            for (queue, terms, left, note), some in groups.items()
            for piece in pieces(some)
        ]

    def _sending(self, keys: Keys, terms: RowTerms, left: int, rows: list[StoredRow], *, again: bool) -> Sending:
        lane = self._lanes.take()
        return Sending(keys, terms, left, again, rows, lane.next(), lane)

    def _refuse(self, row: StoredRow, why: Exception) -> None:
        logger.error("outbox: row %d cannot be published and stays, see its note: %s", row.seq, why)
        self.store.note_refused(row.seq, str(why)[:500])

    def _publish(self) -> int:
        """Publish what was taken; return how many rows have an answer."""
        plain = [one for one in self._unanswered if one.terms.durability is None]
        requests = [request for one in plain for request in (one.call(), remember(one.keys, one.number.lane))]
        began = time.monotonic()
        answers = self._clients.blocking().run_all(requests, for_seconds=PUBLISH_SECONDS)
        for one, answer, kept in zip(plain, answers[::2], answers[1::2], strict=True):
            self._answered(one, answer, began)
            if (
                kept is False and answer is not STALE
            ):  # Redis did not know the script yet: it was sent once more, after it
                self._clients.blocking().run(remember(one.keys, one.number.lane))
        self._unanswered = [one for one in self._unanswered if one.terms.durability is not None]
        while self._unanswered:
            began = time.monotonic()
            self._answered(self._unanswered[0], self._confirmed(self._unanswered[0]), began)
            del self._unanswered[0]
        for entry in [of[0].due() for of in self._of_queue.values()]:
            if entry:
                with suppress(ReliqError):
                    self._clients.blocking().run(entry)
        return sum(len(one.rows) for one in self._sent)

    def _confirmed(self, one: Sending) -> PublishAnswer | Exception | None:
        """Publish rows that must be confirmed; return None when they were published and not confirmed in time."""
        terms = one.terms
        orders = [Order(row.id, b"", None) for row in one.rows]  # type: ignore[arg-type]  # only ids are told
        try:
            answer, confirmed = self._parts(one.keys)[1].run(one.call(), orders, terms.confirmation)
            self._clients.blocking().run(remember(one.keys, one.number.lane))
        except RedisUnavailableError:
            raise
        except ReliqError as error:
            return error
        return answer if confirmed.durable else None

    def _answered(self, one: Sending, answer: PublishAnswer | Exception | None, began: float) -> None:
        """Note what became of a call; rows without an answer are sent again under its number when they are overdue."""
        queue = one.keys.name
        if isinstance(answer, Exception):
            self._blocked.add(one.keys.entry)
            logger.error(
                "outbox: %d row(s) of queue %s were not published, and will be tried again: %s",
                len(one.rows),
                queue,
                answer,
            )
            outcomes: dict[str, int] = {"unknown" if getattr(answer, "maybe_ran", False) else "refused": len(one.rows)}
        elif answer is None:
            outcomes = {"published": len(one.rows)}
        else:
            self._sent.append(one)
            self._blocked.discard(one.keys.entry)
            if one.lane:
                self._lanes.give_back(one.lane)
            self._parts(one.keys)
            outcomes = dict(Counter(answer.refused.values()))
            outcomes["published"] = len(one.rows) - len(answer.refused)
        if self._watching:
            notify(self._watching, [PublishEnded(queue, time.monotonic() - began, outcomes)])

    def _parts(self, keys: Keys) -> tuple[Registrar, Confirmer]:
        """Return what names a queue in the registry, and what waits for confirmations of its publishes."""
        if keys.entry not in self._of_queue:
            self._of_queue[keys.entry] = Registrar(keys, self._clients), Confirmer(keys.name, self._clients)
        return self._of_queue[keys.entry]

    def _look_after(self) -> None:
        """Delete what need not be kept, and say how much waits, each once in a while."""
        now = time.monotonic()
        if now >= self._due["clean"]:
            self._due["clean"] = now + CLEAN_EVERY_SECONDS
            self.store.clean(self._keep_ms)
        if now >= self._due["look"]:
            self._due["look"] = now + LOOK_EVERY_SECONDS
            look = self.store.look()
            notify(self._observers, [OutboxSeen("", look.waiting, look.oldest_seconds)])

    def _database_away(self, error: Exception) -> float:
        """Give the connection up; return how long to wait before the next try."""
        self.store.database.close()
        self._failures += 1
        if self._failures == 1:
            logger.warning("outbox: the database is away, trying again until it is back (%s)", error)
        notify(self._observers, [DatabaseAway("", str(error))])
        return seconds_after(RECONNECT, self._failures)

    def _database_back(self) -> None:
        if self._failures:
            self._failures = 0
            logger.info("outbox: the database is back")
            notify(self._observers, [DatabaseBack("")])
