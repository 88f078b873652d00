"""One relay at work: takes rows, publishes them, notes them as sent, and cleans."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq.chunks import chunked_by_size
from reliq.distribution import VERSION
from reliq.errors import ConfigurationError
from reliq.events import DatabaseAway, DatabaseBack, OutboxSeen, notify
from reliq.ids import check_id, home
from reliq.outbox.database import database
from reliq.outbox.missing import missing
from reliq.outbox.store import AGAIN, OVERDUE_LIMIT, OutboxLook, Store, StoredRow
from reliq.outbox.tables import Tables
from reliq.publish.route import check_one_shard
from reliq.relay.row_publisher import RowPublisher
from reliq.relay.sending import NEVER, Sending, checked, left_ms, parse_number
from reliq.retry import RECONNECT, seconds_after
from reliq.settings import BATCH_LIMIT, READ_BYTES, milliseconds, seconds
from reliq.text import count_of

if TYPE_CHECKING:
    from reliq.client.client import Clients
    from reliq.keys import Keys
    from reliq.outbox.rows import RowTerms
    from reliq.relay.relay import Relay

logger = logging.getLogger(__name__)

#: How often a relay looks for calls that are to be made again, and cleans.
OVERDUE_EVERY_SECONDS, CLEAN_EVERY_SECONDS = 5.0, 60.0
#: How often it says how much waits.
LOOK_EVERY_SECONDS = 15.0
#: A relay without a successful round for so long is not ready.
STUCK_SECONDS = 30.0


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
        self._due = dict.fromkeys(("overdue", "refused", "clean", "look"), 0.0)
        self._failures, self._error = 0, ""
        self._look = OutboxLook(0, 0.0)
        self._looked_at = self._well_at = time.monotonic()

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
        """
        Move rows, or wait a while for some; return the seconds to wait before the next step.

        Raises:
            ReliqError: Redis is away or refuses; whatever is raised, the next step has a new connection to the database.
        """
        try:
            self._look_after()  # first: the figures are needed most while Redis is away
            moved = self.move()
            if not (moved or self._took_new):
                self.store.wait(seconds("poll", self._relay.poll))
        except Exception as error:
            self.store.database.close()  # which rolls back: a transaction that failed takes no further statement
            if not isinstance(error, self.store.database.away):
                self._error = str(error)
                raise
            return self._database_failed(error)
        self._well_at = time.monotonic()
        self._database_back()
        return 0.0

    def complaint(self) -> str:
        """Return why the relay is not ready, empty when it is."""
        age = time.monotonic() - self._well_at
        return "" if age < STUCK_SECONDS else f"no round of the relay has succeeded for {age:.0f} s: {self._error}"

    def move(self, *, every: bool = False) -> int:
        """
        Make one round; return how many rows Redis has answered for.

        Args:
            every: have all calls without an answer made again now, in this round and the next rounds.

        Raises:
            RedisUnavailableError: Redis is away; the round is made again next time.
        """
        if not self.redis.unanswered:
            self.redis.look()
            self._take(every=every)
        return self.redis.publish()

    def move_all(self) -> int:
        """Move all rows, also rows of calls that another relay left; try a call that Redis refuses once. Return how many moved."""
        redis, tried = self.redis, set[str]()
        count = self.move() if redis.unanswered else 0  # calls of a round that Redis cut off
        while True:
            self._due["overdue"] = 0.0
            moved = self.move(every=not tried)
            count += moved
            calls = {one.number_text for one in (*redis.sent, *redis.given_up, *redis.failed)}
            if not (moved or calls - tried):
                return count
            tried |= calls

    def poke(self) -> None:
        """End a wait for rows, of another thread."""
        self.store.database.poke()

    def close(self) -> None:
        """Note what was sent, and close the connection to the database; another relay finds nothing left over."""
        with suppress(*self.store.database.away):
            if self.redis.sent or self.redis.given_up or self.redis.failed:
                self.store.begin()
                self._note_answers()
                self.store.commit()
        self.store.database.close()

    def _take(self, *, every: bool = False) -> None:
        """Note what was sent, and take the rows of the next round."""
        redis = self.redis
        self.store.begin()
        self._note_answers()
        if every:
            self.store.hurry()
        is_due = every or time.monotonic() >= self._due["overdue"]
        overdue = self.store.overdue() if is_due else {}
        earlier = self._earlier(overdue)
        if time.monotonic() >= self._due["refused"] and (count := self.store.retry(newer=VERSION)):
            logger.info("outbox: %s that an older version refused tried again", count_of(count, "row is", "rows are"))
        new = self._new(self.store.waiting(self._relay.batch))
        for one in new:
            self.store.note_call(one.number_text, one.rows[0].queue, one.seqs)
        self.store.commit()
        redis.sent, redis.given_up, redis.failed = [], [], []
        redis.unanswered, self._took_new = earlier + new, bool(new)
        if is_due:
            are_more = len(overdue) == OVERDUE_LIMIT
            self._due["overdue"] = 0.0 if are_more else time.monotonic() + OVERDUE_EVERY_SECONDS
        if time.monotonic() >= self._due["refused"]:
            self._due["refused"] = time.monotonic() + CLEAN_EVERY_SECONDS

    def _note_answers(self) -> None:
        sent, given_up, failed = self.redis.sent, self.redis.given_up, self.redis.failed
        seqs = [seq for one in sent for seq in one.seqs]
        self.store.note_sent([one.number_text for one in sent], seqs, keep=self._keep_ms > 0)
        again = [seq for one in given_up if one.again for seq in one.seqs]
        self.store.give_up([one.number_text for one in given_up], again)
        # A queue that failed and works again: its first success is a call that was made again, which has no lane here.
        recovered = {one.rows[0].queue for one in sent if not one.lane} - {one.rows[0].queue for one in failed}
        if recovered:
            self.store.hurry(sorted(recovered))
            self._due["overdue"] = 0.0
        self.store.note_failed([one.number_text for one in failed])

    def _earlier(self, overdue: dict[str, list[StoredRow]]) -> list[Sending]:
        """Return the calls, of whichever relay, that are to be made again as they were."""
        made = []
        for text, rows in overdue.items():
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
            is_chosen = terms.window_ms is not None
            homes = {self._homes(keys, row, is_chosen=is_chosen or row.note == AGAIN) for row in rows}
            # Elsewhere the call must not run now. Its own answer comes before the fence, which refuses a call that never ran.
            fence = shards.map.fence if homes == {(shard, shard)} else NEVER
            made.append(Sending(shards.keys(shard), terms, left, True, rows, number, None, fence))
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
        return Sending(shards.keys(now), terms, left, again, rows, lane.next(), lane, shards.map.fence, old_home)

    def _refuse(self, row: StoredRow, why: Exception) -> None:
        logger.error("outbox: row %d is refused and stays, see `reliq outbox refused`: %s", row.seq, why)
        self.store.note_refused(row, VERSION, str(why)[:500])

    def _look_after(self) -> None:
        """Delete what need not be kept, and say how much waits, each once in a while."""
        now = time.monotonic()
        if now >= self._due["clean"]:
            self._due["clean"] = now + CLEAN_EVERY_SECONDS
            self.store.clean(self._keep_ms)
        if now >= self._due["look"]:
            self._due["look"] = now + LOOK_EVERY_SECONDS
            self._look, self._looked_at = self.store.look(), time.monotonic()
            notify(self._observers, [OutboxSeen("", self._look.waiting, self._look.oldest_seconds)])

    def _database_failed(self, error: Exception) -> float:
        """Report a round that the database has failed; return how long to wait before the next."""
        self._failures += 1
        self._due["look"] = 0.0
        why = str(error).partition("\n")[0]
        if why != self._error:
            self._error = why
            logger.warning("outbox: the database failed, trying again until it answers (%s)", why)
        oldest_seconds = self._look.oldest_seconds + time.monotonic() - self._looked_at
        notify(self._observers, [DatabaseAway("", str(error)), OutboxSeen("", self._look.waiting, oldest_seconds)])
        return seconds_after(RECONNECT, self._failures)

    def _database_back(self) -> None:
        self._error = ""
        if self._failures:
            self._failures = 0
            logger.info("outbox: the database answers again")
            notify(self._observers, [DatabaseBack("")])
