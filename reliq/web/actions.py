"""The writes of the pages. A write that takes a while is a background task: a thread of this process that reports its progress."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reliq.admin.bulk import check_redrive
from reliq.admin.calls import PURGEABLE, check_place
from reliq.errors import ConfigurationError, ReliqError
from reliq.logs import WEB_WRITE
from reliq.text import pluralize, printable
from reliq.web.request import PageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.responses import Response

    from reliq.web.request import RequestContext


logger = logging.getLogger(__name__)

#: At most this many writes run at once, and as many checks.
RUNNING_LIMIT = 8
#: Checks of one visitor that run at once.
CHECKS_PER_VISITOR = 2
#: Tasks that are remembered after their end.
REMEMBERED = 50
#: A slower redrive could not be stopped within ten seconds.
SLOWEST_RATE = 0.1
#: The fields of the form of limits; weights of keys are changed by `reliq limits`.
LIMIT_FIELDS: Mapping[str, type] = {
    "per_key": int,
    "rate": str,
    "burst": int,
    "key_rate": str,
    "key_burst": int,
    "concurrency": int,
}

#: It is called after each step, with how many ids the step looked at and what became of all so far.
Step = Callable[[int, str], None]


@dataclass(slots=True)
class BackgroundTask:
    """
    One write that takes a while.

    Attributes:
        title: of what it does.
        by: the name of the visitor who started it.
        started, ended: unix seconds by this process's clock; None while it runs.
        done: how many ids it has looked at.
        total: how many there were when it began; None when that is unknown.
        state: `running`, `finished`, `stopped` by a person between two steps, or `failed`.
        outcome: what became of them so far.
        visitor: the name and the address of the visitor who started it.
        only_reads: whether it is a check, which a visitor without the right to write may start and stop.
    """

    id: str
    title: str
    queue: str
    layout: str
    by: str
    started: float
    total: int | None
    ended: float | None = None
    done: int = 0
    state: str = "running"
    outcome: str = ""
    visitor: str = ""
    only_reads: bool = False


class _Stopped(Exception):  # noqa: N818  it ends a task, and is no error
    """A person stopped the task."""


class BackgroundTasks:
    """The tasks of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, BackgroundTask] = {}
        self._stops: dict[str, threading.Event] = {}

    def all(self) -> list[BackgroundTask]:
        """Return every task that runs or is remembered, the newest first."""
        with self._lock:
            return list(reversed(self._tasks.values()))

    def get(self, id: str) -> BackgroundTask | None:
        """Return the task of that id; None when it is not remembered."""
        with self._lock:
            return self._tasks.get(id)

    def start(self, task: BackgroundTask, run: Callable[[Step], str]) -> bool:
        """Begin a task: `run` gets a step to call, and returns what became of all; False when too many run."""
        stop = threading.Event()
        with self._lock:
            running = [other for other in self._tasks.values() if other.state == "running"]
            alike = [other for other in running if other.only_reads == task.only_reads]
            own_checks = [other for other in alike if other.only_reads and other.visitor == task.visitor]
            if len(alike) >= RUNNING_LIMIT or len(own_checks) >= CHECKS_PER_VISITOR:
                return False
            ended = [old.id for old in self._tasks.values() if old.state != "running"]
            for old in ended[: max(0, len(self._tasks) + 1 - REMEMBERED)]:
                del self._tasks[old]
            threading.Thread(target=self._run, args=(task, run, stop), name=f"reliq-web-{task.id}", daemon=True).start()
            self._tasks[task.id] = task
            self._stops[task.id] = stop
        return True

    def stop(self, id: str) -> bool:
        """Have a task stop after its step; return whether it ran."""
        with self._lock:
            stop = self._stops.get(id)
        if stop is not None:
            stop.set()
        return stop is not None

    def _run(self, task: BackgroundTask, run: Callable[[Step], str], stop: threading.Event) -> None:
        def step(looked: int, outcome: str) -> None:
            task.done += looked
            task.outcome = outcome
            if stop.is_set():
                raise _Stopped

        state = "failed"
        try:
            task.outcome = run(step)
            state = "finished"
        except _Stopped:
            state = "stopped"
        except ReliqError as error:
            task.outcome = f"{task.outcome}; {error}" if task.outcome else str(error)
        except Exception:
            logger.exception("a work of the page failed: %s", task.title)
            task.outcome = f"{task.outcome}; it failed, see the log of the page" if task.outcome else "see the log"
        with self._lock:
            task.ended = time.time()
            task.state = state
            del self._stops[task.id]
        line = f"{task.title} of {task.queue} by {task.by or 'somebody'} {state}: {task.outcome}"
        fields = {"event": WEB_WRITE, "verb": task.title, "queue": task.queue, "who": task.by, "outcome": state}
        logger.info("%s", printable(line), extra={"reliq": fields})


def pause(context: RequestContext) -> Response:
    """Have consumers of a queue stop claiming."""
    reason = context.form.text("reason")
    context.admin.pause(context.queue, reason=reason, for_=context.form.seconds("for"), by=context.visitor.who)
    note(context, "paused", f"reason {reason!r}")
    return context.go("queue", queue=context.queue, said="paused")


def resume(context: RequestContext) -> Response:
    """Have consumers of a queue claim again."""
    was_paused = context.admin.resume(context.queue)
    note(context, "resumed")
    return context.go("queue", queue=context.queue, said="resumed" if was_paused else "not_paused")


def pause_key(context: RequestContext) -> Response:
    """Have no message of a key start."""
    key = context.form.text("key")
    context.admin.pause_key(context.queue, key, for_=context.form.seconds("for"))
    note(context, "paused a key of", f"key {key!r}")
    return context.go("keys", queue=context.queue, key=key, said="key_paused")


def resume_key(context: RequestContext) -> Response:
    """Have a key served again."""
    key = context.form.text("key")
    was_paused = context.admin.resume_key(context.queue, key)
    note(context, "resumed a key of", f"key {key!r}")
    return context.go("keys", queue=context.queue, key=key, said="key_resumed" if was_paused else "not_paused")


def limits(context: RequestContext) -> Response:
    """Change the limits of a queue: what a field says holds, and where one is empty there is none."""
    form = context.form
    limits: dict[str, Any] = {
        name: (form.text(name) or None) if kind is str else form.number(name, int)
        for name, kind in LIMIT_FIELDS.items()
    }
    limits["ordered"] = form.text("ordered") == "1"
    clear = [name for name, value in limits.items() if value is None]
    context.admin.set_limits(context.queue, **limits, clear=clear)
    changes = ", ".join(f"{name} {value}" for name, value in limits.items() if value)
    note(context, "changed the limits of", changes or "to none")
    return context.go("keys", queue=context.queue, said="limits_changed")


def cancel(context: RequestContext) -> Response:
    """Cancel one message."""
    id = context.form.text("id")
    status = context.admin.cancel(context.queue, [id])[id]
    note(context, "cancelled", f"message {id}: {status}")
    return context.go("message", queue=context.queue, id=id, said=status)


def reschedule(context: RequestContext) -> Response:
    """Give one message another due time."""
    id = context.form.text("id")
    status = context.admin.reschedule(context.queue, id, delay=context.form.seconds("delay") or 0.0)
    note(context, "rescheduled", f"message {id}: {status}")
    return context.go("message", queue=context.queue, id=id, said="still_running" if status == "running" else status)


def purge(context: RequestContext) -> Response:
    """Delete the messages of a state."""
    admin = context.admin
    queue = context.queue
    where = context.filter(context.form)
    state = check_place(context.form.text("state"), PURGEABLE)
    return _begin(
        context,
        f"delete of {state} messages",
        admin.count(queue, state),
        lambda step: str(admin.purge(queue, state, where, on_step=lambda looked, done: step(looked, str(done)))),
    )


def redrive(context: RequestContext) -> Response:
    """Publish dead letters again."""
    admin = context.admin
    queue = context.queue
    form = context.form
    where = context.letter_filter(form)
    rate = form.number("rate", float)
    if rate is not None and rate < SLOWEST_RATE:
        raise ConfigurationError(f"rate must be at least {SLOWEST_RATE} in a second, not {rate:g}")
    options: dict[str, Any] = {
        "limit": form.number("limit", int),
        "rate": rate,
        "retries": form.number("retries", int),
        "delay": form.seconds("delay") or 0.0,
    }
    check_redrive(**options)  # at once, and not in the task
    return _begin(
        context,
        "redrive",
        admin.count(queue, "dead"),
        lambda step: str(admin.redrive(queue, where, **options, on_step=lambda looked, done: step(looked, str(done)))),
    )


def delete(context: RequestContext) -> Response:
    """Delete dead letters."""
    admin = context.admin
    queue = context.queue
    where = context.letter_filter(context.form)
    return _begin(
        context,
        "delete of dead letters",
        admin.count(queue, "dead"),
        lambda step: str(admin.purge(queue, "dead", where, on_step=lambda looked, done: step(looked, str(done)))),
    )


def check(context: RequestContext) -> Response:
    """Look at every id of a queue for what contradicts the model; nothing is changed."""
    admin = context.admin
    queue = context.queue
    admin.account(queue)  # an unknown queue is refused at once

    def run(step: Step) -> str:
        report = admin.check(queue, progress=lambda what, looked: step(0, f"reading {what}: {pluralize(looked, 'id')}"))
        faults = ", ".join(f"{fault.count} {fault.name}" for fault in report.faults)
        verdict = "sound" if report.is_sound else "NOT sound"
        summary = f"the queue is {verdict}; {pluralize(report.looked_at, 'id')} looked at"
        return f"{summary}; {faults}" if faults else summary

    return _begin(context, "check", None, run, only_reads=True)


def run_cron(context: RequestContext) -> Response:
    """Have a worker publish the message of a periodic entry at once."""
    admin = context.admin
    name = context.form.text("name")
    return _begin(context, f"run of {name}", None, lambda _step: f"published {admin.run_cron(context.queue, name)}")


def pause_cron(context: RequestContext) -> Response:
    """Have the ticks of a periodic entry skipped."""
    name = context.form.text("name")
    reason = context.form.text("reason")
    context.admin.pause_cron(context.queue, name, reason=reason, by=context.visitor.who)
    note(context, "paused the periodic entry of", f"{name}, reason {reason!r}")
    return context.go("cron", queue=context.queue, name=name, said="cron_paused")


def resume_cron(context: RequestContext) -> Response:
    """Have the ticks of a periodic entry published again."""
    name = context.form.text("name")
    was_paused = context.admin.resume_cron(context.queue, name)
    note(context, "resumed the periodic entry of", name)
    return context.go("cron", queue=context.queue, name=name, said="cron_resumed" if was_paused else "not_paused")


def stacks(context: RequestContext) -> Response:
    """Ask a worker process for the stacks of its handlers."""
    id = context.path["id"]
    context.admin.ask_stacks(id)
    note(context, "asked for the stacks of", f"worker {id}")
    return context.go("worker", id=id, said="asked")


def stop(context: RequestContext) -> Response:
    """Have a task stop after its step; a visitor who may not write stops checks alone."""
    id = context.path["id"]
    task = context.site.tasks.get(id)
    if task is not None and not task.only_reads and not context.visitor.may_write:
        raise PageError(403, "You may only look", "Stopping a write needs WRITE.")
    stopped = context.site.tasks.stop(id)
    note(context, "stopped", f"the work {id}")
    return context.go("task", id=id, said="stopping" if stopped else "ended")


def note(context: RequestContext, what: str, more: str = "") -> None:
    """Log who did what, and let the next page read Redis again."""
    context.site.last.forget()
    queue = context.path.get("queue", "")
    who = context.visitor.who or "somebody"
    line = " ".join(part for part in (f"{who} at {context.asker}", what, queue, more) if part)
    fields = {"event": WEB_WRITE, "verb": context.route, "queue": queue, "who": who, "from": context.asker}
    logger.info("%s", printable(line), extra={"reliq": fields})


def _begin(
    context: RequestContext, title: str, total: int | None, run: Callable[[Step], Any], *, only_reads: bool = False
) -> Response:
    """Begin a task, and lead to its page."""
    who = context.visitor.who
    task = BackgroundTask(
        secrets.token_urlsafe(9),
        title,
        context.queue,
        context.query.text("layout"),
        who,
        time.time(),
        total,
        visitor=f"{who}@{context.asker}",
        only_reads=only_reads,
    )
    if not context.site.tasks.start(task, run):
        raise PageError(429, "Too much is under way", "Wait until one of the others has ended.")
    note(context, "began a", title)
    return context.go("task", id=task.id)
