"""Messages without a decorator: waits for shards with work, claims, leases that are renewed, and the end of each delivery."""

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

#: A shard is looked at this often, which bounds the delay after a lost wake token.
EACH_SHARD_SECONDS = 1.0
#: A shard of several that another process watches is looked at by that one; by this one in case that it was killed.
WATCHED_SHARD_SECONDS = 2.5
#: A look names a length for leases, in ms, and leases nothing.
_LEASE_MS = 1000
#: The thread of a listener takes a step at least this often.
STEP_SECONDS = 1.0
#: The connections are kept for the next wait for this many seconds after the last one.
KEPT_SECONDS = 1.0

#: Where a wait has found something: in these shards, or anywhere.
Found = tuple["Keys", ...]
ANYWHERE: Found = ()


class Listener:
    """
    The waits of a process for a queue, as a worker waits: for the tokens of its shards, and for their due times.

    Its thread runs while anybody waits. A token wakes who has waited for the longest; where nobody waits any more another
    process gets it.

    Args:
        spares_leases: says of a shard whether its leases that are over are left alone.
    """

    def __init__(self, client: Client, shards: Shards, spares_leases: Callable[[Keys], bool]) -> None:
        self.client = client
        self._shards = shards
        self._spares_leases = spares_leases
        self._name = token()
        # Of the thread that runs, or ran last.
        self._scheduler: Scheduler
        self._look_at: dict[Keys, float]
        self._lock = threading.Lock()
        self._waiting: deque[Future[Found]] = deque()
        self._unheard: list[Keys] = []  # what came for who has gone
        self._left_at = 0.0  # when the last wait ended
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._poke: Callable[[], None] = lambda: None

    @property
    def watcher(self) -> str:
        """The name by which claims have this process watch for due times; empty while its thread does not run."""
        return self._name if self._thread else ""

    def wait(self, seconds: float) -> Found | None:
        """Wait so long for something to come; return where, or None."""
        place = self._enter()
        try:
            return place.result(seconds)
        except TimeoutError:
            return self._leave(place)
        except BaseException:
            self.give_back(self._leave(place))
            raise

    async def await_(self, seconds: float) -> Found | None:
        """As `wait`, in async code."""
        place = self._enter()
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(place)), seconds)
        except TimeoutError:
            return self._leave(place)
        except BaseException:
            self.give_back(self._leave(place))
            raise

    def note(self, keys: Keys, answer: ClaimAnswer) -> None:
        """Take over when a shard is due, if this process watches it: a claim has seen it."""
        self._scheduler.note(keys, answer, time.monotonic())

    def close(self) -> None:
        """End the thread, and its connections."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._poke()
        if thread is not None:
            thread.join(KEPT_SECONDS)

    def _enter(self) -> Future[Found]:
        from reliq.worker.upkeep import Scheduler  # noqa: PLC0415  who publishes alone does without it

        place: Future[Found] = Future()
        with self._lock:
            self._is_closed = False
            if self._thread is None:
                self._scheduler = scheduler = Scheduler(self.client, (), lambda: None, self._spares_leases)
                look_at: dict[Keys, float] = {}
                self._look_at = look_at
                run = partial(self._run, scheduler, look_at)
                thread = threading.Thread(target=run, name="reliq-listener", daemon=True)
                thread.start()  # one that cannot start is none: the next wait tries again
                self._thread = thread
            self._waiting.append(place)
        self._poke()
        return place

    def _leave(self, place: Future[Found]) -> Found | None:
        """Give up a place; return what has come for it meanwhile."""
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
                self._left_at = time.monotonic()
                return None
        return place.result()

    def give_back(self, found: Found | None) -> None:
        """Have somebody else take what came for who has gone."""
        for keys in found or ():
            if not self._wake((keys,)):
                with self._lock:
                    self._unheard.append(keys)
                self._poke()

    def _wake(self, found: Found) -> bool:
        """Wake who has waited for the longest; return whether anybody waits."""
        with self._lock:
            if not self._waiting:
                return False
            self._left_at = time.monotonic()
            self._waiting.popleft().set_result(found)
            return True

    def _wake_all(self) -> None:
        """Have everybody look, who sees then what failed."""
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
                # Other processes watch; where something is to come due, one of them looks at once.
                watched = [keys for keys in look_at if scheduler.watches(keys)]
                with suppress(ReliqError):
                    self.client.run_all([commands.drop_watch(keys) for keys in watched])
                tokens.pass_on([*unheard, *watched])
                self._wake_all()  # after a close they wait anew, in another thread
        except Exception:
            logger.exception("queue %s: the waits of `receive` failed and begin anew", self._shards.first.name)
            time.sleep(STEP_SECONDS)  # whoever waits looks then, and begins them anew
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None
            self._wake_all()

    def _step(self, tokens: WakeTokens) -> None:
        """Look at what is to be looked at, stand while anybody waits, and hear what comes."""
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
            logger.debug("queue %s: no shard can be looked at: %s", self._shards.first.name, error)
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
        Look at the shards whose time has come, and watch those that no other process watches; return those with messages.

        Raises:
            ReliqError: none of them could be looked at.
        """
        began = time.monotonic()
        asked = [keys for keys in shards if self._look_at.get(keys, 0.0) <= began]
        number = CallNumber(self._name, 1)  # a look needs no number
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
    One message taken with `receive`. Unless it is answered otherwise, the end of the block answers for it.

    Attributes:
        attempt: 1 for the first delivery, None for a bare body.
        due: unix seconds, or None for a bare body.
        queue: the queue's name.
        key: None without one.
        token: above that of every earlier delivery of this message, and in an ordered queue of its key: for stores that
            refuse what comes late.
        lease_lost: whether its lease ran out, so that another may have it.
        cancelled: whether it was cancelled meanwhile.
        answer: the answer that the end of the block gives to Redis, None for the block's own.
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
        """Answer: done."""
        self.answer = Ack()

    def nack(self, *, delay: Duration | None = None, reason: str = "") -> None:
        """Answer: deliver again after `delay`, None for the default backoff."""
        self.answer = Nack(delay=None if delay is None else seconds("delay", delay), reason=reason)

    def reject(self, *, reason: str = "") -> None:
        """Answer: a dead letter at once."""
        self.answer = Reject(reason=reason)

    def snooze(self, *, delay: Duration, reason: str = "") -> None:
        """Answer: deliver again after `delay`, and spend no retry."""
        self.answer = Snooze(delay=seconds("delay", delay), reason=reason)

    def rate_limited(self, *, delay: Duration, reason: str = "", max_delay: Duration = 3600.0) -> None:
        """Answer: deliver again, as nothing else of its key, after `delay`, and spend no retry; see `RateLimited`."""
        answer = RateLimited(delay, reason, max_delay)
        rate_limit_seconds(answer)
        self.answer = answer


@dataclass(slots=True, eq=False)
class ClaimRound:
    """
    A look that claims messages of a shard; whoever holds it makes the calls.

    Attributes:
        spread: of how many keys they may be; None: of any number.
        claimed: every message that the last look took.
        buried: what the last look took back for good: garbage, of which dead letters are to be made.
        behind: how many the last look has left in ready and retry.
        missed: whether the last look has moved messages and met none: they came after its claim, and another look is due.
        next_in_ms: after a look, until something else comes due; none: nothing will.
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
        """Return the calls of one look: messages that are due or overdue are moved before the claim."""
        return [
            transitions.promote(self.keys),
            transitions.reclaim(self.keys, spare_leases=spare_leases),
            transitions.claim(
                self.keys, call_number, limit=self.limit, lease_ms=self.lease_ms, watcher=watcher, spread=self.spread
            ),
        ]

    def looked(self, answers: Sequence[Any]) -> None:
        """Keep what was claimed; raise what Redis refused."""
        promoted, reclaimed, claim = answers
        self.claimed = [] if isinstance(claim, Exception) else claim.claimed
        raise_first([*answers])
        self.buried = reclaimed.buried
        self.behind = claim.behind
        moved = promoted[0] + len(reclaimed.overdue) + len(reclaimed.again)
        self.missed = moved > 0 and not (self.claimed or self.behind)
        self.next_in_ms = [due for due in (promoted[1], reclaimed.next_in_ms) if due > 0]


class Receiver(Generic[B]):
    """Shared by the receives of one queue in a process: the lanes of their claims, and when they spare leases."""

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
        self._lock = threading.Lock()  # receives of several threads begin at once

    def batch(self, *, limit: int, lease: Duration) -> LeaseBatch[B]:
        """Return what one `receive` is to hold; raise ConfigurationError for a limit or lease that is not allowed."""
        return LeaseBatch(self, check_int("limit", limit, least=1, most=BATCH_LIMIT), HandlerSettings(lease=lease))

    def listener(self) -> Listener:
        """Return what waits for the shards of the queue."""
        with self._lock:
            client = self.shards.clients.blocking()
            if self._listener is None or self._listener.client is not client:
                self._listener = self.shards.clients.waits = Listener(client, self.shards, self.spares_leases)
            return self._listener

    def limits_call(self) -> Call[bool] | None:
        """Return the call that writes the declared limits, before anything is claimed; None when that is done."""
        if self._limits is None or self.has_written_limits:
            return None
        keys = self.shards.first
        self.shards.map.check_is_one(keys.name)
        return transitions.limit(keys, self._limits.fields(), declared=self._limits.declaration)

    def spares_leases(self, keys: Keys) -> bool:
        """Return whether a shard's expired leases stay: after an outage their holders may be about to renew them."""
        return keys in self._away or time.monotonic() < self._spare_until.get(keys, 0.0)

    def away(self, shards: Iterable[Keys]) -> None:
        """Note that shards did not answer."""
        self._away.update(shards)

    def answered(self, keys: Keys, lease_seconds: float) -> None:
        """Note that a shard has answered; its leases are spared for another third of one if it was away before."""
        if keys in self._away:
            self._spare_until[keys] = time.monotonic() + lease_seconds / 3
            self._away.discard(keys)


class LeaseBatch(Generic[B]):
    """
    The messages of one `receive`, from the claim to the settling.

    Attributes:
        lease_seconds: how long a lease lasts that is not renewed.
        undecodable: events of those that were nacked because their body does not decode.
        jobs: those that the block works on.
        receiver: of the queue.
        given_up: whether the caller has gone.
        listener: waits for tokens and due times of the shards.
        cut: ends the wait of a caller that goes.
    """

    def __init__(self, receiver: Receiver[B], limit: int, handling: HandlerSettings) -> None:
        self.receiver = receiver
        self._handling = handling
        self._limit = limit
        self._take = self._at(receiver.shards.first, limit)
        self._glances: list[ClaimRound] = []
        self._switches = 0
        self._watcher = ""  # which the last look named
        self._is_wide = False
        self._kept_ms = partial(inbox_keep_ms, receiver.settings, handling)
        self.lease_seconds = handling.lease_ms / 1000
        self._call_number = receiver.lanes.take()
        self.undecodable: list[Handled] = []
        self.jobs: list[ReceivedJob[B]] = []
        self._held: list[Settlement] = []  # what was claimed; then what the jobs are of, in their order
        self.given_up = False
        self.listener = receiver.listener()
        self.cut: Callable[[], object] = lambda: None

    @property
    def claimed(self) -> list[Claimed]:
        """Every message that the claim took."""
        return self._take.claimed

    def give_up(self) -> None:
        """Note that nobody waits for the messages any more."""
        self.given_up = True
        self.cut()

    @property
    def may_detour(self) -> bool:
        """Whether another shard can serve when the chosen one is away."""
        return bool(self._glances)

    def begin(self) -> None:
        """Choose a shard, by the map as it is known now."""
        shards = self.receiver.shards
        self.listener = self.receiver.listener()
        self._is_wide = False
        self._take = self._at(shards.keys(shards.turn()), self._limit)
        self._glances = [self._at(keys, 0) for keys in shards.all if keys.shard != self._take.keys.shard]

    def look(self) -> list[Request[Any]]:
        """
        Return the calls of one look: messages that are due or overdue are moved before the claim.

        It claims in one shard; when there was nothing, the next one counts also what there is in the others.
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
        """Note that Redis was away when that ends the code inside."""
        try:
            yield
        except RedisUnavailableError:
            self.receiver.away(self.receiver.shards.all)
            raise

    def looked(self, answers: Sequence[Any]) -> bool:
        """
        Keep what was claimed; return whether another look is due at once. Raise what was refused.

        It is when another shard may have messages: the next look claims there; and when messages were moved after the
        claim. Shards that are away are left out while others answer.
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
        """Look next where a wait has found something, if it says where."""
        for keys in found:
            self._take = self._at(keys, self._limit)
            self._glances = []
        if not found:
            self.begin()

    def over(self) -> None:
        """Note that the last look has its answer: its lane is free."""
        self.receiver.lanes.give_back(self._call_number)

    def reader(self) -> BodyReader[Settlement]:
        """Return what reads the bodies of what was claimed."""
        keys = self._take.keys
        self._held = [Settlement(Delivery(one)) for one in self.claimed]
        reader: BodyReader[Settlement] = BodyReader({keys.name: self.receiver.settings.max_body})
        reader.add(keys, self._held)
        return reader

    def fill(self, gone: Sequence[Settlement]) -> list[Call[Settled]]:
        """Turn what was claimed into jobs; return the calls that settle what has no body or does not decode."""
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
        """Return the calls that give everything back unspent."""
        return self._calls([Settlement(Delivery(one)) for one in self.claimed])

    def renew(self) -> Call[Settled]:
        """Return the call that extends every lease that still holds."""
        held = [held.delivery.claimed for job, held in zip(self.jobs, self._held, strict=True) if not job.lease_lost]
        return transitions.extend(self._take.keys, held, lease_ms=self._handling.lease_ms)

    def note_settled(self, answer: Settled) -> None:
        """Tell the jobs what a renewal or their settling showed."""
        for job in self.jobs:
            job.lease_lost = job.lease_lost or job.id in answer.lost
            job.cancelled = job.cancelled or job.id in answer.cancelled

    def settle(self, error: BaseException | None) -> list[Call[Settled]]:
        """Return the calls that settle everything: unanswered jobs are acked, after an error nacked."""
        unanswered = Ack() if error is None else Nack(reason=type(error).__name__)
        for job, held in zip(self.jobs, self._held, strict=True):
            held.outcome = settlement.answered(job.answer or unanswered, held.delivery.attempt, self._handling)
        return self._calls(self._held)

    def _calls(self, held: list[Settlement]) -> list[Call[Settled]]:
        return [call for call, _ in settlement.calls(self._take.keys, self.receiver.settings, held)]

    def _at(self, keys: Keys, limit: int) -> ClaimRound:
        return ClaimRound(keys, limit, self._handling.lease_ms)

    def _takes(self) -> Sequence[ClaimRound]:
        """Return where the next look is made."""
        return (self._take, *self._glances) if self._is_wide else (self._take,)

    def _switch(self) -> bool:
        """Claim next where most messages are; say whether there are any. Who claims nothing again and again waits."""
        fullest = max(self._glances, key=lambda take: take.behind, default=self._take)
        self._switches += 1
        if not fullest.behind or self._switches > len(self._glances):
            self._switches = 0
            return False
        rest = [take for take in self._glances if take is not fullest]
        self._glances = [*rest, self._at(self._take.keys, 0)]
        self._take = self._at(fullest.keys, self._limit)
        return True


#: Taking messages tries at a Redis that is away for this long, in seconds, before it raises.
TAKE_SECONDS = 2.0
#: A cancelled `areceive` waits at most this many seconds for what it settles; then that goes on by itself.
CANCELLED_SECONDS = 2.0

#: Settlings of cancelled blocks; an event loop itself keeps no hold of its tasks.
_settlings: set[asyncio.Task[None]] = set()


@contextmanager
def receiving(client: Client, batch: LeaseBatch[B], wait_seconds: float) -> Iterator[list[ReceivedJob[B]]]:
    """Take messages, renew their leases in a thread of its own while the block runs, and settle them."""

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
    """As `receiving`; the renewal is a task, so a block that holds the event loop up for a lease loses it."""
    # Taking is not cut off: what a cancelled caller has claimed is given back.
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
        # Settling is not cut off either: what is dropped here would be delivered again, at the end of its lease.
        settling = asyncio.create_task(_settle(client, batch, batch.settle(error)))
        _settlings.add(settling)
        settling.add_done_callback(_settlings.discard)
        try:
            await asyncio.shield(settling)
        except asyncio.CancelledError:
            await asyncio.wait([settling], timeout=CANCELLED_SECONDS)
            raise


async def _alisten(batch: LeaseBatch[B], seconds: float) -> Found | None:
    """Return where something has come; None when the time is over, or the caller has gone."""
    if batch.given_up:  # during the look
        return None
    listening = asyncio.ensure_future(batch.listener.await_(seconds))
    batch.cut = listening.cancel
    try:
        found = await listening
    except asyncio.CancelledError:
        if batch.given_up:
            return None
        raise
    if found and batch.given_up:  # it came at the same moment
        batch.listener.give_back(found)
        return None
    return found


async def _take(
    client: AnyClient, batch: LeaseBatch[B], wait_seconds: float, wait: Callable[[float], Awaitable[Found | None]]
) -> None:
    """Claim messages and read their bodies; on an error release them."""
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
    for one in batch.undecodable:  # the block never sees them
        logger.warning("%s: %s does not decode and goes back: %s", one.queue, printable(one.id), one.error)
    notify(client.observers, batch.undecodable)


async def _look(
    client: AnyClient, batch: LeaseBatch[B], wait_seconds: float, wait: Callable[[float], Awaitable[Found | None]]
) -> None:
    """Look for messages until some are claimed, or the time is over."""
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
    """Settle in one round trip; a call that Redis cannot answer now is made again alone. Raise what was refused."""
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
    """Renew the leases until a pause says that the block is over."""
    while batch.jobs and not await pause(batch.lease_seconds / 3):
        with suppress(ReliqError), batch.noting_outages():
            batch.note_settled(await client.run(batch.renew()))
