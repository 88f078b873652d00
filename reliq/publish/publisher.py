"""A producer names its queue in the registry once a minute, after a publish; a failure there fails no publish."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections import Counter, deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reliq.errors import ConfigurationError, PublishFailed, RedisRefusedError, RedisUnavailableError, ReliqError
from reliq.events import PublishEnded, Unconfirmed, notify, wanting
from reliq.keys import home, of_shard
from reliq.lua import transitions
from reliq.message import Confirmed, Receipt
from reliq.publish.messages import NOT_ASKED, ShardBatch, has_lines, receipts
from reliq.redis import commands, server as transport
from reliq.redis.connection import ServerVersion
from reliq.redis.server import PUBLISH_SECONDS
from reliq.settings import MIB, Durability, seconds
from reliq.text import pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from reliq.events import Observer
    from reliq.keys import Keys
    from reliq.lua.transitions import AskStatus, CallSequence, CallSequences, PublishAnswer
    from reliq.publish.messages import PreparedMessage, Writer
    from reliq.redis.client import AsyncClient, Client, Clients
    from reliq.redis.commands import Call, Command, Request, T
    from reliq.redis.shards import Shards


#: A process names a queue in a Redis once in this many seconds; a queue is forgotten only after such a time.
NAMING_SECONDS = 60.0


class QueueRegistration:
    """Says when the queue of `keys` is to be named in the registry of the Redis that its `clients` ask."""

    def __init__(self, keys: Keys, clients: Clients) -> None:
        self._entry, self._clients = keys.entry, clients

    def due(self) -> Command[None] | None:
        """Return the command that names the queue, to be made once by whoever asks; None for the next minute."""
        now = time.monotonic()
        if now < self._clients.named_until:
            return None
        named, self._clients.named_until = self._clients.connection().named, now + NAMING_SECONDS
        if named.get(self._entry, 0.0) > now:  # another object of the same queue has named it
            return None
        named[self._entry] = self._clients.named_until
        return commands.register([self._entry], int(time.time()))


OLDEST_WITH_WAITAOF = (7, 2)


class Confirmer:
    """Makes publishes and waits for their confirmation, through clients that await a reply for longer than usual."""

    def __init__(self, queue: str, clients: Clients) -> None:
        self._queue, self._clients = queue, clients
        self._has_waitaof = False

    def run(
        self, call: Call[PublishAnswer], orders: Sequence[PreparedMessage], durability: Durability
    ) -> tuple[PublishAnswer, Confirmed]:
        """
        Make `call` and wait for its confirmation.

        Raises:
            ConfigurationError: the server cannot confirm in this way; nothing was published.
            RedisUnavailableError, RedisRefusedError: the call failed.
        """
        client = self._clients.blocking(longer_seconds(durability))
        if self._must_ask(durability):
            self._judge(client.run_all(_questions(), for_seconds=PUBLISH_SECONDS), durability)
        answer, found = client.run_confirmed(call, commands.confirmation(durability), for_seconds=PUBLISH_SECONDS)
        return answer, self._told(client, orders, durability, found)

    async def arun(
        self, call: Call[PublishAnswer], orders: Sequence[PreparedMessage], durability: Durability
    ) -> tuple[PublishAnswer, Confirmed]:
        """As `run`, in async code."""
        client = self._clients.asynchronous(longer_seconds(durability))
        if self._must_ask(durability):
            self._judge(await client.run_all(_questions(), for_seconds=PUBLISH_SECONDS), durability)
        answer, found = await client.run_confirmed(call, commands.confirmation(durability), for_seconds=PUBLISH_SECONDS)
        return answer, self._told(client, orders, durability, found)

    def _must_ask(self, durability: Durability) -> bool:
        return durability.kind == "aof" and not self._has_waitaof

    def _judge(self, answers: Sequence[dict[str, str] | Exception], durability: Durability) -> None:
        """Note that the server has WAITAOF, or raise ConfigurationError; one that hides its version is trusted."""
        server, persistence = ({} if isinstance(one, Exception) else one for one in answers)
        version = ServerVersion.read(server)
        if version.is_before(OLDEST_WITH_WAITAOF):
            raise ConfigurationError(
                f"durability by aof needs Redis 7.2 or newer (WAITAOF), not {version.text}; "
                f"Durability.replicas(1) works with every version"
            )
        if durability.local and persistence.get("aof_enabled") == "0":
            raise ConfigurationError("durability by aof needs `appendonly yes` in the server's redis.conf")
        self._has_waitaof = True

    def _told(
        self,
        client: Client | AsyncClient,
        orders: Sequence[PreparedMessage],
        durability: Durability,
        found: Confirmed | Exception,
    ) -> Confirmed:
        """Return what was confirmed, and tell the observers of what was not."""
        if isinstance(found, Exception):
            confirmed, why = Confirmed(durable=False), str(found)
        else:
            confirmed, why = found, _shortfall(found, durability)
        if not confirmed.durable:
            notify(client.observers, [Unconfirmed(self._queue, tuple(order.id for order in orders), why)])
        return confirmed


def longer_seconds(durability: Durability) -> float:
    """
    Return for how much longer than else a reply is awaited.

    Rounded up to a power of two: a queue has connections of their own for each, and there are to be few.
    """
    return float(2 ** math.ceil(math.log2(max(1.0, seconds("timeout", durability.timeout)))))


def _questions() -> list[Command[Any]]:
    return [commands.server_facts("server"), commands.server_facts("persistence")]


def _shortfall(found: Confirmed, durability: Durability) -> str:
    """Say what was confirmed of what was asked for."""
    local = "" if found.on_disk is None else f", own file {'on disk' if found.on_disk else 'not on disk'}"
    return f"{found.replicas} of {pluralize(durability.count, 'replica')}{local} within {durability.timeout:g} s"


#: One round trip carries at most this many calls, and this many bytes of bodies unless one call alone has more.
TOGETHER_LIMIT, TOGETHER_BYTES = 500, 8 * MIB
#: After this many seconds the next round trip begins beside one that has no answer: Redis may be away.
OVERLAP_SECONDS = 0.1


class Waiting(NamedTuple):
    """A request, how many bytes it carries, and the answer to come."""

    request: Request[Any]
    weight: int
    answer: asyncio.Future[Any]


class Batcher:
    """Makes the calls of many tasks: one that is alone goes at once; while some are under way, the next fill up."""

    def __init__(self, client: Callable[[], AsyncClient], *, for_seconds: float) -> None:
        self._client, self._for_seconds = client, for_seconds
        self._waiting: deque[Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self._rounds: set[asyncio.Task[None]] = set()  # under way; the event loop itself keeps no hold of its tasks

    async def run(self, request: Request[T], weight: int, *, once_sent: bool = False) -> T:
        """
        Make `request`, which carries `weight` bytes, and return its answer, as `AsyncClient.run` does.

        With `once_sent` it is tried again only when it was sent, as by `Client.run_once_sent`. A caller that is
        cancelled does not stop its request.
        """
        one = Waiting(request, weight, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._task is None:
            self._start()
        answer = await one.answer
        if isinstance(answer, RedisUnavailableError):  # Redis answered the others: it may answer this one in a moment
            if once_sent and not answer.maybe_ran:
                raise answer
            return await self._client().run(request, for_seconds=self._for_seconds)
        if isinstance(answer, BaseException):
            raise answer
        result: T = answer
        return result

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run_all())
        self._task.add_done_callback(self._ended)

    def _ended(self, _task: asyncio.Task[None]) -> None:
        """Begin again for those who still wait: the end of an event loop cancels this task as any other."""
        self._task = None
        self._waiting = deque(one for one in self._waiting if not one.answer.done())
        if self._waiting:
            self._start()

    async def _run_all(self) -> None:
        while self._waiting:
            one_round = asyncio.create_task(self._make(self._next()))
            self._rounds.add(one_round)
            one_round.add_done_callback(self._rounds.discard)
            await asyncio.wait([one_round], timeout=OVERLAP_SECONDS)

    def _next(self) -> list[Waiting]:
        """Take what goes in one round trip."""
        together = [self._waiting.popleft()]
        weight = together[0].weight
        while self._waiting and len(together) < TOGETHER_LIMIT:
            weight += self._waiting[0].weight
            if weight > TOGETHER_BYTES:
                break
            together.append(self._waiting.popleft())
        return together

    async def _make(self, together: list[Waiting]) -> None:
        """Make the calls in one round trip, and tell each caller that still waits."""
        try:
            answers = await self._client().run_all([one.request for one in together], for_seconds=self._for_seconds)
        except asyncio.CancelledError:
            for one in together:
                one.answer.cancel()
            raise
        except Exception as error:
            for one in together:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        for one, answer in zip(together, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)


#: A message with a generated id tries so many shards that cannot be reached before it waits for one.
DETOURS = 2
#: A publish reads the map so often because a shard knows a later one.
LOOKS = 5


class Router:
    """
    Where `orders` go by the map as it is now.

    Attributes:
        is_stale: a shard knows a later map: it is to be read.
        left: how many orders have no receipt yet.
    """

    __slots__ = (
        "_confirmed",
        "_detours",
        "_looks",
        "_map",
        "_orders",
        "_receipts",
        "_shards",
        "_whole",
        "is_stale",
        "left",
    )

    def __init__(
        self, shards: Shards, orders: list[PreparedMessage], confirmed: int = 0, *, is_stale: bool = False
    ) -> None:
        self._shards, self._map, self._orders = shards, shards.map, orders
        self._receipts: dict[int, Receipt] = {}
        self._whole: list[Receipt] | None = None  # all receipts at once, of a publish that went in one part
        self.left, self.is_stale = len(orders), is_stale
        self._confirmed, self._looks, self._detours = confirmed, 0, DETOURS

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts, in the order of the orders."""
        return self._whole if self._whole is not None else [self._receipts[at] for at in range(len(self._orders))]

    @property
    def unsent(self) -> list[PreparedMessage]:
        """The orders that have no receipt yet."""
        return [one for at, one in enumerate(self._orders) if at not in self._receipts]

    @property
    def confirmed(self) -> int:
        """How many are published, with those of earlier calls."""
        return self._confirmed + sum(one.status == "published" for one in self._receipts.values())

    @contextmanager
    def telling_rest(self) -> Iterator[None]:
        """Have the failure of a part tell all that has no receipt yet."""
        try:
            yield
        except PublishFailed as failed:
            failed.orders = self.unsent
            raise

    def looked(self) -> None:
        """
        Go by the map that was read.

        Raises:
            RedisRefusedError: a shard again and again knows a later map than there is.
        """
        self._looks += self.is_stale
        if self._looks > LOOKS:
            name = self._shards.first.name
            raise RedisRefusedError(
                f"a shard of queue {name!r} knows a later map of the shards than {self._shards.first.map!r} is, of epoch "
                f"{self._map.epoch}: a failover may have lost that write; have an operator write it again: "
                + shell_command("check", name, options=["--repair"])
            )
        if self._map.n == 1 < self._shards.map.n:  # orders that were made before the map was known
            self._move([at for at, one in enumerate(self._orders) if one.is_generated], self._shards.turn())
        self._map, self.is_stale = self._shards.map, False

    def parts(self) -> list[ShardBatch]:
        """
        Return the orders that have no receipt yet, by the shard that they go to.

        Raises:
            ConfigurationError: there are several shards, and one of the orders has a key.
        """
        shards, map, orders = self._shards, self._map, self._orders
        if map.served > 1 and has_lines(orders):
            check_one_shard(shards)
        found: dict[tuple[int, int], list[int]] = {}
        for at, one in enumerate(orders):
            if at not in self._receipts:
                found.setdefault(self._homes(one), []).append(at)
        return [
            ShardBatch(
                [orders[at] for at in places],
                places,
                shards.keys(now),
                map,
                None if now == before else shards.keys(before),
                may_detour=map.n > 1 and self._detours > 0 and orders[places[0]].is_generated,
            )
            for (now, before), places in found.items()
        ]

    def _homes(self, order: PreparedMessage) -> tuple[int, int]:
        """Return the shard of an order, and the one that may have its id already: for a generated id there is no other."""
        now = home(order.id, self._map.n)
        return now, now if order.is_generated else home(order.id, self._map.was)

    def question(self, part: ShardBatch) -> Call[list[AskStatus]]:
        """Return the call that asks the old home of a part which of its ids are free."""
        ids = list(dict.fromkeys(one.id for one in part.orders))
        old, replace = part.old_home or part.keys, part.orders[0].terms.replace
        return transitions.ask(old, ids, fence=part.map.fence, replace=replace)

    def asked(self, part: ShardBatch, answers: Sequence[AskStatus]) -> ShardBatch:
        """Note what an old home has answered; return the part without the orders that may not be published."""
        ids = dict.fromkeys(one.id for one in part.orders)
        told = dict(zip(ids, answers, strict=True))
        self.is_stale = self.is_stale or "stale" in answers
        free, terms = [], part.orders[0].terms
        due = (time.time() * 1000 + terms.delay_ms if terms.at_ms is None else terms.at_ms) / 1000
        for place, one in zip(part.places, part.orders, strict=True):
            answer = told[one.id]
            if answer == "free":
                free.append(place)
            elif answer != "stale":
                self._receipts[place] = Receipt(one.id, answer, due)
                self.left -= 1
        return part._replace(orders=[self._orders[at] for at in free], places=free)

    def answered(self, part: ShardBatch, done: list[Receipt] | None) -> None:
        """
        Note the receipts of a shard.

        Args:
            done: for all of a part's orders; none when they must go by a later map; None when the shard could not be
                reached: they go to the one whose turn it is, and their ids say so.
        """
        if done is None:
            self._detours -= 1
            shard = self._shards.turn()
            self._move(part.places, self._shards.turn() if shard == part.keys.shard else shard)
            return
        self._receipts.update(zip(part.places, done, strict=False))
        self.left -= len(done)
        self.is_stale = self.is_stale or not done

    def _move(self, places: Sequence[int], shard: int) -> None:
        for at in places:
            self._orders[at] = self._orders[at]._replace(id=of_shard(self._orders[at].id, shard))


def check_one_shard(shards: Shards) -> None:
    """Raise ConfigurationError when a queue has several shards: messages with keys are in one."""
    if (count := max(shards.map.served, shards.wanted or 1)) > 1:
        raise ConfigurationError(
            f"queue {shards.first.name!r} has {count} shards: keys, priorities and limits need a queue of one shard"
        )


class Sender:
    """Sends orders through either client."""

    def __init__(
        self,
        writer: Writer,
        shards: Shards,
        lanes: CallSequences,
        clients: Clients,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._writer, self._shards, self._lanes, self._clients = writer, shards, lanes, clients
        self._registrar = QueueRegistration(writer.keys, clients)
        self._confirmer = Confirmer(writer.keys.name, clients)
        self._watching = wanting(observers, PublishEnded)
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher]
        self._batchers = weakref.WeakKeyDictionary()

    def send(
        self, orders: list[PreparedMessage], confirmed: int = 0, durability: Durability = Durability.NONE
    ) -> list[Receipt]:
        """Send `orders`; raise PublishFailed, with how many were `confirmed` before, when Redis is away or refuses."""
        clients, shards, done = self._clients, self._shards, None
        is_first_key = self._is_first_key(orders)
        is_fresh = not is_first_key and time.monotonic() < clients.mapped_until and clients.epoch is transport.epoch
        if is_one := is_fresh and shards.map.n == shards.map.was == 1:
            done = self._call(ShardBatch(orders, range(len(orders)), shards.first, shards.map), confirmed, durability)
        if not done:
            done = self._by_route(Router(shards, orders, confirmed, is_stale=is_one or is_first_key), durability)
        if time.monotonic() >= clients.named_until and (entry := self._registrar.due()):
            with suppress(ReliqError):
                clients.blocking().run(entry)
        return done

    async def asend(
        self, orders: list[PreparedMessage], confirmed: int = 0, durability: Durability = Durability.NONE
    ) -> list[Receipt]:
        """As `send`, in async code; those of many tasks share round trips."""
        clients, shards, done = self._clients, self._shards, None
        is_first_key = self._is_first_key(orders)
        is_fresh = not is_first_key and time.monotonic() < clients.mapped_until and clients.epoch is transport.epoch
        if is_one := is_fresh and shards.map.n == shards.map.was == 1:
            part = ShardBatch(orders, range(len(orders)), shards.first, shards.map)
            done = await self._acall(part, confirmed, durability)
        if not done:
            done = await self._aby_route(Router(shards, orders, confirmed, is_stale=is_one or is_first_key), durability)
        if time.monotonic() >= clients.named_until and (entry := self._registrar.due()):
            with suppress(ReliqError):
                await clients.asynchronous().run(entry)
        return done

    def _is_first_key(self, orders: list[PreparedMessage]) -> bool:
        """Say whether orders with a key are perhaps the queue's first: another process may have given it several shards."""
        return self._writer.has_lines and not self._shards.is_keyed and has_lines(orders)

    def _by_route(self, route: Router, durability: Durability) -> list[Receipt]:
        """Send orders to their shards; those that a shard did not take go by a later map, or to another shard."""
        while route.left:
            if route.is_stale or self._shards.is_old:
                self._look(route)
            for part in self._parts(route):
                if part.old_home is not None:
                    part = self._ask(route, part)  # noqa: PLW2901  what is free there
                if part.orders:
                    with route.telling_rest():
                        done = self._call(part, route.confirmed, durability)
                    route.answered(part, done)
        return route.receipts

    async def _aby_route(self, route: Router, durability: Durability) -> list[Receipt]:
        """As `_by_route`, in async code."""
        while route.left:
            if route.is_stale or self._shards.is_old:
                await self._alook(route)
            for part in self._parts(route):
                if part.old_home is not None:
                    part = await self._aask(route, part)  # noqa: PLW2901  what is free there
                if part.orders:
                    with route.telling_rest():
                        done = await self._acall(part, route.confirmed, durability)
                    route.answered(part, done)
        return route.receipts

    def _parts(self, route: Router) -> list[ShardBatch]:
        """Return the parts of a route; tell observers of orders that the queue cannot have."""
        try:
            return route.parts()
        except ConfigurationError as error:
            self._unsent(route.unsent, error, route.confirmed)
            raise

    def _look(self, route: Router) -> None:
        """Read the map, for the first time, because it is old, or because a shard knows a later one."""
        try:
            if route.is_stale:
                self._shards.read(for_seconds=PUBLISH_SECONDS)
            else:
                self._shards.refresh()
            route.looked()
        except ReliqError as error:
            self._unsent(route.unsent, error, route.confirmed)
            raise

    async def _alook(self, route: Router) -> None:
        """As `_look`, in async code."""
        try:
            if route.is_stale:
                await self._shards.aread(for_seconds=PUBLISH_SECONDS)
            else:
                await self._shards.arefresh()
            route.looked()
        except ReliqError as error:
            self._unsent(route.unsent, error, route.confirmed)
            raise

    def _ask(self, route: Router, part: ShardBatch) -> ShardBatch:
        """Ask the old home of a part; return what of it is free."""
        try:
            answers = self._clients.blocking().run(route.question(part), for_seconds=PUBLISH_SECONDS)
        except ReliqError as error:
            self._unsent(part.orders, error, route.confirmed)
            raise
        return route.asked(part, answers)

    def _call(self, part: ShardBatch, confirmed: int, durability: Durability) -> list[Receipt] | None:
        """Send a part to its shard; return its receipts: none when a later map binds, None when another shard may have it."""
        lane, call_number = self._lanes.take(self._writer.known_by(part.orders) if self._lanes.parked else ())
        call, told, began = self._writer.call(part, call_number), NOT_ASKED, time.monotonic()
        try:
            if durability.kind != "none":
                answer, told = self._confirmer.run(call, part.orders, durability)
            elif part.may_detour:
                answer = self._clients.blocking().run_once_sent(call, for_seconds=PUBLISH_SECONDS)
            else:
                answer = self._clients.blocking().run(call, for_seconds=PUBLISH_SECONDS)
        except BaseException as error:
            if self._failed(part, lane, error, confirmed, began):
                return None
            raise
        return self._done(part, lane, answer, told, began)

    async def _aask(self, route: Router, part: ShardBatch) -> ShardBatch:
        """As `_ask`, in async code."""
        try:
            answers = await self._clients.asynchronous().run(route.question(part), for_seconds=PUBLISH_SECONDS)
        except ReliqError as error:
            self._unsent(part.orders, error, route.confirmed)
            raise
        return route.asked(part, answers)

    async def _acall(self, part: ShardBatch, confirmed: int, durability: Durability) -> list[Receipt] | None:
        """As `_call`, in async code."""
        lane, call_number = self._lanes.take(self._writer.known_by(part.orders) if self._lanes.parked else ())
        call, told, began = self._writer.call(part, call_number), NOT_ASKED, time.monotonic()
        try:
            if durability.kind != "none":
                answer, told = await self._confirmer.arun(call, part.orders, durability)
            else:
                weight = sum(len(order.value) for order in part.orders)
                answer = await self._batcher().run(call, weight, once_sent=part.may_detour)
        except BaseException as error:
            if self._failed(part, lane, error, confirmed, began):
                return None
            raise
        return self._done(part, lane, answer, told, began)

    def _done(
        self, part: ShardBatch, lane: CallSequence, answer: PublishAnswer, told: Confirmed, began: float
    ) -> list[Receipt]:
        """Return the receipts in the answer of a shard."""
        self._lanes.give_back(lane)
        done = receipts(part.orders, answer, told)
        if self._watching and done:
            self._tell(began, Counter(one.status for one in done))
        return done

    def _batcher(self) -> Batcher:
        """Return what makes the calls of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._batchers:
            for closed in [one for one in self._batchers if one.is_closed()]:  # its last task may hold it for ever
                del self._batchers[closed]
            self._batchers[loop] = Batcher(self._clients.asynchronous, for_seconds=PUBLISH_SECONDS)
        return self._batchers[loop]

    def _tell(self, began: float, outcomes: Mapping[str, int]) -> None:
        """Tell the observers how a call ended that began at `began`."""
        notify(self._watching, [PublishEnded(self._writer.keys.name, time.monotonic() - began, outcomes)])

    def _unsent(self, orders: list[PreparedMessage], error: ReliqError, confirmed: int) -> None:
        """Raise PublishFailed for what went wrong before anything was sent; the caller raises a ConfigurationError."""
        self._tell(time.monotonic(), {"refused": len(orders)})
        if not isinstance(error, ConfigurationError):
            raise self._writer.failed(orders, error, confirmed, unsent=True) from error

    def _failed(self, part: ShardBatch, lane: CallSequence, error: BaseException, confirmed: int, began: float) -> bool:
        """
        Say whether another shard may have a part whose own could not be reached.

        Else keep the number of a call whose outcome is unknown, and raise PublishFailed for what Redis did or did not do;
        the caller raises any other error.
        """
        orders = part.orders
        failure = self._writer.failed(orders, error, confirmed) if isinstance(error, ReliqError) else None
        is_refused = isinstance(error, ConfigurationError) or (failure and failure.outcome == "refused")
        if is_refused and isinstance(error, RedisUnavailableError) and part.may_detour:
            self._lanes.give_back(lane)
            return True
        self._tell(began, {"refused" if is_refused else "unknown": len(orders)})
        if is_refused:
            self._lanes.give_back(lane)
        elif not orders[0].terms.replace:  # who replaces wants it published now, whatever was before
            self._lanes.park(lane, self._writer.known_by(orders))
        if failure and not isinstance(error, ConfigurationError):
            raise failure from error
        return False


def begun(executor: Executor, call: Callable[[], T]) -> Callable[[], T]:
    """
    Begin `call` in a thread and return what waits for its answer.

    When the main thread has ended Python starts no more of them; then the call is made when its answer is asked for.
    """
    try:
        return executor.submit(call).result
    except RuntimeError:
        return call
