"""
`Job`, one delivery of a message; `Handler`, a registered function; and the checks of registered functions.

The signature is checked when the function is registered, so that mistakes show at import time.
"""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from reliq.codec import Codec
from reliq.errors import ConfigurationError, JobInterrupted
from reliq.handlers.effects import Effects, inbox_keep_ms
from reliq.keys import first_published, made_at
from reliq.queue import Queue
from reliq.settings import LINGER_SECONDS, HandlerSettings, seconds
from reliq.text import pluralize

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from reliq.message import Duration
    from reliq.worker.slots import HandlerCall, HeldDelivery


B = TypeVar("B")

#: The most parameters of a handler: body and job.
_MOST_PARAMETERS = 2


class Job(Effects, Generic[B]):
    """
    One delivery of a message, passed to the handler as its second argument.

    Attributes:
        id: the message id.
        queue: the name of the queue.
        body: the decoded body, of the queue's type.
        state: the value that the consumer's `lifespan` yielded, None without a lifespan. Its type is Any; annotate the
            variable for your type checker: `gateway: Gateway = job.state`.

    Example:
        for page in pages:
            job.raise_if_stopped()  # raises JobInterrupted if the worker stops, or the message was cancelled or lost
            fetch(page)
    """

    __slots__ = ("_call", "_held", "_stopping", "body", "id", "queue", "state")

    def __init__(self, held: HeldDelivery, call: HandlerCall, body: B, state: Any, stopping: threading.Event) -> None:
        self.id = held.delivery.claimed.id
        self.queue = held.queue
        self.body = body
        self.state = state
        self._held = held
        self._call = call
        self._stopping = stopping
        self._published = 0

    def __repr__(self) -> str:
        return f"Job(queue={self.queue!r}, id={self.id!r}, attempt={self.attempt})"

    @property
    def attempt(self) -> int | None:
        """The number of this delivery, 1 for the first; None for a body without reliq's envelope."""
        return self._held.delivery.attempt

    @property
    def token(self) -> int:
        """
        The fencing token: larger in each later delivery of the message, so that a store can refuse late writes.

        In an ordered queue it also is larger than the tokens of all earlier messages with the same key.

        Example: `UPDATE stock SET left = :left, token = :token WHERE item = :item AND token < :token`
        """
        return self._held.delivery.claimed.token

    @property
    def key(self) -> str | None:
        """The message key; None without a key."""
        return self._held.delivery.header.key

    @property
    def _first(self) -> tuple[str, str, int]:
        return first_published(self.queue, self.id, self._held.delivery.header)

    @property
    def retries_left(self) -> int:
        """The number of retries left after this delivery."""
        return self._held.delivery.claimed.left

    @property
    def due(self) -> float | None:
        """When this delivery was due, in Unix seconds of the Redis clock; None for a body without reliq's envelope."""
        due = self._held.delivery.header.due
        return None if due is None else due / 1000

    @property
    def enqueued(self) -> float | None:
        """When the message was published, in Unix seconds of the publisher's clock; None without reliq's envelope."""
        header = self._held.delivery.header
        if header.due is None:
            return None
        ms = header.enqueued if header.enqueued is not None else made_at(self.id)
        return None if ms is None else ms / 1000

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers given to `publish`, a read-only mapping of str to str."""
        return self._held.delivery.header.headers

    @property
    def trace_id(self) -> str:
        """The OpenTelemetry trace id of this delivery, 32 hexadecimal digits; empty without `reliq.tracing`."""
        return self._held.trace_id

    @trace_id.setter
    def trace_id(self, trace_id: str) -> None:
        self._held.trace_id = trace_id

    @property
    def stopping(self) -> bool:
        """Whether the worker is shutting down; finish or postpone the rest of the work."""
        return self._stopping.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether the message was cancelled while it ran; updated when the lease is renewed."""
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
        Raise `JobInterrupted` if the worker is shutting down, or the message was cancelled or lost.

        Call it in long loops. Let the exception leave the handler: then the message is returned to the queue without
        using a retry.

        Raises:
            JobInterrupted: with the job and the cause in its text.
        """
        for name in ("cancelled", "lease_lost", "stopping"):
            if getattr(self, name):
                raise JobInterrupted(f"job {self.id} of queue {self.queue!r}: {name}")

    def extend_timeout(self, by: Duration) -> None:
        """
        Extend the timeout of this call; all jobs of a batch share one timeout.

        Args:
            by: the additional time, in seconds or as a timedelta.
        """
        if self._call.timeout_at is not None:
            self._call.timeout_at += seconds("by", by)


class Handler:
    """
    A registered function with its queue and settings.

    Attributes:
        takes_job: whether the function has a second parameter, the `Job`.
        is_async: whether it is a coroutine function.
        is_batch: whether it takes a list of bodies, and a list of jobs.
        batch: the most messages in one call.
        codec: the queue's codec; for an untyped queue, the codec of the annotated type.

    Raises:
        ConfigurationError: the parameters are not a body and an optional job.
    """

    def __init__(self, queue: Queue[Any] | str, function: Callable[..., Any], settings: HandlerSettings) -> None:
        self.queue = queue if isinstance(queue, Queue) else Queue(queue)
        self.queue_name = self.queue.name
        self.function = function
        self.settings = settings
        self.is_batch = settings.batch is not None
        self.batch = settings.batch or 1
        linger = LINGER_SECONDS if settings.linger is None else settings.linger
        self.linger_seconds = seconds("linger", linger) if self.is_batch else 0.0
        self.lease_seconds = seconds("lease", settings.lease)
        self.lease_ms = settings.lease_ms
        self.timeout_seconds = None if settings.timeout is None else seconds("timeout", settings.timeout)
        where = f"handler {function_name(function)}"
        positional = _positional(where, function)
        try:
            hints = get_type_hints(function)
        except (NameError, TypeError):
            hints = {}  # a name imported only under TYPE_CHECKING, or not a plain function: use the queue's type
        first = positional[0].name
        annotated = hints.get(first)
        is_job_list = self.is_batch and bool(get_args(annotated)) and _is_job(annotated, is_batch=True)
        if is_job_list or _is_job(annotated, is_batch=False):
            raise ConfigurationError(
                f"{where}: the first parameter is the body, the second the Job; {first!r} comes first"
            )
        self.takes_job = False
        if len(positional) > 1:
            second = positional[1]
            is_job = _is_job(hints.get(second.name), self.is_batch)
            self.takes_job = is_job or second.default is second.empty
            if self.takes_job and not is_job and second.name in hints:
                wanted = (
                    "list of jobs; annotate {!r} as list[Job[...]]"
                    if self.is_batch
                    else "Job; annotate {!r} as Job[...]"
                )
                raise ConfigurationError(f"{where}: the second parameter is the {wanted.format(second.name)}")
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
        called = getattr(function, "__call__", None)  # noqa: B004  its `__call__` may be a coroutine function
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)

    @property
    def name(self) -> str:
        """Module and name of the function, for tables and logs."""
        return f"{self.function.__module__}.{function_name(self.function)}"

    def _check_keys(self, where: str) -> None:
        """Raise ConfigurationError if the queue cannot have `batch` messages with the same key at once."""
        queue = self.queue
        if queue.layout.bare or (queue.known_shards.wanted or 1) > 1:
            layout = f"in the layout {queue.layout}" if queue.layout.bare else "of several shards"
            raise ConfigurationError(f"{where}: batch_by_key is for messages with keys, and a queue {layout} has none")
        per_key = int((queue.limits and queue.limits.fields().get("per_key")) or 0)
        if 0 < per_key < self.batch:
            raise ConfigurationError(
                f"{where}: queue {queue.name!r} has at most {pluralize(per_key, 'message')} of a "
                "key at once, so that a batch "
                f"of one key never has {self.batch}; give batch={per_key}, or leave batch_by_key out"
            )


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function for error messages."""
    return getattr(function, "__qualname__", type(function).__name__)


def check_manager(what: str, function: Callable[..., Any], *wanted: str) -> None:
    """Raise ConfigurationError if `function` does not take `wanted` or cannot return a context manager."""
    enters = hasattr(function, "__enter__") or hasattr(function, "__aenter__")
    if enters and not isinstance(function, type):
        raise ConfigurationError(f"{what} must be the function, not what it returned: name it without ()")
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
    """Return the parameters for body and job; raise ConfigurationError for other signatures and generators."""
    if not callable(function):
        raise ConfigurationError(f"{where} must be a function, not a {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{where} must return its answer, not yield")
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


def _is_job(hint: Any, is_batch: bool) -> bool:
    if is_batch:
        return _is_list(hint) and all(_is_job(item, is_batch=False) for item in get_args(hint))
    return hint is Job or get_origin(hint) is Job


def _is_list(hint: Any) -> bool:
    """Return whether `hint` accepts a list, such as `list[int]` or `Sequence[int]`."""
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(list, kind)
