"""Implement `Queue.receive`: wait for messages, claim them, renew their leases and settle them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reliq.errors import RedisUnavailableError, ReliqError
from reliq.events import Handled, notify
from reliq.handlers import settlement
from reliq.handlers.effects import Effects, inbox_keep_ms
from reliq.handlers.settlement import EXPIRED, Settlement, rate_limit_seconds
from reliq.keys import Keys, first_published, token
from reliq.lua import transitions
from reliq.lua.transitions import NOT_WATCHING, CallNumber, CallSequences, ClaimAnswer, Settled
from reliq.message import Ack, Claimed, Delivery, Duration, Nack, RateLimited, Reject, Snooze
from reliq.receive.bodies import BodyReader
from reliq.redis import commands
from reliq.redis.commands import Call, Request, raise_first
from reliq.redis.connection import BLOCKING, run_blocking
from reliq.settings import BATCH_LIMIT, HandlerSettings, Limits, QueueSettings, check_int, seconds
from reliq.text import printable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from reliq.codec import Codec
    from reliq.redis.client import AnyClient, AsyncClient, Client
    from reliq.redis.shards import Shards
    from reliq.redis.wakeups import WakeTokens
    from reliq.worker.upkeep import Scheduler

logger = logging.getLogger(__name__)

#: How often a shard is polled, in seconds; this bounds the delay after a lost wake-up.
EACH_SHARD_SECONDS = 1.0
#: How often a shard is polled, in seconds, if another process watches it; needed in case that process is killed.
WATCHED_SHARD_SECONDS = 2.5
#: A claim with limit 0 needs a lease time in ms, but leases nothing.
_LEASE_MS = 1000
#: The longest step of a listener's thread, in seconds.
STEP_SECONDS = 1.0
#: How long the listener keeps its connections after the last wait, in seconds.
KEPT_SECONDS = 1.0

#: The result of a wait: the shards that have messages; empty if they are not known.
Found = tuple["Keys", ...]
ANYWHERE: Found = ()


class Listener:
    """
    Wait for messages of a queue on behalf of all `receive` calls of a process.

    It waits for wake-ups and due times of all shards, like a worker. Its thread runs while a caller waits. A wake-up
    goes to the caller that has waited longest. If no caller waits any more, the wake-up goes back to Redis for another
    process.

    Args:
        spares_leases: returns whether expired leases of a shard must not be reclaimed yet.
    """

    def __init__(self, client: Client, shards: Shards, spares_leases: Callable[[Keys], bool]) -> None:
        self.client = client
        self._shards = shards
        self._spares_leases = spares_leases
        self._name = token()
        # Both belong to the current thread, or to the last.
        self._scheduler: Scheduler
        self._look_at: dict[Keys, float]
        self._lock = threading.Lock()
        self._waiting: deque[Future[Found]] = deque()
        self._unheard: list[Keys] = []  # wake-ups for callers that left
        self._left_at = 0.0  # when the last wait ended
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._poke: Callable[[], None] = lambda: None

    @property
    def watcher(self) -> str:
        """The name under which this process watches due times; empty while its thread does not run."""
        return self._name if self._thread else ""

    def wait(self, seconds: float) -> Found | None:
        """Wait for messages; return the shards that have some, or None after `seconds`."""
        place = self._enter()
        try:
            return place.result(seconds)
        except TimeoutError:
            return self._leave(place)
        except BaseException:
            self.give_back(self._leave(place))
            raise

    async def await_(self, seconds: float) -> Found | None:
        """Async version of `wait`."""
        place = self._enter()
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(place)), seconds)
        except TimeoutError:
            return self._leave(place)
        except BaseException:
            self.give_back(self._leave(place))
            raise

    def note(self, keys: Keys, answer: ClaimAnswer) -> None:
        """Store the next due time that a claim returned, if this process watches the shard."""
        self._scheduler.note(keys, answer, time.monotonic())

    def close(self) -> None:
        """Stop the thread and close its connections."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._poke()
        if thread is not None:
            thread.join(KEPT_SECONDS)

    def _enter(self) -> Future[Found]:
        from reliq.worker.upkeep import Scheduler  # noqa: PLC0415  not needed to publish

        place: Future[Found] = Future()
        with self._lock:
            self._is_closed = False
            if self._thread is None:
                self._scheduler = scheduler = Scheduler(self.client, (), lambda: None, self._spares_leases)
                look_at: dict[Keys, float] = {}
                self._look_at = look_at
                run = partial(self._run, scheduler, look_at)
                thread = threading.Thread(target=run, name="reliq-listener", daemon=True)
                thread.start()  # if this raises, the next wait starts a thread
                self._thread = thread
            self._waiting.append(place)
        self._poke()
        return place

    def _leave(self, place: Future[Found]) -> Found | None:
        """Stop waiting; return the wake-up that came meanwhile, or None."""
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
                self._left_at = time.monotonic()
                return None
        return place.result()

    def give_back(self, found: Found | None) -> None:
        """Pass a wake-up on to another caller or process, because its caller has left."""
        for keys in found or ():
            if not self._wake((keys,)):
                with self._lock:
                    self._unheard.append(keys)
                self._poke()

    def _wake(self, found: Found) -> bool:
        """Wake the caller that has waited longest; return False if no caller waits."""
        with self._lock:
            if not self._waiting:
                return False
            self._left_at = time.monotonic()
            self._waiting.popleft().set_result(found)
            return True

    def _wake_all(self) -> None:
        """Wake all callers: each polls Redis and raises the error itself."""
        while self._wake(ANYWHERE):
            pass

    def _run(self, scheduler: Scheduler, look_at: dict[Keys, float]) -> None:
        try:
            with closing(self.client.wake_tokens()) as tokens:
                self._poke = scheduler.wake = tokens.poke
                while True:
                    with self._lock:
                        is_idle = not (self._waiting or self._unheard)
                        if self._is_closed or (is_idle and time.monotonic() >= self._left_at + KEPT_SECONDS):
                            self._thread = None
                            unheard, self._unheard = self._unheard, []
                            break
                    self._step(tokens)
                # Hand the watch over to other processes: a wake-up makes one of them poll at once.
                watched = [keys for keys in look_at if scheduler.watches(keys)]
                with suppress(ReliqError):
                    self.client.run_all([commands.drop_watch(keys) for keys in watched])
                tokens.pass_on([*unheard, *watched])
                self._wake_all()  # callers left after close() start a new thread
        except Exception:
            logger.exception(
                "receive: queue %s: the thread that waits for messages failed; it restarts at the next wait",
                self._shards.first.name,
            )
            time.sleep(STEP_SECONDS)  # then the waiting callers poll Redis and start a new thread
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None
            self._wake_all()

    def _step(self, tokens: WakeTokens) -> None:
        """Poll the shards that are due, wait for a wake-up, and pass wake-ups to callers."""
        with suppress(ReliqError):
            run_blocking(self._shards.refresh(BLOCKING, for_seconds=0.0))
        shards = self._shards.all
        for keys in self._look_at.keys() - set(shards):
            del self._look_at[keys]
            self._scheduler.forget(keys)
        if self._waiting:
            for place, together in tokens.serve(shards).items():
                tokens.expect(place, together)
        seconds = STEP_SECONDS
        try:
            seconds = min(seconds, self._scheduler.step())
            found = self._look(shards)
            tokens.pass_on([keys for keys in found if not self._wake((keys,))])
            seconds = max(0.0, min(seconds, min(self._look_at.values()) - time.monotonic()))
        except ReliqError as error:
            logger.debug("receive: queue %s: cannot poll any shard; retrying: %s", self._shards.first.name, error)
            tokens.restart()
            self._wake_all()
        came, failed = tokens.came(seconds)
        self._look_at.update(dict.fromkeys(failed, 0.0))
        with self._lock:
            unheard = self._unheard
            self._unheard = []
        tokens.pass_on([*unheard, *(keys for keys in came if not self._wake((keys,)))])

    def _look(self, shards: Sequence[Keys]) -> list[Keys]:
        """
        Poll the shards that are due, and watch those that no other process watches; return the shards with messages.

        Raises:
            ReliqError: no shard could be polled.
        """
        began = time.monotonic()
        asked = [keys for keys in shards if self._look_at.get(keys, 0.0) <= began]
        number = CallNumber(self._name, 1)  # a claim of nothing needs no real number
        looks = [transitions.claim(keys, number, limit=0, lease_ms=_LEASE_MS, watcher=self._name) for keys in asked]
        answers = self.client.run_all(looks)
        found = []
        for keys, answer in zip(asked, answers, strict=True):
            now = time.monotonic()
            self._look_at[keys] = now + EACH_SHARD_SECONDS
            if isinstance(answer, Exception):
                continue
            self._scheduler.note(keys, answer, now)
            if answer.promote_in_ms == NOT_WATCHING and len(shards) > 1:
                self._look_at[keys] = now + WATCHED_SHARD_SECONDS
            if answer.behind:
                found.append(keys)
        if answers and all(isinstance(answer, Exception) for answer in answers):
            raise answers[0]
        return found


B = TypeVar("B")


@dataclass(slots=True)
class ReceivedJob(Effects, Generic[B]):
    """
    A message received with `Queue.receive`.

    Call `ack`, `nack`, `reject`, `snooze` or `rate_limited` to answer it; the last call counts. Unanswered messages are
    acked at the end of the block, or retried with backoff if the block raises.

    Attributes:
        id: the message id.
        body: the decoded body, of the queue's type.
        attempt: the number of this delivery, 1 for the first; None for a body without reliq's envelope.
        retries_left: the number of retries left after this delivery.
        due: when this delivery was due, in Unix seconds of the Redis clock; None for a body without reliq's envelope.
        headers: the headers given to `publish`.
        queue: the name of the queue.
        key: the message key; None without a key.
        token: the fencing token: larger in each later delivery of the message, and in an ordered queue larger than the
            tokens of all earlier messages with the same key. Let a store refuse writes with a smaller token.
        lease_lost: whether the lease expired, so that another process may have the message.
        cancelled: whether the message was cancelled meanwhile; updated when the lease is renewed.
        answer: the answer given so far; None means that the end of the block decides.
    """

    id: str
    body: B
    attempt: int | None
    retries_left: int
    due: float | None
    headers: Mapping[str, str]
    queue: str = ""
    key: str | None = None
    token: int = 0
    _first: tuple[str, str, int] = field(default=("", "", 0), repr=False)
    _kept_ms: Callable[[], int] = field(default=int, repr=False)
    _published: int = field(default=0, repr=False)
    lease_lost: bool = False
    cancelled: bool = False
    answer: Ack | Nack | Reject | Snooze | RateLimited | None = field(default=None, repr=False)

    @property
    def _inbox_keep_ms(self) -> int:
        return self._kept_ms()

    def ack(self) -> None:
        """Ack the message at the end of the block: it is finished."""
        self.answer = Ack()

    def nack(self, *, delay: Duration | None = None, reason: str = "") -> None:
        """
        Retry the message; without a retry left it becomes a dead letter.

        Args:
            delay: the time until the next delivery, in seconds or as a timedelta; None for the default backoff.
            reason: a text stored for the operator.
        """
        self.answer = Nack(delay=None if delay is None else seconds("delay", delay), reason=reason)

    def reject(self, *, reason: str = "") -> None:
        """Make the message a dead letter at once; `reason` is stored for the operator."""
        self.answer = Reject(reason=reason)

    def snooze(self, *, delay: Duration, reason: str = "") -> None:
        """
        Redeliver the message later without using a retry.

        Args:
            delay: the time until the next delivery, in seconds or as a timedelta.
            reason: a note for your own code; it is not stored.
        """
        self.answer = Snooze(delay=seconds("delay", delay), reason=reason)

    def rate_limited(self, *, delay: Duration, reason: str = "", max_delay: Duration = 3600.0) -> None:
        """
        Redeliver the message later without using a retry, and throttle its key until then; see `RateLimited`.

        Args:
            delay: the time until the next delivery, in seconds or as a timedelta.
            reason: a note for your own code; it is not stored.
            max_delay: the longest allowed delay, in seconds or as a timedelta (3600); guards against milliseconds.

        Raises:
            ConfigurationError: `delay` is longer than `max_delay`.
        """
        answer = RateLimited(delay, reason, max_delay)
        rate_limit_seconds(answer)
        self.answer = answer


@dataclass(slots=True, eq=False)
class ClaimRound:
    """
    The calls that poll one shard and claim its messages; the owner sends them.

    Attributes:
        keys: the shard.
        limit: the most messages to claim.
        lease_ms: the lease time in ms.
        spread: the most message keys to claim from; None for no limit.
        claimed: the messages claimed by the last poll.
        buried: ids that the last poll moved to garbage; they still have to become dead letters.
        behind: the number of messages left in ready and retry after the last poll.
        missed: whether the last poll moved messages after it claimed none; then poll again.
        next_in_ms: ms until the next messages come due, known after a poll; empty if none will.
    """

    keys: Keys
    limit: int
    lease_ms: int
    spread: int | None = None
    claimed: list[Claimed] = field(default_factory=list)
    buried: tuple[str, ...] = ()
    next_in_ms: list[int] = field(default_factory=list)
    behind: int = 0
    missed: bool = False

    def look(self, call_number: CallNumber, *, spare_leases: bool = False, watcher: str = "") -> list[Call[Any]]:
        """Return the calls of one poll: move messages that are due or have expired leases, then claim."""
        return [
            transitions.promote(self.keys),
            transitions.reclaim(self.keys, spare_leases=spare_leases),
            transitions.claim(
                self.keys, call_number, limit=self.limit, lease_ms=self.lease_ms, watcher=watcher, spread=self.spread
            ),
        ]

    def looked(self, answers: Sequence[Any]) -> None:
        """Store the claimed messages and counts; raise the first error among `answers`."""
        promoted, reclaimed, claim = answers
        self.claimed = [] if isinstance(claim, Exception) else claim.claimed
        raise_first([*answers])
        self.buried = reclaimed.buried
        self.behind = claim.behind
        moved = promoted[0] + len(reclaimed.overdue) + len(reclaimed.again)
        self.missed = moved > 0 and not (self.claimed or self.behind)
        self.next_in_ms = [due for due in (promoted[1], reclaimed.next_in_ms) if due > 0]


class Receiver(Generic[B]):
    """State that all `receive` calls of a queue share in a process: shards, call numbers, outages, the listener."""

    def __init__(self, shards: Shards, codec: Codec[B], settings: QueueSettings, limits: Limits | None = None) -> None:
        self.shards = shards
        self.codec = codec
        self.settings = settings
        self._limits = limits
        self.lanes = CallSequences()
        self.has_written_limits = False
        self._away: set[Keys] = set()
        self._spare_until: dict[Keys, float] = {}
        self._listener: Listener | None = None
        self._lock = threading.Lock()  # several threads may call receive

    def batch(self, *, limit: int, lease: Duration) -> LeaseBatch[B]:
        """Return the batch of one `receive` call; raise ConfigurationError if limit or lease is not allowed."""
        return LeaseBatch(self, check_int("limit", limit, least=1, most=BATCH_LIMIT), HandlerSettings(lease=lease))

    def listener(self) -> Listener:
        """Return the listener of this queue; create it if necessary."""
        with self._lock:
            client = self.shards.clients.blocking()
            if self._listener is None or self._listener.client is not client:
                self._listener = self.shards.clients.waits = Listener(client, self.shards, self.spares_leases)
            return self._listener

    def limits_call(self) -> Call[bool] | None:
        """Return the call that writes the queue's declared limits; None if they are already written."""
        if self._limits is None or self.has_written_limits:
            return None
        keys = self.shards.first
        self.shards.map.check_is_one(keys.name)
        return transitions.limit(keys, self._limits.fields(), declared=self._limits.declaration)

    def spares_leases(self, keys: Keys) -> bool:
        """Return whether not to reclaim expired leases: soon after an outage, their owners may still renew them."""
        return keys in self._away or time.monotonic() < self._spare_until.get(keys, 0.0)

    def away(self, shards: Iterable[Keys]) -> None:
        """Mark shards as unavailable."""
        self._away.update(shards)

    def answered(self, keys: Keys, lease_seconds: float) -> None:
        """Mark a shard as available; after an outage, spare its expired leases for another third of a lease."""
        if keys in self._away:
            self._spare_until[keys] = time.monotonic() + lease_seconds / 3
            self._away.discard(keys)


class LeaseBatch(Generic[B]):
    """
    The messages of one `receive` call, from the claim until they are settled.

    Attributes:
        lease_seconds: the length of a lease in seconds.
        undecodable: events of the messages that were nacked because their bodies do not decode.
        jobs: the messages that the block gets.
        receiver: the receiver of the queue.
        given_up: whether the caller was cancelled.
        listener: waits for wake-ups and due times of the shards.
        cut: a function that ends the wait of a cancelled caller.
    """

    def __init__(self, receiver: Receiver[B], limit: int, handling: HandlerSettings) -> None:
        self.receiver = receiver
        self._handling = handling
        self._limit = limit
        self._take = self._at(receiver.shards.first, limit)
        self._glances: list[ClaimRound] = []
        self._switches = 0
        self._watcher = ""  # the watcher named in the last poll
        self._is_wide = False
        self._kept_ms = partial(inbox_keep_ms, receiver.settings, handling)
        self.lease_seconds = handling.lease_ms / 1000
        self._call_number = receiver.lanes.take()
        self.undecodable: list[Handled] = []
        self.jobs: list[ReceivedJob[B]] = []
        self._held: list[Settlement] = []  # all claimed; after fill(), one for each of `jobs`
        self.given_up = False
        self.listener = receiver.listener()
        self.cut: Callable[[], object] = lambda: None

    @property
    def claimed(self) -> list[Claimed]:
        """The claimed messages."""
        return self._take.claimed

    def give_up(self) -> None:
        """Note that the caller was cancelled, and end its wait."""
        self.given_up = True
        self.cut()

    @property
    def may_detour(self) -> bool:
        """Whether another shard can be used if the chosen shard is unavailable."""
        return bool(self._glances)

    def begin(self) -> None:
        """Choose a shard by the current shard map."""
        shards = self.receiver.shards
        self.listener = self.receiver.listener()
        self._is_wide = False
        self._take = self._at(shards.keys(shards.turn()), self._limit)
        self._glances = [self._at(keys, 0) for keys in shards.all if keys.shard != self._take.keys.shard]

    def look(self) -> list[Request[Any]]:
        """
        Return the calls of one poll: move messages that are due or have expired leases, then claim.

        The first poll claims from one shard. If it was empty, the next poll also counts the messages of the other
        shards.
        """
        spares = self.receiver.spares_leases
        self._watcher = self.listener.watcher
        calls: list[Request[Any]] = []
        for take in self._takes():
            calls += take.look(self._call_number, spare_leases=spares(take.keys), watcher=self._watcher)
            self._call_number = self._call_number.next()
        return calls

    @contextmanager
    def noting_outages(self) -> Iterator[None]:
        """Mark all shards as unavailable if the block raises RedisUnavailableError."""
        try:
            yield
        except RedisUnavailableError:
            self.receiver.away(self.receiver.shards.all)
            raise

    def looked(self, answers: Sequence[Any]) -> bool:
        """
        Store the claimed messages; return whether to poll again at once. Raise errors of Redis.

        Poll again if another shard may have messages, or if messages were moved after the claim. Unavailable shards are
        skipped while others answer.
        """
        takes = self._takes()
        away: dict[Keys, RedisUnavailableError] = {}
        for at, take in enumerate(takes):
            try:
                take.looked(answers[3 * at :][:3])
                self.receiver.answered(take.keys, self.lease_seconds)
                if self._watcher:
                    self.listener.note(take.keys, answers[3 * at + 2])
            except RedisUnavailableError as error:
                away[take.keys] = error
        self.receiver.away(away)
        self._glances = [take for take in self._glances if take.keys not in away]
        if self._take.keys in away:
            if self.claimed or not self._glances:
                raise away[self._take.keys]
            self._take = self._at(self._glances.pop(self.receiver.shards.turn() % len(self._glances)).keys, self._limit)
            return True
        if self.claimed:
            return False
        if any(take.missed for take in takes):
            return True
        if self._glances and not self._is_wide:
            self._is_wide = True
            return True
        return self._switch()

    def heard(self, found: Found) -> None:
        """Poll next the shard that a wait has found; without a shard, begin again."""
        for keys in found:
            self._take = self._at(keys, self._limit)
            self._glances = []
        if not found:
            self.begin()

    def over(self) -> None:
        """Return the call number sequence after the last answer, so that it can be used again."""
        self.receiver.lanes.give_back(self._call_number)

    def reader(self) -> BodyReader[Settlement]:
        """Return a reader for the bodies of the claimed messages."""
        keys = self._take.keys
        self._held = [Settlement(Delivery(one)) for one in self.claimed]
        reader: BodyReader[Settlement] = BodyReader({keys.name: self.receiver.settings.max_body})
        reader.add(keys, self._held)
        return reader

    def fill(self, gone: Sequence[Settlement]) -> list[Call[Settled]]:
        """Fill `jobs`; return the calls that settle messages with missing or undecodable bodies."""
        for held in gone:
            held.outcome = EXPIRED
        endings = [*gone]
        queue = self._take.keys.name
        jobs = []
        for held in self._held:
            if held.outcome is EXPIRED:
                continue
            delivery = held.delivery
            try:
                body = settlement.decoded(delivery, self.receiver.codec.decode)
            except Exception as error:
                why = settlement.undecodable(error, queue, delivery.id)
                held.outcome = settlement.raised(why, delivery.attempt, self._handling)
                text = held.outcome.error
                self.undecodable.append(
                    Handled(queue, delivery.id, delivery.attempt, "nack", 0.0, error=text, failed=True)
                )
                endings.append(held)
                continue
            jobs.append(held)
            one = delivery.claimed
            header = delivery.header
            due = None if header.due is None else header.due / 1000
            known = (queue, header.key, one.token, first_published(queue, one.id, header), self._kept_ms)
            self.jobs.append(ReceivedJob(one.id, body, delivery.attempt, one.left, due, header.headers, *known))
        self._held = jobs
        return self._calls(endings)

    def release(self) -> list[Call[Settled]]:
        """Return the calls that return all messages to the queue without using a retry."""
        return self._calls([Settlement(Delivery(one)) for one in self.claimed])

    def renew(self) -> Call[Settled]:
        """Return the call that renews all leases that are not lost."""
        held = [held.delivery.claimed for job, held in zip(self.jobs, self._held, strict=True) if not job.lease_lost]
        return transitions.extend(self._take.keys, held, lease_ms=self._handling.lease_ms)

    def note_settled(self, answer: Settled) -> None:
        """Set `lost` and `cancelled` of the messages from the answer of a renewal or settlement."""
        for job in self.jobs:
            job.lease_lost = job.lease_lost or job.id in answer.lost
            job.cancelled = job.cancelled or job.id in answer.cancelled

    def settle(self, error: BaseException | None) -> list[Call[Settled]]:
        """Return the calls that settle all messages: unanswered messages are acked, or nacked after an error."""
        unanswered = Ack() if error is None else Nack(reason=type(error).__name__)
        for job, held in zip(self.jobs, self._held, strict=True):
            held.outcome = settlement.answered(job.answer or unanswered, held.delivery.attempt, self._handling)
        return self._calls(self._held)

    def _calls(self, held: list[Settlement]) -> list[Call[Settled]]:
        return [call for call, _ in settlement.calls(self._take.keys, self.receiver.settings, held)]

    def _at(self, keys: Keys, limit: int) -> ClaimRound:
        return ClaimRound(keys, limit, self._handling.lease_ms)

    def _takes(self) -> Sequence[ClaimRound]:
        """Return the shards of the next poll."""
        return (self._take, *self._glances) if self._is_wide else (self._take,)

    def _switch(self) -> bool:
        """Claim next from the fullest shard; return False if all are empty, or each was tried without success."""
        fullest = max(self._glances, key=lambda take: take.behind, default=self._take)
        self._switches += 1
        if not fullest.behind or self._switches > len(self._glances):
            self._switches = 0
            return False
        rest = [take for take in self._glances if take is not fullest]
        self._glances = [*rest, self._at(self._take.keys, 0)]
        self._take = self._at(fullest.keys, self._limit)
        return True


#: How long `receive` retries while Redis is unavailable, in seconds, before it raises.
TAKE_SECONDS = 2.0
#: How long a cancelled `areceive` waits, in seconds, until its messages are settled; the rest runs in the background.
CANCELLED_SECONDS = 2.0

#: Tasks that settle cancelled blocks; event loops hold only weak references to tasks.
_settlings: set[asyncio.Task[None]] = set()


@contextmanager
def receiving(client: Client, batch: LeaseBatch[B], wait_seconds: float) -> Iterator[list[ReceivedJob[B]]]:
    """Claim messages, renew their leases in a thread while the block runs, and settle them."""

    async def wait(seconds: float) -> Found | None:
        return batch.listener.wait(seconds)

    run_blocking(_take(client.driven, batch, wait_seconds, wait))
    over = threading.Event()

    async def pause(seconds: float) -> bool:
        return over.wait(seconds)

    def renew() -> None:
        run_blocking(_renew(client.driven, batch, pause))

    renewer = threading.Thread(target=renew, name="reliq-receive", daemon=True)
    renewer.start()
    error: BaseException | None = None
    try:
        yield batch.jobs
    except BaseException as raised:
        error = raised
        raise
    finally:
        over.set()
        renewer.join()
        run_blocking(_settle(client.driven, batch, batch.settle(error)))


@asynccontextmanager
async def areceiving(
    client: AsyncClient, batch: LeaseBatch[B], wait_seconds: float
) -> AsyncIterator[list[ReceivedJob[B]]]:
    """Async version of `receiving`. A block that blocks the event loop for a whole lease loses its messages."""
    # Shield the claim from cancellation: a claim that has reached Redis must be returned.
    taking = asyncio.ensure_future(_take(client, batch, wait_seconds, partial(_alisten, batch)))
    try:
        await asyncio.shield(taking)
    except asyncio.CancelledError:
        batch.give_up()
        with suppress(ReliqError):
            await taking
            await client.run_all(batch.release())
        raise
    renewer = asyncio.create_task(_renew(client, batch, asyncio.sleep))
    error: BaseException | None = None
    try:
        yield batch.jobs
    except BaseException as raised:
        error = raised
        raise
    finally:
        renewer.cancel()
        # Shield this too: unsettled messages would be redelivered when their leases expire.
        settling = asyncio.create_task(_settle(client, batch, batch.settle(error)))
        _settlings.add(settling)
        settling.add_done_callback(_settlings.discard)
        try:
            await asyncio.shield(settling)
        except asyncio.CancelledError:
            await asyncio.wait([settling], timeout=CANCELLED_SECONDS)
            raise


async def _alisten(batch: LeaseBatch[B], seconds: float) -> Found | None:
    """Return the shards that have messages; None after `seconds`, or if the caller was cancelled."""
    if batch.given_up:  # cancelled during the poll
        return None
    listening = asyncio.ensure_future(batch.listener.await_(seconds))
    batch.cut = listening.cancel
    try:
        found = await listening
    except asyncio.CancelledError:
        if batch.given_up:
            return None
        raise
    if found and batch.given_up:  # cancelled at the same moment
        batch.listener.give_back(found)
        return None
    return found


async def _take(
    client: AnyClient, batch: LeaseBatch[B], wait_seconds: float, wait: Callable[[float], Awaitable[Found | None]]
) -> None:
    """Claim messages and read their bodies; release the messages on an error."""
    try:
        with batch.noting_outages():
            await _look(client, batch, wait_seconds, wait)
        if batch.given_up:
            return
        reader = batch.reader()
        while reads := reader.next_reads():
            requests = [read.request for read in reads]
            reader.take(reads, raise_first(await client.run_all(requests, for_seconds=TAKE_SECONDS)))
        for call in batch.fill(reader.gone):
            await client.run(call, for_seconds=TAKE_SECONDS)
    except BaseException:
        with suppress(ReliqError):
            await client.run_all(batch.release())
        raise
    for one in batch.undecodable:  # the block does not get these messages
        logger.warning(
            "queue %s: message %s: cannot decode the body, so it is retried with backoff: %s",
            one.queue,
            printable(one.id),
            one.error,
        )
    notify(client.observers, batch.undecodable)


async def _look(
    client: AnyClient, batch: LeaseBatch[B], wait_seconds: float, wait: Callable[[float], Awaitable[Found | None]]
) -> None:
    """Poll until messages are claimed or the time is over."""
    batch.begin()
    if limits_call := batch.receiver.limits_call():
        await client.run(limits_call, for_seconds=TAKE_SECONDS)
        batch.receiver.has_written_limits = True
    until = time.monotonic() + wait_seconds
    while not batch.given_up:
        again = batch.looked(await client.run_all(batch.look(), for_seconds=TAKE_SECONDS, once_sent=batch.may_detour))
        if batch.claimed:
            break
        if not again:
            rest = until - time.monotonic()
            found = await wait(rest) if rest > 0 else None
            if found is None:
                break
            batch.heard(found)
    batch.over()


async def _settle(client: AnyClient, batch: LeaseBatch[B], calls: list[Call[Settled]]) -> None:
    """Settle in one round trip; repeat calls while Redis is unavailable. Raise the first other error."""
    refusals = []
    with batch.noting_outages():
        answers = await client.run_all(calls, for_seconds=batch.lease_seconds)
        for call, answer in zip(calls, answers, strict=True):
            if isinstance(answer, RedisUnavailableError):
                batch.note_settled(await client.run(call, for_seconds=batch.lease_seconds))
            elif isinstance(answer, Exception):
                refusals.append(answer)
            else:
                batch.note_settled(answer)
    raise_first(refusals)


async def _renew(client: AnyClient, batch: LeaseBatch[B], pause: Callable[[float], Awaitable[bool | None]]) -> None:
    """Renew the leases until `pause` returns True, or the task is cancelled, at the end of the block."""
    while batch.jobs and not await pause(batch.lease_seconds / 3):
        with suppress(ReliqError), batch.noting_outages():
            batch.note_settled(await client.run(batch.renew()))
