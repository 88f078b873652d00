"""The pages that show something: each function reads the values of its template. Pages share one sample of all queues."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from reliq.admin.screens import account as account_of
from reliq.admin.workers import running_in
from reliq.errors import ConfigurationError, RedisUnavailableError
from reliq.message import DEATH_REASONS
from reliq.redis.commands import BEAT_SECONDS
from reliq.web.render import redacted
from reliq.web.request import PageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.responses import Response

    from reliq.admin import Admin, Failure, MessagePage, MinuteStats, QueueSample, QueueSnapshot
    from reliq.web.request import RequestContext

    #: A sample, and queue -> the minutes of the last hour, as its workers stored them.
    Now = tuple[QueueSample, Mapping[str, Sequence[MinuteStats]]]

#: Pages that are requested within this many seconds show the same sample.
FRESH_SECONDS = 1.0
#: After this many seconds without a sample, rates come from the minutes that workers store, not from the last sample.
OLD_SECONDS = 15.0
#: The minutes that workers store are read again after this many seconds.
HISTORY_SECONDS = 10.0
#: A page of dead letters groups the newest letters that can be read in this many seconds.
GROUPS_SECONDS = 0.05
#: The same, when a visitor asks to look further.
FURTHER_SECONDS = 1.0
#: The page of keys shows this many of the largest.
KEYS_SHOWN = 50
#: The page of every key shows at most this many.
EVERY_KEY_LIMIT = 1000
#: A worker that has not taken a request for its stacks after two of its beats does not answer.
SILENT_SECONDS = 2 * BEAT_SECONDS


class LastSample:
    """The last sample of all queues."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._watcher = admin.watch()
        self._lock = threading.Lock()
        self._now: Now | None = None
        self._at = self._history_at = self._failed_at = float("-inf")
        self._failure = ""
        self._is_fresh = False

    def get(self) -> Now:
        """Return a sample of the last second; raise RedisUnavailableError if Redis was unavailable within it."""
        with self._lock:
            at = time.monotonic()
            if self._now is not None and self._is_fresh and at < self._at + FRESH_SECONDS * 0.9:
                return self._now
            if at < self._failed_at + FRESH_SECONDS:
                raise RedisUnavailableError(self._failure)
            self._is_fresh = True
            if at > self._at + OLD_SECONDS:
                self._watcher = self._admin.watch()  # its first rates are those of the last minute
            try:
                sample = self._watcher.look()
                if self._now is None or at >= self._history_at + HISTORY_SECONDS:
                    self._history_at = at
                    self._now = sample, self._admin.histories()
                else:
                    self._now = sample, self._now[1]
            except RedisUnavailableError as error:
                # Requests that waited for the lock report the outage, instead of waiting for Redis once more.
                self._failure = str(error)
                self._failed_at = time.monotonic()
                raise
            self._at = at
            return self._now

    def forget(self) -> None:
        """Have the next page read Redis again, because a visitor has changed something."""
        self._is_fresh = False


def queues(context: RequestContext) -> Response:
    """Show all queues at a glance."""
    sample, histories = context.app.last.get()
    return context.page("queues.html", overview=sample.overview, histories=histories)


def queue(context: RequestContext) -> Response:
    """Show one queue: its messages by state, and its workers."""
    sample, histories = context.app.last.get()
    view = _view(context, sample)
    failures: Counter[Failure] = Counter()  # without the texts of their errors; failures that are alike count together
    for failure in sample.errors:
        if failure.queue == view.queue:
            failures[replace(failure, error="", count=0)] += failure.count
    return context.page(
        "queue.html",
        view=view,
        history=histories.get(view.queue, ()),
        running=running_in(list(sample.overview.workers or ()), view.queue),
        failures=[replace(failure, count=count) for failure, count in failures.most_common()],
    )


def keys(context: RequestContext) -> Response:
    """Show the keys of a queue's messages and its limits; one key, the largest, or the first 1,000 of all."""
    admin = context.admin
    queue = context.queue
    key = context.text("key")
    lines = [admin.key(queue, key)] if key else None
    if context.text("every") == "1":
        lines = list(islice(admin.each_key(queue), EVERY_KEY_LIMIT))
    try:
        limits = admin.limits(queue)
    except ConfigurationError:  # Redis has limits that make no sense
        limits = None
    return context.page(
        "keys.html",
        view=_view(context),
        seen=admin.keys(queue, limit=KEYS_SHOWN),
        lines=lines,
        is_cut=lines is not None and len(lines) == EVERY_KEY_LIMIT,
        limits=limits,
    )


def workers(context: RequestContext) -> Response:
    """Show the workers that are alive, and their running messages."""
    return context.page("workers.html", workers=context.app.last.get()[0].overview.workers)


def worker(context: RequestContext) -> Response:
    """Show one worker process, and the stacks of its handlers that a visitor has requested."""
    worker = context.admin.worker(context.path["id"])
    return context.page("worker.html", worker=worker, silent_seconds=SILENT_SECONDS)


def crons(context: RequestContext) -> Response:
    """Show all periodic entries: the next tick of each, and its missed and skipped ticks."""
    return context.page("crons.html", entries=context.app.last.get()[0].crons)


def cron(context: RequestContext) -> Response:
    """Show one periodic entry."""
    name = context.text("name")
    for entry in context.admin.crons([context.queue]):
        if entry.name == name:
            return context.page("cron.html", entry=entry)
    raise PageError(404, "There is no such periodic entry", f"Queue {context.queue} has none called {name[:80]!r}.")


def task(context: RequestContext) -> Response:
    """Show the progress of one background task."""
    task = context.app.tasks.get(context.path["id"])
    if task is None:
        raise PageError(404, "There is no such task", "It ended long ago, or another process runs it.")
    return context.page("task.html", task=task)


def tasks(context: RequestContext) -> Response:
    """Show the background tasks of this process."""
    return context.page("tasks.html", tasks=list(reversed(context.app.tasks.copy().values())))


def message(context: RequestContext) -> Response:
    """Show one message: its state, and its events."""
    view = context.admin.show(context.queue, context.text("id"))
    return context.page("message.html", message=view if context.shows_bodies else redacted(view))


def messages(context: RequestContext) -> Response:
    """Show the messages of a state, or those that a search finds."""
    state = context.path["state"]
    if state == "waiting" and not context.text("key"):
        return context.go("keys", queue=context.queue)
    return context.page("messages.html", state=state, view=_view(context), page=_page(context, state))


def dead(context: RequestContext) -> Response:
    """Show why messages died, and the dead letters that a search finds."""
    groups = context.admin.dead_groups(
        context.queue,
        where=context.filter("dead"),
        for_seconds=FURTHER_SECONDS if context.text("further") == "1" else GROUPS_SECONDS,
    )
    return context.page(
        "dead.html", view=_view(context), groups=groups, reasons=DEATH_REASONS, page=_page(context, "dead")
    )


def account(context: RequestContext) -> Response:
    """Show how many messages came into each queue, and how they ended."""
    overview = context.admin.queues()
    accounts = [
        {"queue": view.queue, "layout": view.layout, "away": view.away, **account_of(view, view.layout)}
        for view in overview.queues
    ]
    return context.page("account.html", accounts=accounts, unreadable=overview.unreadable)


def doctor(context: RequestContext) -> Response:
    """Show whether this Redis is fit for queues."""
    return context.page("doctor.html", findings=context.admin.doctor())


def _view(context: RequestContext, sample: QueueSample | None = None) -> QueueSnapshot:
    """Return the queue of the address; raise ConfigurationError when there is none."""
    layout = context.text("layout") or "reliq"
    for view in (sample or context.app.last.get()[0]).overview.queues:
        if (view.queue, view.layout) == (context.queue, layout):
            return view
    overview = context.admin.queues([context.queue])
    if not overview.queues:
        raise PageError(503, f"Queue {context.queue} cannot be read", "".join(overview.unreadable.values()))
    return overview.queues[0]


def _page(context: RequestContext, state: str) -> MessagePage:
    """Return a page of messages that the search chooses, without their contents if the visitor may not see them."""
    page = context.admin.page(context.queue, state, context.filter(state), after=context.text("after") or None)
    return page if context.shows_bodies else redacted(page)
