"""Writes that take a while: each runs in a thread of this process, and says how far it is."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reliq.admin.bulk import PURGEABLE
from reliq.admin.calls import check_place
from reliq.admin.dead import RedriveOptions
from reliq.errors import ConfigurationError, ReliqError
from reliq.logs import WEB_WRITE
from reliq.text import pluralize, printable
from reliq.web.request import PageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.responses import Response

    from reliq.web.request import RequestContext


logger = logging.getLogger(__name__)

#: Writes and checks that run at once, each counted apart; checks of one visitor; works remembered after their end.
RUNNING_LIMIT, CHECKS_PER_VISITOR, REMEMBERED = 8, 2, 50

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


class _Stopped(Exception):  # noqa: N818  it ends a work, and is no error
    """A person stopped the work."""


class BackgroundTasks:
    """The works of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[str, BackgroundTask] = {}
        self._stops: dict[str, threading.Event] = {}

    def all(self) -> list[BackgroundTask]:
        """Return every work that runs or is remembered, the newest first."""
        with self._lock:
            return list(reversed(self._works.values()))

    def get(self, id: str) -> BackgroundTask | None:
        """Return the work of that id; None when it is not remembered."""
        with self._lock:
            return self._works.get(id)

    def start(self, work: BackgroundTask, run: Callable[[Step], str]) -> bool:
        """Begin a work: `run` gets a step to call, and returns what became of all; False when too many run."""
        stop = threading.Event()
        with self._lock:
            running = [one for one in self._works.values() if one.state == "running"]
            alike = [one for one in running if one.only_reads == work.only_reads]
            own_checks = [one for one in alike if one.only_reads and one.visitor == work.visitor]
            if len(alike) >= RUNNING_LIMIT or len(own_checks) >= CHECKS_PER_VISITOR:
                return False
            ended = [old.id for old in self._works.values() if old.state != "running"]
            for old in ended[: max(0, len(self._works) + 1 - REMEMBERED)]:
                del self._works[old]
            threading.Thread(target=self._run, args=(work, run, stop), name=f"reliq-web-{work.id}", daemon=True).start()
            self._works[work.id], self._stops[work.id] = work, stop
        return True

    def stop(self, id: str) -> bool:
        """Have a work stop after its step; return whether it ran."""
        with self._lock:
            stop = self._stops.get(id)
        if stop is not None:
            stop.set()
        return stop is not None

    def _run(self, work: BackgroundTask, run: Callable[[Step], str], stop: threading.Event) -> None:
        def step(looked: int, outcome: str) -> None:
            work.done += looked
            work.outcome = outcome
            if stop.is_set():
                raise _Stopped

        state = "failed"
        try:
            work.outcome, state = run(step), "finished"
        except _Stopped:
            state = "stopped"
        except ReliqError as error:
            work.outcome = f"{work.outcome}; {error}" if work.outcome else str(error)
        except Exception:
            logger.exception("a work of the page failed: %s", work.title)
            work.outcome = f"{work.outcome}; it failed, see the log of the page" if work.outcome else "see the log"
        with self._lock:
            work.ended, work.state = time.time(), state
            del self._stops[work.id]
        line = f"{work.title} of {work.queue} by {work.by or 'somebody'} {state}: {work.outcome}"
        told = {"event": WEB_WRITE, "verb": work.title, "queue": work.queue, "who": work.by, "outcome": state}
        logger.info("%s", printable(line), extra={"reliq": told})


def new_id() -> str:
    """Return an id that nobody can guess."""
    return secrets.token_urlsafe(9)


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


def pause(visit: RequestContext) -> Response:
    """Have consumers of a queue stop claiming."""
    reason, for_ = visit.form.text("reason"), visit.form.seconds("for")
    visit.admin.pause(visit.queue, reason=reason, for_=for_, by=visit.visitor.who)
    note(visit, "paused", f"reason {reason!r}")
    return visit.go("queue", queue=visit.queue, said="paused")


def resume(visit: RequestContext) -> Response:
    """Have consumers of a queue claim again."""
    was_paused = visit.admin.resume(visit.queue)
    note(visit, "resumed")
    return visit.go("queue", queue=visit.queue, said="resumed" if was_paused else "not_paused")


def pause_key(visit: RequestContext) -> Response:
    """Have no message of a key start."""
    key, for_ = visit.form.text("key"), visit.form.seconds("for")
    visit.admin.pause_key(visit.queue, key, for_=for_)
    note(visit, "paused a key of", f"key {key!r}")
    return visit.go("keys", queue=visit.queue, key=key, said="key_paused")


def resume_key(visit: RequestContext) -> Response:
    """Have a key served again."""
    key = visit.form.text("key")
    was_paused = visit.admin.resume_key(visit.queue, key)
    note(visit, "resumed a key of", f"key {key!r}")
    return visit.go("keys", queue=visit.queue, key=key, said="key_resumed" if was_paused else "not_paused")


def limits(visit: RequestContext) -> Response:
    """Change the limits of a queue: what a field says holds, and where one is empty there is none."""
    form, given = visit.form, dict[str, Any]()
    for name, kind in LIMIT_FIELDS.items():
        given[name] = (form.text(name) or None) if kind is str else form.number(name, int)
    given["ordered"] = form.text("ordered") == "1"
    clear = [name for name, value in given.items() if value is None]
    visit.admin.set_limits(visit.queue, **given, clear=clear)
    told = ", ".join(f"{name} {value}" for name, value in given.items() if value)
    note(visit, "changed the limits of", told or "to none")
    return visit.go("keys", queue=visit.queue, said="limits_changed")


def cancel(visit: RequestContext) -> Response:
    """Cancel one message."""
    id = visit.form.text("id")
    said = visit.admin.cancel(visit.queue, [id])[id]
    note(visit, "cancelled", f"message {id}: {said}")
    return visit.go("message", queue=visit.queue, id=id, said=said)


def reschedule(visit: RequestContext) -> Response:
    """Give one message another due time."""
    id = visit.form.text("id")
    said = visit.admin.reschedule(visit.queue, id, delay=visit.form.seconds("delay") or 0.0)
    note(visit, "rescheduled", f"message {id}: {said}")
    return visit.go("message", queue=visit.queue, id=id, said="still_running" if said == "running" else said)


def purge(visit: RequestContext) -> Response:
    """Delete the messages of a state."""
    admin, queue, where = visit.admin, visit.queue, visit.filter(visit.form)
    state = check_place(visit.form.text("state"), PURGEABLE)
    return _begin(
        visit,
        f"delete of {state} messages",
        admin.size(queue, state),
        lambda step: str(admin.purge(queue, state, where, on_step=lambda looked, done: step(looked, str(done)))),
    )


def redrive(visit: RequestContext) -> Response:
    """Publish dead letters again."""
    admin, queue, where, form = visit.admin, visit.queue, visit.letter_filter(visit.form), visit.form
    rate = form.number("rate", float)
    if rate is not None and rate < SLOWEST_RATE:
        raise ConfigurationError(f"rate must be at least {SLOWEST_RATE} in a second, not {rate:g}")
    options = RedriveOptions(
        limit=form.number("limit", int),
        rate=rate,
        retries=form.number("retries", int),
        delay=form.seconds("delay") or 0.0,
    )
    return _begin(
        visit,
        "redrive",
        admin.size(queue, "dead"),
        lambda step: str(admin.redrive(queue, where, options, on_step=lambda looked, done: step(looked, str(done)))),
    )


def delete(visit: RequestContext) -> Response:
    """Delete dead letters."""
    admin, queue, where = visit.admin, visit.queue, visit.letter_filter(visit.form)

    def run(step: Step) -> str:
        deleted = admin.delete_letters(queue, where, on_step=lambda looked, sum_of: step(looked, f"{sum_of} deleted"))
        return f"{deleted} deleted"

    return _begin(visit, "delete of dead letters", admin.size(queue, "dead"), run)


def check(visit: RequestContext) -> Response:
    """Look at every id of a queue for what contradicts the model; nothing is changed."""
    admin, queue = visit.admin, visit.queue
    admin.account(queue)  # an unknown queue is refused at once

    def run(step: Step) -> str:
        report = admin.check(queue, progress=lambda what, looked: step(0, f"reading {what}: {pluralize(looked, 'id')}"))
        faults = ", ".join(f"{fault.count} {fault.name}" for fault in report.faults)
        verdict = "sound" if report.is_sound else "NOT sound"
        return f"the queue is {verdict}; {pluralize(report.looked_at, 'id')} looked at" + (
            f"; {faults}" if faults else ""
        )

    return _begin(visit, "check", None, run, only_reads=True)


def run_cron(visit: RequestContext) -> Response:
    """Have a worker publish the message of a periodic entry at once."""
    admin, queue, name = visit.admin, visit.queue, visit.form.text("name")
    return _begin(visit, f"run of {name}", None, lambda _step: f"published {admin.run_cron(queue, name)}")


def pause_cron(visit: RequestContext) -> Response:
    """Have the ticks of a periodic entry skipped."""
    name, reason = visit.form.text("name"), visit.form.text("reason")
    visit.admin.pause_cron(visit.queue, name, reason=reason, by=visit.visitor.who)
    note(visit, "paused the periodic entry of", f"{name}, reason {reason!r}")
    return visit.go("cron", queue=visit.queue, name=name, said="cron_paused")


def resume_cron(visit: RequestContext) -> Response:
    """Have the ticks of a periodic entry published again."""
    name = visit.form.text("name")
    was_paused = visit.admin.resume_cron(visit.queue, name)
    note(visit, "resumed the periodic entry of", name)
    return visit.go("cron", queue=visit.queue, name=name, said="cron_resumed" if was_paused else "not_paused")


def stacks(visit: RequestContext) -> Response:
    """Ask a worker process for the stacks of its handlers."""
    id = visit.path["id"]
    visit.admin.ask_stacks(id)
    note(visit, "asked for the stacks of", f"worker {id}")
    return visit.go("worker", id=id, said="asked")


def stop(visit: RequestContext) -> Response:
    """Have a work stop after its step; a visitor who may not write stops checks alone."""
    work = visit.desk.works.get(visit.path["id"])
    if work is not None and not work.only_reads and not visit.visitor.may_write:
        raise PageError(403, "You may only look", "Stopping a write needs WRITE.")
    stopped = visit.desk.works.stop(visit.path["id"])
    note(visit, "stopped", f"the work {visit.path['id']}")
    return visit.go("work", id=visit.path["id"], said="stopping" if stopped else "ended")


def note(visit: RequestContext, what: str, more: str = "") -> None:
    """Write down who did what, and have the next page look at Redis anew."""
    visit.desk.last.forget()
    queue, who = visit.path.get("queue", ""), visit.visitor.who or "somebody"
    line = " ".join(part for part in (f"{who} at {visit.asker}", what, queue, more) if part)
    told = {"event": WEB_WRITE, "verb": visit.route, "queue": queue, "who": who, "from": visit.asker}
    logger.info("%s", printable(line), extra={"reliq": told})


def _begin(
    visit: RequestContext, title: str, total: int | None, run: Callable[[Step], Any], *, only_reads: bool = False
) -> Response:
    """Begin a work, and lead to its page."""
    layout = visit.query.text("layout")
    who = visit.visitor.who
    work = BackgroundTask(new_id(), title, visit.queue, layout, who, time.time(), total)
    work.visitor, work.only_reads = f"{who}@{visit.asker}", only_reads
    if not visit.desk.works.start(work, run):
        raise PageError(429, "Too much is under way", "Wait until one of the others has ended.")
    note(visit, "began a", f"{title}")
    return visit.go("work", id=work.id)
