"""
Publishing: check the options, encode the bodies, and send the messages to their shards.

`Writer` checks options and encodes bodies. `Sender` sends the messages, with one script call to each shard. It sends
the script calls of several async tasks together, and waits until replicas or disks have confirmed the messages, as the
durability requires. After a publish, at most once a minute, `Sender` also writes the queue to the queue registry. If
that write fails, the publish is still successful.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from reliq.errors import (
    BodyError,
    ConfigurationError,
    LoginError,
    PublishFailed,
    RedisRefusedError,
    RedisUnavailableError,
    ReliqError,
)
from reliq.events import Observer, PublishEnded, Unconfirmed, notify, wanting
from reliq.keys import Keys, check_id, home, made_at, new_id, of_shard
from reliq.lua import transitions
from reliq.lua.transitions import AskStatus, CallNumber, CallSequences, Message, Messages, PublishAnswer, ReplaceMode
from reliq.message import (
    COST_LIMIT,
    COST_MARK,
    PRIORITY_LINES,
    Confirmed,
    Copied,
    Debounce,
    Duration,
    OnConflict,
    OutgoingMessage,
    Priority,
    PublishOptions,
    Receipt,
    Throttle,
)
from reliq.redis import commands, server as transport
from reliq.redis.connection import ASYNCIO, Driver, ServerVersion
from reliq.redis.server import PUBLISH_SECONDS
from reliq.redis.shards import UNREAD, ShardMap, Shards
from reliq.settings import LONGEST_SECONDS, MIB, Durability, check_int, check_is_one_of, milliseconds, seconds
from reliq.text import check_keywords, pluralize, shell_command
from reliq.wire_format import ENVELOPE_START, MAGIC, NUMBER_LIMIT, check_key, envelope_rest, open_envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from reliq.codec import Codec
    from reliq.message import Header
    from reliq.redis.client import AnyClient, Clients
    from reliq.redis.commands import Call, Command, Request, T
    from reliq.settings import QueueSettings


#: The names of the keyword arguments of `Queue.publish`.
PUBLISH_KEYWORDS = frozenset({"durability", *PublishOptions.__annotations__})
#: The confirmations of a publish whose durability requires none.
NOT_ASKED = Confirmed()


def line_of(outgoing: OutgoingMessage[Any]) -> str:
    """
    Return the name of a message's key queue, followed by its cost if the cost is above 1.

    The name is the message key, or stands for the priority, or is empty for normal priority without a key.

    Raises:
        ConfigurationError: the key, the priority or the cost is not valid, or key and priority are given.
    """
    if type(outgoing.cost) is not int or outgoing.cost != 1:
        check_int("cost", outgoing.cost, least=1, most=COST_LIMIT)
        return f"{line_of(replace(outgoing, cost=1))}{COST_MARK}{outgoing.cost}"
    if outgoing.key is None and outgoing.priority == "normal":
        return ""
    check_is_one_of("priority", outgoing.priority, get_args(Priority))
    if outgoing.key is None:
        return PRIORITY_LINES[outgoing.priority]
    if outgoing.priority != "normal":
        raise ConfigurationError(
            f"give key or priority, not both: key {outgoing.key!r:.40} takes turns with other keys; to give it more "
            "turns, use Queue(key_weights={…})"
        )
    return check_key(outgoing.key)


def when(delay: Duration, at: datetime | None) -> tuple[int | None, int]:
    """Convert `at` to unix ms and `delay` to ms; raise ConfigurationError if they are invalid or both given."""
    delay_ms = milliseconds(seconds("delay", delay))
    if at is not None and delay_ms:
        raise ConfigurationError("give delay or at, not both")
    return None if at is None else unix_ms(at), delay_ms


def unix_ms(at: datetime) -> int:
    """Convert an aware datetime to unix ms; raise ConfigurationError if it is naive or out of range."""
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise ConfigurationError("at must be an aware datetime, such as datetime.now(UTC) + timedelta(hours=1)")
    unix = at.timestamp()
    now = datetime.now(at.tzinfo).timestamp()
    if unix < 0 or unix - now > LONGEST_SECONDS:
        raise ConfigurationError(f"at must lie between 1970 and ten years from now, not {at.isoformat()}")
    return milliseconds(unix)


class Conflict(NamedTuple):
    """The option `on_conflict`, checked and converted to arguments for `transitions.replace`; not for "keep"."""

    mode: ReplaceMode
    span_ms: int = 0
    most_ms: int = 0

    @classmethod
    def of(cls, outgoing: OutgoingMessage[Any]) -> Conflict:
        """Convert the `on_conflict` of a message; raise ConfigurationError for an invalid value or combination."""
        match outgoing.on_conflict:
            case "follow" | "replace" as mode:
                conflict = cls(mode)
            case Debounce() as one:
                wait = seconds("Debounce", one.seconds, least=0.001)
                most = 10 * wait if one.max_wait is None else seconds("max_wait", one.max_wait, least=wait)
                conflict = cls("debounce", milliseconds(wait), milliseconds(most))
            case Throttle() as one:
                conflict = cls("throttle", milliseconds(seconds("Throttle", one.seconds, least=0.001)))
            case other:
                raise ConfigurationError(
                    f'on_conflict must be "keep", "follow", "replace", Debounce(seconds) or Throttle(seconds), not {other!r:.60}'
                )
        if outgoing.id is None:
            raise ConfigurationError(
                "on_conflict needs an id chosen by you: publish(..., id='cart-7', on_conflict='replace')"
            )
        others = {
            "dedup": outgoing.dedup is not None,
            "ignore_dedup": outgoing.ignore_dedup,
            "publication_id": outgoing.publication_id is not None,
            "delay or at, which Debounce computes": conflict.mode == "debounce" and (outgoing.delay or outgoing.at),
        }
        if given := [name for name, is_given in others.items() if is_given]:
            raise ConfigurationError(
                f"leave out {given[0]}: it cannot be combined with on_conflict={outgoing.on_conflict!r}"
            )
        return conflict

    @property
    def option(self) -> OnConflict:
        """The value of `on_conflict` that the publisher gave, for publishing the message again."""
        if self.mode == "debounce":
            return Debounce(self.span_ms / 1000, self.most_ms / 1000)
        return Throttle(self.span_ms / 1000) if self.mode == "throttle" else self.mode


class CallTerms(NamedTuple):
    """The publish options that are the same for all messages of one script call. Times are in ms."""

    at_ms: int | None
    delay_ms: int
    ttl_ms: int
    retries: int
    window_ms: int | None
    ignore_dedup: bool
    conflict: Conflict | None = None


class PreparedMessage(NamedTuple):
    """
    A message with checked options and encoded body, ready to be sent.

    Attributes:
        line: the name of the key queue and the cost, as returned by `line_of`.
    """

    id: str
    value: bytes
    terms: CallTerms
    line: str = ""

    @property
    def is_generated(self) -> bool:
        """Whether reliq generated the message id. Such a message may be sent to any shard."""
        return self.terms.window_ms is None


class ShardBatch(NamedTuple):
    """
    Messages that one script call publishes in one shard. They have the same options.

    Attributes:
        places: for each message, its index in the list of all messages of the publish.
        keys: the Redis keys of the shard.
        fence: the version of the shard map by which the shard was selected. A shard with a newer shard map refuses
            messages with chosen ids.
        old_home: during a resize, the shard that these ids belonged to before. It may still store earlier messages with
            these ids, so the publisher first asks it which ids are unused. None if the ids stay in their shard.
        may_detour: whether the messages may be sent to another shard if this shard cannot be reached.
    """

    orders: list[PreparedMessage]
    places: Sequence[int]
    keys: Keys
    fence: str
    old_home: Keys | None = None
    may_detour: bool = False

    def question(self) -> Call[list[AskStatus]]:
        """Return the script call that checks in `old_home`, the shard before a resize, which ids are unused there."""
        ids = [order.id for order in self.orders]
        terms = self.orders[0].terms
        ignores = terms.ignore_dedup or terms.conflict is not None
        return transitions.ask(self.old_home or self.keys, ids, fence=self.fence, replace=ignores)

    def free(self, answers: Sequence[AskStatus]) -> ShardBatch:
        """
        Return a batch with only the messages whose ids are unused in `old_home`.

        Args:
            answers: for each message, the result of the script call that `question` returns.
        """
        free = [at for at, answer in enumerate(answers) if answer == "free"]
        return self._replace(orders=[self.orders[at] for at in free], places=[self.places[at] for at in free])

    def call(
        self, terms: CallTerms, call_number: transitions.CallNumber, *, remember_ms: int = transitions.REMEMBER_MS
    ) -> Call[transitions.PublishAnswer]:
        """Return the script call that publishes the messages of this batch with the options `terms`."""
        lines = [order.line for order in self.orders]
        items = [(order.id, order.value) for order in self.orders]
        if (how := terms.conflict) is not None:
            make = partial(transitions.replace, mode=how.mode, span_ms=how.span_ms, most_ms=how.most_ms)
        else:
            make = partial(
                transitions.publish, window_ms=terms.window_ms, replace=terms.ignore_dedup, bare=self.keys.bare
            )
        return make(
            self.keys,
            items,
            call_number,
            at_ms=terms.at_ms,
            delay_ms=terms.delay_ms,
            ttl_ms=terms.ttl_ms,
            retries=terms.retries,
            fence=self.fence,
            message_keys=lines if any(lines) else None,
            remember_ms=remember_ms,
        )


def by_shard(
    orders: Mapping[int, PreparedMessage], shards: Shards, map: ShardMap, *, may_detour: bool = False
) -> list[ShardBatch]:
    """
    Group messages into batches for their shards.

    During a resize, messages of a batch also have the same old shard (see `ShardBatch.old_home`).

    Args:
        orders: the messages. Each dict key is the index of the message in the list of all messages of the publish.
        map: the shard map, which assigns each id to a shard.
        may_detour: whether a message with a generated id may be sent to another shard.
    """
    by_homes: dict[tuple[int, int], list[int]] = {}
    for place, order in orders.items():
        now = home(order.id, map.n)
        # During a resize, an earlier message with the same chosen id may still be in its old shard.
        before = now if order.is_generated else home(order.id, map.was)
        by_homes.setdefault((now, before), []).append(place)
    return [
        ShardBatch(
            [orders[place] for place in places],
            places,
            shards.keys(now),
            map.fence,
            None if now == before else shards.keys(before),
            may_detour and orders[places[0]].is_generated,
        )
        for (now, before), places in by_homes.items()
    ]


class Writer:
    """
    Checks the options of messages and encodes their bodies.

    Attributes:
        shards: the shards of the queue, as last read from Redis.
    """

    def __init__(
        self, shards: Shards, codec: Codec[Any], settings: QueueSettings, cost_burst: int | None = None
    ) -> None:
        self.keys = shards.first
        self._cost_burst = cost_burst or COST_LIMIT
        self.shards = shards
        self._codec = codec
        self._settings = settings
        self.bare = self.keys.bare
        self._usual = CallTerms(None, 0, milliseconds(settings.ttl), settings.retries, None, False)
        self._usual_start = b"" if self.bare else envelope_rest(settings.retries)

    def order(
        self, body: Any, options: PublishOptions, shard: int | None = None, *, call: str = "publish"
    ) -> PreparedMessage:
        """
        Check the options, encode `body`, and return the prepared message.

        Without options, the message gets the options of the queue and is due immediately.

        Args:
            shard: the shard of the message if its id is generated; None selects the next shard in rotation.
            call: the name of the `Queue` method that was called, for error messages.

        Raises:
            ConfigurationError: an option is not valid.
            BodyError: the body cannot be encoded or is too large.
            TypeError: an option does not exist.
        """
        if shard is None:
            known = self.shards.clients.maps.get(self.shards.entry, UNREAD)
            shard = self.shards.turn() if self.shards.wanted or known.map.n > 1 else 0
        if options:
            check_keywords(f"Queue.{call}", options, PUBLISH_KEYWORDS)
            return self.special(OutgoingMessage(body=body, **options), shard)
        return PreparedMessage(new_id(shard), self._usual_start + self._payload(body), self._usual)

    def special(self, outgoing: OutgoingMessage[Any], shard: int = 0) -> PreparedMessage:
        """Check and encode a message that has its own options; raise the same exceptions as `order`."""
        terms = self._terms(outgoing)
        id = new_id(shard) if outgoing.id is None else check_id(outgoing.id)
        payload = self._payload(outgoing.body)
        if self.bare:
            given = {
                "headers": outgoing.headers,
                "on_conflict": terms.conflict is not None,
                "publication_id": outgoing.publication_id is not None,
                "key": outgoing.key is not None,
                "priority": outgoing.priority != "normal",
                "cost": outgoing.cost != 1,
            }
            for name, is_given in given.items():
                if is_given:
                    raise ConfigurationError(
                        f"{name} cannot be sent on a queue in the hdt3213 layout: its bodies are bare"
                    )
            return PreparedMessage(id, payload, terms)
        enqueued = None if outgoing.id is None else made_at(new_id())
        number = outgoing.publication_id
        if number is not None:
            if outgoing.id is None:
                raise ConfigurationError(
                    "publication_id needs an id chosen by you: publish(..., id='order-7', publication_id=1)"
                )
            check_int("publication_id", number, most=NUMBER_LIMIT - 1)
        line = line_of(outgoing)
        if outgoing.cost > self._cost_burst:
            raise ConfigurationError(
                f"cost must be at most the burst of the queue's rate by cost, which is {self._cost_burst}, not "
                f"{outgoing.cost}: split the message, or raise burst"
            )
        origin = outgoing.origin if isinstance(outgoing, Copied) else None
        start = envelope_rest(terms.retries, enqueued, terms.window_ms, outgoing.headers, number, line, origin)
        return PreparedMessage(id, start + payload, terms, line)

    def known_by(self, orders: list[PreparedMessage]) -> Messages:
        """Return the id of each message and a hash of its body and options, for detecting a repeated publish."""
        terms = orders[0].terms
        if terms.window_ms is None:  # a repeated publish passes the generated ids as `id`, so they have a `dedup`
            terms = terms._replace(window_ms=milliseconds(self._settings.dedup))
        known = []
        for order in orders:
            header, body = self._opened(order)
            rest = body, terms, header.publication_id, header.line, frozenset(header.headers.items())
            known.append(Message(order.id, hash(rest)))
        return tuple(known)

    def failed(self, orders: list[PreparedMessage], error: ReliqError, *, unsent: bool = False) -> PublishFailed:
        """Convert `error` to a PublishFailed; `unsent` means that Redis has certainly not published the messages."""
        maybe_ran = getattr(error, "maybe_ran", False) and not unsent
        return PublishFailed(
            self.keys.name,
            tuple(order.id for order in orders),
            "unknown" if maybe_ran else "refused",
            str(error),
            advised=not isinstance(error, LoginError),  # the text of a LoginError already contains advice
            again=lambda rest: tuple(map(self._outgoing, rest)),
        )

    def _outgoing(self, order: PreparedMessage) -> OutgoingMessage[Any]:
        header, payload = self._opened(order)
        terms = order.terms
        given: dict[str, Any] = {} if header.origin is None else {"origin": header.origin}
        return (Copied if given else OutgoingMessage)(
            body=self._codec.decode(payload),
            delay=terms.delay_ms / 1000,
            at=None if terms.at_ms is None else datetime.fromtimestamp(terms.at_ms / 1000, UTC),
            id=order.id,
            retries=terms.retries,
            ttl=terms.ttl_ms / 1000,
            headers=header.headers or None,
            dedup=None if terms.window_ms is None or terms.conflict else terms.window_ms / 1000,
            ignore_dedup=terms.ignore_dedup,
            on_conflict=terms.conflict.option if terms.conflict else "keep",
            publication_id=header.publication_id,
            key=header.key,
            priority=header.priority,
            cost=header.cost,
            **given,
        )

    def _opened(self, order: PreparedMessage) -> tuple[Header, bytes]:
        start = b"" if self.bare else b"%b0" % ENVELOPE_START.encode()
        return open_envelope(start + order.value, bare=self.bare)

    def _payload(self, body: Any) -> bytes:
        payload = self._codec.encode(body)
        if len(payload) > self._settings.max_body:
            raise BodyError(f"body must be at most {self._settings.max_body} bytes (max_body), not {len(payload)}")
        if self.bare and payload.startswith(MAGIC):
            raise BodyError("body must not begin with 'RELIQ/1 ' on a queue in the hdt3213 layout")
        return payload

    def _terms(self, outgoing: OutgoingMessage[Any]) -> CallTerms:
        is_due_now = type(outgoing.delay) is float and not outgoing.delay and outgoing.at is None
        is_plain = outgoing.retries is None and outgoing.ttl is None and outgoing.id is None and outgoing.dedup is None
        conflict = None if outgoing.on_conflict == "keep" else Conflict.of(outgoing)
        if is_due_now and is_plain and not outgoing.ignore_dedup:
            return self._usual  # `Queue` has already checked its own options
        settings = self._settings
        ttl = seconds("ttl", settings.ttl if outgoing.ttl is None else outgoing.ttl, least=0.001)
        retries = settings.retries if outgoing.retries is None else check_int("retries", outgoing.retries, most=1000)
        window = None
        if outgoing.id is not None:
            dedup = settings.dedup if outgoing.dedup is None else outgoing.dedup
            window = 0 if conflict else milliseconds(seconds("dedup", dedup))
        elif outgoing.dedup is not None:
            raise ConfigurationError("dedup needs an id chosen by you: publish(..., id='report-7', dedup=86400)")
        due = when(outgoing.delay, outgoing.at)
        return CallTerms(*due, milliseconds(ttl), retries, window, bool(outgoing.ignore_dedup), conflict)


#: A publishing process writes its queue to the queue registry at most once in this many seconds. For this time after
#: a write, `reliq delete` refuses to delete the queue, because the process would not yet write it again.
NAMING_SECONDS = 60.0
OLDEST_WITH_WAITAOF = (7, 2)
#: One round trip to Redis contains at most this many script calls.
TOGETHER_LIMIT = 500
#: One round trip to Redis contains at most this many bytes of messages, unless a single script call is larger.
TOGETHER_BYTES = 8 * MIB
#: If Redis has not replied to a round trip after this many seconds, the next round trip starts in parallel.
OVERLAP_SECONDS = 0.1
#: If a shard cannot be reached, messages with generated ids are sent to another shard, at most this many times for
#: one publish.
DETOURS = 2
#: Seconds until a publish tries again, if the earlier message with the same id is about to become a dead letter or to
#: move to another shard.
ENDING_SECONDS = 0.05
#: If a shard reports a newer shard map, a publish reads the shard map from Redis and tries again, at most this many
#: times.
LOOKS = 5

_SERVER_FACTS = (commands.server_facts("server"), commands.server_facts("persistence"))


def registration(keys: Keys, clients: Clients) -> Command[None] | None:
    """
    Return the command that writes a queue to the queue registry; the caller runs it.

    Return None if this process has already written the queue in the last NAMING_SECONDS.
    """
    now = time.monotonic()
    named = clients.connection().named
    if named.get(keys.entry, 0.0) > now:
        return None
    named[keys.entry] = now + NAMING_SECONDS
    return commands.register([keys.entry], int(time.time()))


class Confirmer:
    """Publishes batches and waits for their confirmations, with clients that wait longer than usual for a reply."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._has_waitaof = False

    async def run(
        self, driver: Driver, call: Call[PublishAnswer], part: ShardBatch, durability: Durability
    ) -> tuple[PublishAnswer, Confirmed]:
        """
        Publish a batch, and wait until replicas or disks confirm it; notify the observers if they do not.

        Raises:
            ConfigurationError: the Redis server does not support this durability. Nothing was published.
            RedisUnavailableError, RedisRefusedError: the script call failed.
        """
        client = self._clients.driven(driver, longer_seconds(durability))
        if durability.kind == "aof" and not self._has_waitaof:
            self._check_server(await client.run_all(_SERVER_FACTS, for_seconds=PUBLISH_SECONDS), durability)
        confirmation = commands.confirmation(durability)
        answer, confirmed = await client.run_confirmed(call, confirmation, for_seconds=PUBLISH_SECONDS)
        if isinstance(confirmed, Exception):
            why = str(confirmed)
            confirmed = Confirmed(durable=False)
        else:
            disk = (
                "" if confirmed.on_disk is None else f", own file {'on disk' if confirmed.on_disk else 'not on disk'}"
            )
            replicas = f"{confirmed.replicas} of {pluralize(durability.count, 'replica')}"
            why = f"{replicas}{disk} within {durability.timeout:g} s"
        if not confirmed.durable:
            notify(client.observers, [Unconfirmed(part.keys.name, tuple(order.id for order in part.orders), why)])
        return answer, confirmed

    def _check_server(self, answers: Sequence[dict[str, str] | Exception], durability: Durability) -> None:
        """
        Raise ConfigurationError if the server has no WAITAOF, or if `durability` requires its AOF, which is off.

        A server that hides its version is accepted.
        """
        server, persistence = ({} if isinstance(facts, Exception) else facts for facts in answers)
        version = ServerVersion.read(server)
        if version.is_before(OLDEST_WITH_WAITAOF):
            raise ConfigurationError(
                f"durability by aof needs Redis 7.2 or newer (WAITAOF), not {version.text}; "
                f"Durability.replicas(1) works with every version"
            )
        if durability.local and persistence.get("aof_enabled") == "0":
            raise ConfigurationError("durability by aof needs `appendonly yes` in the server's redis.conf")
        self._has_waitaof = True


def longer_seconds(durability: Durability) -> float:
    """
    Return how many seconds to wait for the reply of Redis, in addition to the usual timeout.

    The number is rounded up to a power of two, because clients with different timeouts use separate connections.
    """
    return float(2 ** math.ceil(math.log2(max(1.0, seconds("timeout", durability.timeout)))))


class Waiting(NamedTuple):
    """A request to Redis, its size in bytes, and the future that gets its result."""

    request: Request[Any]
    weight: int
    answer: asyncio.Future[Any]


class Batcher:
    """
    Sends the requests of many async tasks to Redis in shared round trips.

    The first request is sent immediately. Requests that arrive during a round trip wait for the next round trip.
    """

    def __init__(self, client: Callable[[], AnyClient], *, for_seconds: float) -> None:
        self._client = client
        self._for_seconds = for_seconds
        self._waiting: deque[Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        # These references keep the tasks alive, because the event loop itself has only weak references to tasks.
        self._rounds: set[asyncio.Task[None]] = set()

    async def run(self, request: Request[T], weight: int, *, once_sent: bool = False) -> T:
        """
        Send a request and return its result, like `AnyClient.run`.

        If the calling task is cancelled, the request is sent nevertheless.

        Args:
            weight: the size of the request in bytes.
            once_sent: whether to raise RedisUnavailableError immediately, without a retry, if the request certainly did
                not run.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(request, weight, future))
        if self._task is None:
            self._start()
        answer = await future
        if isinstance(answer, RedisUnavailableError):  # the other requests of the round trip are not retried
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
        """Start a new task if requests still wait, because the end of an event loop can cancel the task too early."""
        self._task = None
        self._waiting = deque(call for call in self._waiting if not call.answer.done())
        if self._waiting:
            self._start()

    async def _run_all(self) -> None:
        while self._waiting:
            together = [self._waiting.popleft()]
            weight = together[0].weight
            while self._waiting and len(together) < TOGETHER_LIMIT:
                weight += self._waiting[0].weight
                if weight > TOGETHER_BYTES:
                    break
                together.append(self._waiting.popleft())
            trip = asyncio.create_task(self._make(together))
            self._rounds.add(trip)
            trip.add_done_callback(self._rounds.discard)
            await asyncio.wait([trip], timeout=OVERLAP_SECONDS)

    async def _make(self, together: list[Waiting]) -> None:
        """Send the requests in one round trip, and set the results of the requests whose callers still wait."""
        try:
            answers = await self._client().run_all([call.request for call in together], for_seconds=self._for_seconds)
        except asyncio.CancelledError:
            for call in together:
                call.answer.cancel()
            raise
        except Exception as error:
            for call in together:
                if not call.answer.done():
                    call.answer.set_exception(error)
            return
        for call, answer in zip(together, answers, strict=True):
            if not call.answer.done():
                call.answer.set_result(answer)


def _move(orders: list[PreparedMessage], places: Sequence[int], shard: int) -> None:
    """Assign the messages at the indexes `places` to another shard, by changing their generated ids."""
    for at in places:
        orders[at] = orders[at]._replace(id=of_shard(orders[at].id, shard))


def check_one_shard(shards: Shards) -> None:
    """Raise ConfigurationError if a queue has several shards, because keys and limits need a single shard."""
    if (count := max(shards.map.served, shards.wanted or 1)) > 1:
        raise ConfigurationError(
            f"queue {shards.first.name!r} has {count} shards: keys, priorities, costs and limits need a queue of one shard"
        )


class Sender:
    """Sends the messages of one queue to Redis, through a blocking or an async client."""

    def __init__(
        self, writer: Writer, shards: Shards, lanes: CallSequences, clients: Clients, observers: Sequence[Observer] = ()
    ) -> None:
        self._writer = writer
        self._shards = shards
        self._lanes = lanes
        self._clients = clients
        self._confirmer = Confirmer(clients)
        self._watching = wanting(observers, PublishEnded)
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher] = weakref.WeakKeyDictionary()

    async def send(
        self,
        driver: Driver,
        orders: list[PreparedMessage],
        confirmed: int = 0,
        durability: Durability = Durability.NONE,
    ) -> list[Receipt]:
        """
        Send messages to Redis, and return their receipts.

        In async code, many tasks share round trips. With `on_conflict`, try again for up to 2 s while an earlier
        message with the same id is about to become a dead letter or to move to another shard.

        Args:
            orders: the messages.
            confirmed: how many messages of the same `publish_many` were published before. This number is added to
                `PublishFailed.confirmed`.

        Raises:
            PublishFailed: Redis is unavailable or refuses the messages.
        """
        done = await self._send(driver, orders, confirmed, durability)
        until = time.monotonic() + PUBLISH_SECONDS
        while ending := {at: orders[at] for at, receipt in enumerate(done) if receipt.status == "ending"}:
            left = [*ending.values()]
            if time.monotonic() > until:
                why = f"message {left[0].id} is about to become a dead letter or to move to another shard"
                failed = self._writer.failed(left, RedisRefusedError(why), unsent=True)
                failed.orders, failed.confirmed = left, confirmed + sum(bool(receipt) for receipt in done)
                raise failed
            await driver.sleep(ENDING_SECONDS)
            for at, receipt in zip(ending, await self._send(driver, left, confirmed, durability), strict=True):
                done[at] = receipt
        return done

    async def _send(
        self, driver: Driver, orders: list[PreparedMessage], confirmed: int, durability: Durability
    ) -> list[Receipt]:
        clients = self._clients
        known = clients.maps.get(self._shards.entry, UNREAD)
        map = known.map
        done = None
        receipts: dict[int, Receipt] = {}
        try:
            # If the shard map was read recently and has only one shard, send all messages in one script call. Group
            # them by shard only if this shard refuses them.
            is_whole = (
                (map.n == map.was == 1 and self._shards.wanted in (None, 1))
                and time.monotonic() < known.until
                and clients.epoch is transport.epoch
            )
            if is_whole:
                fence = "" if orders[0].terms.window_ms is None else map.fence
                part = ShardBatch(orders, range(len(orders)), self._shards.first, fence)
                done = await self._call(driver, part, durability)
            if not done:
                await self._by_shard(driver, orders, receipts, durability, is_stale=is_whole)
                done = [receipts[at] for at in range(len(orders))]
        except PublishFailed as failed:
            failed.orders = [order for at, order in enumerate(orders) if at not in receipts]
            failed.confirmed = confirmed + sum(bool(receipt) for receipt in receipts.values())
            raise
        if time.monotonic() >= clients.named.get(self._shards.entry, 0.0):
            entry = registration(self._writer.keys, clients)
            with suppress(ReliqError):
                if entry:
                    await clients.driven(driver).run(entry)
        return done

    async def _by_shard(
        self,
        driver: Driver,
        orders: list[PreparedMessage],
        receipts: dict[int, Receipt],
        durability: Durability,
        *,
        is_stale: bool,
    ) -> None:
        """
        Send messages to their shards, and store their receipts in `receipts`, by the index of the message in `orders`.

        If a shard reports a newer shard map, read it from Redis and try again. If a shard cannot be reached, give its
        messages with generated ids new ids of another shard.

        Args:
            is_stale: whether a shard has already reported that the shard map of this process is outdated.
        """
        shards = self._shards
        map = shards.map
        looks = 0
        detours = DETOURS
        while unsent := {at: order for at, order in enumerate(orders) if at not in receipts}:
            try:
                if is_stale:
                    looks += 1
                    await shards.read(driver, for_seconds=PUBLISH_SECONDS)
                else:
                    await shards.refresh(driver)
                if looks > LOOKS:
                    name = shards.first.name
                    raise RedisRefusedError(
                        f"a shard of queue {name!r} has a later shard map than {shards.first.map!r}, which has epoch "
                        f"{map.epoch}: a failover may have lost the later map; restore it with: "
                        + shell_command("check", name, options=["--repair"])
                    )
                if map.n == 1 < shards.map.n:  # these ids were generated when the queue had one shard
                    _move(orders, [at for at, order in unsent.items() if order.is_generated], shards.turn())
                    unsent = {at: orders[at] for at in unsent}
                map = shards.map
                if map.served > 1 and any(order.line for order in orders):
                    check_one_shard(shards)
                parts = by_shard(unsent, shards, map, may_detour=map.n > 1 and detours > 0)
                parts = await self._ask_old_homes(driver, parts, receipts)
            except ReliqError as error:
                self._notify_ended(time.monotonic(), {"refused": len(unsent)})
                if isinstance(error, ConfigurationError):
                    raise
                raise self._writer.failed(orders=[*unsent.values()], error=error, unsent=True) from error
            # If a shard refuses its messages, the next try first reads the shard map from Redis. After an unreachable
            # shard, this is not needed.
            is_stale = True
            for part in parts:
                done = await self._call(driver, part, durability)
                if done is not None:
                    receipts.update(zip(part.places, done, strict=False))
                    continue
                is_stale = False
                detours -= 1
                shard = shards.turn()
                _move(orders, part.places, shards.turn() if shard == part.keys.shard else shard)

    async def _ask_old_homes(
        self, driver: Driver, parts: list[ShardBatch], receipts: dict[int, Receipt]
    ) -> list[ShardBatch]:
        """
        During a resize, check in the old shards which ids are in use there.

        Store receipts for the messages whose ids are in use, and return batches with the other messages.
        """
        ready = []
        for part in parts:
            if part.old_home is None:
                ready.append(part)
                continue
            statuses = await self._clients.driven(driver).run(part.question(), for_seconds=PUBLISH_SECONDS)
            terms = part.orders[0].terms
            due = (time.time() * 1000 + terms.delay_ms if terms.at_ms is None else terms.at_ms) / 1000
            for place, order, status in zip(part.places, part.orders, statuses, strict=True):
                if status == "duplicate" and terms.conflict:  # the earlier message with this id is about to move
                    receipts[place] = Receipt(order.id, "ending", due)
                elif status != "free" and status != "stale":  # noqa: PLR1714  mypy does not narrow a tuple
                    receipts[place] = Receipt(order.id, status, due)
            if "free" in statuses:
                ready.append(part.free(statuses))
        return ready

    async def _call(self, driver: Driver, part: ShardBatch, durability: Durability) -> list[Receipt] | None:
        """
        Send a batch to its shard.

        Returns:
            The receipts of the messages. An empty list if the shard has refused the batch because of a newer shard map.
            None if the shard could not be reached and the batch may be sent to another shard.
        """
        call_number = self._lanes.take(self._writer.known_by(part.orders) if self._lanes.parked else ())
        call = part.call(part.orders[0].terms, call_number)
        confirmations = NOT_ASKED
        began = time.monotonic()
        try:
            if durability.kind != "none":
                answer, confirmations = await self._confirmer.run(driver, call, part, durability)
            elif driver is ASYNCIO:
                weight = sum(len(order.value) for order in part.orders)
                answer = await self._batcher().run(call, weight, once_sent=part.may_detour)
            else:
                client = self._clients.blocking().driven
                answer = await client.run(call, for_seconds=PUBLISH_SECONDS, once_sent=part.may_detour)
        except BaseException as error:
            if self._failed(part, call_number, error, began):
                return None
            raise
        self._lanes.give_back(call_number)
        refused, due_ms, dues_ms = answer.refused, answer.due_ms, answer.dues_ms
        done = [
            Receipt(order.id, refused.get(at, "published"), dues_ms.get(at, due_ms) / 1000, *confirmations)
            for at, order in enumerate(() if answer.is_stale else part.orders)
        ]
        if self._watching and done:
            self._notify_ended(began, Counter(receipt.status for receipt in done))
        return done

    def _batcher(self) -> Batcher:
        """Return the `Batcher` of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._batchers:
            # Remove closed event loops, because their last tasks can keep them in memory. `keyrefs` returns a copy, so
            # other threads may add event loops at the same time.
            for reference in self._batchers.keyrefs():
                if (known := reference()) and known.is_closed():
                    self._batchers.pop(known, None)
            self._batchers[loop] = Batcher(self._clients.asynchronous, for_seconds=PUBLISH_SECONDS)
        return self._batchers[loop]

    def _notify_ended(self, began: float, outcomes: Mapping[str, int]) -> None:
        """Notify the observers that a script call has ended; `began` is its start by `time.monotonic`."""
        notify(self._watching, [PublishEnded(self._writer.keys.name, time.monotonic() - began, outcomes)])

    def _failed(self, part: ShardBatch, call_number: CallNumber, error: BaseException, began: float) -> bool:
        """
        Handle the error of a failed script call. Return True if the caller may send the batch to another shard.

        This is possible if the shard of the batch could not be reached. For other errors of Redis, raise PublishFailed.
        For all other errors, return False, and the caller raises them. If Redis may have run the script call, keep its
        call number. With this number, a repeated publish does not publish the messages twice.
        """
        orders = part.orders
        failure = self._writer.failed(orders, error) if isinstance(error, ReliqError) else None
        is_refused = isinstance(error, ConfigurationError) or (failure and failure.outcome == "refused")
        if is_refused and isinstance(error, RedisUnavailableError) and part.may_detour:
            self._lanes.give_back(call_number)
            return True
        self._notify_ended(began, {"refused" if is_refused else "unknown": len(orders)})
        if is_refused:
            self._lanes.give_back(call_number)
        # With `ignore_dedup` or `on_conflict`, a repeated publish gets a new call number.
        elif not (orders[0].terms.ignore_dedup or orders[0].terms.conflict):
            self._lanes.park(call_number, self._writer.known_by(orders))
        if failure and not isinstance(error, ConfigurationError):
            raise failure from error
        return False


def begun(executor: Executor, call: Callable[[], T]) -> Callable[[], T]:
    """
    Run `call` in a thread, and return a function that waits for its result.

    After the end of the main thread, Python cannot start threads. Then the returned function runs `call` itself.
    """
    try:
        return executor.submit(call).result
    except RuntimeError:
        return call
