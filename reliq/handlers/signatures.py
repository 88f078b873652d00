"""What `Consumer.handler` takes and returns, for type checkers: a handler of another body is a mistake they find."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenacity.wait import wait_base

    from reliq.handlers.job import Job
    from reliq.message import Duration

B = TypeVar("B")
R = TypeVar("R")


class Register(Protocol[B]):
    """What `Consumer.handler(queue)` returns: a decorator that leaves the function as it is."""

    @overload
    def __call__(self, function: Callable[[B], R], /) -> Callable[[B], R]: ...
    @overload
    def __call__(self, function: Callable[[B, Job[B]], R], /) -> Callable[[B, Job[B]], R]: ...


class RegisterBatch(Protocol[B]):
    """What `Consumer.handler(queue, batch=...)` returns."""

    @overload
    def __call__(self, function: Callable[[list[B]], R], /) -> Callable[[list[B]], R]: ...
    @overload
    def __call__(self, function: Callable[[list[B], list[Job[B]]], R], /) -> Callable[[list[B], list[Job[B]]], R]: ...


class Options(TypedDict, total=False):
    """What `Consumer.handler` takes; the defaults are those of `HandlerSettings`."""

    lease: Duration
    timeout: Duration | None
    concurrency: int | None
    weight: int
    backoff: wait_base
    retry_on: type[Exception] | tuple[type[Exception], ...]
    reject_on: type[Exception] | tuple[type[Exception], ...]
    undecodable: Literal["retry", "reject"]
