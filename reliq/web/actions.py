"""
The forms of the web pages that change queues and messages, or start a check.

An `Action` is short: it calls one method of `Admin`. A long change or check runs as a background task, in a thread of
this process, and reports its progress on a page. It continues after the visitor closes the page.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from reliq.admin import Admin
from reliq.admin.bulk import check_redrive
from reliq.admin.filters import PURGEABLE, check_place, duration
from reliq.errors import ReliqError
from reliq.logs import WEB_WRITE
from reliq.text import pluralize, printable
from reliq.web.access import Access
from reliq.web.request import PageError, RequestContext

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.responses import Response


logger = logging.getLogger(__name__)

#: The maximum number of running background tasks that change messages, and also the maximum number of running checks.
RUNNING_LIMIT = 8
#: The maximum number of checks that a single visitor may run at the same time.
CHECKS_PER_VISITOR = 2
#: The maximum number of background tasks, running and ended, that this process keeps for the page of tasks.
REMEMBERED = 50
#: The fields of the form that sets the limits of a queue, with their types. The form has no weights, which the
#: command `reliq limits` can change.
LIMITS: Mapping[str, Callable[[str], Any]] = {
    "ordered": bool,
    "per_key": int,
    "rate": lambda text: [rate.strip() for rate in text.split(",")],
    "burst": lambda text: [int(burst) for burst in text.split(",")],
    "key_rate": str,
    "key_burst": int,
    "concurrency": int,
}


class Action(NamedTuple):
    """
    A form that calls one method of `Admin`. The visitor needs the right WRITE.

    Attributes:
        method: the method of `Admin`, or a function with an `Admin` as the first argument. The other arguments are the
            values in the path, such as the queue, and the value of `subject`. Its name is also the name of the route.
        page: the route of the page that the browser opens after the call.
        subject: the name of the form field with the message key, message id or name of a periodic job. Empty if the
            form applies to the whole queue.
        fields: the other form fields, with functions that convert their texts. Fields that the visitor has filled in
            are passed as keyword arguments.
        done: the sentence that the page shows after the call.
        others: for some return values of the method, the sentence that the page shows instead of `done`.
        parent: the path of the form is `parent`, a slash, and the name of the route.
    """

    method: Callable[..., Any]
    page: str
    subject: str
    fields: Mapping[str, Callable[[str], Any]]
    done: str
    others: Mapping[Any, str] = {}
    parent: str = "/queues/{queue}"

    @property
    def name(self) -> str:
        """The name of the form's route."""
        return self.method.__name__

    def answer(self, context: RequestContext) -> Response:
        """Call the method with the fields of the form, log the call, and redirect the browser to `page`."""
        subject = {self.subject: context.text(self.subject)} if self.subject else {}
        names = [*context.path.values(), *subject.values()]
        fields = {name: context.value(name, kind) for name, kind in self.fields.items()}
        given = {name: value for name, value in fields.items() if value is not None}
        author = {"by": context.visitor.who} if "reason" in fields else {}
        answer = self.method(context.admin, *names, **given, **author)
        result = [] if answer is None else [f"({answer})"]
        log(context, self.name, *names, *(f"{name}={value!r}" for name, value in given.items()), *result)
        notice = f"{self.name}-{answer}" if answer in self.others else self.name
        return context.go(self.page, **context.path, **subject, done=notice)


def cancel(admin: Admin, queue: str, id: str) -> str:
    """Cancel one message; return its status, such as `cancelled` or `running`."""
    return admin.cancel(queue, [id])[id]


def set_limits(admin: Admin, queue: str, **limits: Any) -> None:
    """Set the limits of a queue, and remove every limit that is not in `limits`."""
    admin.set_limits(queue, **limits, clear=[name for name in LIMITS if name not in limits])


NOT_PAUSED = {False: "It was not paused."}
ENDED = {"not_found": "It had ended already."}
CANCELS = ENDED | {"running": "A worker runs it: its handler is notified, and it is not retried."}
MOVES = ENDED | {"running": "A worker runs it: a running message has no due time."}
ACTIONS = (
    Action(
        Admin.pause, "queue", "", {"reason": str, "for_": duration}, "Paused: workers stop claiming within a second."
    ),
    Action(Admin.resume, "queue", "", {}, "Resumed: workers claim again.", NOT_PAUSED),
    Action(Admin.pause_key, "keys", "key", {"for_": duration}, "Paused: no message of this key starts."),
    Action(Admin.resume_key, "keys", "key", {}, "Resumed: messages of this key start again.", NOT_PAUSED),
    Action(set_limits, "keys", "", LIMITS, "Changed: the new limits hold within a second."),
    Action(cancel, "message", "id", {}, "Cancelled: it does not start.", CANCELS),
    Action(Admin.reschedule, "message", "id", {"delay": duration}, "It has another due time.", MOVES),
    Action(Admin.pause_cron, "cron", "name", {"reason": str}, "Paused: its ticks are skipped, and counted."),
    Action(Admin.resume_cron, "cron", "name", {}, "Resumed: its next tick is published.", NOT_PAUSED),
    Action(Admin.pause_schedule, "schedules", "name", {"reason": str}, "Paused: its ticks are skipped."),
    Action(Admin.resume_schedule, "schedules", "name", {}, "Resumed: its next tick is published.", NOT_PAUSED),
    Action(Admin.delete_schedule, "schedules", "name", {}, "Deleted: its published messages stay."),
    Action(Admin.ask_stacks, "worker", "", {}, "The stacks arrive within 5 seconds.", parent="/workers/{id}"),
)
#: The sentence that a page shows after a form was sent, for each value of the query field `done` in the page's URL.
NOTICES = {"stop": "It stops after its step.", "stop-ended": "It had ended already."}
for _action in ACTIONS:
    NOTICES[_action.name] = _action.done
    NOTICES |= {f"{_action.name}-{answer}": text for answer, text in _action.others.items()}


class _Stopped(Exception):  # noqa: N818  a control flow signal, not an error
    """Raised in the thread of a background task to end it, after a visitor has stopped the task."""


@dataclass(slots=True)
class BackgroundTask:
    """
    A long change or check of a queue, which runs in a thread of this process.

    Attributes:
        title: the name of the task on its page and in log lines.
        by: the name of the visitor who started the task; empty if unknown.
        visitor: the name and the IP address of this visitor, as NAME@ADDRESS.
        only_reads: whether the task is a check, which visitors without the right WRITE may start and stop.
        total: the number of messages in the state when the task started, for the progress bar; None if unknown.
        started, ended: when the task started and ended, in unix seconds by the clock of this process.
        done: how many messages the task has processed.
        state: `running`, `finished`, `stopped` or `failed`.
        outcome: the text of the result so far.
        is_stopped: whether a visitor has asked the task to stop after its current step.
    """

    title: str
    queue: str
    layout: str
    by: str
    visitor: str
    only_reads: bool
    total: int | None
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    started: float = field(default_factory=time.time)
    ended: float | None = None
    done: int = 0
    state: str = "running"
    outcome: str = ""
    is_stopped: bool = False

    def step(self, looked: int, outcome: object) -> None:
        """Store the progress after a step of the task; raise `_Stopped` if a visitor has stopped the task."""
        self.done += looked
        self.outcome = str(outcome)
        if self.is_stopped:
            raise _Stopped

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` in this thread, store its return value as `outcome`, and log how the task ended."""
        state = "failed"
        try:
            self.outcome = str(work())
            state = "finished"
        except _Stopped:
            state = "stopped"
        except ReliqError as error:
            self.outcome = f"{self.outcome}; {error}".removeprefix("; ")
        except Exception:
            logger.exception("web: %s of queue %s failed", self.title, self.queue)
            self.outcome = f"{self.outcome}; it failed, see the log".removeprefix("; ")
        self.ended = time.time()
        self.state = state
        fields = {"event": WEB_WRITE, "verb": self.title, "queue": self.queue, "who": self.by, "outcome": state}
        line = f"web: {self.by or self.visitor}: {self.title} of queue {self.queue} {state}: {self.outcome}"
        logger.info("%s", printable(line), extra={"reliq": fields})


class BackgroundTasks(dict[str, BackgroundTask]):
    """The background tasks of this process by task id, newest last: all running tasks, and the last ended tasks."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def start(self, task: BackgroundTask, work: Callable[[], object]) -> bool:
        """Start a task, which calls `work` in a thread. Return False if too many tasks run already."""
        with self._lock:
            alike = [one for one in self.values() if one.state == "running" and one.only_reads == task.only_reads]
            own = [one for one in alike if one.visitor == task.visitor]
            if len(alike) >= RUNNING_LIMIT or (task.only_reads and len(own) >= CHECKS_PER_VISITOR):
                return False
            ended = [id for id, one in self.items() if one.state != "running"]
            for id in ended[: max(0, len(self) + 1 - REMEMBERED)]:
                del self[id]
            threading.Thread(target=task.run, args=(work,), name=f"reliq-web-{task.id}", daemon=True).start()
            self[task.id] = task
        return True


def purge(context: RequestContext) -> Response:
    """Start a background task that deletes messages of a state, or dead letters."""
    state = check_place(context.text("state"), PURGEABLE)
    where = context.filter(state)
    title = "delete of dead letters" if state == "dead" else f"delete of {state} messages"
    total = context.admin.count(context.queue, state)
    return _start(context, title, lambda task: context.admin.purge(task.queue, state, where, on_step=task.step), total)


def redrive(context: RequestContext) -> Response:
    """Start a background task that publishes dead letters again."""
    where = context.filter("dead")
    kinds = {"limit": int, "rate": float, "retries": int}
    options: dict[str, Any] = {name: context.value(name, kind) for name, kind in kinds.items()}
    options["delay"] = context.value("delay", duration) or 0.0
    check_redrive(**options)  # for wrong options, raise an error before the task starts
    admin = context.admin
    total = admin.count(context.queue, "dead")
    return _start(
        context, "redrive", lambda task: admin.redrive(task.queue, where, **options, on_step=task.step), total
    )


def check(context: RequestContext) -> Response:
    """Start a background task that checks each message of a queue for inconsistent data, and changes nothing."""
    admin = context.admin
    admin.account(context.queue)  # for an unknown queue, raise an error before the task starts

    def work(task: BackgroundTask) -> str:
        report = admin.check(
            task.queue, progress=lambda part, ids: task.step(0, f"reading {part}: {pluralize(ids, 'id')}")
        )
        verdict = "sound" if report.is_sound else "NOT sound"
        summary = f"the queue is {verdict}; {pluralize(report.looked_at, 'id')} looked at"
        return "; ".join([summary, *(f"{fault.count} {fault.name}" for fault in report.faults)])

    return _start(context, "check", work, only_reads=True)


def _start(
    context: RequestContext,
    title: str,
    work: Callable[[BackgroundTask], object],
    total: int | None = None,
    *,
    only_reads: bool = False,
) -> Response:
    """Start a background task and redirect the browser to its page; raise PageError if too many tasks run."""
    who = context.visitor.who
    layout = context.text("layout")
    task = BackgroundTask(title, context.queue, layout, who, f"{who}@{context.address}", only_reads, total)
    if not context.app.tasks.start(task, lambda: work(task)):
        raise PageError("Too many tasks run", "Wait until a task has ended.", status=429)
    log(context, f"{title} of queue {context.queue} started")
    return context.go("task", id=task.id)


def run_cron(context: RequestContext) -> Response:
    """Start a background task that asks a worker to publish the message of a periodic job now."""
    name = context.text("name")
    return _start(context, f"run of {name}", lambda task: f"published {context.admin.run_cron(task.queue, name)}")


def stop(context: RequestContext) -> Response:
    """Stop a background task after its current step. Visitors without the right WRITE may stop only checks."""
    id = context.path["id"]
    task = context.app.tasks.get(id)
    if task is not None and not task.only_reads and not context.visitor.may(Access.WRITE):
        raise PageError(
            "You may not stop this task", "This task changes messages: it needs the right WRITE.", status=403
        )
    runs = task is not None and task.state == "running"
    if task is not None:
        task.is_stopped = True
    log(context, f"stop of task {id}")
    return context.go("task", id=id, done="stop" if runs else "stop-ended")


def log(context: RequestContext, *words: str) -> None:
    """Log which visitor did what; discard the shared sample of the queues, so that the next page shows the change."""
    context.app.last.forget()
    who = context.visitor.who
    line = f"web: {who or 'a visitor'} at {context.address}: {' '.join(words)}"
    fields = {"event": WEB_WRITE, "verb": context.route, "queue": context.queue, "who": who, "from": context.address}
    logger.info("%s", printable(line), extra={"reliq": fields})
