"""
What a consumer registers: handlers by queue, middleware, error hooks, and periodic entries by `cron` and `every`.

A periodic entry publishes a message for each tick of its schedule. Every process plans the same ticks, and Redis settles
each tick once.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict, TypeVar, Unpack, get_args, overload

from reliq.errors import ConfigurationError
from reliq.handlers.handler import Handler, Job, check_manager, check_takes, function_name
from reliq.keys import run_id, tick_id
from reliq.lua.transitions import Tick
from reliq.publish import Writer
from reliq.queue import Queue
from reliq.redis.server import Connection, check_slots
from reliq.schedule import Schedule
from reliq.settings import DAY_SECONDS, HandlerSettings, check_is_one_of, milliseconds, seconds
from reliq.text import check_keywords

if TYPE_CHECKING:
    from datetime import datetime

    from tenacity.wait import wait_base

    from reliq.message import Duration
    from reliq.redis.url import Target


B = TypeVar("B")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound="Callable[[Job[Any], BaseException, bool], Any]")

CatchUp = Literal["skip", "latest", "all"]
Overlap = Literal["allow", "skip"]

#: The header of a tick's message: the tick in ISO 8601.
TICK_HEADER = "reliq-tick"
#: A tick that comes no later than so many seconds is on time, not made up for.
ON_TIME_SECONDS = 60.0
#: One step looks at this many ticks of an entry; after a long absence it takes several.
STEP_TICKS = 100

#: Stands for a body that a decorated function makes.
_FROM_FUNCTION = object()
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class Options(TypedDict, total=False):
    """The options of `Consumer.handler`; `HandlerSettings` has the defaults."""

    lease: Duration
    timeout: Duration | None
    concurrency: int | None
    weight: int
    backoff: wait_base
    retry_on: type[Exception] | tuple[type[Exception], ...]
    reject_on: type[Exception] | tuple[type[Exception], ...]
    on_decode_error: Literal["retry", "reject"]


class BatchOptions(Options, total=False):
    """The options of `Consumer.handler` with `batch`."""

    linger: Duration | None
    batch_by_key: bool


class Register(Protocol[B]):
    """The decorator that `Consumer.handler(queue)` returns; it leaves the function as it is."""

    @overload
    def __call__(self, function: Callable[[B], R], /) -> Callable[[B], R]: ...
    @overload
    def __call__(self, function: Callable[[B, Job[B]], R], /) -> Callable[[B, Job[B]], R]: ...


class RegisterBatch(Protocol[B]):
    """The decorator that `Consumer.handler(queue, batch=...)` returns."""

    @overload
    def __call__(self, function: Callable[[list[B]], R], /) -> Callable[[list[B]], R]: ...
    @overload
    def __call__(self, function: Callable[[list[B], list[Job[B]]], R], /) -> Callable[[list[B], list[Job[B]]], R]: ...


class PeriodicOptions(TypedDict, total=False):
    """The options that `cron` and `every` share; `Periodic` has the defaults."""

    jitter: Duration
    catch_up: CatchUp
    misfire_grace_time: Duration
    overlap: Overlap


class CronOptions(PeriodicOptions, total=False):
    """The options of `cron`."""

    tz: str


#: The keyword arguments of `Consumer.every`.
_EVERY_KEYWORDS = frozenset({"queue", "body", "name", *PeriodicOptions.__annotations__})


class Makes(Protocol[B]):
    """The decorator that `cron` and `every` return without a body; it leaves the function as it is."""

    def __call__(self, function: Callable[[datetime], B], /) -> Callable[[datetime], B]:
        """Register the function that makes the body."""


class Planned(NamedTuple):
    """A tick to settle, in unix seconds: up to which tick all is done, how many are missed, whether it is published."""

    at: int
    since: int
    missed: int
    is_published: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Periodic:
    """
    One periodic entry.

    Attributes:
        body: what its messages carry, or a function that makes it from the tick, an aware datetime.
        jitter: each message is due up to so many seconds after its tick; the same for a tick in every process.
        catch_up: which ticks are made up for that passed while no process was there: none, the last, or all.
        misfire_grace_time: seconds after which a tick is not made up for.
        overlap: `skip` publishes nothing while the entry's last message is alive.
    """

    name: str
    queue: Queue[Any]
    schedule: Schedule
    body: Any
    jitter: Duration = 0.0
    catch_up: CatchUp = "latest"
    misfire_grace_time: Duration = DAY_SECONDS
    overlap: Overlap = "allow"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            raise ConfigurationError(
                f"a periodic entry's name must be 1 to 100 of A-Z a-z 0-9 _ . - , not {str(self.name)[:80]!r}"
            )
        if not isinstance(self.queue, Queue):
            raise ConfigurationError(f"queue of {self} must be a Queue, not {type(self.queue).__name__}")
        if inspect.iscoroutinefunction(self.body):
            raise ConfigurationError(f"the function that makes the body of {self} must be plain: nobody awaits it")
        check_is_one_of("catch_up", self.catch_up, get_args(CatchUp))
        check_is_one_of("overlap", self.overlap, get_args(Overlap))
        seconds("misfire_grace_time", self.misfire_grace_time, least=ON_TIME_SECONDS)
        seconds("jitter", self.jitter, most=DAY_SECONDS)
        if not callable(self.body):
            self.run(0)  # a body that cannot be sent is refused now

    def __str__(self) -> str:
        return f"periodic entry {self.name!r}"

    def plan(self, last: int, now: int) -> list[Planned]:
        """
        Return what is to be settled `now` when all is done up to the tick `last`, in unix seconds, oldest first.

        After a long absence it is the beginning of that, of STEP_TICKS ticks.
        """
        within = ON_TIME_SECONDS if self.catch_up == "skip" else seconds("misfire_grace_time", self.misfire_grace_time)
        ticks = self.schedule.ticks(last, now, most=STEP_TICKS + 1)
        newest = ticks[-1:]
        ticks = ticks[:STEP_TICKS]
        planned: list[Planned] = []
        missed = 0
        for tick in ticks:
            if now - tick <= within and (self.catch_up == "all" or [tick] == newest):
                planned.append(Planned(tick, last, missed, is_published=True))
                last = tick
                missed = 0
            else:
                missed += 1
        if missed:
            planned.append(Planned(ticks[-1], last, missed, is_published=False))
        return planned

    def tick(self, planned: Planned) -> Tick:
        """Return what settles a tick; raise what its body raises."""
        tick = Tick(self.name, str(self.schedule), planned.at, planned.since, planned.missed)
        if not planned.is_published:
            return tick
        message = self._message(tick_id(self.name, planned.at), planned.at)
        # The jitter is random over ticks, and the same in every process.
        digest = hashlib.sha256(f"{self.name} {planned.at}".encode()).digest()
        jitter_ms = int.from_bytes(digest[:8], "big") % (milliseconds(self.jitter) + 1)
        return replace(tick, message=message, due_ms=planned.at * 1000 + jitter_ms, overlap=self.overlap)

    def run(self, asked_ms: int) -> Tick:
        """Return the tick of a requested run; raise what its body raises."""
        at = asked_ms // 1000
        message = self._message(run_id(self.name, asked_ms), at)
        return Tick(self.name, str(self.schedule), at, at, message=message, asked=asked_ms)

    def _message(self, id: str, at: int) -> tuple[str, bytes]:
        """Return id and value of a message; the id is its own alone, so that it need not stay taken after its end."""
        moment = self.schedule.moment(at)
        body = self.body(moment) if callable(self.body) else self.body
        headers = {} if self.queue.keys.bare else {TICK_HEADER: moment.isoformat()}
        writer = Writer(self.queue.known_shards, self.queue.codec, self.queue.settings)
        order = writer.order(body, {"id": id, "dedup": 0, "headers": headers})
        return order.id, order.value


class Registration:
    """The handlers of a consumer by queue, the middleware and error hooks for all of them, and its periodic entries."""

    def __init__(self, target: Target | None = None) -> None:
        self.target = target
        self._handlers: dict[str, Handler] = {}
        self._periodic: dict[str, Periodic] = {}
        #: The middleware of every call, the outermost first.
        self.around_calls: list[Callable[[Job[Any]], Any]] = []
        #: The hooks that are called for each failure.
        self.error_hooks: list[Callable[[Job[Any], BaseException, bool], Any]] = []

    @property
    def handlers(self) -> Sequence[Handler]:
        """The registered handlers."""
        return tuple(self._handlers.values())

    @property
    def periodic(self) -> Sequence[Periodic]:
        """The registered periodic entries."""
        return tuple(self._periodic.values())

    @overload
    def cron(self, expression: str, *, queue: Queue[B], name: str = "", **options: Unpack[CronOptions]) -> Makes[B]: ...

    @overload
    def cron(
        self,
        expression: str,
        *,
        queue: Queue[B],
        body: B | Callable[[datetime], B],
        name: str,
        **options: Unpack[CronOptions],
    ) -> None: ...

    def cron(
        self,
        expression: str,
        *,
        queue: Queue[Any],
        body: Any = _FROM_FUNCTION,
        name: str = "",
        tz: str = "UTC",
        **options: Unpack[PeriodicOptions],
    ) -> Any:
        """
        Publish a message at each tick of a cron expression, by the process of the consumer that comes first.

        With `body` it registers the entry at once. Without, it decorates the function that makes the body from the tick,
        an aware datetime in `tz`; every process may call it, more than once for a tick, so it must be quick and only
        compute. A message's id is `cron.NAME.UNIX`, its header `reliq-tick` has the tick in ISO 8601.

        Args:
            expression: minute, hour, day of the month, month, day of the week; in UTC, or the time zone `tz`.
            queue: gets the messages, on its terms; its handler may be another consumer's.
            body: a value of the queue's type, or a function that makes one from the tick.
            name: 1 to 100 of A-Z a-z 0-9 _ . -, which no other entry has; of a decorated function its own by default.
            tz: the name of a time zone, such as Europe/Berlin.
            jitter: seconds or timedelta up to which each message is due later than its tick (0).
            catch_up: which ticks are made up for that passed while no process was there: `skip` for none, `latest` for
                the last one (the default), `all`.
            misfire_grace_time: seconds or timedelta after which a tick is not made up for (a day).
            overlap: `skip` publishes nothing while the entry's last message is alive (`allow`).

        Raises:
            ConfigurationError: an argument is not allowed, or another entry has that name.
            BodyError: the body cannot be encoded.

        Example:
            @consumer.cron("0 6 * * *", queue=reports, tz="Europe/Berlin")
            def daily_report(tick: datetime) -> Report:
                return Report(day=tick.date())
        """
        check_keywords("Consumer.cron", options, {"tz", *_EVERY_KEYWORDS})
        return self._enter(Schedule.cron(expression, tz), queue, body, name, options)

    @overload
    def every(
        self, interval: Duration, *, queue: Queue[B], name: str = "", **options: Unpack[PeriodicOptions]
    ) -> Makes[B]: ...

    @overload
    def every(
        self,
        interval: Duration,
        *,
        queue: Queue[B],
        body: B | Callable[[datetime], B],
        name: str,
        **options: Unpack[PeriodicOptions],
    ) -> None: ...

    def every(
        self,
        interval: Duration,
        *,
        queue: Queue[Any],
        body: Any = _FROM_FUNCTION,
        name: str = "",
        **options: Unpack[PeriodicOptions],
    ) -> Any:
        """
        As `cron`, at equal intervals of whole seconds, counted from 1970 in UTC: every 5 minutes is 12:00, 12:05, ….

        Example: `consumer.every(timedelta(minutes=5), queue=checks, body=Check("all"), name="checks")`
        """
        check_keywords("Consumer.every", options, _EVERY_KEYWORDS)
        return self._enter(Schedule.every(interval), queue, body, name, options)

    def _enter(self, schedule: Schedule, queue: Queue[Any], body: Any, name: str, options: PeriodicOptions) -> Any:
        if body is not _FROM_FUNCTION:
            return self._add(Periodic(name=name, queue=queue, schedule=schedule, body=body, **options))

        def register(function: F) -> F:
            if not callable(function):
                raise ConfigurationError(f"the function that makes a body must be one, not a {type(function).__name__}")
            entry_name = name or getattr(function, "__name__", "")
            self._add(Periodic(name=entry_name, queue=queue, schedule=schedule, body=function, **options))
            return function

        return register

    def _add(self, *entries: Periodic) -> None:
        for entry in entries:
            if entry.name in self._periodic:
                raise ConfigurationError(
                    f"two periodic entries are called {entry.name!r}; give one of them another name="
                )
        self._periodic |= {entry.name: entry for entry in entries}

    @overload
    def handler(self, queue: Queue[B], **options: Unpack[Options]) -> Register[B]: ...

    @overload
    def handler(self, queue: Queue[B], *, batch: int, **options: Unpack[BatchOptions]) -> RegisterBatch[B]: ...

    @overload
    def handler(self, queue: str, *, batch: int | None = None, **options: Unpack[BatchOptions]) -> Callable[[F], F]: ...

    def handler(self, queue: Queue[Any] | str, *, batch: int | None = None, **options: Unpack[BatchOptions]) -> Any:
        """
        Register the decorated function, plain or async, for the messages of `queue`; the function stays as it is.

        The function takes the body and, as an optional second parameter, the `Job`. Returning acks; `Nack`, `Reject`, `Snooze`
        and `RateLimited` may be returned or raised; any other exception nacks with backoff.

        With `batch` it takes a list of bodies and, as an optional second parameter, the list of their jobs, on one
        slot. Its answer or exception then holds for every message, unless it returns a list with an answer for each,
        in their order (None acks). A body that does not decode is left out; a message that may have killed its
        worker, or has no retry left, comes alone.

        Args:
            queue: a `Queue`, or the name of an untyped one.
            batch: the most messages in one call (1..500); None for a function that takes one body.
            linger: seconds that a batch waits at most to be full (0.05), from its first message on.
            batch_by_key: whether all messages of a batch have the same key; those without one come together, too.
            lease: seconds after which a silent worker's message goes to another (30); renewed while the handler runs.
            timeout: seconds a call may take (600), or None. A coroutine is cancelled; a thread, or a coroutine that
                goes on all the same, ends with its process.
            concurrency: the most calls for this queue that run at once in a process.
            weight: this queue's share of free slots.
            backoff: tenacity's wait strategy between a failure and the next delivery.
            retry_on: exceptions after which the message is delivered again; after others it is rejected.
            reject_on: exceptions after which the message is rejected, even if they are in `retry_on`.
            on_decode_error: `retry` a body that does not decode with backoff, or `reject` it at once.

        Raises:
            ConfigurationError: a setting or the signature is not allowed, or the queue has a handler.

        Example:
            @consumer.handler(orders, timeout=60, concurrency=4)
            def ship(order: Order, job: Job) -> None: ...
        """
        if not isinstance(queue, Queue | str):
            if callable(queue):
                raise ConfigurationError(f"say which queue {function_name(queue)} handles: @consumer.handler(QUEUE)")
            raise ConfigurationError(f"handler takes a Queue or the name of one, not {type(queue).__name__}")
        check_keywords("Consumer.handler", options, HandlerSettings.__dataclass_fields__)
        settings = HandlerSettings(batch=batch, **options)  # type: ignore[arg-type]  # a single class becomes a tuple there

        def register(function: F) -> F:
            handler = Handler(queue, function, settings)
            self._check_is_new(handler)
            self._handlers[handler.queue.name] = handler
            return function

        return register

    def middleware(self, around: Callable[[Job[Any]], Any]) -> Callable[[Job[Any]], Any]:
        """
        Register a function that returns a context manager for each handler call; the first is the outermost.

        Of a batch it is called for each message.

        Raises:
            ConfigurationError: it does not take a job, or cannot return a context manager.
        """
        check_manager("middleware", around, "job")
        self.around_calls.append(around)
        return around

    def on_error(self, hook: E) -> E:
        """
        Register a plain function that is called for each failure, `hook(job, error, final)`; for error trackers.

        A failure is an exception, a handler that overran its timeout (`TimeoutError`), a body that does not decode
        (`UndecodableError`; `job.body` are its bytes), or a `Nack` after which no retry is left. Other answers are
        none. With `final` the message becomes a dead letter. Of a batch it is called for each message, and always in
        the thread of the handler before its answer is on its way; be quick. What it raises is logged and passed over.

        Raises:
            ConfigurationError: it is async, or does not take three arguments.
        """
        if not callable(hook):
            raise ConfigurationError(f"an on_error hook must be a function, not a {type(hook).__name__}")
        if inspect.iscoroutinefunction(hook):
            raise ConfigurationError(f"on_error {function_name(hook)} must be a plain function: nobody awaits it")
        check_takes(f"on_error {function_name(hook)}", hook, "job", "error", "final")
        self.error_hooks.append(hook)
        return hook

    def chosen(self, queues: Sequence[str]) -> list[Handler]:
        """
        Return the handlers of `queues`, of all when none is named.

        Raises:
            ConfigurationError: there is no such queue, or a middleware is for coroutines alone and a handler is none.
        """
        if not self._handlers:
            raise ConfigurationError("this consumer has no handlers; decorate one with @consumer.handler(QUEUE)")
        if unknown := [name for name in queues if name not in self._handlers]:
            raise ConfigurationError(f"no handler for queue {unknown[0]!r}; there are: {', '.join(self._handlers)}")
        chosen = [handler for name, handler in self._handlers.items() if not queues or name in queues]
        plain = next((handler for handler in chosen if not handler.is_async), None)
        for around in self.around_calls:
            is_async_class = (
                isinstance(around, type) and hasattr(around, "__aenter__") and not hasattr(around, "__enter__")
            )
            if plain and (is_async_class or inspect.isasyncgenfunction(inspect.unwrap(around))):
                raise ConfigurationError(
                    f"middleware {function_name(around)} is an async context manager, and handler "
                    f"{function_name(plain.function)} of queue {plain.queue.name!r} is plain; make the middleware a plain one, "
                    "or the handler async"
                )
        return chosen

    def ticked_beside(self, handlers: Sequence[Handler]) -> list[Periodic]:
        """Return the periodic entries of a process with these handlers: of their queues, and of queues without one here."""
        others = self._handlers.keys() - {handler.queue.name for handler in handlers}
        return [entry for entry in self.periodic if entry.queue.name not in others]

    def redis(self, handlers: Sequence[Handler]) -> Target | None:
        """Return the one Redis of the consumer and its queues, None for RELIQ_URL; raise ConfigurationError for two."""
        queues = [handler.queue for handler in handlers] + [entry.queue for entry in self.ticked_beside(handlers)]
        named = [self.target, *(queue.target for queue in queues)]
        targets = [target for target in named if target is not None]
        if any(target != targets[0] for target in targets):
            raise ConfigurationError("the consumer and its queues name different Redis servers; name one")
        for queue in queues:
            check_slots(targets[0] if targets else None, queue.layout)
        return targets[0] if targets else None

    def connection(self, handlers: Sequence[Handler]) -> Connection:
        """Return the connection to the one Redis of the consumer and its queues; raise as `redis` does."""
        return Connection.to(self.redis(handlers))

    def _check_is_new(self, handler: Handler) -> None:
        name = handler.queue.name
        if name in self._handlers:
            raise ConfigurationError(f"queue {name!r} has two handlers: {self._handlers[name].name} and {handler.name}")
