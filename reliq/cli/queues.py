"""`reliq queues`: every queue at a glance."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from reliq.admin.filters import duration
from reliq.cli.ends import asleep_text
from reliq.cli.options import Json, Shard, Url, admin, queue_names
from reliq.cli.output import print_json, say
from reliq.cli.tables import print_table
from reliq.message import Pause
from reliq.readable import amount, rate, spoken
from reliq.text import partial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.admin import Overview, QueueView

QUEUE_COLUMNS = ("queue", "late", "ready", "pending", "leased", "backoff", "retry", "garbage", "dead")
RATE_COLUMNS = ("in/s", "acked/s", "failed/s")


def queues(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE", help="Only these.", autocompletion=queue_names)
    ] = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Also find queues that are in no registry, by a walk over all keys.")
    ] = False,
    interval: Annotated[str, typer.Option(help="The time over which rates are counted; 0 for none.")] = "500ms",
    json: Json = False,
    url: Url = None,
    shard: Shard = None,
) -> None:
    """
    Show every queue: its messages by state, how late the first one is, how fast it moves, who works on it.

    Exit codes: 0 done, 1 Redis is away or refuses, 2 wrong usage or an unknown queue.

    Example: reliq queues orders mails
    """
    seen = admin(url, shard=shard).queues(names or (), scan=scan, interval=duration(interval))
    if json:
        print_json({"queues": seen.queues, "unreadable": seen.unreadable, "left_out": seen.left_out})
        return
    _print(seen)


def _print(seen: "Overview") -> None:
    """Print a table of the queues, then what there is to say besides."""
    if not seen.queues and not seen.unreadable:
        say("There is no queue in the registry; --scan looks for others.")
    elif seen.queues:
        _print_table(seen.queues)
    for view in seen.queues:
        if view.pause is not None:
            say(f"{view.queue} is {pause_text(view.pause, time.time())}")
        if view.away:
            say(f"{view.queue} is {partial(view.away)}")
        if view.lines and view.lines.asleep_until:
            say(asleep_text(view.queue, view.lines.asleep_until))
    if seen.workers is None:
        say("The workers are unknown: the Redis of their registry is away.")
    for name, why in seen.unreadable.items():
        say(f"{name} cannot be read: {why}")
    if seen.left_out:
        say(
            f"The registry has {seen.left_out} more, which are not shown: name them, such as `reliq queues orders`; "
            f"`reliq forget` removes those that are no more."
        )


def _print_table(views: "Sequence[QueueView]") -> None:
    """Print a row for each queue; columns that say something of few queues are left out when they say it of none."""
    rated = any(view.rates is not None for view in views)
    due = {
        "waiting": any(view.lines for view in views),
        "shards": any(view.shards > 1 for view in views),
        "layout": any(view.layout != "reliq" for view in views),
    }
    more = [name for name, is_due in due.items() if is_due]
    columns = (*QUEUE_COLUMNS, *(RATE_COLUMNS if rated else ()), "workers", *more)
    print_table(columns, [(*_row(view, rated=rated), *(getattr(view, name) for name in more)) for view in views])


def pause_text(pause: Pause, now: float) -> str:
    """Return who paused a queue, when, why and until when."""
    said = "paused" + (f" by {pause.by}" if pause.by else "")
    if pause.at is not None:
        said += f" {spoken(max(0.0, now - pause.at))} ago"
    if pause.until is not None:
        said += f", for {spoken(max(0.0, pause.until - now))} more"
    return said + (f": {pause.reason}" if pause.reason else "")


def _row(view: "QueueView", *, rated: bool) -> list[str]:
    late = "?" if view.late is None else spoken(view.late)
    counts = (view.ready, view.pending, view.unack - view.backoff, view.backoff, view.retry, view.garbage, view.dead)
    cells = [view.queue, late, *map(amount, counts)]
    if rated:
        rates = view.rates
        cells += [rate(rates.arrived), rate(rates.acked), rate(rates.failed)] if rates else ["", "", ""]
    return [*cells, "?" if view.workers is None else str(view.workers)]
