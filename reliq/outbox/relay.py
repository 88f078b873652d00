"""
The relay, which moves the messages of `publish_in` from a database to Redis.

A round takes rows under the numbers of calls and commits, publishes them, and notes them as sent in the transaction that
takes the next rows. Redis remembers each number, so that rows whose round was cut off are sent again without harm, by
this relay or by another.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from contextlib import nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from reliq.consumer import STOPS, SignalNotes, handle_signal
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
from reliq.worker import health
from reliq.worker.health import PATIENT_SECONDS, Pulse
from reliq.worker.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from reliq.lua.transitions import AskStatus
    from reliq.message import Duration, Header
    from reliq.redis.client import Clients
    from reliq.redis.commands import Call
    from reliq.redis.url import Target
    from reliq.supervisor.supervisor import ServiceManager

logger = logging.getLogger(__name__)

#: Within 30 days a call may be made again, by any relay, and publishes nothing twice. A relay that died leaves one key
#: for each lane of a queue, of about 100 bytes.
REMEMBERED_MS = 30 * 86_400_000
#: A message that is sent for a second time, and has an id of reliq's own, is published as one of a chosen id with this
#: window: not while it is alive, nor within that time of its end.
AGAIN_WINDOW_MS = 600_000
#: The fence of a call that gets its answer if it has run, and else is refused by every shard.
NEVER = "never"
#: The answer to a call of a lane that has had a later one since: it was made.
STALE = PublishAnswer(0, {})
#: Rows share a call when their due times are as near as a thousandth of their delay, and a second at most.
DELAY_PARTS = 1000
LONGEST_STEP_MS = 1000
#: How often a relay looks for calls that are to be made again.
OVERDUE_EVERY_SECONDS = 5.0
#: How often it deletes rows that need not be kept.
CLEAN_EVERY_SECONDS = 60.0
#: How often it reports how many rows wait.
LOOK_EVERY_SECONDS = 15.0
#: A relay without a successful round for so long is not ready.
STUCK_SECONDS = 30.0
#: How often the main thread of `reliq relay` notifies the service manager.
NOTIFY_SECONDS = 0.5


@dataclass(frozen=True)
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
    _: KW_ONLY
    prefix: str = OUTBOX_PREFIX
    batch: int = 500
    keep: Duration = 3600.0
    poll: Duration = 1.0
    url: Target | None = None

    def __post_init__(self) -> None:
        """Check the settings, and keep times as seconds."""
        object.__setattr__(self, "keep", seconds("keep", self.keep))
        object.__setattr__(self, "poll", seconds("poll", self.poll, least=0.01, most=3600))
        Tables.of(self.prefix)
        database(self.database)
        check_int("batch", self.batch, least=1, most=10_000)
        if self.url is not None:
            check_target(self.url)


class RelaySequences:
    """
    The lanes of one relay: each call has its own.

    A lane is free again when the rows of its call are noted as sent in the transaction that takes the next rows, or in
    an earlier one. So a relay that finds rows of an earlier call in the database, and gets the answer `stale` for it,
    knows that they were sent.
    """

    def __init__(self) -> None:
        self._name = token()
        self._count = 0
        self._free: list[CallSequence] = []

    def take(self) -> CallSequence:
        """Return a lane that no call has; it is gone until it is given back."""
        if self._free:
            return self._free.pop()
        self._count += 1
        return CallSequence(f"{self._name}{self._count}")

    def give_back(self, lane: CallSequence) -> None:
        """Note that the call of the lane has its answer."""
        self._free.append(lane)


@dataclass(slots=True)
class RelayCall:
    """
    Rows that one call to Redis publishes.

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
        """The numbers of the rows."""
        return [row.seq for row in self.rows]

    @property
    def number_text(self) -> str:
        """The number of the call as the database has it, with the shard that the call is for."""
        return f"{self.number.lane}.{self.number.number}.{self.keys.shard}"

    def ask_request(self) -> Call[list[AskStatus]] | None:
        """Return the request that asks the old home of chosen ids which of them are free; None where there is none."""
        if self.old_home is None:
            return None
        ids = [row.id for row in self.rows]
        return transitions.ask(self.old_home, ids, fence=self.fence, replace=self.terms.replace and not self.again)

    def publish_request(self, taken: Collection[str] = ()) -> Call[PublishAnswer]:
        """
        Return the request that publishes all rows whose ids are not `taken`.

        They are due as long after they were written as their publisher asked.
        """
        terms = self.terms
        window_ms = AGAIN_WINDOW_MS if self.again and terms.window_ms is None else terms.window_ms
        gone_ms = int((time.monotonic() - self.taken_at) * 1000)
        rows = [row for row in self.rows if row.id not in taken]
        request = transitions.publish(
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
        parse = request.parse
        return replace(request, parse=lambda reply: STALE if reply == b"stale" else parse(reply))

    def _value(self, row: StoredRow) -> bytes:
        """Return the value of a row; a value that is sent again says that its id is to be checked."""
        value = bytes(row.value)
        if not self.again or self.keys.bare or self.terms.window_ms is not None:
            return value
        header, body = _header(row)
        enqueued = made_at(row.id) if header.enqueued is None else header.enqueued
        return (
            envelope_rest(
                self.terms.retries, enqueued, AGAIN_WINDOW_MS, header.headers, header.incarnation, header.line or ""
            )
            + body
        )


def _header(row: StoredRow) -> tuple[Header, bytes]:
    """Return header and body of a row's value, which begins after the due time."""
    return open_envelope(b"%b0%b" % (ENVELOPE_START.encode(), bytes(row.value)))


def _parse_number(text: str) -> tuple[CallNumber, int] | None:
    """Return the number of a call and its shard, of a `number_text`; None for any other text."""
    lane, _, rest = text.partition(".")
    number, _, shard = rest.partition(".")
    if not (lane and lane.isprintable() and number.isdecimal() and shard.isdecimal() and int(shard) < SHARDS_LIMIT):
        return None
    return CallNumber(lane, int(number)), int(shard)


def _checked(row: StoredRow) -> tuple[Keys, RowTerms]:
    """Return queue and terms of a row; raise ConfigurationError when it can be published nowhere."""
    keys = Keys.registered(row.queue)
    if keys is None:
        raise ConfigurationError(f"{row.queue[:80]!r} is no queue")
    return keys, RowTerms.parse(row.terms)


def _left_ms(terms: RowTerms, age_ms: int) -> int:
    """Return in how many ms a message of this age is due, rounded up so that few due times differ."""
    left = max(0, terms.delay_ms - max(0, age_ms))
    step = min(max(1, terms.delay_ms // DELAY_PARTS), LONGEST_STEP_MS)
    return -(-left // step) * step


class QueueParts(NamedTuple):
    """The parts of a relay for one queue: its shards, its name in the registry, and its confirmations."""

    shards: Shards
    registrar: QueueRegistration
    confirmer: Confirmer


class RowPublisher:
    """
    Publishes rows.

    Attributes:
        unanswered: calls that are to be made, or made again because Redis was away.
        sent: calls that have an answer since the last time that they were noted.
        given_up: calls that a shard has refused by a later map: their rows are to be taken anew.
        failed: calls that Redis has refused or not confirmed since then.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._watching = wanting(clients.observers, PublishEnded)
        self.lanes = RelaySequences()
        self.unanswered: list[RelayCall] = []
        self.sent: list[RelayCall] = []
        self.given_up: list[RelayCall] = []
        self.failed: list[RelayCall] = []
        self._queues: dict[str, QueueParts] = {}

    def shards(self, keys: Keys) -> Shards:
        """Return the shards of the queue that has `keys`, as they are known; a queue that is new here has one."""
        return self._parts(keys).shards

    def look(self) -> None:
        """Read the maps of queues where that is due, or where a shard knew a later one."""
        stale = {call.keys.entry for call in self.given_up}
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
        self._give_up_keyed_rows_of_sharded_queues()
        taken = self._taken_ids()
        unconfirmed = [call for call in self.unanswered if call.terms.durability is None]
        requests = [call.publish_request(taken[id(call)]) for call in unconfirmed]
        began = time.monotonic()
        answers = self._clients.blocking().run_all(requests, for_seconds=PUBLISH_SECONDS)
        for call, answer in zip(unconfirmed, answers, strict=True):
            self._note_answer(call, answer, began)
        while self.unanswered:
            began = time.monotonic()
            call = self.unanswered[0]
            if any(call.keys.entry == other.keys.entry for other in self.failed):
                self._fail(call)  # unmade: the queue has held up the others once in this round
            else:
                self._note_answer(call, self._publish_confirmed(call, taken[id(call)]), began)
        for entry in [parts.registrar.due() for parts in self._queues.values()]:
            if entry:
                with suppress(ReliqError):
                    self._clients.blocking().run(entry)
        return sum(len(call.rows) for call in self.sent)

    def _give_up_keyed_rows_of_sharded_queues(self) -> None:
        """Give up rows with keys of a queue that has several shards: they are taken anew, and refused."""
        for call in [call for call in self.unanswered if call.terms.keyed]:
            shards = self.shards(call.keys)
            try:
                if not shards.is_keyed:
                    shards.read(for_seconds=PUBLISH_SECONDS)
            except RedisUnavailableError:
                raise
            except ReliqError as error:
                self._note_answer(call, error, time.monotonic())
                continue
            if shards.map.served > 1:
                self._give_up(call)

    def _taken_ids(self) -> dict[int, set[str]]:
        """Return for each call the ids that their old home has; give up calls that it refuses by a later map."""
        taken: dict[int, set[str]] = {id(call): set() for call in self.unanswered}
        asking = [(call, request) for call in self.unanswered if (request := call.ask_request())]
        answers = self._clients.blocking().run_all([request for _, request in asking], for_seconds=PUBLISH_SECONDS)
        for (call, _), answer in zip(asking, answers, strict=True):
            if isinstance(answer, Exception):
                self._note_answer(call, answer, time.monotonic())
            elif "stale" in answer:
                self._give_up(call)
            else:
                words: Sequence[AskStatus] = answer
                taken[id(call)] = {row.id for row, word in zip(call.rows, words, strict=True) if word != "free"}
        return taken

    def _publish_confirmed(self, call: RelayCall, taken: set[str]) -> PublishAnswer | Exception | None:
        """Make a call that must be confirmed; return None when the confirmation did not come in time."""
        # The confirmer reports their ids alone.
        messages = [PreparedMessage(row.id, b"", None) for row in call.rows]  # type: ignore[arg-type]
        confirmer = self._parts(call.keys).confirmer
        try:
            answer, confirmed = confirmer.run(call.publish_request(taken), messages, call.terms.confirmation)
        except RedisUnavailableError:
            raise
        except ReliqError as error:
            return error
        return answer if confirmed.durable or answer.is_stale else None

    def _note_answer(self, call: RelayCall, answer: PublishAnswer | Exception | None, began: float) -> None:
        """Note the answer to a call; without an answer it is made again later, under its number."""
        if not isinstance(answer, Exception | None) and answer.is_stale:
            self._give_up(call)
            return
        outcomes: dict[str, int] = {"published": len(call.rows)}
        if isinstance(answer, Exception):
            self._fail(call)
            failure = f"{pluralize(len(call.rows), 'row')} of queue {call.keys.name} not published, to be tried again"
            logger.error("outbox: %s: %s", failure, answer)
            outcomes = {"unknown" if getattr(answer, "maybe_ran", False) else "refused": len(call.rows)}
        elif answer is None:
            self._fail(call)
        else:
            self.unanswered.remove(call)
            self.sent.append(call)
            if call.lane:
                self.lanes.give_back(call.lane)
            outcomes = {"published": len(call.rows) - len(answer.refused), **Counter(answer.refused.values())}
        if self._watching:
            notify(self._watching, [PublishEnded(call.keys.name, time.monotonic() - began, outcomes)])

    def _fail(self, call: RelayCall) -> None:
        """Note that a call has no answer and its queue is to back off; the lane stays with the call."""
        self.unanswered.remove(call)
        self.failed.append(call)

    def _give_up(self, call: RelayCall) -> None:
        """Note that a call has published nothing; its number was not used."""
        self.unanswered.remove(call)
        self.given_up.append(call)
        if call.lane:
            self.lanes.give_back(call.lane)

    def _parts(self, keys: Keys) -> QueueParts:
        if keys.entry not in self._queues:
            first = keys.of_shard(0) if keys.shard else keys
            self._queues[keys.entry] = QueueParts(
                Shards(first, self._clients),
                QueueRegistration(first, self._clients),
                Confirmer(first.name, self._clients),
            )
        return self._queues[keys.entry]


class OutboxMover:
    """Moves rows of one outbox; a part of a worker or a process of its own. One thread calls `step` or `move_all`."""

    def __init__(self, relay: Relay, clients: Clients) -> None:
        self._relay = relay
        self._observers = clients.observers
        self.redis = RowPublisher(clients)
        self.store = Store(database(relay.database), relay.prefix)
        self._poll_seconds = seconds("poll", relay.poll)
        self._keep_ms = milliseconds(relay.keep)
        self._took_new = False
        self._due = dict.fromkeys(("overdue", "refused", "clean", "look"), 0.0)
        self._failures = 0
        self._error = ""
        self._look = OutboxLook(0, 0.0)
        self._looked_at = self._well_at = time.monotonic()

    def check(self) -> None:
        """
        Check that the tables exist.

        Raises:
            ConfigurationError: they do not.
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
                self.store.wait(self._poll_seconds)
        except Exception as error:
            self.store.database.close()  # which rolls back: a transaction that failed takes no further statement
            if not isinstance(error, self.store.database.away):
                self._error = str(error)
                raise
            return self._database_failed(error)
        self._well_at = time.monotonic()
        self._error = ""
        if self._failures:
            self._failures = 0
            logger.info("outbox: the database answers again")
            notify(self._observers, [DatabaseBack("")])
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
        tried = set[str]()
        count = self.move() if self.redis.unanswered else 0  # calls of a round that Redis cut off
        while True:
            self._due["overdue"] = 0.0
            moved = self.move(every=not tried)
            count += moved
            ended = (*self.redis.sent, *self.redis.given_up, *self.redis.failed)
            numbers = {call.number_text for call in ended}
            if not (moved or numbers - tried):
                return count
            tried |= numbers

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
        self.store.begin()
        self._note_answers()
        if every:
            self.store.hurry()
        is_due = every or time.monotonic() >= self._due["overdue"]
        overdue = self.store.overdue() if is_due else {}
        earlier = self._earlier_calls(overdue)
        if time.monotonic() >= self._due["refused"] and (count := self.store.retry(newer=VERSION)):
            logger.info("outbox: %s that an older version refused tried again", pluralize(count, "row is", "rows are"))
        new = self._new_calls(self.store.waiting(self._relay.batch))
        for call in new:
            self.store.note_call(call.number_text, call.rows[0].queue, call.seqs)
        self.store.commit()
        self.redis.sent = []
        self.redis.given_up = []
        self.redis.failed = []
        self.redis.unanswered = earlier + new
        self._took_new = bool(new)
        if is_due:
            are_more = len(overdue) == OVERDUE_LIMIT
            self._due["overdue"] = 0.0 if are_more else time.monotonic() + OVERDUE_EVERY_SECONDS
        if time.monotonic() >= self._due["refused"]:
            self._due["refused"] = time.monotonic() + CLEAN_EVERY_SECONDS

    def _note_answers(self) -> None:
        sent = self.redis.sent
        given_up = self.redis.given_up
        failed = self.redis.failed
        seqs = [seq for call in sent for seq in call.seqs]
        self.store.note_sent([call.number_text for call in sent], seqs, keep=self._keep_ms > 0)
        again = [seq for call in given_up if call.again for seq in call.seqs]
        self.store.give_up([call.number_text for call in given_up], again)
        # A queue that failed and works again: its first success is a call that was made again, which has no lane here.
        recovered = {call.rows[0].queue for call in sent if not call.lane} - {call.rows[0].queue for call in failed}
        if recovered:
            self.store.hurry(sorted(recovered))
            self._due["overdue"] = 0.0
        self.store.note_failed([call.number_text for call in failed])

    def _earlier_calls(self, overdue: dict[str, list[StoredRow]]) -> list[RelayCall]:
        """Return the calls, of any relay, that are to be made again as they were."""
        calls = []
        for text, rows in overdue.items():
            parsed = _parse_number(text)
            if parsed is None or not rows:
                self.store.note_sent([text], [], keep=True)
                continue
            try:
                keys, terms = _checked(rows[0])
            except ConfigurationError as error:
                logger.warning("outbox: the call %s waits for a relay that understands its rows: %s", text, error)
                continue
            number, shard = parsed
            shards = self.redis.shards(keys)
            left_ms = max(_left_ms(terms, row.age_ms) for row in rows)
            # Elsewhere the call must not run now. Its own answer comes before the fence, which refuses a call that never ran.
            fence = shards.map.fence if {self._homes(keys, terms, row) for row in rows} == {(shard, shard)} else NEVER
            calls.append(RelayCall(shards.keys(shard), terms, left_ms, True, rows, number, None, fence))
        return calls

    def _new_calls(self, rows: list[StoredRow]) -> list[RelayCall]:
        """Return the calls for rows that none has; those of a call share queue, shard, terms and when they are due."""
        groups: defaultdict[tuple[str, str, int, str, tuple[int, int]], list[StoredRow]] = defaultdict(list)
        known: dict[tuple[str, str], tuple[Keys, RowTerms]] = {}
        for row in rows:
            try:
                check_id(row.id)
                keys, terms = known.get((row.queue, row.terms)) or _checked(row)
                if terms.keyed:
                    check_one_shard(self.redis.shards(keys))
            except ConfigurationError as error:
                logger.error(  # noqa: TRY400  the row and the reason are in the message
                    "outbox: row %d is refused and stays, see `reliq outbox refused`: %s", row.seq, error
                )
                self.store.note_refused(row, VERSION, str(error)[:500])
                continue
            known[row.queue, row.terms] = keys, terms
            homes = self._homes(keys, terms, row)
            groups[row.queue, row.terms, _left_ms(terms, row.age_ms), row.note, homes].append(row)
        calls = []
        for (queue, terms_text, left_ms, note, (now, before)), group in groups.items():
            keys, terms = known[queue, terms_text]
            shards = self.redis.shards(keys)
            old_home = None if now == before else shards.keys(before)
            for piece in chunked_by_size(group, lambda row: len(row.value), READ_BYTES, BATCH_LIMIT):
                lane = self.redis.lanes.take()
                again = note == AGAIN
                calls.append(
                    RelayCall(
                        shards.keys(now), terms, left_ms, again, piece, lane.next(), lane, shards.map.fence, old_home
                    )
                )
        return calls

    def _homes(self, keys: Keys, terms: RowTerms, row: StoredRow) -> tuple[int, int]:
        """Return the shard of a row, and the shard that may have its id already: else the same."""
        map = self.redis.shards(keys).map
        now = home(row.id, map.n)
        is_chosen = terms.window_ms is not None or row.note == AGAIN
        return now, home(row.id, map.was) if is_chosen else now

    def _look_after(self) -> None:
        """Delete rows that need not be kept, and report how many wait, each once in a while."""
        now = time.monotonic()
        if now >= self._due["clean"]:
            self._due["clean"] = now + CLEAN_EVERY_SECONDS
            self.store.clean(self._keep_ms)
        if now >= self._due["look"]:
            self._due["look"] = now + LOOK_EVERY_SECONDS
            self._look = self.store.look()
            self._looked_at = time.monotonic()
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


def run_until_signal(mover: OutboxMover, clients: Clients, observers: list[Any], page: tuple[int, str] | None) -> None:
    """
    Move rows until SIGTERM or Ctrl-C, and notify the service manager.

    Args:
        observers: of `clients`; those of the metrics are among them while they are served.
        page: port and address of the metrics; None serves none.
    """
    from reliq.metrics.serving import of_relay  # noqa: PLC0415  an application with a `Relay` needs none of these
    from reliq.supervisor.plan import STOP_MARGIN_SECONDS  # noqa: PLC0415
    from reliq.supervisor.supervisor import ServiceManager  # noqa: PLC0415

    # A round may wait for the confirmation of each of its calls: only a round of minutes hangs.
    pulse = Pulse(rounds="round", seconds=PATIENT_SECONDS)
    serving = (
        of_relay(*page, observers, pulse=pulse, connection=clients.connection(), complaint=mover.complaint)
        if page
        else nullcontext()
    )

    def step() -> float:
        try:
            return mover.step()
        finally:  # also a round that found Redis away: a restart would not help
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


def notify_manager(manager: ServiceManager, pulse: Pulse) -> None:
    """Notify the service manager; its watchdog gets no sign of life from a relay whose round does not end."""
    if not health.live([pulse]):
        manager.look([pulse])
