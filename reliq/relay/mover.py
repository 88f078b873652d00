"""One relay at work: takes rows, publishes them, notes them as sent, and cleans."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq.chunks import chunked_by_size
from reliq.errors import ConfigurationError
from reliq.events import DatabaseAway, DatabaseBack, OutboxSeen, notify
from reliq.ids import check_id, home
from reliq.outbox.database import database
from reliq.outbox.missing import missing
from reliq.outbox.store import AGAIN, Store, StoredRow
from reliq.outbox.tables import Tables
from reliq.publish.fleet import check_one_shard
from reliq.relay.row_publisher import RowPublisher
from reliq.relay.sending import Sending, checked, left_ms, parse_number
from reliq.retry import RECONNECT, seconds_after
from reliq.settings import BATCH_LIMIT, READ_BYTES, milliseconds, seconds

if TYPE_CHECKING:
    from reliq.client.client import Clients
    from reliq.keys import Keys
    from reliq.outbox.rows import RowTerms
    from reliq.relay.relay import Relay

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

    def __init__(self, relay: Relay, clients: Clients) -> None:
        self._relay, self._observers = relay, clients.observers
        self.redis = RowPublisher(clients)
        self.store = Store(database(relay.database), relay.prefix)
        self._keep_ms, self._took_new = milliseconds(relay.keep), False
        self._due = dict.fromkeys(("overdue", "clean", "look"), 0.0)
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
        if not self.redis.unanswered:
            self.redis.look()
            self._take(overdue_seconds)
        return self.redis.publish()

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
            if self.redis.sent or self.redis.given_up:
                self.store.begin()
                self._note_answers()
                self.store.commit()
        self.store.database.close()

    def _take(self, overdue_seconds: float) -> None:
        """Note what was sent, and take the rows of the next round."""
        is_due, redis = time.monotonic() >= self._due["overdue"], self.redis
        self.store.begin()
        self._note_answers()
        earlier = self._earlier(milliseconds(overdue_seconds)) if is_due else []
        new = self._new(self.store.waiting(self._relay.batch, sorted(redis.blocked)))
        self.store.note_calls({one.number_text: one.seqs for one in new})
        self.store.commit()
        redis.sent, redis.given_up, redis.unanswered, self._took_new = [], [], earlier + new, bool(new)
        if is_due:
            self._due["overdue"] = time.monotonic() + OVERDUE_EVERY_SECONDS

    def _note_answers(self) -> None:
        sent, given_up = self.redis.sent, self.redis.given_up
        seqs = [seq for one in sent for seq in one.seqs]
        self.store.note_sent([one.number_text for one in sent], seqs, keep=self._keep_ms > 0)
        again = [seq for one in given_up if one.again for seq in one.seqs]
        self.store.give_up([one.number_text for one in given_up], again)

    def _earlier(self, overdue_ms: int) -> list[Sending]:
        """Return the calls, of whichever relay, that have had no answer for too long: to be made again as they were."""
        made = []
        for text, rows in self.store.overdue(overdue_ms).items():
            known = parse_number(text)
            if known is None or not rows:
                self.store.note_sent([text], [], keep=True)
                continue
            try:
                keys, terms = checked(rows[0])
            except ConfigurationError as error:
                logger.warning("outbox: the call %s waits for a relay that understands its rows: %s", text, error)
                continue
            (number, shard), left = known, max(left_ms(terms, row.age_ms) for row in rows)
            shards = self.redis.shards(keys)
            made.append(Sending(shards.keys(shard), terms, left, True, rows, number, None, shards.map.epoch))
        return made

    def _new(self, rows: list[StoredRow]) -> list[Sending]:
        """Return the calls for rows that none has; those of a call share queue, shard, terms and when they are due."""
        groups: defaultdict[tuple[str, str, int, str, tuple[int, int]], list[StoredRow]] = defaultdict(list)
        known: dict[tuple[str, str], tuple[Keys, RowTerms]] = {}
        for row in rows:
            try:
                check_id(row.id)
                keys, terms = known.get((row.queue, row.terms)) or checked(row)
                if terms.keyed:
                    check_one_shard(self.redis.shards(keys))
            except ConfigurationError as error:
                self._refuse(row, error)
                continue
            known[row.queue, row.terms] = keys, terms
            homes = self._homes(keys, row, is_chosen=terms.window_ms is not None or row.note == AGAIN)
            groups[row.queue, row.terms, left_ms(terms, row.age_ms), row.note, homes].append(row)
        return [
            self._sending(*known[queue, terms_text], left, piece, homes, again=note == AGAIN)
            for (queue, terms_text, left, note, homes), some in groups.items()
            for piece in chunked_by_size(some, lambda row: len(row.value), READ_BYTES, BATCH_LIMIT)
        ]

    def _homes(self, keys: Keys, row: StoredRow, *, is_chosen: bool) -> tuple[int, int]:
        """Return the shard of a row, and the one that may have its id already: else the same."""
        map = self.redis.shards(keys).map
        now = home(row.id, map.n)
        return now, home(row.id, map.was) if is_chosen else now

    def _sending(
        self, keys: Keys, terms: RowTerms, left: int, rows: list[StoredRow], homes: tuple[int, int], *, again: bool
    ) -> Sending:
        (now, before), lane, shards = homes, self.redis.lanes.take(), self.redis.shards(keys)
        old_home = None if now == before else shards.keys(before)
        return Sending(shards.keys(now), terms, left, again, rows, lane.next(), lane, shards.map.epoch, old_home)

    def _refuse(self, row: StoredRow, why: Exception) -> None:
        logger.error("outbox: row %d cannot be published and stays, see its note: %s", row.seq, why)
        self.store.note_refused(row.seq, str(why)[:500])

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
