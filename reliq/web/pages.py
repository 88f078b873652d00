"""
The web pages that show data. Each function reads data from Redis and returns a page.

Pages share a sample: the state of all queues at one time. It is read from Redis at most once a second, and again after
a visitor has changed something.
"""

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

    #: The last sample of the state of all queues, and the statistics that workers stored for each queue and each minute
    #: of the last hour.
    Now = tuple[QueueSample, Mapping[str, Sequence[MinuteStats]]]

#: All pages use the same sample for this many seconds. After that, the next page reads a new sample from Redis.
FRESH_SECONDS = 1.0
#: Rates are computed from the last two samples. If the last sample is older than this many seconds, they are computed
#: from the statistics that workers stored each minute.
OLD_SECONDS = 15.0
#: The statistics that workers stored each minute are read again after this many seconds.
HISTORY_SECONDS = 10.0
#: The page of dead letters groups the newest dead letters by error. It reads dead letters for at most this many
#: seconds.
GROUPS_SECONDS = 0.05
#: If the visitor asks for more groups, the page reads dead letters for at most this many seconds.
FURTHER_SECONDS = 1.0
#: The page of message keys shows this many keys with the most messages.
KEYS_SHOWN = 50
#: The maximum number of message keys that the page shows if the visitor asks for all keys.
EVERY_KEY_LIMIT = 1000
#: The maximum number of schedules that the page of schedules shows.
SCHEDULES_LIMIT = 200
#: If a worker process does not send the requested stacks within this many seconds, its page shows that it does not
#: respond.
SILENT_SECONDS = 2 * BEAT_SECONDS


class LastSample:
    """The last sample of the state of all queues, which all pages share. The class is thread-safe."""

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
        Return a sample that is at most FRESH_SECONDS old. If necessary, first read a new sample from Redis.

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
                # Use a new watcher. It has no previous sample, so the rates in its first sample are the rates of the
                # last minute.
                self._watcher = self._admin.watch()
            try:
                sample = self._watcher.look()
                if self._now is None or at >= self._history_at + HISTORY_SECONDS:
                    self._history_at = at
                    self._now = sample, self._admin.histories()
                else:
                    self._now = sample, self._now[1]
            except RedisUnavailableError as error:
                # Requests that wait for the lock raise the same error next, instead of waiting for Redis too.
                self._failure = str(error)
                self._failed_at = time.monotonic()
                raise
            self._at = at
            return self._now

    def forget(self) -> None:
        """Discard the sample, so that the next page reads a new sample and shows what a visitor has changed."""
        self._is_fresh = False


def queues(context: RequestContext) -> Response:
    """Show all queues at a glance."""
    sample, histories = context.app.last.get()
    return context.page("queues.html", overview=sample.overview, histories=histories)


def queue(context: RequestContext) -> Response:
    """Show one queue: its messages by state, and its workers."""
    sample, histories = context.app.last.get()
    view = _view(context, sample)
    failures: Counter[Failure] = Counter()  # number of messages by failure, without its error text
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
    Show the limits of a queue, and its message keys.

    The page shows the keys with the most messages. If the visitor asks for it, the page shows a single key instead, or
    the first EVERY_KEY_LIMIT of all keys.
    """
    admin = context.admin
    queue = context.queue
    key = context.text("key")
    lines = [admin.key(queue, key)] if key else None
    if context.text("every") == "1":
        lines = list(islice(admin.each_key(queue), EVERY_KEY_LIMIT))
    try:
        limits = admin.limits(queue)
    except ConfigurationError:  # the limits that Redis stores are malformed
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
    """Show one worker process, and the stack traces of its running handlers if a visitor has requested them."""
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
    """Show the schedules of a queue that were made at run time, and whose names start with the field `name`."""
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
    """Show one message: its state, its body if the visitor may see it, and the events in its life."""
    view = context.admin.show(context.queue, context.text("id"))
    return context.page("message.html", message=view if context.shows_bodies else redacted(view))


def messages(context: RequestContext) -> Response:
    """Show the messages of a queue in one state, or only those messages that a search finds."""
    state = context.path["state"]
    if state == "waiting" and not context.text("key"):
        return context.go("keys", queue=context.queue)
    return context.page("messages.html", state=state, view=_view(context), page=_page(context, state))


def dead(context: RequestContext) -> Response:
    """Show the dead letters of a queue that a search finds, and their number by error."""
    for_seconds = FURTHER_SECONDS if context.text("further") == "1" else GROUPS_SECONDS
    groups = context.admin.dead_groups(context.queue, where=context.filter("dead"), for_seconds=for_seconds)
    return context.page(
        "dead.html", view=_view(context), groups=groups, reasons=DEATH_REASONS, page=_page(context, "dead")
    )


def account(context: RequestContext) -> Response:
    """Show how many messages were published to each queue, and how many ended in which way."""
    overview = context.admin.queues()
    accounts = [
        {"queue": view.queue, "layout": view.layout, "away": view.away, **account_of(view, view.layout)}
        for view in overview.queues
    ]
    return context.page("account.html", accounts=accounts, unreadable=overview.unreadable)


def doctor(context: RequestContext) -> Response:
    """Show whether this Redis server is fit for queues: the findings of the command `reliq doctor`."""
    return context.page("doctor.html", findings=context.admin.doctor())


def _view(context: RequestContext, sample: QueueSample | None = None) -> QueueSnapshot:
    """
    Return the snapshot of the queue that is named in the page's URL.

    Raises:
        ConfigurationError: the queue does not exist.
        PageError: the data of the queue cannot be read.
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
    Return the messages that a search finds, from the position in the field `after` on, as many as a page shows.

    Bodies, headers and error texts are removed, unless the visitor asks for them and has the right BODIES.
    """
    page = context.admin.page(context.queue, state, context.filter(state), after=context.text("after") or None)
    return page if context.shows_bodies else redacted(page)
