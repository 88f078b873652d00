"""The types of `Consumer.handler`: a type checker finds a handler that takes another body than its queue has."""

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
    """The options of `Consumer.handler`; the defaults are those of `HandlerSettings`."""

    lease: Duration
    timeout: Duration | None
    concurrency: int | None
    weight: int
    backoff: wait_base
    retry_on: type[Exception] | tuple[type[Exception], ...]
    reject_on: type[Exception] | tuple[type[Exception], ...]
    undecodable: Literal["retry", "reject"]
