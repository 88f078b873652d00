"""The implementation of `Queue.receive`: wait for messages, claim them, renew their leases and settle them."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reliq.errors import ConfigurationError, RedisUnavailableError, ReliqError
from reliq.events import Handled, notify
from reliq.handlers import settlement
from reliq.handlers.effects import Effects, inbox_keep_ms
from reliq.handlers.settlement import EXPIRED, RELEASED, Settlement, rate_limit_seconds
from reliq.keys import Keys, token
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
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

    from reliq.codec import Codec
    from reliq.redis.client import AnyClient, Client
    from reliq.redis.shards import Shards
    from reliq.redis.wakeups import WakeTokens
    from reliq.worker.upkeep import Scheduler

logger = logging.getLogger(__name__)

#: The interval between two polls of a shard, in seconds. So if a wake-up is lost, messages wait at most this long.
EACH_SHARD_SECONDS = 1.0
#: The interval between two polls of a shard whose due times another process watches, in seconds. The polls are needed
#: because that process may have been killed.
WATCHED_SHARD_SECONDS = 2.5
#: The lease time in ms that a listener sends with a poll. A poll is a claim with limit 0, which leases no messages but
#: needs a valid lease time.
_LEASE_MS = 1000
#: How long a listener's thread waits for a wake-up before it starts its next step, in seconds.
STEP_SECONDS = 1.0
#: How long the listener keeps its connections after the last wait, in seconds.
KEPT_SECONDS = 1.0

#: How long `receive` retries while Redis is unavailable, in seconds, before it raises an exception.
TAKE_SECONDS = 2.0
#: How long a cancelled `areceive` waits until its messages are settled, in seconds. Then it raises CancelledError, and
#: the settling continues in the background.
CANCELLED_SECONDS = 2.0

#: A wake-up: the shard that has messages, as a tuple with one item; an empty tuple if the shard is not known.
Found = tuple["Keys", ...]
#: A function that waits for the wake-up in a future of `Listener.enter`. Its second argument is the timeout in seconds.
Wait = Callable[[Future[Found | None], float], Awaitable[None]]
ANYWHERE: Found = ()


class Listener:
    """
    Wait for messages of a queue, for all `receive` calls of this process.

    While at least one `receive` call waits, a thread waits for wake-ups and due times of all shards. A wake-up goes to
    the `receive` call that has waited longest. If no `receive` call waits any more, the wake-up goes back to Redis for
    another process.

    Args:
        client: a blocking client, on whose connections the thread waits.
        shards: the shards of the queue.
        spares_leases: a function that returns whether expired leases of a shard must not be reclaimed yet.
    """

    def __init__(self, client: Client, shards: Shards, spares_leases: Callable[[Keys], bool]) -> None:
        self.client = client
        self._shards = shards
        self._spares_leases = spares_leases
        self._name = token()
        # The object that watches due times, and the time of each shard's next poll. Each new thread replaces both.
        self._scheduler: Scheduler
        self._look_at: dict[Keys, float]
        self._lock = threading.Lock()
        self._waiting: deque[Future[Found | None]] = deque()
        self._left_at = 0.0  # when the last wait ended
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._poke: Callable[[], None] = lambda: None

    @property
    def watcher(self) -> str:
        """The name with which this process watches due times in Redis; empty while the thread does not run."""
        return self._name if self._thread else ""

    def note(self, keys: Keys, answer: ClaimAnswer) -> None:
        """Store the next due times of a shard from the result of a claim, if this process watches the shard."""
        self._scheduler.note(keys, answer, time.monotonic())

    def close(self) -> None:
        """Stop the thread and close its connections."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._poke()
        if thread is not None:
            thread.join(KEPT_SECONDS)

    def enter(self) -> Future[Found | None]:
        """
        Start to wait for messages; return a future that gets the wake-up.

        Each caller must call `leave` with this future afterwards.
        """
        from reliq.worker.upkeep import Scheduler  # noqa: PLC0415  not needed to publish

        place: Future[Found | None] = Future()
        with self._lock:
            self._is_closed = False
            if self._thread is None:
                self._scheduler = scheduler = Scheduler(self.client, (), lambda: None, self._spares_leases)
                look_at: dict[Keys, float] = {}
                self._look_at = look_at
                run = partial(self._run, scheduler, look_at)
                thread = threading.Thread(target=run, name="reliq-listener", daemon=True)
                thread.start()  # if this raises, `_thread` stays None, and the next caller tries again
                self._thread = thread
            self._waiting.append(place)
        self._poke()
        return place

    def leave(self, place: Future[Found | None]) -> Found | None:
        """Stop waiting with a future of `enter`; return its wake-up, or None if it has not arrived."""
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
                self._left_at = time.monotonic()
                place.set_result(None)
        return place.result()

    def _wake(self, found: Found) -> bool:
        """Give a wake-up to the `receive` call that has waited longest; return False if no call waits."""
        with self._lock:
            if not self._waiting:
                return False
            self._left_at = time.monotonic()
            self._waiting.popleft().set_result(found)
            return True

    def _wake_all(self) -> None:
        """Wake all waiting `receive` calls, so that each polls Redis, and raises if Redis is still unavailable."""
        while self._wake(ANYWHERE):
            pass

    def _run(self, scheduler: Scheduler, look_at: dict[Keys, float]) -> None:
        try:
            with closing(self.client.wake_tokens()) as tokens:
                self._poke = scheduler.wake = tokens.poke
                while True:
                    with self._lock:
                        is_over = not self._waiting and time.monotonic() >= self._left_at + KEPT_SECONDS
                        if self._is_closed or is_over:
                            self._thread = None
                            break
                    self._step(tokens)
                # This process stops watching due times. For each watched shard, send a wake-up, so that another process
                # polls the shard and then watches it.
                watched = [keys for keys in look_at if scheduler.watches(keys)]
                with suppress(ReliqError):
                    self.client.run_all([commands.drop_watch(keys) for keys in watched])
                tokens.pass_on(watched)
                self._wake_all()  # `receive` calls that still wait after close() poll Redis, and start a new thread
        except Exception:
            logger.exception(
                "receive: queue %s: the thread that waits for messages failed; it restarts at the next wait",
                self._shards.first.name,
            )
            time.sleep(STEP_SECONDS)  # wait before the callers poll Redis and start a new thread
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None
            self._wake_all()

    def _step(self, tokens: WakeTokens) -> None:
        """Poll the shards whose poll is due, wait for wake-ups, and give each wake-up to a waiting `receive` call."""
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
        tokens.pass_on([keys for keys in came if not self._wake((keys,))])

    def _look(self, shards: Sequence[Keys]) -> list[Keys]:
        """
        Poll the shards whose poll is due; return the shards with messages.

        If no other process watches the due times of a shard, this process watches them from now on.

        Raises:
            ReliqError: no shard could be polled.
        """
        began = time.monotonic()
        asked = [keys for keys in shards if self._look_at.get(keys, 0.0) <= began]
        number = CallNumber(self._name, 1)  # a claim with limit 0 does not use its call number
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

    In the `with` block, call `ack`, `nack`, `reject`, `snooze` or `rate_limited` to choose the outcome; the last call
    counts. If you call none, the message is acked at the end of the block, or retried with backoff if the block raises.

    Attributes:
        id: the message id.
        body: the decoded body, of the queue's type.
        attempt: the number of this delivery, 1 for the first; None for a message without reliq's envelope, as in the Go
            layout.
        retries_left: the number of retries left after this delivery.
        due: when this delivery was due, in Unix seconds of the Redis clock; None for a message without the envelope.
        headers: the headers given to `publish`.
        queue: the name of the queue.
        key: the message key; None without a key.
        token: the fencing token: larger in each later delivery of the message, and in an ordered queue larger than the
            tokens of all earlier messages with the same key. Let a store refuse writes with a smaller token.
        lease_lost: whether the lease expired, so that another process may have received the message.
        cancelled: whether the message was cancelled after the claim; updated when the lease is renewed.
        answer: the outcome that you have chosen; None if you have chosen none.
    """

    id: str
    body: B
    attempt: int | None
    retries_left: int
    due: float | None
    headers: Mapping[str, str]
    queue: str
    key: str | None
    token: int
    _held: Settlement = field(repr=False)
    _kept_ms: Callable[[], int] = field(repr=False)
    _published: int = field(default=0, repr=False)
    lease_lost: bool = False
    cancelled: bool = False
    answer: Ack | Nack | Reject | Snooze | RateLimited | None = field(default=None, repr=False)

    @property
    def _inbox_keep_ms(self) -> int:
        return self._kept_ms()

    def ack(self) -> None:
        """Mark the message as finished; it is acked at the end of the block."""
        self.answer = Ack()

    def nack(self, *, delay: Duration | None = None, reason: str = "") -> None:
        """
        Retry the message; if no retry is left, it becomes a dead letter.

        Args:
            delay: the time until the next delivery, in seconds or as a timedelta; None for the default backoff.
            reason: a text stored for the operator.
        """
        self.answer = Nack(delay=None if delay is None else seconds("delay", delay), reason=reason)

    def reject(self, *, reason: str = "") -> None:
        """Make the message a dead letter without a retry; `reason` is a text stored for the operator."""
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
            max_delay: the longest allowed delay, in seconds or as a timedelta (3600). It detects a delay that was given
                in milliseconds by mistake.

        Raises:
            ConfigurationError: `delay` is longer than `max_delay`.
        """
        answer = RateLimited(delay, reason, max_delay)
        rate_limit_seconds(answer)
        self.answer = answer


def poll(
    keys: Keys,
    call_number: CallNumber,
    *,
    limit: int,
    lease_ms: int,
    spare_leases: bool = False,
    watcher: str = "",
    spread: int | None = None,
) -> list[Call[Any]]:
    """Return the script calls that poll a shard: make due messages ready, reclaim expired leases, then claim."""
    return [
        transitions.promote(keys),
        transitions.reclaim(keys, spare_leases=spare_leases),
        transitions.claim(keys, call_number, limit=limit, lease_ms=lease_ms, watcher=watcher, spread=spread),
    ]


class Receiver(Generic[B]):
    """
    The state that all `receive` calls of a queue share in this process, such as the listener and unavailable shards.

    Attributes:
        is_shared: whether the queue has shared limits, which only workers enforce, so that `receive` is not allowed.
    """

    is_shared = False

    def __init__(self, shards: Shards, codec: Codec[B], settings: QueueSettings, limits: Limits | None = None) -> None:
        self.shards = shards
        self.codec = codec
        self.settings = settings
        self._limits = limits
        self.lanes = CallSequences()
        self._has_written_limits = False
        self._away: set[Keys] = set()
        self._spare_until: dict[Keys, float] = {}
        self._listener: Listener | None = None
        self._lock = threading.Lock()  # several threads may call `receive` at the same time

    def batch(self, *, limit: int, lease: Duration) -> LeaseBatch[B]:
        """
        Return a new `LeaseBatch` for a `receive` call.

        Raises:
            ConfigurationError: `limit` or `lease` is not allowed, or the queue has shared limits.
        """
        if self.is_shared:
            name = self.shards.first.name
            raise ConfigurationError(
                f"queue {name!r} has shared limits, which `receive` does not enforce: use a handler and a worker"
            )
        return LeaseBatch(self, check_int("limit", limit, least=1, most=BATCH_LIMIT), HandlerSettings(lease=lease))

    def listener(self) -> Listener:
        """Return the listener of this queue; create it if necessary."""
        with self._lock:
            client = self.shards.clients.blocking()
            if self._listener is None or self._listener.client is not client:
                self._listener = self.shards.clients.waits = Listener(client, self.shards, self.spares_leases)
            return self._listener

    async def write_limits(self, client: AnyClient) -> None:
        """
        Write the limits that the queue declares to Redis, once in this process.

        Raises:
            ConfigurationError: the queue declares limits, but has several shards.
        """
        if self._limits is None or self._has_written_limits:
            return
        keys = self.shards.first
        self.shards.map.check_is_one(keys.name)
        call = transitions.limit(keys, self._limits.fields(), declared=self._limits.declaration)
        await client.run(call, for_seconds=TAKE_SECONDS)
        self._has_written_limits = True

    def spares_leases(self, keys: Keys) -> bool:
        """
        Return whether expired leases of a shard must not be reclaimed yet.

        Soon after an outage of Redis, the processes that own the leases may still renew them.
        """
        return keys in self._away or time.monotonic() < self._spare_until.get(keys, 0.0)

    def away(self, shards: Iterable[Keys]) -> None:
        """Mark shards as unavailable."""
        self._away.update(shards)

    def answered(self, keys: Keys, lease_seconds: float) -> None:
        """Mark a shard as available. After an outage, do not reclaim its expired leases for a third of the lease time."""
        if keys in self._away:
            self._spare_until[keys] = time.monotonic() + lease_seconds / 3
            self._away.discard(keys)


class LeaseBatch(Generic[B]):
    """
    The messages of one `receive` call, from the claim until they are settled.

    Attributes:
        jobs: the messages that the `with` block gets.
    """

    def __init__(self, receiver: Receiver[B], limit: int, handling: HandlerSettings) -> None:
        self._receiver = receiver
        self._handling = handling
        self._lease_seconds = handling.lease_ms / 1000
        self._limit = limit
        self._listener: Listener
        self._keys = receiver.shards.first  # the shard to claim from
        self._others: list[Keys] = []  # other shards that may have messages
        self._is_wide = False  # whether a poll also counts the messages of the other shards
        self._left: dict[Keys, int] = {}  # the messages left in each shard at its last poll
        self._switches = 0
        self._heard: Found = ()  # the shard of the last wake-up, until it is polled
        self._call_number = receiver.lanes.take()
        self._claimed: list[Claimed] = []
        self._held: list[Settlement] = []  # the deliveries of `jobs`
        self.jobs: list[ReceivedJob[B]] = []
        self._is_given_up = False
        self._cut: Callable[[], object] = lambda: None  # called to end the wait of a cancelled caller

    async def take(self, client: AnyClient, wait_seconds: float, wait: Wait) -> None:
        """Claim messages and read their bodies. If this fails, return the messages to the queue."""
        try:
            with self.noting_outages():
                await self._claim(client, wait_seconds, wait)
            if not self._is_given_up:
                await self._read(client)
        except BaseException:
            await self.release(client)
            raise

    def give_up(self) -> None:
        """Stop waiting for messages, because the caller of `areceive` was cancelled."""
        self._is_given_up = True
        self._cut()

    async def release(self, client: AnyClient) -> None:
        """Return the messages to the queue without using a retry; send an unused wake-up back to Redis."""
        calls: list[Request[Any]] = []
        for keys in self._heard:
            calls += commands.push_wake_token(keys)
        with suppress(ReliqError):
            await client.run_all(calls)
            await self._end(client, [Settlement(Delivery(one)) for one in self._claimed], 0.0)

    async def renew(self, client: AnyClient, pause: Callable[[float], Awaitable[bool | None]]) -> None:
        """
        Renew the leases of the messages until the `with` block has ended.

        `pause` waits between two renewals, and returns True when the block has ended. Alternatively, the caller cancels
        this task.
        """
        while self.jobs and not await pause(self._lease_seconds / 3):
            held = [
                held.delivery.claimed for job, held in zip(self.jobs, self._held, strict=True) if not job.lease_lost
            ]
            with suppress(ReliqError), self.noting_outages():
                call = transitions.extend(self._keys, held, lease_ms=self._handling.lease_ms)
                self._note_settled(await client.run(call))

    async def settle(self, client: AnyClient, error: BaseException | None) -> None:
        """
        Settle all messages in one round trip.

        If the user chose no outcome for a message, ack it, or nack it if the `with` block raised `error`. While Redis
        is unavailable, retry for the lease time, and then raise RedisUnavailableError. If Redis refuses script calls,
        run the other script calls, and then raise the first of these errors.
        """
        unanswered = Ack() if error is None else Nack(reason=type(error).__name__)
        for job, held in zip(self.jobs, self._held, strict=True):
            held.outcome = settlement.answered(job.answer or unanswered, held.delivery.attempt, self._handling)
        unsettled, refusals = self._held, []
        while unsettled:
            calls = settlement.calls(self._keys, self._receiver.settings, unsettled)
            unsettled = []
            with self.noting_outages():
                answers = await client.run_all([call for call, _ in calls], for_seconds=self._lease_seconds)
                for (call, piece), first in zip(calls, answers, strict=True):
                    answer = first
                    if isinstance(first, RedisUnavailableError):
                        answer = await client.run(call, for_seconds=self._lease_seconds)
                    if isinstance(answer, Exception):
                        refusals.append(answer)
                    else:
                        self._note_settled(answer)
                        unsettled += settlement.unsettled(piece, answer)
        raise_first(refusals)

    @contextmanager
    def noting_outages(self) -> Iterator[None]:
        """Mark all shards as unavailable if the block raises RedisUnavailableError."""
        try:
            yield
        except RedisUnavailableError:
            self._receiver.away(self._receiver.shards.all)
            raise

    async def _claim(self, client: AnyClient, wait_seconds: float, wait: Wait) -> None:
        """Poll until messages are claimed, `wait_seconds` are over, or the caller is cancelled."""
        self._begin()
        await self._receiver.write_limits(client)
        until = time.monotonic() + wait_seconds
        while not self._is_given_up:
            is_repeated = await self._poll(client)
            rest = until - time.monotonic()
            if not is_repeated and (
                self._claimed or self._is_given_up or rest <= 0 or not await self._listen(rest, wait)
            ):
                break
        # Redis has replied to the last script call, so another `receive` call may use this sequence of call numbers.
        self._receiver.lanes.give_back(self._call_number)

    def _begin(self) -> None:
        """Choose the shard to claim from first. The shard map may have changed, so list the other shards again."""
        shards = self._receiver.shards
        self._listener = self._receiver.listener()
        self._is_wide = False
        self._keys = shards.keys(shards.turn())
        self._others = [keys for keys in shards.all if keys is not self._keys]

    async def _poll(self, client: AnyClient) -> bool:
        """
        Claim messages from a shard; return whether the caller must poll again immediately.

        If the shard is empty, the next poll also counts the messages of the other shards, and the poll after it claims
        from the fullest shard. If the scripts moved or dropped messages, poll the same shard again. Skip unavailable
        shards.

        Raises:
            RedisUnavailableError: no shard is available, or the shard of the claimed messages failed.
            RedisRefusedError: Redis refused a script call.
        """
        receiver = self._receiver
        polled = [self._keys, *self._others] if self._is_wide else [self._keys]
        watcher = self._listener.watcher
        calls: list[Request[Any]] = []
        for keys in polled:
            calls += poll(
                keys,
                self._call_number,
                limit=self._limit if keys is self._keys else 0,
                lease_ms=self._handling.lease_ms,
                spare_leases=receiver.spares_leases(keys),
                watcher=watcher,
            )
            self._call_number = self._call_number.next()
        answers = await client.run_all(calls, for_seconds=TAKE_SECONDS, once_sent=bool(self._others))
        self._heard = ()
        away: dict[Keys, RedisUnavailableError] = {}
        behind: dict[Keys, int] = {}
        has_moved = False
        for at, keys in enumerate(polled):
            promoted, reclaimed, claim = of_shard = answers[3 * at :][:3]
            if keys is self._keys and not isinstance(claim, Exception):
                self._claimed = claim.claimed
            try:
                raise_first(of_shard)
            except RedisUnavailableError as error:
                away[keys] = error
                continue
            receiver.answered(keys, self._lease_seconds)
            if watcher:
                self._listener.note(keys, claim)
            behind[keys] = claim.behind
            moved = promoted[0] + len(reclaimed.overdue) + len(reclaimed.again)
            has_moved = has_moved or (moved > 0 and not claim.behind)
            # A claim may only drop cancelled messages, and return none. So if fewer messages are left than at the last
            # poll, poll again.
            has_moved = has_moved or (keys is self._keys and 0 < claim.behind < (self._left.get(keys) or math.inf))
            self._left[keys] = claim.behind
        receiver.away(away)
        self._others = [keys for keys in self._others if keys not in away]
        if self._keys in away:
            if self._claimed or not self._others:
                raise away[self._keys]
            self._keys = self._others.pop(receiver.shards.turn() % len(self._others))
            return True
        if self._claimed:
            return False
        if has_moved:
            return True
        if self._others and not self._is_wide:
            self._is_wide = True
            return True
        fullest = max(self._others, key=lambda keys: behind[keys], default=self._keys)
        self._switches += 1
        if not behind[fullest] or self._switches > len(self._others):
            self._switches = 0
            return False
        self._others = [*(keys for keys in self._others if keys is not fullest), self._keys]
        self._keys = fullest
        return True

    async def _listen(self, seconds: float, wait: Wait) -> bool:
        """Wait for a wake-up, and choose its shard for the next poll; return False if none arrives in `seconds`."""
        place = self._listener.enter()
        self._cut = partial(self._listener.leave, place)
        try:
            with suppress(TimeoutError):
                await wait(place, seconds)
        finally:
            found = self._listener.leave(place)
            self._heard = found or ()
        if found == ANYWHERE:
            self._begin()
        for keys in self._heard:
            self._keys = keys
            self._others = []
        return found is not None

    async def _read(self, client: AnyClient) -> None:
        """Read and decode the bodies, and fill `jobs`. Settle messages whose bodies have expired or do not decode."""
        keys = self._keys
        settings = self._receiver.settings
        claimed = [Settlement(Delivery(one)) for one in self._claimed]
        reader: BodyReader[Settlement] = BodyReader({keys.name: settings.max_body})
        reader.add(keys, claimed)
        while reads := reader.next_reads():
            requests = [read.request for read in reads]
            reader.take(reads, raise_first(await client.run_all(requests, for_seconds=TAKE_SECONDS)))
        for held in reader.gone:
            held.outcome = EXPIRED
        undecodable: list[Handled] = []
        for held in claimed:
            if held.outcome is EXPIRED:
                continue
            delivery = held.delivery
            one = delivery.claimed
            try:
                body = settlement.decoded(delivery, self._receiver.codec.decode)
            except Exception as error:
                why = settlement.undecodable(error, keys.name, one.id)
                held.outcome = settlement.raised(why, delivery.attempt, self._handling)
                text = held.outcome.error
                undecodable.append(Handled(keys.name, one.id, delivery.attempt, "nack", 0.0, error=text, failed=True))
                continue
            header = delivery.header
            due = None if header.due is None else header.due / 1000
            kept_ms = partial(inbox_keep_ms, settings, self._handling)
            known = (keys.name, header.key, one.token, held, kept_ms)
            self._held.append(held)
            self.jobs.append(ReceivedJob(one.id, body, delivery.attempt, one.left, due, header.headers, *known))
        await self._end(client, [held for held in claimed if held.outcome is not RELEASED], TAKE_SECONDS)
        for event in undecodable:  # these messages are not in `jobs`
            logger.warning(
                "receive: queue %s: message %s: cannot decode the body, so the message is retried with backoff: %s",
                event.queue,
                printable(event.id),
                event.error,
            )
        notify(client.observers, undecodable)

    def _note_settled(self, answer: Settled) -> None:
        """Set `lease_lost` and `cancelled` of the jobs from the result of a script that renews or settles them."""
        for job in self.jobs:
            job.lease_lost = job.lease_lost or job.id in answer.lost
            job.cancelled = job.cancelled or job.id in answer.cancelled

    async def _end(self, client: AnyClient, unsettled: list[Settlement], for_seconds: float) -> None:
        """Settle messages that are not in `jobs`, for example messages with undecodable bodies."""
        while unsettled:
            calls = settlement.calls(self._keys, self._receiver.settings, unsettled)
            unsettled = []
            for call, piece in calls:
                unsettled += settlement.unsettled(piece, await client.run(call, for_seconds=for_seconds))


#: The asyncio tasks that settle messages, or return them to the queue. This set keeps the tasks alive, because an event
#: loop has only weak references to its tasks.
_settlings: set[asyncio.Task[None]] = set()


@contextmanager
def receiving(client: Client, batch: LeaseBatch[B], wait_seconds: float) -> Iterator[list[ReceivedJob[B]]]:
    """Claim messages, renew their leases in a thread while the `with` block runs, and settle them afterwards."""
    over = threading.Event()

    async def wait(place: Future[Found | None], seconds: float) -> None:
        place.result(seconds)

    async def pause(seconds: float) -> bool:
        return over.wait(seconds)

    def renew() -> None:
        run_blocking(batch.renew(client.driven, pause))

    run_blocking(batch.take(client.driven, wait_seconds, wait))
    renewer = threading.Thread(target=renew, name="reliq-receive", daemon=True)
    error: BaseException | None = None
    try:
        renewer.start()
        yield batch.jobs
    except BaseException as raised:
        error = raised
        raise
    finally:
        over.set()
        if renewer.ident is not None:  # the thread was started
            renewer.join()
        run_blocking(batch.settle(client.driven, error))


@asynccontextmanager
async def areceiving(
    client: AnyClient, batch: LeaseBatch[B], wait_seconds: float
) -> AsyncIterator[list[ReceivedJob[B]]]:
    """Async version of `receiving`. If the block blocks the event loop for the whole lease time, the leases expire."""

    async def wait(place: Future[Found | None], seconds: float) -> None:
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(place)), seconds)

    # Shield the claim from cancellation. Redis may run a claim that was already sent; then the messages must be
    # returned to the queue.
    taking = asyncio.ensure_future(batch.take(client, wait_seconds, wait))
    try:
        await asyncio.shield(taking)
    except asyncio.CancelledError:
        batch.give_up()

        async def give_back() -> None:
            with suppress(ReliqError):
                await taking
                await batch.release(client)

        await _completed(give_back())
        raise
    renewer = asyncio.create_task(batch.renew(client, asyncio.sleep))
    error: BaseException | None = None
    try:
        yield batch.jobs
    except BaseException as raised:
        error = raised
        raise
    finally:
        renewer.cancel()
        # Shield the settling from cancellation. Otherwise the messages would be redelivered when their leases expire.
        await _completed(batch.settle(client, error))


async def _completed(work: Coroutine[Any, Any, None]) -> None:
    """
    Await `work`. If the caller is cancelled, `work` continues in the background.

    anyio cancels a task repeatedly, which also has no effect on `work`.
    """
    task = asyncio.create_task(work)
    _settlings.add(task)
    task.add_done_callback(_settlings.discard)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=CANCELLED_SECONDS)
        raise
