"""
`Job`, the message as its handler sees it; `Handler`, a registered function; and the checks of registered functions.

A function's signature and annotations are checked when it is registered, so that no message meets a wrong handler.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Protocol,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from reliq.codec import Codec, type_name
from reliq.errors import ConfigurationError, Stopped
from reliq.handlers.effects import Effects
from reliq.keys import first_published, made_at
from reliq.queue import Queue
from reliq.settings import LINGER_SECONDS, HandlerSettings, seconds
from reliq.text import pluralize

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from tenacity.wait import wait_base

    from reliq.message import Duration
    from reliq.worker.slots import HandlerCall, HeldDelivery


B = TypeVar("B")
R = TypeVar("R")

Function = Callable[..., Any]

#: The most parameters of a handler: body and job.
_MOST_PARAMETERS = 2


class Job(Effects, Generic[B]):
    """
    One delivery, as its handler sees it.

    Attributes:
        id: the message's id.
        queue: the queue's name.
        body: the decoded body.
        state: what the consumer's `lifespan` yielded, None without one. A type checker takes it for anything: annotate what
            you take from it, as in `gateway: Gateway = job.state`.

    Example:
        for page in pages:
            job.check()  # ends here when the worker stops, or the message was cancelled or lost
            fetch(page)
    """

    __slots__ = ("_call", "_held", "_published", "_stopping", "body", "id", "queue", "state")

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
        """The number of this delivery, 1 for the first; None for a bare body."""
        return self._held.delivery.attempt

    @property
    def token(self) -> int:
        """
        A number above the token of every earlier delivery of this message, for stores that refuse late writes.

        In an ordered queue it is also above the token of every earlier message of its key.

        Example: `UPDATE stock SET left = :left, token = :token WHERE item = :item AND token < :token`
        """
        return self._held.delivery.claimed.token

    @property
    def key(self) -> str | None:
        """The key of the message; None without one."""
        return self._held.delivery.header.key

    @property
    def _first(self) -> tuple[str, str, int]:
        return first_published(self.queue, self.id, self._held.delivery.header)

    @property
    def retries_left(self) -> int:
        """How many deliveries may follow this one."""
        return self._held.delivery.claimed.left

    @property
    def due(self) -> float | None:
        """When this delivery was due, in unix seconds by Redis' clock; None for a bare body."""
        due = self._held.delivery.header.due
        return None if due is None else due / 1000

    @property
    def enqueued(self) -> float | None:
        """When the message was published, in unix seconds by its publisher's clock; None for a bare body."""
        header = self._held.delivery.header
        if header.due is None:
            return None
        ms = header.enqueued if header.enqueued is not None else made_at(self.id)
        return None if ms is None else ms / 1000

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers given at the publish."""
        return self._held.delivery.header.headers

    @property
    def trace_id(self) -> str:
        """The trace that this delivery is a part of, 32 hexadecimal digits; empty where `reliq.tracing` records none."""
        return self._held.trace_id

    @trace_id.setter
    def trace_id(self, trace_id: str) -> None:
        self._held.trace_id = trace_id

    @property
    def stopping(self) -> bool:
        """Whether the worker is stopping: put off what can be put off."""
        return self._stopping.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether the message was cancelled while it ran; known at the next renewal of its lease."""
        return self._held.cancelled

    @property
    def lost(self) -> bool:
        """Whether the lease ran out, so that another worker may have the message."""
        return self._held.lost or time.monotonic() >= self._held.lease_until

    def _ordinal(self) -> int:
        self._published += 1
        return self._published

    @property
    def _inbox_keep_ms(self) -> int:
        return self._held.inbox_keep_ms

    def check(self) -> None:
        """Raise Stopped when the worker is stopping or the message was cancelled or lost."""
        for name in ("cancelled", "lost", "stopping"):
            if getattr(self, name):
                raise Stopped(f"job {self.id} of queue {self.queue!r}: {name}")

    def extend_timeout(self, by: Duration) -> None:
        """Give the handler `by` seconds more than it would have had; a batch has one timeout for all its jobs."""
        if self._call.timeout_at is not None:
            self._call.timeout_at += seconds("by", by)


@dataclass(frozen=True, slots=True)
class Handler:
    """
    The function for the messages of one queue, and how it is called.

    Attributes:
        takes_job: whether the function wants the `Job` besides the body.
        is_async: whether it is a coroutine function.
        is_batch: whether it takes a list of bodies, and of jobs.
        batch: how many messages it takes at most.
        codec: of the queue, or of the function's annotation when the queue has no type of its own.
    """

    queue: Queue[Any]
    function: Function
    settings: HandlerSettings
    takes_job: bool
    is_async: bool
    codec: Codec[Any] = field(repr=False)
    queue_name: str = field(init=False, repr=False)
    is_batch: bool = field(init=False, repr=False)
    batch: int = field(init=False, repr=False)
    linger_seconds: float = field(init=False, repr=False)
    lease_seconds: float = field(init=False, repr=False)
    lease_ms: int = field(init=False, repr=False)
    timeout_seconds: float | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        settings = self.settings
        linger = LINGER_SECONDS if settings.linger is None else settings.linger
        derived = {
            "queue_name": self.queue.name,
            "is_batch": settings.batch is not None,
            "batch": settings.batch or 1,
            "linger_seconds": 0.0 if settings.batch is None else seconds("linger", linger),
            "lease_seconds": seconds("lease", settings.lease),
            "lease_ms": settings.lease_ms,
            "timeout_seconds": None if settings.timeout is None else seconds("timeout", settings.timeout),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The function's place, for a table or a log."""
        return f"{self.function.__module__}.{_name(self.function)}"


def inspect_handler(queue: Queue[Any] | str, function: Function, settings: HandlerSettings) -> Handler:
    """
    Return `function` as the handler of `queue`.

    Raises:
        ConfigurationError: it takes other parameters than a body and an optional job.
    """
    where = f"handler {_name(function)}"
    if not callable(function):
        raise ConfigurationError(f"{where} must be a function, not a {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{where} must return its answer, not yield")
    positional = _positional(where, function)
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):
        hints = {}  # a name that only a type checker sees, or no plain function: the queue's type decides
    is_batch = settings.batch is not None
    first = positional[0].name
    annotated = hints.get(first)
    is_job_list = is_batch and bool(get_args(annotated)) and _is_job(annotated, is_batch=True)
    if is_job_list or _is_job(annotated, is_batch=False):
        raise ConfigurationError(f"{where}: the first parameter is the body, the second the Job; {first!r} comes first")
    takes_job = len(positional) > 1 and (
        positional[1].default is inspect.Parameter.empty or _is_job(hints.get(positional[1].name), is_batch)
    )
    if takes_job and not _is_job(hints.get(positional[1].name, list[Job[Any]] if is_batch else Job), is_batch):
        wanted = "list of jobs; annotate {!r} as list[Job[...]]" if is_batch else "Job; annotate {!r} as Job[...]"
        raise ConfigurationError(f"{where}: the second parameter is the {wanted.format(positional[1].name)}")
    if is_batch and annotated not in (None, Any):
        if not _is_list(annotated):
            raise ConfigurationError(
                f"{where}: with batch the first parameter is a list; annotate {first!r} as list[...]"
            )
        annotated = (*get_args(annotated), None)[0]
    chosen = queue if isinstance(queue, Queue) else Queue(queue)
    if settings.batch_by_key:
        if chosen.layout.bare or (chosen.known_shards.wanted or 1) > 1:
            layout = f"in the layout {chosen.layout}" if chosen.layout.bare else "of several shards"
            raise ConfigurationError(f"{where}: batch_by_key is for messages with keys, and a queue {layout} has none")
        per_key = int((chosen.limits and chosen.limits.fields().get("per_key")) or 0)
        if 0 < per_key < (settings.batch or 1):
            raise ConfigurationError(
                f"{where}: queue {chosen.name!r} has at most {pluralize(per_key, 'message')} of a key at once, so that a batch "
                f"of one key never has {settings.batch}; give batch={per_key}, or leave batch_by_key out"
            )
    untyped = chosen.codec.kind is dict and annotated not in (None, Any)
    codec = Codec(annotated) if untyped else chosen.codec
    _check_agrees(where, first, annotated, "", chosen.name, codec.kind)
    if takes_job:
        second = positional[1].name
        job = (*get_args(hints.get(second)), None)[0] if is_batch else hints.get(second)
        _check_agrees(where, second, (*get_args(job), None)[0], "Job of ", chosen.name, codec.kind)
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return Handler(chosen, function, settings, takes_job, is_async, codec)


def check_middleware(middleware: Sequence[Function], handlers: Sequence[Handler]) -> None:
    """Raise ConfigurationError when one of `middleware` is for coroutines alone and one of `handlers` is none."""
    plain = next((handler for handler in handlers if not handler.is_async), None)
    for around in middleware:
        is_async_class = isinstance(around, type) and hasattr(around, "__aenter__") and not hasattr(around, "__enter__")
        if plain and (is_async_class or inspect.isasyncgenfunction(inspect.unwrap(around))):
            raise ConfigurationError(
                f"middleware {_name(around)} is an async context manager, and handler {_name(plain.function)} of queue "
                f"{plain.queue.name!r} is plain; make the middleware a plain one, or the handler async"
            )


def check_queue(queue: object) -> None:
    """Raise ConfigurationError when `queue` is neither a queue nor the name of one."""
    if isinstance(queue, Queue | str):
        return
    if callable(queue):
        raise ConfigurationError(f"say which queue {_name(queue)} handles: @consumer.handler(QUEUE)")
    raise ConfigurationError(f"handler takes a Queue or the name of one, not {type(queue).__name__}")


def check_lifespan(lifespan: Any) -> None:
    """Raise ConfigurationError when `lifespan` cannot be called for a context manager."""
    if lifespan is not None:
        _check_manager("lifespan", lifespan)
        _check_takes(f"lifespan {_name(lifespan)}", lifespan)


def check_around(around: Any) -> None:
    """Raise ConfigurationError when the middleware `around` cannot be called with a job for a context manager."""
    _check_manager("middleware", around)
    _check_takes(f"middleware {_name(around)}", around, "job")


def _check_manager(what: str, function: Function) -> None:
    """Raise ConfigurationError when `function` certainly does not return a context manager."""
    enters = hasattr(function, "__enter__") or hasattr(function, "__aenter__")
    if enters and not isinstance(function, type):
        raise ConfigurationError(f"{what} must be the function, not what it returned: name it without ()")
    if not callable(function):
        raise ConfigurationError(f"{what} must be a function, not a {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        how = "@asynccontextmanager" if inspect.isasyncgenfunction(function) else "@contextmanager"
        raise ConfigurationError(f"{what} {_name(function)} must be decorated with {how} of contextlib")
    if inspect.iscoroutinefunction(function) or (isinstance(function, type) and not enters):
        raise ConfigurationError(f"{what} {_name(function)} must return a context manager")


def check_hook(hook: Function) -> None:
    """Raise ConfigurationError when `hook` cannot be called with a job, an exception and whether it is final."""
    if not callable(hook):
        raise ConfigurationError(f"an on_error hook must be a function, not a {type(hook).__name__}")
    if inspect.iscoroutinefunction(hook):
        raise ConfigurationError(f"on_error {_name(hook)} must be a plain function: nobody awaits it")
    _check_takes(f"on_error {_name(hook)}", hook, "job", "error", "final")


def _check_takes(where: str, function: Function, *wanted: str) -> None:
    """Raise ConfigurationError when `function` cannot be called with as many positional arguments as `wanted`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function written in C may have no signature
    try:
        signature.bind(*wanted)
    except TypeError:
        raise ConfigurationError(f"{where} must take ({', '.join(wanted)}); it takes {signature}") from None


def _positional(where: str, function: Function) -> list[inspect.Parameter]:
    """Return the parameters for body and job."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{where} must be a Python function with a signature: {error}") from error
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required_elsewhere = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    needed = [p for p in positional if p.default is p.empty]
    if not positional or len(needed) > _MOST_PARAMETERS or required_elsewhere:
        takes = ", ".join(p.name for p in parameters) or "nothing"
        raise ConfigurationError(f"{where} must take a body and, if it likes, a job; it takes {takes}")
    return positional


def _name(function: Function) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _is_job(hint: Any, is_batch: bool) -> bool:
    if is_batch:
        return _is_list(hint) and all(_is_job(item, is_batch=False) for item in get_args(hint))
    return hint is Job or get_origin(hint) is Job


def _is_list(hint: Any) -> bool:
    """Return whether a list is an instance of `hint`, such as `list[int]` or `Sequence[int]`."""
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(list, kind)


def _check_agrees(where: str, name: str, annotated: Any, role: str, queue: str, kind: Any) -> None:
    """Raise ConfigurationError when no body of `kind` can be what a parameter is annotated as."""
    if not (isinstance(annotated, type) and isinstance(kind, type)) or Any in (annotated, kind):
        return
    if inspect.isabstract(annotated) or get_origin(annotated) or get_origin(kind):
        return
    if annotated in (float, complex) and kind is int:
        return
    try:
        agrees = issubclass(kind, annotated) or issubclass(annotated, kind)
    except TypeError:  # of a TypedDict or a Protocol nothing is certain
        return
    if not agrees:
        raise ConfigurationError(
            f"{where}: {name!r} is annotated as {role}{type_name(annotated)}, and queue {queue!r} has bodies "
            f"of {type_name(kind)}; make them agree"
        )


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


class Options(TypedDict, total=False):
    """The options of `Consumer.handler`; `HandlerSettings` has the defaults."""

    lease: Duration
    timeout: Duration | None
    concurrency: int | None
    weight: int
    backoff: wait_base
    retry_on: type[Exception] | tuple[type[Exception], ...]
    reject_on: type[Exception] | tuple[type[Exception], ...]
    undecodable: Literal["retry", "reject"]
