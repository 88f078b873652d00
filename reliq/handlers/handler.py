"""
`Job` is one delivery of a message. `Handler` is a registered function with its settings.

The signature of a function is checked when the function is registered, so that a mistake raises at import time.
"""

from __future__ import annotations

import inspect
import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_origin, get_type_hints, overload

from reliq.codec import Codec
from reliq.errors import ConfigurationError, JobInterrupted
from reliq.handlers.effects import Effects, inbox_keep_ms
from reliq.keys import made_at
from reliq.message import TASK_HEADER
from reliq.queue import Queue
from reliq.settings import LINGER_SECONDS, HandlerSettings, milliseconds, seconds
from reliq.text import clean_text, join_first, pluralize
from reliq.wire_format import encoded_checkpoint

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from reliq.message import Duration, Header
    from reliq.worker.slots import HandlerCall, HeldDelivery


if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # With a default type, `mypy --strict` accepts `Job` without a parameter. The default is `object`, because with Any
    # mypy could not choose between the overloads of `task`.
    B_co = TypeVarWithDefault("B_co", covariant=True, default=object)
else:
    B_co = TypeVar("B_co", covariant=True)
T = TypeVar("T")

#: How many required parameters a handler function may have at most: body and job.
_MOST_PARAMETERS = 2


class Job(Effects, Generic[B_co]):
    """
    One delivery of a message, passed to the handler as its second argument.

    Attributes:
        id: the message id.
        queue: the name of the queue.
        body: the decoded body, of the queue's type.
        state: the value that the consumer's `lifespan` yielded; None without a lifespan. The type of `state` is Any, so
            annotate the variable for your type checker: `gateway: Gateway = job.state`.

    Example:
        for page in pages:
            # JobInterrupted: the worker stops, the message was cancelled, or its lease is lost
            job.raise_if_stopped()
            fetch(page)
    """

    __slots__ = ("_call", "_cursor", "_held", "_number", "_report", "_stopping", "body", "id", "queue", "state")

    _held: HeldDelivery

    def __init__(
        self, held: HeldDelivery, call: HandlerCall, body: B_co, state: Any, stopping: threading.Event
    ) -> None:
        self.id = held.delivery.claimed.id
        self.queue = held.queue
        self.body = body
        self.state = state
        self._held = held
        self._call = call
        self._stopping = stopping
        self._number = self._published = 0
        self._cursor = None
        self._report = ""
        # Error hooks get a new `Job` object, which continues with the last checkpoint of the handler's `Job`.
        if held.checkpoint is not None:
            self._number, _, self._published, self._cursor = held.checkpoint
        elif held.delivery.header.saved is not None:
            self._number, self._published, self._cursor = held.delivery.header.checkpoint
            self._report = held.delivery.header.report

    def __repr__(self) -> str:
        return f"Job(queue={self.queue!r}, id={self.id!r}, attempt={self.attempt})"

    @property
    def attempt(self) -> int | None:
        """
        The number of this delivery, 1 for the first.

        The value is None for a message without reliq's envelope, as in the Go layout.
        """
        return self._held.delivery.attempt

    @property
    def token(self) -> int:
        """
        The fencing token: a number that grows with each delivery of the message.

        With this number, a database can refuse late writes of an earlier delivery.

        In an ordered queue, the token is also larger than the tokens of all earlier messages with the same key.

        Example:
            UPDATE stock SET left = :left, token = :token
            WHERE item = :item AND token < :token
        """
        return self._held.delivery.claimed.token

    @property
    def key(self) -> str | None:
        """The message key; None without a key."""
        return self._held.delivery.header.key

    @property
    def retries_left(self) -> int:
        """The number of retries left after this delivery."""
        return self._held.delivery.claimed.left

    @property
    def due(self) -> float | None:
        """
        The time at which this delivery was due, in Unix seconds of the Redis clock.

        The value is None for a message without reliq's envelope, as in the Go layout.
        """
        due = self._held.delivery.header.due
        return None if due is None else due / 1000

    @property
    def enqueued(self) -> float | None:
        """
        The time of the publish, in Unix seconds of the publisher's clock.

        The value is None for a message without reliq's envelope, as in the Go layout.
        """
        header = self._held.delivery.header
        if header.due is None:
            return None
        ms = header.enqueued if header.enqueued is not None else made_at(self.id)
        return None if ms is None else ms / 1000

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that the publisher gave to `publish`, as a read-only mapping of str to str."""
        return self._held.delivery.header.headers

    @property
    def trace_id(self) -> str:
        """
        The OpenTelemetry trace id of this delivery, 32 hexadecimal digits.

        The text is empty if the consumer is not instrumented with `reliq.tracing`.
        """
        return self._held.trace_id

    @trace_id.setter
    def trace_id(self, trace_id: str) -> None:
        self._held.trace_id = trace_id

    @property
    def stopping(self) -> bool:
        """Whether the worker is shutting down. If so, finish soon, or leave the rest to a later delivery."""
        return self._stopping.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether the message was cancelled while the handler runs; updated when the worker renews the lease."""
        return self._held.cancelled

    @property
    def lease_lost(self) -> bool:
        """Whether the lease expired, so that another worker may run the message."""
        return self._held.lost or time.monotonic() >= self._held.lease_until

    @property
    def _inbox_keep_ms(self) -> int:
        handler = self._held.handler
        return inbox_keep_ms(handler.queue.settings, handler.settings)

    def raise_if_stopped(self) -> None:
        """
        Raise `JobInterrupted` if the handler must end soon.

        The handler must end if the worker is shutting down, the message was cancelled, or its lease is lost.

        Call this method in long loops, and do not catch the exception in the handler. The worker then returns the
        message to the queue without using a retry.

        Raises:
            JobInterrupted: the handler must end; the text of the exception names the job and the cause.
        """
        for name in ("cancelled", "lease_lost", "stopping"):
            if getattr(self, name):
                raise JobInterrupted(f"job {self.id} of queue {self.queue!r}: {name}")

    @property
    def cursor(self) -> Any:
        """The cursor of the last checkpoint of this or an earlier delivery; None if there is no checkpoint."""
        return self._cursor

    def checkpoint(self, cursor: Any) -> None:
        """
        Save how far this job is, restart its timeout, and call `raise_if_stopped`.

        The next delivery finds the cursor in `job.cursor`, also after a crash, a retry, a deploy or a redrive. This
        method does not wait for Redis: the worker sends the cursor within a second, or together with the outcome of a
        failed or stopped job. So after a killed process, about a second of work is repeated, and after a graceful
        shutdown none. Redis deletes the cursor when the message ends.

        Args:
            cursor: a JSON value, such as the id of the last processed row; at most 4 KiB. Give dates and UUIDs as text.

        Raises:
            ConfigurationError: JSON cannot encode the cursor, it is too large, or the message has no envelope, as in a
                queue that Go programs share.
            JobInterrupted: the worker is shutting down, the message was cancelled, or its lease is lost.

        Example:
            for row in rows_after(job.cursor):
                export(row)
                job.checkpoint(row.id)
        """
        self._save(self._number + 1, self._published, cursor)
        if self._call.timeout_at is not None:
            restarted = time.monotonic() + (self._held.handler.timeout_seconds or 0.0)
            self._call.timeout_at = max(self._call.timeout_at, restarted)
        self.raise_if_stopped()

    def progress(self, fraction: float, note: str = "") -> None:
        """
        Report how far the job is, for `Queue.status`, `reliq show` and the message's web page.

        This method does not wait for Redis: the worker sends the last report within a second.

        Args:
            fraction: the finished part of the work, 0 to 1.
            note: a text such as "page 40", of which the first 200 characters are stored.

        Raises:
            ConfigurationError: the fraction is not a number from 0 to 1, or the message has no envelope, as in a queue
                that Go programs share.

        Example: `job.progress(done / total, f"page {done}")`
        """
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ConfigurationError(f"progress must be a number from 0 to 1, not {str(fraction)[:40]}")
        self._report = f"{fraction:.4g} {' '.join(clean_text(note, 200).split())}"
        # A redelivered job continues after its last checkpoint. So store how many follow-ups the job had published at
        # this checkpoint, not now.
        published = self._held.checkpoint[2] if self._held.checkpoint else self._held.delivery.header.checkpoint[1]
        self._save(self._number, published, self._cursor)

    def _save(self, number: int, published: int, cursor: Any) -> None:
        """Keep a checkpoint and the last progress report in memory; the worker sends both to Redis within a second."""
        if self._held.delivery.header.due is None:
            raise ConfigurationError(
                f"job {self.id} of queue {self.queue!r} cannot have a checkpoint or progress: its body has no envelope "
                "of reliq"
            )
        text = encoded_checkpoint(number, published, cursor, self._report)
        self._number, self._cursor = number, cursor
        self._held.checkpoint = number, text, published, cursor

    @overload
    def resume(self, items: Iterable[T], /) -> Iterator[T]: ...

    @overload
    def resume(self, items: Callable[[Any], Iterable[T]], /, *, key: Callable[[T], Any]) -> Iterator[T]: ...

    def resume(self, items: Any, /, *, key: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        """
        Iterate over the items that earlier deliveries have not finished, and save a checkpoint after each item.

        Args:
            items: without `key`, an iterable with the same items in each delivery; the cursor is the number of finished
                items. With `key`, a function that takes a cursor and returns the items after it, or all items for None.
            key: a function that returns the cursor of an item. The items must be in the order of their cursors.

        Raises:
            ConfigurationError, JobInterrupted: see `checkpoint`.

        Example: `for row in job.resume(rows_after, key=lambda row: row.id): export(row)`
        """
        if key is not None:
            for item in items(self.cursor):
                yield item
                self.checkpoint(key(item))
            return
        before = self.cursor or 0
        for done, item in enumerate(islice(items, before, None), before + 1):
            yield item
            self.checkpoint(done)

    def extend_timeout(self, by: Duration) -> None:
        """
        Extend the timeout of the running handler call; all jobs of a batch share one timeout.

        Args:
            by: the additional time, in seconds or as a timedelta.
        """
        if self._call.timeout_at is not None:
            self._call.timeout_at += seconds("by", by)


class Handler:
    """
    A registered function with its queue and settings.

    Attributes:
        takes_job: whether the function takes the `Job` (with `batch`, a list of jobs) as its second argument.
        is_async: whether the function is a coroutine function.
        is_batch: whether the function takes a list of bodies.
        batch: the most messages in one handler call.
        task: the name of the task; `unknown` for the handler of unknown tasks, empty in a queue without tasks.
        keep_ms: for how many ms Redis keeps results; 0 to keep none.
        codec: decodes the bodies: the queue's codec, or for an untyped queue, a codec for the annotation of the
            function's first parameter.
        routes: in a queue of `Tasks`, the handler of each task, by the task's name. This handler then handles only
            messages of unknown tasks. None in other queues.

    Raises:
        ConfigurationError: the parameters of the function are not a body and an optional job.
    """

    def __init__(self, queue: Queue[Any] | str, function: Callable[..., Any], settings: HandlerSettings) -> None:
        self.queue = queue if isinstance(queue, Queue) else Queue(queue)
        self.queue_name = self.queue.name
        self.routes: dict[str, Handler] | None = None
        self.task = ""
        self.function = function
        self.settings = settings
        self.is_batch = settings.batch is not None
        self.batch = settings.batch or 1
        linger = LINGER_SECONDS if settings.linger is None else settings.linger
        self.linger_seconds = seconds("linger", linger) if self.is_batch else 0.0
        self.lease_seconds = seconds("lease", settings.lease)
        self.lease_ms = settings.lease_ms
        self.timeout_seconds = None if settings.timeout is None else seconds("timeout", settings.timeout)
        self.keep_ms = milliseconds(settings.keep or 0)
        where = f"handler {function_name(function)}"
        if settings.keep and self.queue.layout.bare:
            raise ConfigurationError(
                f"{where}: a queue in the layout {self.queue.layout} keeps no results; leave out `keep`"
            )
        positional = _positional(where, function)
        try:
            hints = get_type_hints(function)
        except (NameError, TypeError):
            hints = {}  # a type is imported only under TYPE_CHECKING, or `function` is a callable object
        first = positional[0].name
        annotated = hints.get(first)
        is_job_list = self.is_batch and bool(get_args(annotated)) and is_job(annotated, is_batch=True)
        if is_job_list or is_job(annotated, is_batch=False):
            raise ConfigurationError(
                f"{where}: the first parameter must be the body and the second the Job, but {first!r} comes first"
            )
        self.takes_job = False
        if len(positional) > 1:
            second = positional[1]
            has_job = is_job(hints.get(second.name), self.is_batch)
            self.takes_job = has_job or second.default is second.empty
            if self.takes_job and not has_job and second.name in hints:
                what, annotation = ("list of jobs", "list[Job[...]]") if self.is_batch else ("Job", "Job[...]")
                raise ConfigurationError(
                    f"{where}: the second parameter is the {what}; annotate {second.name!r} as {annotation}"
                )
        if self.is_batch and annotated not in (None, Any):
            if not _is_list(annotated):
                raise ConfigurationError(
                    f"{where}: with batch the first parameter is a list; annotate {first!r} as list[...]"
                )
            annotated = (*get_args(annotated), None)[0]
        if settings.batch_by_key:
            self._check_keys(where)
        is_untyped = self.queue.codec.kind is dict and annotated not in (None, Any)
        self.codec = Codec[Any](annotated) if is_untyped else self.queue.codec
        called = getattr(function, "__call__", None)  # noqa: B004  of an object, `__call__` may be a coroutine function
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)

    @property
    def name(self) -> str:
        """The module and name of the function, or the names of the queue's tasks, for tables and log lines."""
        if self.routes is not None:
            return f"tasks {join_first([function_name(each.function) for each in self.each])}"
        return f"{self.function.__module__}.{function_name(self.function)}"

    @property
    def each(self) -> list[Handler]:
        """The handlers of all tasks of the queue. In a queue without tasks, only this handler."""
        return list(dict.fromkeys((self.routes or {}).values())) or [self]

    def of(self, header: Header) -> Handler:
        """Return the handler of the task that a message names; this handler if the task is unknown."""
        return self if self.routes is None else self.routes.get(header.headers.get(TASK_HEADER, ""), self)

    def _check_keys(self, where: str) -> None:
        """
        Check that the queue can run `batch` messages with the same key at the same time.

        Raises:
            ConfigurationError: the queue has no message keys, or its limit `per_key` is lower than `batch`.
        """
        queue = self.queue
        if queue.layout.bare or (queue.known_shards.wanted or 1) > 1:
            layout = f"in the layout {queue.layout}" if queue.layout.bare else "of several shards"
            raise ConfigurationError(f"{where}: batch_by_key is for messages with keys, and a queue {layout} has none")
        per_key = int((queue.own_limits and queue.own_limits.fields().get("per_key")) or 0)
        if 0 < per_key < self.batch:
            raise ConfigurationError(
                f"{where}: queue {queue.name!r} runs at most {pluralize(per_key, 'message')} of a key at once, so a "
                f"batch of one key never has {self.batch} messages; give batch={per_key}, or leave batch_by_key out"
            )


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function for error messages."""
    return getattr(function, "__qualname__", type(function).__name__)


def check_manager(what: str, function: Callable[..., Any], *wanted: str) -> None:
    """
    Check that a function takes the given arguments and can return a context manager.

    Args:
        what: the subject of the error message, for example "lifespan".
        function: the function of the application.
        wanted: the names of the positional arguments that the function will get.

    Raises:
        ConfigurationError: the function does not take these arguments, or cannot return a context manager.
    """
    enters = hasattr(function, "__enter__") or hasattr(function, "__aenter__")
    if enters and not isinstance(function, type):
        raise ConfigurationError(f"{what} must be the function, not its result: write it without ()")
    if not callable(function):
        raise ConfigurationError(f"{what} must be a function, not a {type(function).__name__}")
    where = f"{what} {function_name(function)}"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        how = "@asynccontextmanager" if inspect.isasyncgenfunction(function) else "@contextmanager"
        raise ConfigurationError(f"{where} must be decorated with {how} of contextlib")
    if inspect.iscoroutinefunction(function) or (isinstance(function, type) and not enters):
        raise ConfigurationError(f"{where} must return a context manager")
    check_takes(where, function, *wanted)


def check_takes(where: str, function: Callable[..., Any], *wanted: str) -> None:
    """Raise ConfigurationError if `function` cannot take the positional arguments `wanted`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function written in C may have no signature
    try:
        signature.bind(*wanted)
    except TypeError:
        raise ConfigurationError(f"{where} must take ({', '.join(wanted)}); it takes {signature}") from None


def _positional(where: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    """
    Return the positional parameters of a handler function.

    Raises:
        ConfigurationError: the function cannot be a handler.
    """
    if not callable(function):
        raise ConfigurationError(f"{where} must be a function, not a {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{where} must return its result, not yield it")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{where} must be a Python function with a signature: {error}") from error
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required_elsewhere = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    needed = [p for p in positional if p.default is p.empty]
    if not positional or len(needed) > _MOST_PARAMETERS or required_elsewhere:
        takes = ", ".join(p.name for p in parameters) or "nothing"
        raise ConfigurationError(f"{where} must take a body and optionally a job; it takes {takes}")
    return positional


def is_job(hint: Any, is_batch: bool) -> bool:
    """Return whether an annotation is `Job`, or with `is_batch` a list of jobs."""
    if is_batch:
        return _is_list(hint) and all(is_job(item, is_batch=False) for item in get_args(hint))
    return hint is Job or get_origin(hint) is Job


def _is_list(hint: Any) -> bool:
    """Return whether `hint` accepts a list, such as `list[int]` or `Sequence[int]`."""
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(list, kind)
