"""
`Tasks`: run registered functions (tasks) as background jobs. All tasks of a queue share it.

A message is a call of one task. A header of the message contains the name of the task, and the body its arguments.
"""

from __future__ import annotations

import inspect
import logging
import re
import time
from copy import copy
from dataclasses import replace
from functools import update_wrapper
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    get_type_hints,
    overload,
)

from msgspec import UNSET, defstruct

from reliq.codec import Codec, JsonBodies
from reliq.consumer import Consumer
from reliq.errors import BodyError, ConfigurationError
from reliq.handlers.handler import Handler, Job, is_job
from reliq.handlers.registration import FunctionOptions, Options
from reliq.message import TASK_HEADER, OutgoingMessage, PublishOptions, Reject, Snooze
from reliq.queue import PublishedMessage, Queue, QueueOptions
from reliq.settings import DAY_SECONDS, HandlerSettings
from reliq.text import check_keywords

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from reliq.message import Receipt
    from reliq.outbox.relay import Relay
    from reliq.outbox.transactions import AsyncTransaction, Transaction

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

logger = logging.getLogger("reliq")

#: If no worker has the task of a message, the message becomes a dead letter this many seconds after its publish.
UNKNOWN_SECONDS = DAY_SECONDS
#: After a worker process first claims a message of an unknown task, it rejects no messages of this task for this many
#: seconds. So during a deploy, workers of the new version have time to claim messages that were delayed for days. The
#: time is short, because some deployments replace processes every few minutes, and each new process counts from 0.
PATIENCE_SECONDS = 60.0
#: The shortest and the longest delay until a message of an unknown task is delivered again, in seconds.
UNKNOWN_WAITS = (1.0, 15.0)
#: A process stores and logs the names of at most this many unknown tasks.
UNKNOWN_LIMIT = 100

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class TaskSettings(FunctionOptions, total=False):
    """The keyword options of `Tasks.task`, for type checkers; see there."""

    name: str
    aliases: tuple[str, ...]
    retries: int | None


class TaskOptions(PublishOptions, total=False):
    """The options for publishing a task: the options of `Queue.publish`, and `after`."""

    after: Job[Any]


class Task(Generic[P, R_co]):
    """
    A function that workers can run as a background job. `Tasks.task` creates it.

    A direct call of the task runs the function in this process, without Redis.

    Attributes:
        name: the name of the task.
        queue: the queue to which the task's messages are published. Their bodies are JSON objects of the arguments.
        function: the decorated function.

    Example: `send.options(delay=60).publish("a@example.org", subject="hello")`
    """

    def __init__(
        self, queue: Queue[bytes], name: str, function: Callable[..., R_co], *, retries: int | None, validate: bool
    ) -> None:
        self.queue = queue
        self.name = name
        self.function = function
        self._options: dict[str, Any] = {} if retries is None else {"retries": retries}
        where = f"task {name!r}"
        try:
            hints = get_type_hints(function, include_extras=True)
        except (NameError, TypeError) as error:
            raise ConfigurationError(
                f"{where}: the annotations cannot be read: {error}; import the types outside of `if TYPE_CHECKING`"
            ) from error
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(f"{where} must return its result, not yield")
        parameters = list(inspect.signature(function).parameters.values())
        self._returns = hints.get("return", Any)
        self.takes_job = bool(parameters) and is_job(hints.get(parameters[0].name), is_batch=False)
        parameters = parameters[self.takes_job :]
        for parameter in parameters:
            if parameter.kind not in _KINDS:
                raise ConfigurationError(
                    f"{where}: parameter {parameter} is not allowed: a publish sends each argument by its name"
                )
            if is_job(hints.get(parameter.name), is_batch=False):
                raise ConfigurationError(f"{where}: the Job must be the first parameter, not {parameter.name!r}")
        self._signature = inspect.Signature(parameters)
        # If the publisher gives no argument for a parameter with a default, its field is UNSET, and is not encoded.
        fields = [(p.name, hints.get(p.name, Any), *(() if p.default is p.empty else (UNSET,))) for p in parameters]
        arguments = defstruct(re.sub(r"\W", "_", name), fields, kw_only=True, forbid_unknown_fields=True)
        self.codec: Codec[Any] = Codec(arguments, validate=validate)
        update_wrapper(self, function, updated=())

    def __repr__(self) -> str:
        return f"Task({self.name!r})"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function in this process, without Redis; raise TypeError if it takes a `Job`."""
        if self.takes_job:
            raise TypeError(
                f"task {self.name!r} takes a Job: use `perform` of the test kit, or call the task's `function` with a job"
            )
        return self.function(*args, **kwargs)

    def options(self, **options: Unpack[TaskOptions]) -> Task[P, R_co]:
        """
        Return a copy of the task whose messages are published with these options.

        Args:
            after: the running job, to publish the message as its follow-up: only once, even if the job is redelivered,
                see `Job.publish`.
            options: `delay`, `at`, `id`, `retries`, `ttl`, `headers`, `dedup`, `ignore_dedup`, `on_conflict`, `publication_id`, `key` and
                `priority`, see `Queue.publish`.

        Raises:
            TypeError: an option is unknown.
        """
        check_keywords("Task.options", options, TaskOptions.__annotations__)
        other = copy(self)
        other._options = {**self._options, **options}  # noqa: SLF001  a copy of this object
        return other

    def outgoing(self, *args: P.args, **kwargs: P.kwargs) -> OutgoingMessage[bytes]:
        """
        Create a message that calls the task with these arguments, for `queue.publish_many` or `Consumer.cron`.

        Raises:
            BodyError: see `publish`.
        """
        body, options = self._message(args, kwargs)
        return OutgoingMessage(body=body, **options)

    def publish(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """
        Publish a message, so that a worker calls the task with these arguments.

        The returned receipt is true if the message was published. The message does not contain arguments that you leave
        out; the function uses their default values when the worker calls it.

        Raises:
            BodyError: the function does not take these arguments, JSON cannot encode them, or the body is too large.
            ConfigurationError, PublishFailed: see `Queue.publish`.
        """
        body, options = self._message(args, kwargs)
        return self.queue.publish(body, **options)

    async def apublish(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Async version of `publish`."""
        body, options = self._message(args, kwargs)
        return await self.queue.apublish(body, **options)

    def publish_in(self, tx: Transaction, *args: P.args, **kwargs: P.kwargs) -> str:
        """Write the message to the outbox in your transaction `tx`, see `Queue.publish_in`; return the message id."""
        body, options = self._message(args, kwargs)
        return self.queue.publish_in(tx, body, **options)

    async def apublish_in(self, tx: AsyncTransaction, *args: P.args, **kwargs: P.kwargs) -> str:
        """Async version of `publish_in`."""
        body, options = self._message(args, kwargs)
        return await self.queue.apublish_in(tx, body, **options)

    def of(self, id: str | UUID) -> PublishedMessage[R_co]:
        """
        Return an object to read the status and result of the message with this id.

        The result is decoded into the return type of the task's function.

        Raises:
            ConfigurationError: JSON cannot be decoded into this return type.
        """
        return PublishedMessage(self.queue, id, decode=JsonBodies(self._returns).decode)

    def _message(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, PublishOptions]:
        """Encode the arguments; return the body and the publish options. Raise BodyError for wrong arguments."""
        try:
            body = self.codec.encode(self.codec.kind(**self._signature.bind(*args, **kwargs).arguments))
        except (TypeError, BodyError) as error:
            raise BodyError(f"task {self.name!r}: {error}") from None
        options = dict(self._options)
        if job := options.pop("after", None):
            options = job._follow_up(self.queue, "", options)  # noqa: SLF001  as `Job.publish`
        options["headers"] = {**(options.get("headers") or {}), TASK_HEADER: self.name}
        return body, options  # type: ignore[return-value]

    def handler(self, settings: HandlerSettings) -> Handler:
        """Return a handler that calls the task's function with the arguments in the message body."""
        function = self.function
        takes_job = self.takes_job
        names = list(self._signature.parameters)

        def call(body: Any, job: Job) -> Any:
            given = {name: value for name in names if (value := getattr(body, name)) is not UNSET}
            return function(job, **given) if takes_job else function(**given)

        call.__module__, call.__qualname__ = function.__module__, self.name
        handler = Handler(self.queue, call, settings)
        handler.task = self.name
        handler.codec = self.codec
        # `call` is a plain function, but for an async function it returns a coroutine, which the worker must await.
        handler.is_async = inspect.iscoroutinefunction(function)
        return handler


class MakesTask(Protocol):
    """The decorator that `Tasks.task(...)` returns."""

    @overload
    def __call__(self, function: Callable[Concatenate[Job[Any], P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class Tasks(Consumer):
    """
    A consumer of one queue in which each message is a call of a registered function (task).

    Args:
        name: the name of the queue. Default: "default".
        lifespan: see `Consumer`.
        relay: see `Consumer`.
        handler: the options of `Consumer.handler` for all tasks, such as `{"timeout": 60}`. Default: none.
        options: the options of `Queue`; `url` and `observers` also apply to the consumer. The Go layout (`hdt3213`) is
            not allowed.

    Attributes:
        queue: the queue to which messages of all tasks are published.
        tasks: the registered tasks by name.

    Example:
        app = Tasks("default")

        @app.task(timeout=60)
        def send(to: str, subject: str = "hello") -> None: ...

        send.publish("a@example.org")
    """

    def __init__(
        self,
        name: str = "default",
        *,
        lifespan: Callable[[], Any] | None = None,
        relay: Relay | None = None,
        handler: Options | None = None,
        **options: Unpack[QueueOptions],
    ) -> None:
        super().__init__(options.get("url"), lifespan=lifespan, observers=options.get("observers", ()), relay=relay)
        check_keywords("Tasks(handler=…)", handler or (), Options.__annotations__)
        self.queue: Queue[bytes] = Queue(name, bytes, **options)
        if self.queue.layout.bare:
            raise ConfigurationError(
                f"Tasks({name!r}) cannot have the layout {self.queue.layout}: its messages have no header for a task's name"
            )
        self.tasks: dict[str, Task[..., Any]] = {}
        self._defaults = HandlerSettings(**(handler or {}))  # type: ignore[arg-type]  # one exception class is allowed too
        self._validate = options.get("validate", True)
        self._unknown = Handler(self.queue, leave_to_others, self._defaults)
        self._routes: dict[str, Handler] = {}
        self._unknown.task = "unknown"
        self._unknown.routes = self._routes
        self._handlers[name] = self._unknown

    @overload
    def task(self, function: Callable[Concatenate[Job[Any], P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, **options: Unpack[TaskSettings]) -> MakesTask: ...

    def task(  # type: ignore[misc]  # mypy does not accept the default of the positional parameter
        self,
        function: Any = None,
        /,
        *,
        name: str = "",
        aliases: tuple[str, ...] = (),
        retries: int | None = None,
        **settings: Any,
    ) -> Any:
        """
        Register a plain or async function as a task. Use it as a decorator, with or without options.

        When you publish the task, the arguments are checked against the annotations of the function. If its first
        parameter is annotated as `Job`, the worker passes the running job.

        Args:
            name: the name of the task in its messages, 1 to 100 of A-Z a-z 0-9 _ . -. Default: the function's name.
            aliases: earlier names of the task, which waiting messages may still contain. Default: none.
            retries: how many times a failed message is delivered again. Default: the queue's `retries`.
            settings: `timeout`, `backoff`, `retry_on`, `reject_on`, `on_decode_error` and `keep`, see `Consumer.handler`.
                Default: the options of `Tasks(handler=…)`.

        Raises:
            ConfigurationError: another task of the queue has this name, or the function cannot be a task.
        """
        check_keywords("Tasks.task", settings, TaskSettings.__annotations__)

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            names = (name or function.__name__, *aliases)
            for each in names:
                if not isinstance(each, str) or _NAME.fullmatch(each) is None:
                    raise ConfigurationError(f"a task's name must be 1 to 100 of A-Z a-z 0-9 _ . - , not {each!r:.80}")
                if each in self._routes:
                    raise ConfigurationError(
                        f"queue {self.queue.name!r} has two tasks named {each!r}; give one of them another name"
                    )
            task: Task[..., Any] = Task(self.queue, names[0], function, retries=retries, validate=self._validate)
            self._routes.update(dict.fromkeys(names, task.handler(replace(self._defaults, **settings))))
            self.tasks[task.name] = task
            # If all tasks are coroutines, the worker must not claim from the queue while its event loop is blocked. So
            # mark the handler of unknown tasks as async too. Its plain function may run in the event loop, because it
            # only raises.
            self._unknown.is_async = all(each.is_async for each in self._unknown.each)
            return task

        return register if function is None else register(function)


#: When this process first claimed a message of each unknown task (monotonic time), by the name of the task.
_unknown_since: dict[str, float] = {}


def leave_to_others(_payload: bytes, job: Job[bytes]) -> None:
    """
    Postpone a message whose task this worker does not have, so that a worker of another version can run it.

    This does not use up a retry of the message.

    Raises:
        Snooze: always, unless the message is too old. The older the message, the longer the delay.
        Reject: the message is older than UNKNOWN_SECONDS, and this process has known the name of the task for more than
            PATIENCE_SECONDS.
    """
    name = job.headers.get(TASK_HEADER, "")
    age = time.time() - (job.enqueued or 0.0)  # the age since the publish: each snooze changes `job.due`
    now = time.monotonic()
    since = _unknown_since.get(name)
    if since is None and len(_unknown_since) < UNKNOWN_LIMIT:
        since = _unknown_since[name] = now
        logger.warning(
            "worker: queue %s has messages of the task %r, which this worker does not have; other workers may run them",
            job.queue,
            name,
        )
    if since is None:  # UNKNOWN_LIMIT names are stored already: use the time of the first name
        since = next(iter(_unknown_since.values()))
    if age > UNKNOWN_SECONDS and now - since > PATIENCE_SECONDS:
        raise Reject(f"no worker has a task named {name!r}")
    shortest, longest = UNKNOWN_WAITS
    raise Snooze(delay=min(max(age / 4, shortest), longest), reason=f"this worker has no task named {name!r}")
