"""The pages that show data: each function reads the data for its template. All pages share one sample of the queues."""

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
from reliq.web.request import PageError, RequestContext

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.responses import Response

    from reliq.admin import Admin, Failure, MessagePage, MinuteStats, QueueSample, QueueSnapshot

    #: A sample of all queues, and for each queue the statistics that workers stored for each minute of the last hour.
    Now = tuple[QueueSample, Mapping[str, Sequence[MinuteStats]]]

#: All pages use the same sample for this many seconds, before a page reads Redis again.
FRESH_SECONDS = 1.0
#: If the last sample is older than this many seconds, rates come from the statistics that workers stored each minute.
OLD_SECONDS = 15.0
#: After how many seconds the statistics that workers stored each minute are read again.
HISTORY_SECONDS = 10.0
#: The page of dead letters reads the newest dead letters for this many seconds, and groups them by error.
GROUPS_SECONDS = 0.05
#: If the visitor asks to group more dead letters, the page reads them for this many seconds.
FURTHER_SECONDS = 1.0
#: How many message keys the page of keys shows, the largest first.
KEYS_SHOWN = 50
#: The most message keys that the page of all keys shows.
EVERY_KEY_LIMIT = 1000
#: The most schedules that the page of schedules shows.
SCHEDULES_LIMIT = 200
#: If a worker does not answer a request for stacks within this many seconds, the worker's page reports this.
SILENT_SECONDS = 2 * BEAT_SECONDS


class LastSample:
    """The last sample of all queues, which the pages share."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._watcher = admin.watch()
        self._lock = threading.Lock()
        self._now: Now | None = None
        self._at = self._history_at = self._failed_at = float("-inf")
        self._failure = ""
        self._is_fresh = False

    def get(self) -> Now:
        """
        Return a sample that is at most FRESH_SECONDS old.

        Raises:
            RedisUnavailableError: Redis is unavailable, or the last read failed less than FRESH_SECONDS ago.
        """
        with self._lock:
            at = time.monotonic()
            if self._now is not None and self._is_fresh and at < self._at + FRESH_SECONDS * 0.9:
                return self._now
            if at < self._failed_at + FRESH_SECONDS:
                raise RedisUnavailableError(self._failure)
            self._is_fresh = True
            if at > self._at + OLD_SECONDS:
                # A new watcher has no previous sample, so its first sample has the rates of the last minute.
                self._watcher = self._admin.watch()
            try:
                sample = self._watcher.look()
                if self._now is None or at >= self._history_at + HISTORY_SECONDS:
                    self._history_at = at
                    self._now = sample, self._admin.histories()
                else:
                    self._now = sample, self._now[1]
            except RedisUnavailableError as error:
                # Requests that wait for the lock then raise this failure, instead of waiting for Redis again.
                self._failure = str(error)
                self._failed_at = time.monotonic()
                raise
            self._at = at
            return self._now

    def forget(self) -> None:
        """Discard the sample, so that the next page reads Redis and shows a visitor's change."""
        self._is_fresh = False


def queues(context: RequestContext) -> Response:
    """Show all queues at a glance."""
    sample, histories = context.app.last.get()
    return context.page("queues.html", overview=sample.overview, histories=histories)


def queue(context: RequestContext) -> Response:
    """Show one queue: its messages by state, and its workers."""
    sample, histories = context.app.last.get()
    view = _view(context, sample)
    failures: Counter[Failure] = Counter()  # number of messages by failure, ignoring the error text
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
    """
    Show the limits and the message keys of a queue.

    The page shows the largest keys, a single key, or the first 1,000 of all keys.
    """
    admin = context.admin
    queue = context.queue
    key = context.text("key")
    lines = [admin.key(queue, key)] if key else None
    if context.text("every") == "1":
        lines = list(islice(admin.each_key(queue), EVERY_KEY_LIMIT))
    try:
        limits = admin.limits(queue)
    except ConfigurationError:  # the limits in Redis are malformed
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
    """Show the live worker processes, and their running messages."""
    overview = context.app.last.get()[0].overview
    return context.page("workers.html", workers=overview.workers, unknown=overview.unknown)


def worker(context: RequestContext) -> Response:
    """Show one worker process, and the stacks of its handlers if a visitor has requested them."""
    worker = context.admin.worker(context.path["id"])
    return context.page("worker.html", worker=worker, silent_seconds=SILENT_SECONDS)


def crons(context: RequestContext) -> Response:
    """Show all periodic jobs: the next tick of each, and its missed and skipped ticks."""
    return context.page("crons.html", entries=context.app.last.get()[0].crons)


def cron(context: RequestContext) -> Response:
    """Show one periodic job."""
    name = context.text("name")
    for entry in context.admin.crons([context.queue]):
        if entry.name == name:
            return context.page("cron.html", entry=entry)
    raise PageError(
        "There is no such periodic job", f"Queue {context.queue} has no periodic job {name[:80]!r}.", status=404
    )


def schedules(context: RequestContext) -> Response:
    """Show the stored schedules of a queue whose names start with the field `name`."""
    prefix = context.text("name")
    found = context.admin.schedules(context.queue, prefix=prefix, limit=SCHEDULES_LIMIT + 1)
    return context.page("schedules.html", found=found[:SCHEDULES_LIMIT], is_cut=len(found) > SCHEDULES_LIMIT)


def task(context: RequestContext) -> Response:
    """Show the progress of one background task."""
    task = context.app.tasks.get(context.path["id"])
    if task is None:
        raise PageError("There is no such task", "The task ended long ago, or another process runs it.", status=404)
    return context.page("task.html", task=task)


def tasks(context: RequestContext) -> Response:
    """Show the background tasks of this process."""
    return context.page("tasks.html", tasks=list(reversed(context.app.tasks.copy().values())))


def message(context: RequestContext) -> Response:
    """Show one message: its state and its history."""
    view = context.admin.show(context.queue, context.text("id"))
    return context.page("message.html", message=view if context.shows_bodies else redacted(view))


def messages(context: RequestContext) -> Response:
    """Show the messages of a state, or only the messages that a search finds."""
    state = context.path["state"]
    if state == "waiting" and not context.text("key"):
        return context.go("keys", queue=context.queue)
    return context.page("messages.html", state=state, view=_view(context), page=_page(context, state))


def dead(context: RequestContext) -> Response:
    """Show dead letters grouped by error, and the dead letters that a search finds."""
    for_seconds = FURTHER_SECONDS if context.text("further") == "1" else GROUPS_SECONDS
    groups = context.admin.dead_groups(context.queue, where=context.filter("dead"), for_seconds=for_seconds)
    return context.page(
        "dead.html", view=_view(context), groups=groups, reasons=DEATH_REASONS, page=_page(context, "dead")
    )


def account(context: RequestContext) -> Response:
    """Show how many messages were published to each queue, and how they ended."""
    overview = context.admin.queues()
    accounts = [
        {"queue": view.queue, "layout": view.layout, "away": view.away, **account_of(view, view.layout)}
        for view in overview.queues
    ]
    return context.page("account.html", accounts=accounts, unreadable=overview.unreadable)


def doctor(context: RequestContext) -> Response:
    """Show whether this Redis server is fit for queues, as `reliq doctor` does."""
    return context.page("doctor.html", findings=context.admin.doctor())


def _view(context: RequestContext, sample: QueueSample | None = None) -> QueueSnapshot:
    """
    Return the snapshot of the queue that the page's URL names.

    Raises:
        ConfigurationError: the queue does not exist.
        PageError: the queue cannot be read.
    """
    layout = context.text("layout") or "reliq"
    for view in (sample or context.app.last.get()[0]).overview.queues:
        if (view.queue, view.layout) == (context.queue, layout):
            return view
    overview = context.admin.queues([context.queue])
    if not overview.queues:
        raise PageError(f"Queue {context.queue} cannot be read", "".join(overview.unreadable.values()), status=503)
    return overview.queues[0]


def _page(context: RequestContext, state: str) -> MessagePage:
    """
    Return a page of the messages that a search finds.

    Bodies, headers and errors are removed unless the page shows them.
    """
    page = context.admin.page(context.queue, state, context.filter(state), after=context.text("after") or None)
    return page if context.shows_bodies else redacted(page)
