"""The pages that show something: their contents, and how templates render them."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from markupsafe import Markup

from reliq.admin.screens import account as account_of, format_missing, format_number, format_rate, pretty, start_of
from reliq.admin.workers import running_in
from reliq.errors import ConfigurationError
from reliq.message import DEATH_REASONS
from reliq.redis.commands import BEAT_SECONDS
from reliq.text import clamp_time, format_duration, pluralize, printable, shell_command
from reliq.web.render import Sparkline, ages, cron_marks, is_unwatched, marks, redacted, share
from reliq.web.request import PageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2.runtime import Context
    from starlette.responses import Response

    from reliq.admin import Failure, MessagePage, QueueSnapshot
    from reliq.web.request import RequestContext
    from reliq.web.site import Now

TEMPLATES = Path(__file__).parent / "templates"
STATIC = Path(__file__).parent / "static"
#: File of a page -> its digest, which its address has: browsers keep the file for ever.
DIGESTS = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in STATIC.iterdir()}
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


def queues(context: RequestContext) -> Response:
    """Show every queue at a glance."""
    now = context.site.last.get()
    return context.page("queues.html", overview=now.overview, histories=now.histories)


def queue(context: RequestContext) -> Response:
    """Show one queue: where its messages are, and who works on it."""
    now = context.site.last.get()
    view = view_of(context, now)
    failures: Counter[Failure] = Counter()  # without the texts of their errors; those alike are counted together
    for failure in now.moment.errors:
        if failure.queue == view.queue:
            failures[replace(failure, error="", count=0)] += failure.count
    return context.page(
        "queue.html",
        view=view,
        history=now.histories.get(view.queue, ()),
        running=running_in(list(now.overview.workers or ()), view.queue),
        failures=[replace(failure, count=count) for failure, count in failures.most_common()],
    )


def keys(context: RequestContext) -> Response:
    """Show the keys of a queue's messages and its limits; one key, the largest, or the first 1,000 of all."""
    admin = context.admin
    query = context.query
    queue = context.queue
    key = query.text("key")
    lines = [admin.key(queue, key)] if key else None
    if query.text("every") == "1":
        lines = list(islice(admin.each_key(queue), EVERY_KEY_LIMIT))
    try:
        limits = admin.limits(queue)
    except ConfigurationError:  # Redis has limits that make no sense
        limits = None
    return context.page(
        "keys.html",
        queue=queue,
        view=view_of(context, context.site.last.get()),
        seen=admin.keys(queue, limit=KEYS_SHOWN),
        lines=lines,
        is_cut=lines is not None and len(lines) == EVERY_KEY_LIMIT,
        key=key,
        limits=limits,
    )


def workers(context: RequestContext) -> Response:
    """Show who is alive, and what runs where."""
    return context.page("workers.html", workers=context.site.last.get().overview.workers)


def worker(context: RequestContext) -> Response:
    """Show one worker process, and where its handlers stood when somebody asked."""
    worker = context.admin.worker(context.path["id"])
    return context.page("worker.html", worker=worker, silent_seconds=SILENT_SECONDS)


def crons(context: RequestContext) -> Response:
    """Show every periodic entry: when it ticks next, and what was missed or skipped."""
    return context.page("crons.html", entries=context.site.last.get().moment.crons)


def cron(context: RequestContext) -> Response:
    """Show one periodic entry."""
    name = context.query.text("name")
    entry = next((entry for entry in context.admin.crons([context.queue]) if entry.name == name), None)
    if entry is None:
        raise PageError(404, "There is no such periodic entry", f"Queue {context.queue} has none called {name[:80]!r}.")
    return context.page("cron.html", entry=entry)


def task(context: RequestContext) -> Response:
    """Show one write that takes a while, and how far it is."""
    task = context.site.tasks.get(context.path["id"])
    if task is None:
        raise PageError(404, "There is no such work", "It has long ended, or was begun by another process.")
    return context.page("task.html", task=task)


def tasks(context: RequestContext) -> Response:
    """Show every write of this process that takes a while."""
    return context.page("tasks.html", tasks=context.site.tasks.all())


def message(context: RequestContext) -> Response:
    """Show one message: where it is, and what became of it."""
    id = context.query.text("id")
    view = context.admin.show(context.queue, id)
    return context.page(
        "message.html",
        queue=context.queue,
        message=view if context.shows_bodies else redacted(view),
        show_bodies=context.shows_bodies,
    )


def messages(context: RequestContext) -> Response:
    """Show the messages of a state, or those of them that a search finds."""
    admin = context.admin
    query = context.query
    queue = context.queue
    state = context.path["state"]
    where = context.filter(query)
    after = query.text("after") or None
    if state == "waiting" and not where.key:
        return context.go("keys", queue=queue)
    return context.page(
        "messages.html",
        queue=queue,
        state=state,
        key=where.key,
        view=view_of(context, context.site.last.get()),
        page=_page(context, admin.page(queue, state, where, after=after)),
        search={"text": query.text("text"), "header": query.text("header")},
        show_bodies=context.shows_bodies,
        is_further=after is not None,
    )


def dead(context: RequestContext) -> Response:
    """Show why messages died, and the letters that are meant."""
    admin = context.admin
    query = context.query
    queue = context.queue
    where = context.letter_filter(query)
    after = query.text("after") or None
    looks_further = query.text("further") == "1"
    groups = admin.dead_groups(queue, where=where, for_seconds=FURTHER_SECONDS if looks_further else GROUPS_SECONDS)
    names = ("reason", "text", "error", "header", "older", "newer")
    return context.page(
        "dead.html",
        queue=queue,
        view=view_of(context, context.site.last.get()),
        groups=groups.groups,
        looked=groups.looked,
        of=groups.of,
        looks_further=looks_further,
        filter={**{name: query.text(name) for name in names}, "raised": where.raised},
        reasons=DEATH_REASONS,
        page=_page(context, admin.page(queue, "dead", where, after=after)),
        show_bodies=context.shows_bodies,
    )


def account(context: RequestContext) -> Response:
    """Show what came into each queue, and how it ended."""
    overview = context.admin.queues()
    accounts = [
        {"queue": view.queue, "layout": view.layout, "away": view.away, **account_of(view, view.layout)}
        for view in overview.queues
    ]
    return context.page("account.html", accounts=accounts, unreadable=overview.unreadable)


def doctor(context: RequestContext) -> Response:
    """Show whether this Redis is fit for queues."""
    return context.page("doctor.html", findings=context.admin.doctor())


def view_of(context: RequestContext, now: Now) -> QueueSnapshot:
    """Return the queue of the address; raise ConfigurationError when there is none."""
    layout = context.query.text("layout") or "reliq"
    for view in now.overview.queues:
        if (view.queue, view.layout) == (context.queue, layout):
            return view
    overview = context.admin.queues([context.queue])
    if not overview.queues:
        raise PageError(503, f"Queue {context.queue} cannot be read", "".join(overview.unreadable.values()))
    return overview.queues[0]


def _page(context: RequestContext, page: MessagePage) -> MessagePage:
    """Return a page of messages as its visitor may see it."""
    return page if context.shows_bodies else redacted(page)


class Pages:
    """
    Renders templates. Every text is escaped; a character that hides or moves others is shown as its escape.

    Args:
        title: stands in the head of each page and in the browser's tab.
    """

    def __init__(self, title: str = "reliq") -> None:
        self._jinja = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_harmless,
        )
        self._jinja.filters.update(FILTERS)
        self._jinja.globals.update(
            title=title,
            curve=Sparkline,
            ages=ages,
            share=share,
            marks=marks,
            cron_marks=cron_marks,
            is_unwatched=is_unwatched,
            typed=shell_command,
            digests=DIGESTS,
        )

    def render(self, template: str, **context: Any) -> str:
        """Return a template's HTML."""
        return self._jinja.get_template(template).render(context)


def _harmless(value: Any) -> Any:
    """Return what a template prints, without characters that a browser or a terminal obeys."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _clock(at: float) -> str:
    """Return unix seconds as a date and time in UTC."""
    return f"{datetime.fromtimestamp(clamp_time(at), UTC):%d %b %Y, %H:%M:%S} UTC"


def _iso(at: float) -> str:
    """Return unix seconds as the machine-readable form of HTML's `time`."""
    return f"{datetime.fromtimestamp(clamp_time(at), UTC):%Y-%m-%dT%H:%M:%SZ}"


@pass_context
def _ago(context: Context, at: float) -> str:
    """Return how long ago `at` was, or in how long it will be, by the page's `now`."""
    seconds = context["now"] - at
    if abs(seconds) < 1:
        return "now"
    return f"{format_duration(seconds)} ago" if seconds > 0 else f"in {format_duration(-seconds)}"


def _body(body: bytes) -> Markup:
    """Return a body laid out in lines, escaped."""
    return Markup("\n").join(printable(line) for line in pretty(body))


FILTERS: Mapping[str, Any] = {
    "amount": format_number,
    "rate": format_rate,
    "spoken": format_duration,
    "clock": _clock,
    "iso": _iso,
    "ago": _ago,
    "plural": pluralize,
    "partial": format_missing,
    "body": _body,
    "start": lambda body: start_of(body, 120),
}
