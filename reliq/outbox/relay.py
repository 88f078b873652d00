"""The lanes of a relay: each call has one of its own until its rows are noted as sent, and Redis remembers it for weeks."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from reliq.distribution import VERSION
from reliq.errors import ConfigurationError, RedisUnavailableError, ReliqError
from reliq.events import DatabaseAway, DatabaseBack, OutboxSeen, PublishEnded, notify, wanting
from reliq.keys import SHARDS_LIMIT, Keys, check_id, home, made_at, token
from reliq.lua import transitions
from reliq.lua.transitions import CallNumber, CallSequence, PublishAnswer
from reliq.outbox.store import AGAIN, OVERDUE_LIMIT, OutboxLook, Store, StoredRow, database
from reliq.outbox.tables import RowTerms, Tables, missing
from reliq.publish.messages import PreparedMessage
from reliq.publish.publisher import Confirmer, QueueRegistration, check_one_shard
from reliq.redis.server import PUBLISH_SECONDS
from reliq.redis.shards import Shards
from reliq.redis.url import check_target
from reliq.settings import (
    BATCH_LIMIT,
    OUTBOX_PREFIX,
    READ_BYTES,
    RECONNECT,
    check_int,
    milliseconds,
    seconds,
    seconds_after,
)
from reliq.text import chunked_by_size, pluralize
from reliq.wire_format import ENVELOPE_START, envelope_rest, open_envelope

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from reliq.lua.transitions import AskStatus
    from reliq.message import Duration, Header
    from reliq.outbox.store import StoredRow
    from reliq.redis.client import Clients
    from reliq.redis.commands import Call
    from reliq.redis.url import Target


#: Within 30 days a call may be made again, by any relay, and publishes nothing twice. A relay that died leaves one key
#: for each lane of a queue, of about 100 bytes.
REMEMBERED_MS = 30 * 86_400_000


class RelaySequences:
    """
    The lanes of one relay.

    A lane is free again when the rows of its call are noted as sent in the transaction that takes the next rows, or in
    an earlier one: who finds rows of an earlier call in the database, and is told `stale`, knows that they were sent.
    """

    def __init__(self) -> None:
        self._name, self._made = token(), 0
        self._free: list[CallSequence] = []

    def take(self) -> CallSequence:
        """Return a lane that no call has; it is gone until it is given back."""
        if self._free:
            return self._free.pop()
        self._made += 1
        return CallSequence(f"{self._name}{self._made}")

    def give_back(self, lane: CallSequence) -> None:
        """Note that the call of the lane has its answer."""
        self._free.append(lane)


#: A message that is sent for a second time, and has an id of reliq's own, is published as one of a chosen id with this
#: window: not while it is alive, nor within that time of its end.
AGAIN_WINDOW_MS = 600_000
#: The fence of a call that gets its answer if it has run, and else is refused by every shard.
NEVER = "never"
#: Rows share a call when their due times are as near as a thousandth of their delay, and a second at most.
DELAY_PARTS, LONGEST_STEP_MS = 1000, 1000
#: The answer to a call of a lane that has had a later one since: it was made.
STALE = PublishAnswer(0, {})


@dataclass(slots=True)
class Sending:
    """
    Rows that one call publishes.

    Attributes:
        left_ms: until they are due, when they were taken; `taken_at`, by the monotonic clock.
        again: whether they, or a call with their number, may have been sent before.
        lane: of this relay, when the call is its own.
        fence: of the map by which `keys` are the shard of the rows; NEVER when they are not.
        old_home: the shard that may have messages of their chosen ids; None: there is none.
    """

    keys: Keys
    terms: RowTerms
    left_ms: int
    again: bool
    rows: list[StoredRow]
    number: CallNumber
    lane: CallSequence | None = None
    fence: str = "0"
    old_home: Keys | None = None
    taken_at: float = field(default_factory=time.monotonic)

    @property
    def seqs(self) -> list[int]:
        """The rows."""
        return [row.seq for row in self.rows]

    @property
    def number_text(self) -> str:
        """The number of the call as it is written down, with the shard that it is for."""
        return f"{self.number.lane}.{self.number.number}.{self.keys.shard}"

    def question(self) -> Call[list[AskStatus]] | None:
        """Return the call that asks the old home of chosen ids which of them are free; None where there is none."""
        if self.old_home is None:
            return None
        replace = self.terms.replace and not self.again
        return transitions.ask(self.old_home, [row.id for row in self.rows], fence=self.fence, replace=replace)

    def call(self, taken: Collection[str] = ()) -> Call[PublishAnswer]:
        """Return the publish of all rows whose ids are not `taken`; its rows are due as long after they were written as their publisher asked."""
        terms, window_ms = self.terms, self.terms.window_ms
        if self.again and window_ms is None:
            window_ms = AGAIN_WINDOW_MS
        gone_ms = int((time.monotonic() - self.taken_at) * 1000)
        rows = [row for row in self.rows if row.id not in taken]
        made = transitions.publish(
            self.keys,
            [(row.id, self._value(row)) for row in rows],
            self.number,
            ttl_ms=terms.ttl_ms,
            retries=terms.retries,
            delay_ms=max(0, self.left_ms - gone_ms),
            at_ms=terms.at_ms,
            window_ms=window_ms,
            replace=terms.replace and not self.again,
            bare=self.keys.bare,
            fence=self.fence,
            message_keys=[_header(row)[0].line or "" for row in rows] if terms.keyed else None,
            remember_ms=REMEMBERED_MS,
        )
        parse = made.parse
        return replace(made, parse=lambda reply: STALE if reply == b"stale" else parse(reply))

    def _value(self, row: StoredRow) -> bytes:
        """Return the value of a row; one that is sent again says that its id is one to be checked."""
        value = bytes(row.value)
        if not self.again or self.keys.bare or self.terms.window_ms is not None:
            return value
        header, body = _header(row)
        enqueued = made_at(row.id) if header.enqueued is None else header.enqueued
        headers, line = header.headers, header.line or ""
        return envelope_rest(self.terms.retries, enqueued, AGAIN_WINDOW_MS, headers, header.incarnation, line) + body


def _header(row: StoredRow) -> tuple[Header, bytes]:
    """Return header and body of a row's value, which begins after the due time."""
    return open_envelope(b"%b0%b" % (ENVELOPE_START.encode(), bytes(row.value)))


def parse_number(text: str) -> tuple[CallNumber, int] | None:
    """Return the number of a call that was written down and its shard; None for what is none."""
    lane, _, rest = text.partition(".")
    number, _, shard = rest.partition(".")
    if not (lane and lane.isprintable() and number.isdecimal() and shard.isdecimal() and int(shard) < SHARDS_LIMIT):
        return None
    return CallNumber(lane, int(number)), int(shard)


def checked(row: StoredRow) -> tuple[Keys, RowTerms]:
    """Return queue and terms of a row; raise ConfigurationError when it can be published nowhere."""
    keys = Keys.registered(row.queue)
    if keys is None:
        raise ConfigurationError(f"{row.queue[:80]!r} is no queue")
    return keys, RowTerms.parse(row.terms)


def left_ms(terms: RowTerms, age_ms: int) -> int:
    """Return until when a message waits that was written so long ago; nothing is due early, and few times differ."""
    left = max(0, terms.delay_ms - max(0, age_ms))
    step = min(max(1, terms.delay_ms // DELAY_PARTS), LONGEST_STEP_MS)
    return -(-left // step) * step


logger = logging.getLogger(__name__)


class QueueParts(NamedTuple):
    """The parts of a relay that know one queue: its shards, its name in the registry, and its confirmations."""

    shards: Shards
    registrar: QueueRegistration
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
        self.lanes = RelaySequences()
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
        orders = [PreparedMessage(row.id, b"", None) for row in one.rows]  # type: ignore[arg-type]  # their ids alone are told
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
            what = f"{pluralize(len(one.rows), 'row')} of queue {one.keys.name} not published, to be tried again"
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
            made = QueueParts(shards, QueueRegistration(first, clients), Confirmer(first.name, clients))
            self._queues[keys.entry] = made
        return self._queues[keys.entry]


@dataclass(frozen=True, kw_only=True)
class Relay:
    """
    Moves the messages of `publish_in` from a database to Redis: `Consumer(relay=Relay("postgresql://…"))`.

    Several may work on one outbox.

    Attributes:
        database: a URL, `postgresql://…` (by psycopg 3) or `sqlite:///PATH`; SQLAlchemy's URL or engine does too.
        prefix: what the names of the tables begin with; `schema.prefix` names a schema too.
        batch: the most rows of one round (1..10,000); a call to Redis has at most 500.
        keep: seconds or timedelta for which rows stay after they were sent, for a Redis that loses its last writes.
        poll: the most seconds between two looks at the outbox; in PostgreSQL a commit is told at once besides.
        url: the Redis; None means that of the consumer, else RELIQ_URL.

    Raises:
        ConfigurationError: a setting is not allowed, or the library of the database is not installed.
    """

    database: Any
    prefix: str = OUTBOX_PREFIX
    batch: int = 500
    keep: Duration = 3600.0
    poll: Duration = 1.0
    url: Target | None = None

    def __init__(
        self,
        database: Any,
        *,
        prefix: str = OUTBOX_PREFIX,
        batch: int = 500,
        keep: Duration = 3600.0,
        poll: Duration = 1.0,
        url: Target | None = None,
    ) -> None:
        given = {"database": database, "prefix": prefix, "batch": batch, "url": url}
        given |= {"keep": seconds("keep", keep), "poll": seconds("poll", poll, least=0.01, most=3600)}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        _check(self)


def _check(relay: Relay) -> None:
    Tables.of(relay.prefix)
    database(relay.database)
    check_int("batch", relay.batch, least=1, most=10_000)
    if relay.url is not None:
        check_target(relay.url)


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
            logger.info("outbox: %s that an older version refused tried again", pluralize(count, "row is", "rows are"))
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
