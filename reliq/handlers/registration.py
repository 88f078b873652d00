"""
Register the handlers, middleware, error hooks and periodic jobs of a consumer.

A periodic job publishes a message at each planned time (tick) of its schedule. Every worker process computes the same
ticks, and Redis accepts the message of each tick only once.
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
from reliq.message import OutgoingMessage
from reliq.publish import Writer
from reliq.queue import Queue
from reliq.redis.server import Connection, check_slots
from reliq.schedule import CatchUp, Schedule
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

Overlap = Literal["allow", "skip"]

#: In messages of a periodic job, the header with this name contains the planned time (tick) in ISO 8601.
TICK_HEADER = "reliq-tick"
#: A tick that is at most this many seconds late counts as on time, not as a misfire.
ON_TIME_SECONDS = 60.0
#: How many ticks of a periodic job one call of `plan` handles at most.
STEP_TICKS = 100

#: The default of the argument `body`. It means that `cron` or `every` decorates a function that returns the body.
_FROM_FUNCTION = object()
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class FunctionOptions(TypedDict, total=False):
    """The keyword options of `Consumer.handler` that can differ between the tasks of a queue."""

    timeout: Duration | None
    backoff: wait_base
    retry_on: type[Exception] | tuple[type[Exception], ...]
    reject_on: type[Exception] | tuple[type[Exception], ...]
    on_decode_error: Literal["retry", "reject"]
    keep: Duration | None


class Options(FunctionOptions, total=False):
    """
    The keyword options of `Consumer.handler`, which documents them.

    Their defaults are in `HandlerSettings`.
    """

    lease: Duration
    concurrency: int | None
    weight: int


class BatchOptions(Options, total=False):
    """The additional keyword options of `Consumer.handler` if `batch` is given."""

    linger: Duration | None
    batch_by_key: bool


class Register(Protocol[B]):
    """The decorator that `Consumer.handler(queue)` returns; it returns the function unchanged."""

    @overload
    def __call__(self, function: Callable[[B], R], /) -> Callable[[B], R]: ...
    @overload
    def __call__(self, function: Callable[[B, Job[B]], R], /) -> Callable[[B, Job[B]], R]: ...


class RegisterBatch(Protocol[B]):
    """
    The decorator that `Consumer.handler(queue, batch=...)` returns.

    It returns the function unchanged.
    """

    @overload
    def __call__(self, function: Callable[[list[B]], R], /) -> Callable[[list[B]], R]: ...
    @overload
    def __call__(self, function: Callable[[list[B], list[Job[B]]], R], /) -> Callable[[list[B], list[Job[B]]], R]: ...


class PeriodicOptions(TypedDict, total=False):
    """
    The keyword options that `Consumer.cron` and `Consumer.every` share.

    Their defaults are in `Periodic`.
    """

    jitter: Duration
    catch_up: CatchUp
    misfire_grace_time: Duration
    overlap: Overlap


class CronOptions(PeriodicOptions, total=False):
    """The keyword options of `Consumer.cron`, which documents them."""

    tz: str


#: The keyword arguments of `Consumer.every`.
_EVERY_KEYWORDS = frozenset({"queue", "body", "name", *PeriodicOptions.__annotations__})


class Makes(Protocol[B]):
    """
    The decorator that `Consumer.cron` and `Consumer.every` return if they are called without `body`.

    It returns the function unchanged.
    """

    @overload
    def __call__(self, function: Callable[[datetime], B], /) -> Callable[[datetime], B]: ...
    @overload
    def __call__(
        self, function: Callable[[datetime], OutgoingMessage[B]], /
    ) -> Callable[[datetime], OutgoingMessage[B]]: ...


class Planned(NamedTuple):
    """
    A due tick of a periodic job, for which a message must be published, or which was missed.

    Attributes:
        at: the planned time of the tick, in Unix seconds.
        since: the planned time of the previous tick that was published, skipped or missed, in Unix seconds.
        missed: the number of missed ticks after `since`, including this tick if it was missed.
        is_published: whether to publish a message for this tick; False if it was missed.
    """

    at: int
    since: int
    missed: int
    is_published: bool


def plan(schedule: Schedule, last: int, now: int, catch_up: CatchUp, grace: float = DAY_SECONDS) -> list[Planned]:
    """
    Return the ticks that are due and not yet published, skipped or missed, oldest first.

    One call handles at most STEP_TICKS ticks, so after a long downtime several calls are needed. If the last ticks were
    missed, the last item of the list counts them.

    Args:
        schedule: the schedule of the periodic job.
        last: the last tick that was published, skipped or missed, in Unix seconds.
        now: the current time, in Unix seconds.
        catch_up: which late ticks to publish: `skip` (none), `latest` or `all`.
        grace: the age in seconds after which a late tick is not published.
    """
    within = ON_TIME_SECONDS if catch_up == "skip" else grace
    ticks = schedule.ticks(last, now, most=STEP_TICKS + 1)
    newest = ticks[-1:]
    ticks = ticks[:STEP_TICKS]
    planned: list[Planned] = []
    missed = 0
    for tick in ticks:
        if now - tick <= within and (catch_up == "all" or [tick] == newest):
            planned.append(Planned(tick, last, missed, is_published=True))
            last = tick
            missed = 0
        else:
            missed += 1
    if missed:
        planned.append(Planned(ticks[-1], last, missed, is_published=False))
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Periodic:
    """
    A periodic job: it publishes a message at each tick (planned time) of its schedule.

    Attributes:
        name: the unique name of the job.
        queue: the queue to which the messages are published.
        schedule: the schedule that computes the ticks.
        body: the body of the messages, or a function that takes the tick (an aware datetime) and returns the body.
        jitter: the longest random delay after a tick, in seconds or as a timedelta; all processes compute the same
            delay for a tick.
        catch_up: which missed ticks to publish after a downtime: `skip` for none, `latest` for the last, `all` for each.
        misfire_grace_time: the age after which a missed tick is not published, in seconds or as a timedelta.
        overlap: `skip` to skip a tick while the previous message of this job is not finished; `allow` to publish it.
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
                f"a periodic job's name must be 1 to 100 of A-Z a-z 0-9 _ . - , not {str(self.name)[:80]!r}"
            )
        if not isinstance(self.queue, Queue):
            raise ConfigurationError(f"queue of {self} must be a Queue, not {type(self.queue).__name__}")
        if inspect.iscoroutinefunction(self.body):
            raise ConfigurationError(
                f"the function that makes the body of {self} must be a plain function, not async def"
            )
        check_is_one_of("catch_up", self.catch_up, get_args(CatchUp))
        check_is_one_of("overlap", self.overlap, get_args(Overlap))
        seconds("misfire_grace_time", self.misfire_grace_time, least=ON_TIME_SECONDS)
        seconds("jitter", self.jitter, most=DAY_SECONDS)
        if not callable(self.body):
            self.run(0)  # raise an error at registration if the body cannot be encoded

    def __str__(self) -> str:
        return f"periodic job {self.name!r}"

    def plan(self, last: int, now: int) -> list[Planned]:
        """Return the ticks that are due and not yet published, skipped or missed, see the function `plan`."""
        return plan(self.schedule, last, now, self.catch_up, seconds("misfire_grace_time", self.misfire_grace_time))

    def tick(self, planned: Planned) -> Tick:
        """
        Return the arguments of the script `tick` for a planned tick.

        If `body` is a function, this method calls it, and does not catch its exceptions.
        """
        tick = Tick(self.name, str(self.schedule), planned.at, planned.since, planned.missed)
        if not planned.is_published:
            return tick
        message = self._message(tick_id(self.name, planned.at), planned.at)
        # Compute the jitter from a hash, not from a random number, so that all processes get the same jitter.
        digest = hashlib.sha256(f"{self.name} {planned.at}".encode()).digest()
        jitter_ms = int.from_bytes(digest[:8], "big") % (milliseconds(self.jitter) + 1)
        return replace(tick, message=message, due_ms=planned.at * 1000 + jitter_ms, overlap=self.overlap)

    def run(self, asked_ms: int) -> Tick:
        """
        Return the arguments of the script `tick` for a run that an operator requested.

        If `body` is a function, this method calls it, and does not catch its exceptions.

        Args:
            asked_ms: the time of the request, in Unix ms.
        """
        at = asked_ms // 1000
        message = self._message(run_id(self.name, asked_ms), at)
        return Tick(self.name, str(self.schedule), at, at, message=message, asked=asked_ms)

    def _message(self, id: str, at: int) -> tuple[str, bytes]:
        """
        Return the message id and the encoded message of a tick or a requested run.

        The message has no deduplication time (`dedup=0`), because each tick has its own id.
        """
        moment = self.schedule.moment(at)
        body = self.body(moment) if callable(self.body) else self.body
        outgoing = body if isinstance(body, OutgoingMessage) else OutgoingMessage(body=body)
        headers = {} if self.queue.keys.bare else {**(outgoing.headers or {}), TICK_HEADER: moment.isoformat()}
        writer = Writer(self.queue.known_shards, self.queue.codec, self.queue.settings)
        order = writer.special(replace(outgoing, id=id, dedup=0, headers=headers))
        return order.id, order.value


class Registration:
    """Base class of `Consumer`: register handlers, middleware, error hooks, periodic jobs."""

    def __init__(self, target: Target | None = None) -> None:
        self.target = target
        self._handlers: dict[str, Handler] = {}
        self._periodic: dict[str, Periodic] = {}
        #: The middleware functions, applied to all handlers; the first is the outermost.
        self.around_calls: list[Callable[[Job[Any]], Any]] = []
        #: The functions that are called after each failure of a handler.
        self.error_hooks: list[Callable[[Job[Any], BaseException, bool], Any]] = []

    @property
    def handlers(self) -> Sequence[Handler]:
        """The registered handlers."""
        return tuple(self._handlers.values())

    @property
    def periodic(self) -> Sequence[Periodic]:
        """The registered periodic jobs."""
        return tuple(self._periodic.values())

    @overload
    def cron(self, expression: str, *, queue: Queue[B], name: str = "", **options: Unpack[CronOptions]) -> Makes[B]: ...

    @overload
    def cron(
        self,
        expression: str,
        *,
        queue: Queue[B],
        body: B | OutgoingMessage[B] | Callable[[datetime], B | OutgoingMessage[B]],
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
        Register a periodic job: publish one message at each time (tick) of a cron expression.

        You may run many workers: Redis accepts the message of each tick only once. With `body`, `cron` registers the
        job immediately. Without `body`, `cron` returns a decorator for a function that takes the tick and returns the
        body. Every worker process may call the decorated function, also more than once for a tick, so it must be fast
        and have no side effects. The message id is `cron.NAME.UNIX`; the header `reliq-tick` contains the tick in ISO
        8601.

        Args:
            expression: minute, hour, day of month, month and day of week, for example "0 6 * * mon-fri".
            queue: the `Queue` to publish to. Its handler may be registered with another consumer.
            body: a value of the queue's type, or a function that takes the tick (an aware datetime in `tz`) and returns
                the body. It may be an `OutgoingMessage` too, such as `task.outgoing(...)`; its own `id`, `dedup`, `delay`
                and `at` have no effect.
            name: a unique name, 1 to 100 of A-Z a-z 0-9 _ . -; by default the name of the decorated function.
            tz: a time zone name, for example Europe/Berlin ("UTC").
            jitter: the longest random delay of a message after its tick, in seconds or as a timedelta (0).
            catch_up: which missed ticks to publish after a downtime of all workers: `skip` for none, `latest` for the
                last (default), `all` for each.
            misfire_grace_time: the age after which a missed tick is not published, in seconds or as a timedelta (1
                day).
            overlap: `skip` to skip a tick while the previous message of this job is not finished; `allow` to publish it
                (default).

        Raises:
            ConfigurationError: an argument is not allowed, or the name is already taken.
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
        body: B | OutgoingMessage[B] | Callable[[datetime], B | OutgoingMessage[B]],
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
        Register a periodic job: publish one message at equal intervals.

        The times (ticks) are multiples of the interval since 1970 in UTC: with 5 minutes, 12:00, 12:05 and so on.

        Args:
            interval: the time between two messages, in whole seconds or as a timedelta.
            queue: as in `cron`.
            body: as in `cron`.
            name: as in `cron`.
            options: `jitter`, `catch_up`, `misfire_grace_time` and `overlap`, as in `cron`.

        Raises:
            ConfigurationError: an argument is not allowed, or the name is already taken.
            BodyError: the body cannot be encoded.

        Example: `consumer.every(300, queue=checks, body=Check("all"), name="checks")`
        """
        check_keywords("Consumer.every", options, _EVERY_KEYWORDS)
        return self._enter(Schedule.every(interval), queue, body, name, options)

    def _enter(self, schedule: Schedule, queue: Queue[Any], body: Any, name: str, options: PeriodicOptions) -> Any:
        if body is not _FROM_FUNCTION:
            return self._add(Periodic(name=name, queue=queue, schedule=schedule, body=body, **options))

        def register(function: F) -> F:
            if not callable(function):
                raise ConfigurationError(
                    f"the decorator of a periodic job needs a function, not a {type(function).__name__}"
                )
            entry_name = name or getattr(function, "__name__", "")
            self._add(Periodic(name=entry_name, queue=queue, schedule=schedule, body=function, **options))
            return function

        return register

    def _add(self, *entries: Periodic) -> None:
        for entry in entries:
            if entry.name in self._periodic:
                raise ConfigurationError(f"two periodic jobs are called {entry.name!r}; give one of them another name=")
        self._periodic |= {entry.name: entry for entry in entries}

    @overload
    def handler(self, queue: Queue[B], **options: Unpack[Options]) -> Register[B]: ...

    @overload
    def handler(self, queue: Queue[B], *, batch: int, **options: Unpack[BatchOptions]) -> RegisterBatch[B]: ...

    @overload
    def handler(self, queue: str, *, batch: int | None = None, **options: Unpack[BatchOptions]) -> Callable[[F], F]: ...

    def handler(self, queue: Queue[Any] | str, *, batch: int | None = None, **options: Unpack[BatchOptions]) -> Any:
        """
        Return a decorator that registers a function as the handler of `queue`.

        The decorator returns the function unchanged.

        The function is plain or async. It takes the body and, optionally, the `Job`. If the function returns, the
        message is acked. The function may return or raise `Nack`, `Reject`, `Snooze` or `RateLimited`. After any other
        exception the message is retried with backoff.

        With `batch`, the function takes a list of bodies and, optionally, the list of their jobs. A batch uses one slot
        of the worker. The function's return value or exception applies to all messages of the batch. To settle each
        message separately, return a list with one entry for each message, in order; None acks the message. The batch
        does not contain messages with undecodable bodies. A message that may have killed its worker, or that has no
        retry left, is delivered alone.

        Args:
            queue: a `Queue`, or the name of an untyped queue.
            batch: the most messages in one handler call, 1 to 500; None for a function that takes one body (default).
            linger: the longest wait for a full batch after its first message, in seconds or as a timedelta (0.05).
            batch_by_key: whether all messages of a batch must have the same key (False). Messages without a key form
                separate batches.
            lease: the time after which a message of a dead worker is redelivered, in seconds or as a timedelta (30).
                Live workers renew the lease while the handler runs.
            timeout: the longest time of a handler call, in seconds or as a timedelta; None for no timeout (600). After
                this time, the worker cancels a coroutine handler. If the handler is plain, or ignores the cancellation,
                the process is replaced.
            concurrency: the most concurrent calls of this handler in a process; None for all slots (default).
            weight: the share of free slots for this queue, relative to the weights of the other queues (1).
            backoff: a wait strategy of tenacity between a failure and the next delivery. Default: exponential with
                jitter, from 1 to 3 seconds up to an hour.
            retry_on: the exception class after which to retry the message, or a tuple of classes; other exceptions
                reject the message. Default: Exception.
            reject_on: the exception class that rejects the message even if `retry_on` includes it, or a tuple of
                classes. Default: none.
            on_decode_error: `retry` to retry messages with undecodable bodies with backoff (default), `reject` to make
                them dead letters.
            keep: how long Redis keeps the function's return value as the result of an acked message, in seconds or as a
                timedelta, for `Queue.status`; None to keep no results (default). Not with `batch`.

        Raises:
            ConfigurationError: an option or the signature is not allowed, or the queue already has a handler.

        Example:
            @consumer.handler(orders, timeout=60, concurrency=4)
            def ship(order: Order, job: Job) -> None: ...
        """
        if not isinstance(queue, Queue | str):
            if callable(queue):
                raise ConfigurationError(f"handler {function_name(queue)} has no queue; write @consumer.handler(QUEUE)")
            raise ConfigurationError(f"handler takes a Queue or the name of a queue, not {type(queue).__name__}")
        check_keywords("Consumer.handler", options, HandlerSettings.__dataclass_fields__)
        settings = HandlerSettings(batch=batch, **options)  # type: ignore[arg-type]  # retry_on and reject_on may be a class

        def register(function: F) -> F:
            handler = Handler(queue, function, settings)
            self._check_is_new(handler)
            self._handlers[handler.queue.name] = handler
            return function

        return register

    def middleware(self, around: Callable[[Job[Any]], Any]) -> Callable[[Job[Any]], Any]:
        """
        Register a function that returns a context manager, inside which the worker calls each handler.

        The middleware that is registered first is the outermost. For a batch, the worker calls the function for each
        message of the batch.

        Args:
            around: a function that takes the `Job` and returns a context manager, for example one decorated with
                `contextlib.contextmanager`.

        Returns:
            The function itself, so that you can use `middleware` as a decorator.

        Raises:
            ConfigurationError: the function does not take a job, or cannot return a context manager.
        """
        check_manager("middleware", around, "job")
        self.around_calls.append(around)
        return around

    def on_error(self, hook: E) -> E:
        """
        Register a function to call after each failure of a message, for example to report the error.

        Failures are an exception, a timeout (`TimeoutError`), an undecodable body (`UndecodableError`; `job.body` is
        then bytes), and a `Nack` without a retry left. For a batch, the hook is called for each failed message. The hook
        runs before the message is settled, so keep it fast. If the hook raises, the worker logs the exception and
        continues.

        Args:
            hook: a plain function with three parameters: the `Job`, the exception, and a bool that is True if the
                message becomes a dead letter.

        Returns:
            The function itself, so that you can use `on_error` as a decorator.

        Raises:
            ConfigurationError: the hook is async, or does not take three arguments.
        """
        if not callable(hook):
            raise ConfigurationError(f"an on_error hook must be a function, not a {type(hook).__name__}")
        if inspect.iscoroutinefunction(hook):
            raise ConfigurationError(f"on_error {function_name(hook)} must be a plain function, not async def")
        check_takes(f"on_error {function_name(hook)}", hook, "job", "error", "final")
        self.error_hooks.append(hook)
        return hook

    def chosen(self, queues: Sequence[str]) -> list[Handler]:
        """
        Return the handlers of the named queues; all handlers if `queues` is empty.

        Raises:
            ConfigurationError: a queue has no handler, or an async middleware is used with a plain handler.
        """
        if not self._handlers:
            raise ConfigurationError("this consumer has no handlers; decorate one with @consumer.handler(QUEUE)")
        if unknown := [name for name in queues if name not in self._handlers]:
            raise ConfigurationError(
                f"no handler for queue {unknown[0]!r}; queues with a handler: {', '.join(self._handlers)}"
            )
        chosen = [handler for name, handler in self._handlers.items() if not queues or name in queues]
        plain = next((each for handler in chosen for each in handler.each if not each.is_async), None)
        for around in self.around_calls:
            is_async_class = (
                isinstance(around, type) and hasattr(around, "__aenter__") and not hasattr(around, "__enter__")
            )
            if plain and (is_async_class or inspect.isasyncgenfunction(inspect.unwrap(around))):
                raise ConfigurationError(
                    f"middleware {function_name(around)} is an async context manager, and handler "
                    f"{function_name(plain.function)} of queue {plain.queue.name!r} is plain; make the "
                    "middleware a plain one, or the handler async"
                )
        return chosen

    def ticked_beside(self, handlers: Sequence[Handler]) -> list[Periodic]:
        """
        Return the periodic jobs that a process with these handlers must publish.

        If this process does not run the handler of a job's queue, leave out the job: the processes that run this
        handler publish it. Include jobs whose queues have no handler in this consumer.
        """
        others = self._handlers.keys() - {handler.queue.name for handler in handlers}
        return [entry for entry in self.periodic if entry.queue.name not in others]

    def redis(self, handlers: Sequence[Handler]) -> Target | None:
        """
        Return the Redis URL or client that the consumer and its queues use; None to use the variable RELIQ_URL.

        Raises:
            ConfigurationError: the consumer and the queues name different Redis servers.
        """
        queues = [handler.queue for handler in handlers] + [entry.queue for entry in self.ticked_beside(handlers)]
        named = [self.target, *(queue.target for queue in queues)]
        targets = [target for target in named if target is not None]
        if any(target != targets[0] for target in targets):
            raise ConfigurationError("the consumer and its queues name different Redis servers; use one server")
        for queue in queues:
            check_slots(targets[0] if targets else None, queue.layout)
        return targets[0] if targets else None

    def connection(self, handlers: Sequence[Handler]) -> Connection:
        """
        Return a connection to the Redis of the consumer and its queues.

        Raises:
            ConfigurationError: the consumer and the queues name different Redis servers.
        """
        return Connection.to(self.redis(handlers))

    def _check_is_new(self, handler: Handler) -> None:
        name = handler.queue.name
        if name in self._handlers:
            raise ConfigurationError(f"queue {name!r} has two handlers: {self._handlers[name].name} and {handler.name}")
