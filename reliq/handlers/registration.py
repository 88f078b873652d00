"""Which function handles the messages of which queue, on which Redis: registered by a decorator, looked up by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from reliq.errors import ConfigurationError
from reliq.handlers.handler import Handler, check_around, check_hook, check_middleware, check_queue, inspected
from reliq.handlers.periodic import PeriodicRegistration
from reliq.keywords import check_keywords
from reliq.settings import HandlerSettings
from reliq.transport.connection import Connection, check_slots

if TYPE_CHECKING:
    from reliq.handlers.job import Job
    from reliq.handlers.periodic import Periodic
    from reliq.handlers.signatures import Options, Register, RegisterBatch
    from reliq.message import Duration
    from reliq.queue import Queue
    from reliq.transport.target import Target

B = TypeVar("B")
F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound="Callable[[Job[Any], BaseException, bool], Any]")

#: The keyword arguments of `Consumer.handler`.
_KEYWORDS = frozenset(field.name for field in fields(HandlerSettings))


class Registration(PeriodicRegistration):
    """The handlers of a consumer by queue, the middleware and error hooks for all of them, and its periodic entries."""

    def __init__(self, target: Target | None = None) -> None:
        super().__init__()
        self.target = target
        self._handlers: dict[str, Handler] = {}
        self._middleware: list[Callable[[Job[Any]], Any]] = []
        self._on_error: list[Callable[[Job[Any], BaseException, bool], Any]] = []

    @property
    def handlers(self) -> Sequence[Handler]:
        """The registered handlers."""
        return tuple(self._handlers.values())

    @property
    def around_calls(self) -> Sequence[Callable[[Job[Any]], Any]]:
        """The middleware of every call, the outermost first."""
        return tuple(self._middleware)

    @property
    def error_hooks(self) -> Sequence[Callable[[Job[Any], BaseException, bool], Any]]:
        """The hooks that are called for each failure."""
        return tuple(self._on_error)

    @overload
    def handler(self, queue: Queue[B], **options: Unpack[Options]) -> Register[B]: ...

    @overload
    def handler(
        self,
        queue: Queue[B],
        *,
        batch: int,
        linger: Duration | None = None,
        batch_by_key: bool = False,
        **options: Unpack[Options],
    ) -> RegisterBatch[B]: ...

    @overload
    def handler(
        self,
        queue: str,
        *,
        batch: int | None = None,
        linger: Duration | None = None,
        batch_by_key: bool = False,
        **options: Unpack[Options],
    ) -> Callable[[F], F]: ...

    def handler(
        self,
        queue: Queue[Any] | str,
        *,
        batch: int | None = None,
        linger: Duration | None = None,
        batch_by_key: bool = False,
        **options: Unpack[Options],
    ) -> Any:
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
            reject_on: exceptions after which the message is rejected, also those of `retry_on`.
            undecodable: `retry` a body that does not decode with backoff, or `reject` it at once.

        Raises:
            ConfigurationError: a setting or the signature is not allowed, or the queue has a handler.

        Example:
            @consumer.handler(orders, timeout=60, concurrency=4)
            def ship(order: Order, job: Job) -> None: ...
        """
        check_queue(queue)
        check_keywords("Consumer.handler", options, _KEYWORDS)
        settings = HandlerSettings(batch=batch, linger=linger, batch_by_key=batch_by_key, **options)  # type: ignore[arg-type]  # a single class becomes a tuple there

        def register(function: F) -> F:
            handler = inspected(queue, function, settings)
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
        check_around(around)
        self._middleware.append(around)
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
        check_hook(hook)
        self._on_error.append(hook)
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
        check_middleware(self._middleware, chosen)
        return chosen

    def ticked_beside(self, handlers: Sequence[Handler]) -> list[Periodic]:
        """Return the periodic entries of a process with these handlers: of their queues, and of queues without one here."""
        others = self._handlers.keys() - {handler.queue.name for handler in handlers}
        return [one for one in self.periodic if one.queue.name not in others]

    def redis(self, handlers: Sequence[Handler]) -> Target | None:
        """Return the one Redis of the consumer and its queues, None for RELIQ_URL; raise ConfigurationError for two."""
        queues = [handler.queue for handler in handlers] + [one.queue for one in self.ticked_beside(handlers)]
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

    def _register_all_of(self, other: Registration) -> None:
        """Register what `other` has too; raise ConfigurationError when a queue would have two handlers."""
        for handler in other._handlers.values():
            self._check_is_new(handler)
        self._add_all_of(other)
        self._handlers.update(other._handlers)
        self._middleware += other._middleware
        self._on_error += other._on_error

    def _check_is_new(self, handler: Handler) -> None:
        name = handler.queue.name
        if name in self._handlers:
            raise ConfigurationError(f"queue {name!r} has two handlers: {self._handlers[name].name} and {handler.name}")
