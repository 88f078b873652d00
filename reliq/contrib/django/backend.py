"""A backend for Django's tasks framework `django.tasks`, and for its backport, the package `django-tasks`."""

from __future__ import annotations

import json
import os
import socket
import time
from asyncio import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from inspect import iscoroutinefunction
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured, SuspiciousOperation
from django.db import Error as DatabaseError, close_old_connections, connections
from django.utils.module_loading import autodiscover_modules, import_string

from reliq.admin import Admin
from reliq.consumer import Consumer
from reliq.errors import ConfigurationError, JobInterrupted
from reliq.handlers.handler import Handler, Job
from reliq.handlers.settlement import is_final, raised
from reliq.keys import made_at
from reliq.message import TASK_HEADER, Outcome, Reject
from reliq.outbox.tables import Tables
from reliq.outbox.transactions import is_in_transaction
from reliq.queue import Queue
from reliq.settings import DAY_SECONDS, OUTBOX_PREFIX, HandlerSettings
from reliq.tasks import leave_to_others
from reliq.text import check_keywords
from reliq.wire_format import described

try:
    from django.tasks import task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ImportError:  # Django before 6.0 has no tasks; the package django-tasks provides them
    from django_tasks import task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import InvalidTaskError as InvalidTask, TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reliq.message import Header

TIMES = ("enqueued_at", "started_at", "last_attempted_at", "finished_at")
#: The keys that OPTIONS of the setting TASKS may have.
OPTIONS = ("url", "prefix", "queue", "handler", "outbox")
#: The history of a task contains its last ERRORS_LIMIT errors and its last WORKERS_LIMIT workers.
ERRORS_LIMIT = 2
WORKERS_LIMIT = 10
#: How many characters at the end of each traceback the history contains. If the history is then too large for a
#: checkpoint, the next number is tried.
TRACEBACK_LENGTHS = (1200, 400, 100)
#: Exceptions that end an attempt, but are not stored as errors of the task, because its function did not fail.
NO_ERRORS = (Outcome, JobInterrupted, CancelledError)


class ReliqBackend(BaseTaskBackend):  # type: ignore[misc]  # Django has no type hints
    """
    A task backend of Django that publishes tasks as messages of reliq's queues.

    OPTIONS in the setting TASKS, all optional:
        url: the URL of Redis. Default: the environment variable RELIQ_URL.
        prefix: the start of the queues' names in Redis. Default: "django-".
        queue: the options of `Queue`, such as {"retries": 3}.
        handler: the options of `Consumer.handler`, such as {"timeout": 60}; `keep` is a day by default.
        outbox: the alias of the database that has the outbox table. In a transaction of this database, `enqueue`
            writes to the outbox. With None, `enqueue` always publishes immediately. Default: "default".
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        check_keywords(f"OPTIONS of TASKS[{alias!r}]", self.options, OPTIONS)
        if not self.queues:
            raise ImproperlyConfigured(f"TASKS[{alias!r}]['QUEUES'] must name the queues that the worker serves")
        self.settings = HandlerSettings(**{"keep": DAY_SECONDS, **self.options.get("handler", {})})
        prefix, options = self.options.get("prefix", "django-"), self.options.get("queue", {})
        if (layout := options.get("layout")) and layout.bare:
            raise ImproperlyConfigured(
                f"TASKS[{alias!r}] cannot have the layout {layout}: its messages have no header for a task's name"
            )
        self._queues = {
            name: Queue(f"{prefix}{name}", url=self.options.get("url"), **options) for name in sorted(self.queues)
        }
        self._outbox = self.options.get("outbox", "default")

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        """
        Publish a message that runs the task. In a transaction of the outbox's database, write it to the outbox instead.

        Raises:
            InvalidTask: the backend cannot run the task, for example because its module is not in INSTALLED_APPS.
            ConfigurationError, BodyError, PublishFailed: see `Queue.publish`.
        """
        self.validate_task(task)
        try:
            find_task(task.module_path)
        except SuspiciousOperation as error:
            raise InvalidTask(f"workers could not run the task: {error}") from error
        queue = self._queues[task.queue_name]
        body = {"args": normalize_json(list(args)), "kwargs": normalize_json(dict(kwargs))}
        priority: Any = "high" if task.priority > 0 else "low" if task.priority < 0 else "normal"
        options: dict[str, Any] = {"at": task.run_after, "priority": priority}
        options["headers"] = {TASK_HEADER: task.module_path}
        database = connections[self._outbox] if self._outbox and apps.is_installed("reliq.contrib.django") else None
        if database and is_in_transaction(database):
            id = queue.publish_in(database, body, **options)
        else:
            id = queue.publish(body, **options).id
        result = self.result(task, id, "READY", {"body": body})
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """
        Return a `TaskResult` with the current status of a task.

        Raises:
            TaskResultDoesNotExist: Redis has no task with this id. Possible reasons: its transaction is open, the
                outbox relay has not published it yet, it was cancelled, or its result is too old or larger than 64 KiB.
            SuspiciousOperation: the message does not name a task in a module of INSTALLED_APPS.
        """
        name, _, id = str(result_id).rpartition(":")
        for _ in range(2):  # if the message ends between `status` and `show`, read its status again
            with suppress(KeyError, ValueError):
                queue = self._queues[name]
                status = queue.status(id)
                if status.state == "gone":
                    break
                state, record, attempts = "SUCCESSFUL", status.result, status.attempt
                if record is None:
                    view = Admin(self.options.get("url"), layout=queue.layout).show(queue.name, id)
                    history = view.cursor or {}
                    record = {"path": view.headers[TASK_HEADER], "body": json.loads(view.body), "history": history}
                    attempts, state = view.attempt, "RUNNING" if view.mark == "held" else "READY"
                    if view.state in ("dead", "garbage"):
                        state = "FAILED"
                        history.setdefault("errors", [("reliq.errors.ReliqError", view.summary)])
                task = find_task(record["path"]).using(queue_name=name, backend=self.alias)
                return self.result(task, id, state, record, attempts or 0)
        raise TaskResultDoesNotExist(f"Redis has no task with the result id {result_id!r}")

    def consumer(self) -> Consumer:
        """Return a consumer of this backend's queues, and import the module `tasks` of each app."""
        autodiscover_modules("tasks")
        consumer = Consumer(self.options.get("url"))
        for name, queue in self._queues.items():
            consumer._handlers[queue.name] = AnyTask(self, name, queue)  # noqa: SLF001  as `Tasks`
        return consumer

    def check(self, **_options: Any) -> list[checks.CheckMessage]:
        """Return a warning if the tables of the outbox are missing."""
        hint = 'add "reliq.contrib.django" to INSTALLED_APPS, and run `manage.py migrate`'
        if self._outbox is None:
            return []
        if apps.is_installed("reliq.contrib.django"):
            tables: list[str] = []
            with suppress(DatabaseError):  # the database is unavailable
                tables = connections[self._outbox].introspection.table_names()
            # A database without any table needs no warning: `migrate` has not run yet.
            if not tables or Tables.of(OUTBOX_PREFIX).outbox in tables:
                return []
            hint = "run `manage.py migrate`"
        text = f"the tables of reliq's outbox are missing, so enqueue() of TASKS[{self.alias!r}] is in no transaction"
        hint += "; to publish without transactions, set OPTIONS['outbox'] to None"
        return [checks.Warning(text, hint=hint, id="reliq.W001")]

    def result(self, task: Task, id: str, status: str, record: Mapping[str, Any], attempts: int = 0) -> TaskResult:
        """
        Create the `TaskResult` of a task.

        Args:
            task: the task, with the name of its queue.
            id: the message id.
            status: the name of a `TaskResultStatus`.
            record: a dict with the key `body` (the arguments of the task). Optional keys are `value` (the return value)
                and `history` (times in Unix seconds, the last workers, and class and traceback of the last errors).
            attempts: the number of attempts that have begun.
        """
        history = record.get("history", {})
        times = {"enqueued_at": (made_at(id) or 0) / 1000, **history}
        if status in ("READY", "RUNNING"):
            times.pop("finished_at", None)  # a redriven message still has the time of its earlier run
        workers = [""] * attempts + history.get("workers", [])  # "" for a killed attempt, which stored no worker name
        result = TaskResult(
            task=task,
            id=f"{task.queue_name}:{id}",
            status=TaskResultStatus[status],
            **{name: datetime.fromtimestamp(times[name], UTC) if name in times else None for name in TIMES},
            **record["body"],
            backend=self.alias,
            errors=[TaskError(exception_class_path=path, traceback=text) for path, text in history.get("errors", ())],
            worker_ids=workers[-attempts:] if attempts else [],
        )
        object.__setattr__(result, "_return_value", record.get("value"))  # Django's own backends set it like this
        return result


def consumers() -> dict[str, Consumer]:
    """Return the consumer of each `ReliqBackend` in the setting TASKS."""
    return {one.alias: one.consumer() for one in task_backends.all() if isinstance(one, ReliqBackend)}


def find_task(path: str) -> Task:
    """
    Return the task at an import path.

    Raises:
        SuspiciousOperation: no task of a module of INSTALLED_APPS has this path. Other modules are not imported.
    """
    try:
        found = import_string(path) if apps.get_containing_app_config(path) else None
    except ImportError as error:
        raise SuspiciousOperation(f"cannot import the task {path}: {error}") from error
    if not isinstance(found, Task):
        raise SuspiciousOperation(f"{path} is not a task in a module of INSTALLED_APPS")
    return found


class AnyTask(Handler):
    """
    The handler of a queue of `ReliqBackend`.

    It imports the task that a message names. If the task is unknown, it leaves the message to other workers.
    """

    def __init__(self, backend: ReliqBackend, name: str, queue: Queue[Any]) -> None:
        super().__init__(queue, leave_to_others, backend.settings)
        self._backend = backend
        self._name = name
        self._async = Handler(queue, leave_to_others, backend.settings)
        self._async.is_async = True
        self.task = self._async.task = "unknown"
        self.routes = self._found = dict[str, Handler]()

    @property
    def name(self) -> str:
        """The name of the backend, for tables and log lines."""
        return f"tasks of Django's backend {self._backend.alias}"

    @property
    def each(self) -> list[Handler]:
        """A plain handler and an async handler, because a message may name a task of either kind."""
        return [self, self._async]

    def of(self, header: Header) -> Handler:
        """Return the handler of the task that a message names; this handler if the task is unknown."""
        path = header.headers.get(TASK_HEADER, "")
        found = self._found.get(path)
        if found is None:
            try:
                task = find_task(path).using(queue_name=self._name, backend=self._backend.alias)
            except Exception:  # a module may raise any exception when it is imported
                return self
            found = self._found[path] = task_handler(self._backend, self.queue, task)
        return found


@dataclass
class Attempt:
    """
    One attempt of a task.

    The checkpoint of the message stores the history of the task: times, workers and last errors.
    """

    backend: ReliqBackend
    task: Task
    body: dict[str, Any]
    job: Job[Any]

    def begin(self) -> None:
        """Store the start of the attempt, and send `task_started`; raise JobInterrupted if the worker is stopping."""
        close_old_connections()
        self.claimed = self.job._held.delivery.claimed  # noqa: SLF001  whether it is the last attempt, or a suspect
        known = self.job.cursor or {}
        now = time.time()
        workers = [*known.get("workers", ()), f"{socket.gethostname()}:{os.getpid()}"][-WORKERS_LIMIT:]
        self.history = {"started_at": now, **known, "last_attempted_at": now, "workers": workers}
        self.record = {"path": self.task.module_path, "body": self.body, "history": self.history}
        # A checkpoint resets `deaths`, the number of attempts that may have killed their process. At the start of an
        # attempt this would be too early.
        if not self.claimed.deaths:
            self.job.checkpoint(self.history)
        self.result = self._result("RUNNING")
        task_started.send_robust(type(self.backend), task_result=self.result)

    def call(self) -> Any:
        """Call the function of the task; return its result or coroutine."""
        context = [TaskContext(task_result=self.result)] if self.task.takes_context else []
        return self.task.func(*context, *self.body["args"], **self.body["kwargs"])

    def succeed(self, value: Any) -> dict[str, Any]:
        """
        Send the signal `task_finished` for a successful task; return the record that `get_result` reads.

        Raises:
            Reject: JSON cannot encode the return value.
        """
        try:
            self.record["value"] = normalize_json(value)
        except (TypeError, ValueError) as error:
            self.fail(error, retries=False)
            raise Reject(described(error)) from error
        self.history["finished_at"] = time.time()
        task_finished.send_robust(type(self.backend), task_result=self._result("SUCCESSFUL"))
        close_old_connections()
        return self.record

    def fail(self, error: BaseException, *, retries: bool = True) -> None:
        """
        Store an error of the task; send the signal `task_finished` if the message becomes a dead letter.

        With `retries=False`, the message becomes a dead letter in any case.
        """
        final = not retries or is_final(self.claimed, raised(error, self.job.attempt, self.backend.settings))
        path = f"{type(error).__module__}.{type(error).__qualname__}"
        trace = "".join(format_exception(error)).encode("utf-8", "backslashreplace").decode()
        errors = [*self.history.get("errors", ()), (path, trace)][-ERRORS_LIMIT:]
        if final:
            self.history["finished_at"] = time.time()
        for length in TRACEBACK_LENGTHS:
            self.history["errors"] = [(path, trace[-length:]) for path, trace in errors]
            with suppress(ConfigurationError):  # the checkpoint is too large: try shorter tracebacks
                with suppress(JobInterrupted):  # raised after the checkpoint is stored, if the worker is stopping
                    self.job.checkpoint(self.history)
                break
        if final:
            task_finished.send_robust(type(self.backend), task_result=self._result("FAILED"))
        close_old_connections()

    def _result(self, status: str) -> TaskResult:
        return self.backend.result(self.task, self.job.id, status, self.record, self.job.attempt or 1)


def task_handler(backend: ReliqBackend, queue: Queue[Any], task: Task) -> Handler:
    """Return a handler that runs a Django task, and stores its history in checkpoints."""

    def plain(body: dict[str, Any], job: Job[Any]) -> Any:
        attempt = Attempt(backend, task, body, job)
        attempt.begin()
        try:
            value = attempt.call()
        except NO_ERRORS:
            raise
        except BaseException as error:
            attempt.fail(error)
            raise
        return attempt.succeed(value)

    async def coroutine(body: dict[str, Any], job: Job[Any]) -> Any:
        attempt = Attempt(backend, task, body, job)
        # Call `begin` in the thread that async database queries use, because it closes this thread's old connections.
        await sync_to_async(attempt.begin)()
        try:
            value = await attempt.call()
        except NO_ERRORS:
            raise
        except BaseException as error:
            await sync_to_async(attempt.fail)(error)
            raise
        return await sync_to_async(attempt.succeed)(value)

    handler = Handler(queue, coroutine if iscoroutinefunction(task.func) else plain, backend.settings)
    handler.task = handler.function.__qualname__ = task.module_path
    return handler
