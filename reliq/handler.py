"""A handler as it was registered: its function, its queue and its settings, checked once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_origin, get_type_hints

from reliq.codec import Codec
from reliq.errors import ConfigurationError
from reliq.job import Job
from reliq.queue import Queue
from reliq.settings import HandlerSettings, seconds

Function = Callable[..., Any]

_MOST_PARAMETERS = 2  # body and job


@dataclass(frozen=True, slots=True)
class Handler:
    """
    What to do with the messages of one queue.

    Attributes:
        takes_job: whether the function wants the `Job` besides the body.
        is_async: whether it is a coroutine function.
        codec: of the queue, or of the function's annotation when the queue has no type of its own.
    """

    queue: Queue[Any]
    function: Function
    settings: HandlerSettings
    takes_job: bool
    is_async: bool
    codec: Codec[Any] = field(repr=False)
    lease_seconds: float = field(init=False, repr=False)
    timeout_seconds: float | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        timeout = self.settings.timeout
        object.__setattr__(self, "lease_seconds", seconds("lease", self.settings.lease))
        object.__setattr__(self, "timeout_seconds", None if timeout is None else seconds("timeout", timeout))

    @property
    def name(self) -> str:
        """The function's place, for a table or a log."""
        return f"{self.function.__module__}.{_name(self.function)}"


def inspected(queue: Queue[Any] | str, function: Function, settings: HandlerSettings) -> Handler:
    """
    Return `function` as the handler of `queue`.

    Raises:
        ConfigurationError: it takes anything but a body and, if it likes, a job.
    """
    where = f"handler {_name(function)}"
    _check_kind(where, function)
    positional = _positional(where, function)
    hints = _hints(function)
    takes_job = len(positional) > 1 and (
        positional[1].default is inspect.Parameter.empty or _is_job(hints.get(positional[1].name))
    )
    if takes_job and not _is_job(hints.get(positional[1].name, Job)):
        raise ConfigurationError(
            f"{where}: the second parameter is the Job; annotate {positional[1].name!r} as Job[...]"
        )
    annotated = hints.get(positional[0].name)
    chosen = queue if isinstance(queue, Queue) else Queue(queue)
    untyped = chosen.codec.kind is dict and annotated not in (None, Any)
    codec = Codec(annotated) if untyped else chosen.codec
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return Handler(chosen, function, settings, takes_job, is_async, codec)


def check_middleware(middleware: Sequence[Function], handlers: Sequence[Handler]) -> None:
    """Raise ConfigurationError when one of `middleware` is for coroutines alone and one of `handlers` is none."""
    plain = [handler for handler in handlers if not handler.is_async]
    for around in middleware:
        if plain and _is_async_alone(around):
            raise ConfigurationError(
                f"middleware {_name(around)} is an async context manager, and handler {_name(plain[0].function)} of queue "
                f"{plain[0].queue.name!r} is plain; make the middleware a plain one, or the handler async"
            )


def _is_async_alone(around: Function) -> bool:
    """Say whether what `around` returns can be told to be enterable by `async with` alone."""
    if isinstance(around, type):
        return hasattr(around, "__aenter__") and not hasattr(around, "__enter__")
    return inspect.isasyncgenfunction(inspect.unwrap(around))


def _check_kind(where: str, function: Function) -> None:
    if not callable(function):
        raise ConfigurationError(f"{where} must be a function, not a {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{where} must return its answer, not yield")


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


def _is_job(hint: Any) -> bool:
    return hint is Job or get_origin(hint) is Job


def _hints(function: Function) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError):
        return {}  # a name that only a type checker sees, or no plain function: the queue's type decides
