"""
The relay: move the messages of `publish_in` from the outbox table of a database to Redis.

The relay works in rounds. A round takes rows of the outbox, assigns them to numbered publish calls, and commits. A
publish call is a script call that publishes several rows to Redis. Then the relay sends the publish calls. The next
round marks the rows as sent, in the same transaction in which it takes its own rows. Redis stores the number of each
publish call. So after an interruption, any relay can repeat a publish call, and no message is published twice.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, defaultdict
from contextlib import nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from reliq.consumer import STOPS, SignalNotes, handle_signal, ignore_stops
from reliq.distribution import VERSION
from reliq.errors import ConfigurationError, ProtocolError, RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.events import DatabaseRecovered, DatabaseUnavailable, Observer, OutboxSeen, PublishEnded, notify, wanting
from reliq.keys import SHARDS_LIMIT, Keys, check_id, made_at
from reliq.lua.transitions import CallNumber, CallSequences, PublishAnswer
from reliq.outbox.store import AGAIN, OVERDUE_LIMIT, OutboxLook, Store, StoredRow, database
from reliq.outbox.tables import RowTerms, Tables
from reliq.publish import CallTerms, Confirmer, PreparedMessage, ShardBatch, by_shard, check_one_shard, registration
from reliq.redis.client import Clients
from reliq.redis.connection import BLOCKING, run_blocking
from reliq.redis.server import PUBLISH_SECONDS
from reliq.redis.shards import Shards
from reliq.redis.url import Target, check_target
from reliq.settings import (
    BATCH_LIMIT,
    OUTBOX_PREFIX,
    READ_BYTES,
    RECONNECT,
    Durability,
    check_int,
    milliseconds,
    seconds,
    seconds_after,
)
from reliq.text import chunked_by_size, pluralize
from reliq.wire_format import ENVELOPE_START, envelope_rest, open_envelope
from reliq.worker import health
from reliq.worker.health import PATIENT_SECONDS, Pulse
from reliq.worker.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reliq.message import Duration
    from reliq.redis.commands import Call
    from reliq.supervisor.supervisor import ServiceManager

logger = logging.getLogger(__name__)

#: Redis stores the number of a publish call for this many ms. During this time, any relay can repeat the call without
#: publishing its messages twice. A relay that has ended leaves one Redis key of about 100 bytes for each of its call
#: sequences in each queue.
REMEMBERED_MS = 30 * 86_400_000
#: The deduplication window in ms for rows that may have been sent before and have a generated id.
#: Redis refuses such a message if a message with its id exists, or has ended within this time.
AGAIN_WINDOW_MS = 600_000
#: Matches `RelayCall.number_text`. The groups are the call sequence, the number in this sequence, and the shard.
_NUMBER_TEXT = re.compile(r"([^.\s]+)\.(\d{1,15})\.(\d{1,3})")
#: A fence (version of the shard map) that every shard refuses as outdated. A publish call with this fence gets its
#: first result again if it has run before. If it has not run, it publishes nothing.
NEVER = "never"
#: The result of a repeated publish call if a later call of its call sequence has run.
STALE = PublishAnswer(0, {})
#: Rows can share a publish call if their due times differ by at most a thousandth of their delay, and at most 1 s.
DELAY_PARTS = 1000
LONGEST_STEP_MS = 1000
#: How often a relay searches the database for publish calls that must be repeated.
OVERDUE_EVERY_SECONDS = 5.0
#: How often a relay deletes sent rows that are old enough, and expired inbox rows.
CLEAN_EVERY_SECONDS = 60.0
#: How often a relay reports the number of unsent rows.
LOOK_EVERY_SECONDS = 15.0
#: A relay is not ready if no round has succeeded for this long.
STUCK_SECONDS = 30.0
#: How often the main thread of `reliq relay` notifies the service manager.
NOTIFY_SECONDS = 0.5


@dataclass(frozen=True)
class Relay:
    """
    The settings of a relay, which moves messages of `Queue.publish_in` from a database to Redis.

    Several relays may work on the same outbox.

    Attributes:
        database: a URL, `postgresql://…` (needs psycopg 3) or `sqlite:///PATH`, or a URL or engine of SQLAlchemy.
        prefix: the prefix of the table names ("reliq_"); `schema.prefix` names a schema too.
        batch: the largest number of rows in a round, 1 to 10,000 (500). One call to Redis publishes at most 500
            messages.
        keep: how long to keep sent rows, in seconds or as a timedelta (3600). `reliq relay --resend-since` can send
            them again if Redis has lost its last writes.
        poll: the longest time between two checks of the outbox, in seconds or as a timedelta (1). PostgreSQL also
            notifies the relay of each commit.
        url: the URL of Redis. Default: the consumer's Redis, or RELIQ_URL.

    Raises:
        ConfigurationError: a setting is not allowed, or the database library is not installed.

    Example: `Consumer(relay=Relay("postgresql://user:password@db/shop"))`
    """

    database: Any
    _: KW_ONLY
    prefix: str = OUTBOX_PREFIX
    batch: int = 500
    keep: Duration = 3600.0
    poll: Duration = 1.0
    url: Target | None = None

    def __post_init__(self) -> None:
        """Check the settings and convert times to seconds."""
        object.__setattr__(self, "keep", seconds("keep", self.keep))
        object.__setattr__(self, "poll", seconds("poll", self.poll, least=0.01, most=3600))
        Tables.of(self.prefix)
        database(self.database)
        check_int("batch", self.batch, least=1, most=10_000)
        if self.url is not None:
            check_target(self.url)


@dataclass(slots=True, eq=False)
class RelayCall:
    """
    A publish call: a script call that publishes some rows of the outbox.

    Publish calls are numbered in call sequences. A call sequence gets its next call only after the rows of this call
    are marked as sent. If Redis replies `stale` to a repeated call, a later call of its sequence has run. So the rows
    were sent.

    Attributes:
        queue: the text that names the queue in the rows: its name; in the Go layout, the layout and the name.
        seqs: the numbers of the rows.
        batch: the messages to publish. During a resize, messages that still exist in their earlier shard are left out.
        terms: the publish options, with the delay that was left when the rows were taken.
        durability: the confirmation by replicas or disk that the messages need.
        again: whether the rows may have been sent before.
        number: the number of this call in its call sequence.
        is_first: whether this relay created the call; False if it repeats a call from the database.
        outcome: empty if the call was not sent yet or Redis was unavailable. `sent` if Redis ran the call. `given up`
            if a shard refused the call because of a newer shard map, so that the rows are taken again. `failed` if
            Redis refused the call, if a node of a Cluster was unavailable, or if the confirmation did not arrive.
        taken_at: the monotonic time at which the rows were taken.
    """

    queue: str
    seqs: list[int]
    batch: ShardBatch
    terms: CallTerms
    durability: Durability
    again: bool
    number: CallNumber
    is_first: bool = False
    outcome: Literal["", "sent", "given up", "failed"] = ""
    taken_at: float = field(default_factory=time.monotonic)

    @property
    def number_text(self) -> str:
        """The call sequence, the number and the shard of this call, as the database stores them."""
        return f"{self.number.lane}.{self.number.number}.{self.batch.keys.shard}"

    def request(self) -> Call[PublishAnswer]:
        """Create the script call that publishes the batch. Its delay is reduced by the time since `taken_at`."""
        gone_ms = int((time.monotonic() - self.taken_at) * 1000)
        terms = self.terms._replace(delay_ms=max(0, self.terms.delay_ms - gone_ms))
        request = self.batch.call(terms, self.number, remember_ms=REMEMBERED_MS)
        parse = request.parse
        return replace(request, parse=lambda reply: STALE if reply == b"stale" else parse(reply))


def _messages(
    rows: list[StoredRow], terms: RowTerms, left_ms: int, *, again: bool, bare: bool
) -> dict[int, PreparedMessage]:
    """Return the messages of `rows` by row number. If `again` is true, Redis checks generated ids for duplicates."""
    is_checked = again and terms.window_ms is None
    window_ms = AGAIN_WINDOW_MS if is_checked else terms.window_ms
    ignores = terms.ignore_dedup and not again
    call_terms = CallTerms(terms.at_ms, left_ms, terms.ttl_ms, terms.retries, window_ms, ignores)
    messages = {}
    for row in rows:
        value = bytes(row.value)
        line = ""
        if not bare and (is_checked or terms.keyed):
            # The envelope of a message starts with its due time. The row contains the envelope without this start.
            header, body = open_envelope(b"%b0%b" % (ENVELOPE_START.encode(), value))
            line = header.line or ""
            if is_checked:
                enqueued = made_at(row.id) if header.enqueued is None else header.enqueued
                start = envelope_rest(terms.retries, enqueued, window_ms, header.headers, header.publication_id, line)
                value = start + body
        messages[row.seq] = PreparedMessage(row.id, value, call_terms, line)
    return messages


def _left_ms(terms: RowTerms, age_ms: int) -> int:
    """Return how many ms are left until a row is due, rounded up so that similar rows share a publish call."""
    if not terms.delay_ms:
        return 0
    left = max(0, terms.delay_ms - max(0, age_ms))
    step = min(max(1, terms.delay_ms // DELAY_PARTS), LONGEST_STEP_MS)
    return -(-left // step) * step


class RowPublisher:
    """
    Publishes rows of the outbox to Redis.

    Attributes:
        clients: the Redis clients for all publish calls.
        lanes: gives each new publish call a call sequence and a number.
        queues: the shards of each queue that has had rows, by the text that names the queue in the rows.
        calls: the publish calls of this round. The next round stores their outcomes in the database.
    """

    def __init__(self, target: Target | None, observers: Sequence[Observer]) -> None:
        self.clients = Clients(target, observers)
        self._confirmer = Confirmer(self.clients)
        self._watching = wanting(observers, PublishEnded)
        self.lanes = CallSequences()
        self.queues: dict[str, Shards] = {}
        self._unread: dict[str, ReliqError] = {}
        self.calls: list[RelayCall] = []

    def of_outcome(self, outcome: str) -> list[RelayCall]:
        """Return the publish calls of this round with this outcome. The outcome is empty for calls without a reply."""
        return [call for call in self.calls if call.outcome == outcome]

    def shards(self, queue: str) -> Shards:
        """Return the shards of a queue. Raise ConfigurationError if `queue` is not a valid name."""
        if queue not in self.queues:
            keys = Keys.registered(queue)
            if keys is None:
                raise ConfigurationError(f"{queue[:80]!r} is not a queue name")
            self.queues[queue] = Shards(keys, self.clients)
        return self.queues[queue]

    def look(self) -> None:
        """
        Read the shard maps that must be refreshed, and the shard maps that a shard has refused as outdated.

        Raises:
            RedisUnavailableError: Redis is unavailable. In a Cluster, this error is not raised. Instead, the publish
                calls to unavailable servers fail later.
        """
        stale = {call.queue for call in self.of_outcome("given up")}
        # In a Cluster, do not retry, because an unavailable server must not delay queues on other servers.
        patience_seconds = 0.0 if self.clients.blocking().has_many else PUBLISH_SECONDS
        self._unread = {}
        for queue, shards in self.queues.items():
            try:
                if queue in stale:
                    run_blocking(shards.read(BLOCKING, for_seconds=patience_seconds))
                else:
                    run_blocking(shards.refresh(BLOCKING, for_seconds=patience_seconds))
            except (RedisRefusedError, RedisUnavailableError, ProtocolError) as error:
                if patience_seconds and isinstance(error, RedisUnavailableError):
                    raise
                self._unread[queue] = error

    def publish(self) -> int:
        """
        Send the publish calls of this round that have no outcome yet. Return the number of sent rows of this round.

        Raises:
            RedisUnavailableError: Redis is unavailable. Call `publish` again to repeat the calls without an outcome.
        """
        self._ask_old_homes()
        unconfirmed = [call for call in self.of_outcome("") if call.durability.kind == "none"]
        requests = [call.request() for call in unconfirmed]
        began = time.monotonic()
        answers = self.clients.blocking().run_all(requests, for_seconds=PUBLISH_SECONDS)
        for call, answer in zip(unconfirmed, answers, strict=True):
            self._note_answer(call, answer, began)
        for call in self.of_outcome(""):
            if any(call.queue == other.queue for other in self.of_outcome("failed")):
                # Another publish call of this queue has failed. Skip this call, because a wait for its confirmation
                # could delay other queues.
                self._end(call, "failed")
            else:
                self._publish_confirmed(call)
        named = [registration(shards.first, self.clients) for shards in self.queues.values()]
        with suppress(ReliqError):
            self.clients.blocking().run_all([command for command in named if command])
        return sum(len(call.seqs) for call in self.of_outcome("sent"))

    def _ask_old_homes(self) -> None:
        """
        Leave out messages whose id still exists in the shard that had the id before a resize.

        Give up a publish call if its shard map is outdated. Let it fail if its map or the old shard cannot be read.
        """
        for call in self.of_outcome(""):
            if call.queue in self._unread:
                self._note_answer(call, self._unread[call.queue], time.monotonic())
        asking = [call for call in self.of_outcome("") if call.batch.old_home and call.batch.orders]
        requests = [call.batch.question() for call in asking]
        answers = self.clients.blocking().run_all(requests, for_seconds=PUBLISH_SECONDS)
        for call, answer in zip(asking, answers, strict=True):
            if isinstance(answer, Exception):
                self._note_answer(call, answer, time.monotonic())
            elif "stale" in answer:
                self._end(call, "given up")
            else:
                call.batch = call.batch.free(answer)

    def _publish_confirmed(self, call: RelayCall) -> None:
        """Send a publish call that needs a confirmation by replicas or disk, and store its outcome."""
        began = time.monotonic()
        answer: PublishAnswer | ReliqError | None
        try:
            publishing = self._confirmer.run(BLOCKING, call.request(), call.batch, call.durability)
            answer, confirmed = run_blocking(publishing)
            if not (confirmed.durable or answer.is_stale):
                answer = None
        except RedisUnavailableError:
            raise
        except ReliqError as error:
            answer = error
        self._note_answer(call, answer, began)

    def _note_answer(self, call: RelayCall, answer: PublishAnswer | Exception | None, began: float) -> None:
        """Store the outcome of a publish call. `answer` is its result, or None if it was not confirmed in time."""
        count = len(call.seqs)
        outcomes: dict[str, int] = {"published": count}
        if isinstance(answer, Exception):
            self._end(call, "failed")
            rows = pluralize(count, "row")
            logger.error("outbox: could not publish %s of queue %s; retrying: %s", rows, call.batch.keys.name, answer)
            outcomes = {"unknown" if getattr(answer, "maybe_ran", False) else "refused": count}
        elif answer is None:
            self._end(call, "failed")
        elif answer.is_stale:
            self._end(call, "given up")
            return
        else:
            self._end(call, "sent")
            outcomes = {"published": count - len(answer.refused), **Counter(answer.refused.values())}
        if self._watching:
            notify(self._watching, [PublishEnded(call.batch.keys.name, time.monotonic() - began, outcomes)])

    def _end(self, call: RelayCall, outcome: Literal["sent", "given up", "failed"]) -> None:
        """Store the outcome of a publish call, and free its call sequence unless the call failed and is repeated."""
        call.outcome = outcome
        if call.is_first and outcome != "failed":
            self.lanes.give_back(call.number)


class OutboxMover:
    """
    Moves the rows of an outbox to Redis. A worker or `reliq relay` runs it.

    Only one thread may call `step` and `move_all`.
    """

    def __init__(self, relay: Relay, target: Target | None = None, observers: Sequence[Observer] = ()) -> None:
        self._relay = relay
        self._observers = observers
        self.redis = RowPublisher(target, observers)
        self.store = Store(database(relay.database), relay.prefix)
        self._poll_seconds = seconds("poll", relay.poll)
        self._keep_ms = milliseconds(relay.keep)
        self._took_new = False
        self._due = dict.fromkeys(("overdue", "refused", "clean", "look"), 0.0)
        self._failures = 0
        self._error = ""
        self._look = OutboxLook(0, 0.0)
        self._looked_at = self._well_at = time.monotonic()

    def step(self) -> float:
        """
        Run one round. If there are no rows, wait for new rows. Return the seconds to wait before the next step.

        Raises:
            ReliqError: Redis is unavailable or refuses a request. The next step opens a new connection to the database.
        """
        try:
            self._look_after()  # first, so that the backlog is also reported while Redis is unavailable
            moved = self.move()
            if not (moved or self._took_new):
                self.store.wait(self._poll_seconds)
        except Exception as error:
            self.store.database.close()  # this rolls back the failed transaction
            if not isinstance(error, self.store.database.away):
                self._error = str(error)
                raise
            return self._database_failed(error)
        self._well_at = time.monotonic()
        self._error = ""
        if self._failures:
            self._failures = 0
            logger.info("outbox: the database is available again")
            notify(self._observers, [DatabaseRecovered("")])
        return 0.0

    def complaint(self) -> str:
        """Return why the relay is not ready, for its health check. Return an empty text if it is ready."""
        age = time.monotonic() - self._well_at
        return "" if age < STUCK_SECONDS else f"the relay has not completed a round for {age:.0f} s: {self._error}"

    def move(self, *, every: bool = False) -> int:
        """
        Run one round and return the number of sent rows.

        Args:
            every: whether to repeat all unfinished publish calls in the database now, also calls of other relays.

        Raises:
            RedisUnavailableError: Redis is unavailable. Call `move` again to repeat the round.
        """
        if not self.redis.of_outcome(""):
            self.redis.look()
            self._take(every=every)
        return self.redis.publish()

    def move_all(self) -> int:
        """
        Run rounds until all rows are sent. Return the number of sent rows.

        Unfinished publish calls of other relays are repeated too. Rows that cannot be published now are left in the
        outbox.
        """
        tried = set[str]()
        count = self.move() if self.redis.of_outcome("") else 0  # finish the interrupted round
        while True:
            self._due["overdue"] = 0.0
            moved = self.move(every=not tried)
            count += moved
            numbers = {call.number_text for call in self.redis.calls}
            if not (moved or numbers - tried):
                return count
            tried |= numbers

    def poke(self) -> None:
        """End the wait for new rows in `step`. This method may be called from other threads."""
        self.store.database.poke()

    def close(self) -> None:
        """
        Mark the rows of the last round as sent, and close the database connection.

        So no other relay needs to repeat the publish calls of these rows.
        """
        with suppress(*self.store.database.away):
            if any(call.outcome for call in self.redis.calls):
                self.store.begin()
                self._note_answers()
                self.store.database.commit()
        self.store.database.close()

    def _take(self, *, every: bool = False) -> None:
        """Mark the rows of the last round as sent, and take the rows of the next round, in one transaction."""
        self.store.begin()
        self._note_answers()
        if every:
            self.store.hurry()
            self._due["overdue"] = 0.0
        overdue = self.store.overdue() if self._is_due("overdue", OVERDUE_EVERY_SECONDS) else {}
        if len(overdue) == OVERDUE_LIMIT:
            self._due["overdue"] = 0.0  # more publish calls may have to be repeated
        self._read_new_maps(chain(*overdue.values()))
        earlier = self._earlier_calls(overdue)
        if self._is_due("refused", CLEAN_EVERY_SECONDS) and (count := self.store.retry(newer=VERSION)):
            logger.info("outbox: retrying %s that an older version of reliq refused", pluralize(count, "row"))
        rows = self.store.waiting(self._relay.batch)
        if self._read_new_maps(rows):
            queues = {row.queue for row in rows}
            rows = [row for row in self.store.waiting(self._relay.batch) if row.queue in queues]
        new = self._new_calls(rows)
        for call in new:
            self.store.note_call(call.number_text, call.queue, call.seqs)
        self.store.database.commit()
        self.redis.calls = earlier + new
        self._took_new = bool(new)

    def _read_new_maps(self, rows: Iterable[StoredRow]) -> bool:
        """
        If `rows` contain new queues, read the shard maps of these queues. Return whether there were new queues.

        The read commits the open transaction, so that no transaction is open while the relay waits for Redis. Then it
        begins a new transaction.
        """
        new = {row.queue for row in rows} - self.redis.queues.keys()
        if new:
            self.store.database.commit()
            self.redis.calls = []  # the commit has stored the outcomes of these publish calls
            for queue in new:
                with suppress(ConfigurationError):
                    self.redis.shards(queue)
            self.redis.look()
            self.store.begin()
        return bool(new)

    def _note_answers(self) -> None:
        sent = self.redis.of_outcome("sent")
        given_up = self.redis.of_outcome("given up")
        failed = self.redis.of_outcome("failed")
        seqs = [seq for call in sent for seq in call.seqs]
        self.store.note_sent([call.number_text for call in sent], seqs, keep=self._keep_ms > 0)
        again = [seq for call in given_up if call.again for seq in call.seqs]
        self.store.give_up([call.number_text for call in given_up], again)
        # If a repeated publish call succeeds, its queue works again. So repeat the failed calls of this queue now.
        recovered = {call.queue for call in sent if not call.is_first} - {call.queue for call in failed}
        if recovered:
            self.store.hurry(sorted(recovered))
            self._due["overdue"] = 0.0
        self.store.note_failed([call.number_text for call in failed])

    def _earlier_calls(self, overdue: dict[str, list[StoredRow]]) -> list[RelayCall]:
        """Create the publish calls in `overdue` again, to repeat them with the same numbers and rows."""
        calls = []
        for text, rows in overdue.items():
            match = _NUMBER_TEXT.fullmatch(text)
            if match is None or int(match[3]) >= SHARDS_LIMIT or not rows:
                self.store.note_sent([text], [], keep=True)
                continue
            queue = rows[0].queue
            try:
                shards = self.redis.shards(queue)
                terms = RowTerms.parse(rows[0].terms)
            except ConfigurationError as error:
                logger.warning(
                    "outbox: call %s was written by a newer version of reliq and is skipped; upgrade this relay: %s",
                    text,
                    error,
                )
                continue
            shard = int(match[3])
            number = CallNumber(match[1], int(match[2]))
            left_ms = max(_left_ms(terms, row.age_ms) for row in rows)
            messages = _messages(rows, terms, left_ms, again=True, bare=shards.first.bare)
            batch, *others = by_shard(messages, shards, shards.map)
            if others or batch.keys.shard != shard or batch.old_home:
                # The shard map has changed since the publish call was created. With the fence NEVER, Redis returns
                # the result of the call if it has run, but does not run it now.
                batch = ShardBatch([*messages.values()], [*messages], shards.keys(shard), NEVER)
            calls.append(RelayCall(queue, [*messages], batch, batch.orders[0].terms, terms.confirmation, True, number))
        return calls

    def _new_calls(self, rows: list[StoredRow]) -> list[RelayCall]:
        """Create publish calls for new rows. The rows of a call have the same queue, shard, options and due time."""
        groups: defaultdict[tuple[str, str, int, str], list[StoredRow]] = defaultdict(list)
        known: dict[tuple[str, str], RowTerms] = {}
        for row in rows:
            try:
                check_id(row.id)
                terms = known.get((row.queue, row.terms))
                if terms is None:
                    shards = self.redis.shards(row.queue)
                    terms = RowTerms.parse(row.terms)
                    if terms.keyed:
                        check_one_shard(shards)
                    known[row.queue, row.terms] = terms
            except ConfigurationError as error:
                logger.error(  # noqa: TRY400  the text contains row and reason
                    "outbox: row %d cannot be published and stays in the table; fix the cause and "
                    "run `reliq outbox retry`: %s",
                    row.seq,
                    error,
                )
                self.store.note_refused(row, VERSION, str(error)[:500])
                continue
            groups[row.queue, row.terms, _left_ms(terms, row.age_ms), row.note].append(row)
        calls = []
        for (queue, terms_text, left_ms, note), group in groups.items():
            shards = self.redis.shards(queue)
            terms = known[queue, terms_text]
            again = note == AGAIN
            messages = _messages(group, terms, left_ms, again=again, bare=shards.first.bare)
            sizes = {seq: len(message.value) for seq, message in messages.items()}
            for batch in by_shard(messages, shards, shards.map):
                for seqs in chunked_by_size(batch.places, sizes.__getitem__, READ_BYTES, BATCH_LIMIT):
                    part = batch._replace(places=seqs, orders=[messages[seq] for seq in seqs])
                    call_terms = part.orders[0].terms
                    number = self.redis.lanes.take()
                    calls.append(
                        RelayCall(queue, seqs, part, call_terms, terms.confirmation, again, number, is_first=True)
                    )
        return calls

    def _look_after(self) -> None:
        """Delete old rows, and report the number and age of unsent rows, if these periodic tasks are due."""
        if self._is_due("clean", CLEAN_EVERY_SECONDS):
            self.store.clean(self._keep_ms)
        if self._is_due("look", LOOK_EVERY_SECONDS):
            self._look = self.store.look()
            self._looked_at = time.monotonic()
            notify(self._observers, [OutboxSeen("", self._look.waiting, self._look.oldest_seconds)])

    def _is_due(self, work: str, every_seconds: float) -> bool:
        """Return whether the periodic task `work` is due. If it is due, store its next due time."""
        now = time.monotonic()
        if now < self._due[work]:
            return False
        self._due[work] = now + every_seconds
        return True

    def _database_failed(self, error: Exception) -> float:
        """Log a database error and notify the observers. Return the seconds to wait before a retry."""
        self._failures += 1
        self._due["look"] = 0.0
        why = str(error).partition("\n")[0]
        if why != self._error:
            self._error = why
            logger.warning("outbox: the database is unavailable or refuses a statement; retrying (%s)", why)
        oldest_seconds = self._look.oldest_seconds + time.monotonic() - self._looked_at
        notify(
            self._observers, [DatabaseUnavailable("", str(error)), OutboxSeen("", self._look.waiting, oldest_seconds)]
        )
        return seconds_after(RECONNECT, self._failures)


def run_until_signal(mover: OutboxMover, observers: list[Any], page: tuple[int, str] | None) -> None:
    """
    Run a relay until SIGTERM or Ctrl-C, and notify the service manager (for example systemd).

    Args:
        mover: moves the rows of the outbox to Redis.
        observers: the list of observers of `mover`. The metrics add an observer to this list.
        page: the port and the address on which to serve /metrics; None to serve no metrics.
    """
    from reliq.metrics.serving import of_relay  # noqa: PLC0415  only needed by `reliq relay`
    from reliq.supervisor.plan import STOP_MARGIN_SECONDS  # noqa: PLC0415
    from reliq.supervisor.supervisor import ServiceManager  # noqa: PLC0415

    # A round may wait long for confirmations by replicas, so only a round of several minutes counts as hung.
    pulse = Pulse(rounds="round", seconds=PATIENT_SECONDS)
    serving = (
        of_relay(*page, observers, pulse=pulse, connection=mover.redis.clients.connection(), complaint=mover.complaint)
        if page
        else nullcontext()
    )

    def step() -> float:
        try:
            return mover.step()
        finally:  # also after a failed round, because the relay does not hang and a restart would not help
            pulse.beat()

    with serving:
        signals = SignalNotes()
        for number in STOPS:
            handle_signal(number, signals.note)
        loop = Loop("relay", step, observers)
        manager = ServiceManager()
        loop.start()
        while not signals.wait(NOTIFY_SECONDS):
            notify_manager(manager, pulse)
        manager.stop(STOP_MARGIN_SECONDS)
        loop.stop()
        mover.poke()
        loop.join()
        mover.close()
    ignore_stops()


def notify_manager(manager: ServiceManager, pulse: Pulse) -> None:
    """Notify the service manager, unless a round hangs. Without notifications, its watchdog restarts the relay."""
    if not health.live([pulse]):
        manager.look([pulse])
