"""`reliq cron`: periodic entries: list, run, pause, resume, forget."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reliq.cli.lazy import OptionsOf
from reliq.cli.messages import format_when
from reliq.cli.options import (
    DEFAULT_LAYOUT,
    Json,
    LayoutText,
    Url,
    WholeQueueAdmin,
    open_whole_queue_admin,
    queue_names,
)
from reliq.cli.output import print_json, print_table, say
from reliq.cli.queues import describe_pause
from reliq.errors import ConfigurationError
from reliq.keys import Layout
from reliq.metrics.crons import TICK_LATE_SECONDS
from reliq.text import format_duration, shell_command

if TYPE_CHECKING:
    from reliq.admin import Admin, CronState

cron = typer.Typer(
    help="Periodic entries: list, run, pause, resume, forget.", no_args_is_help=True, add_completion=False
)

COLUMNS = ("name", "queue", "schedule", "next", "last", "missed", "paused", "overlap", "last message")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the entry, as `cron list` shows it.")]
OfQueue = Annotated[
    str | None,
    typer.Option(
        "--queue",
        metavar="QUEUE",
        help="Its queue, when entries of two queues are called so.",
        autocompletion=queue_names,
    ),
]


def entry_of(
    name: Name, queue: OfQueue = None, url: Url = None, layout: LayoutText = DEFAULT_LAYOUT
) -> "tuple[Admin, str, str]":
    """Return the Admin of an entry's layout, its queue and its name; raise ConfigurationError for none, or for several."""
    admin = open_whole_queue_admin(url, layout)
    if queue is not None:
        return admin, queue, name
    entries = [entry for entry in admin.crons() if entry.name == name]
    if not entries:
        raise ConfigurationError(f"there is no periodic entry {name[:80]!r}; `reliq cron list` shows what there is")
    if len(entries) > 1:
        queues = ", ".join(entry.queue for entry in entries)
        raise ConfigurationError(f"entries of several queues are called {name!r}: {queues}; say which with --queue")
    return admin.in_layout(Layout.parse(entries[0].layout)), entries[0].queue, name


Entry = Annotated["tuple[Admin, str, str]", OptionsOf(entry_of)]


@cron.command("list")
def list_crons(
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE", help="Only of these.", autocompletion=queue_names)
    ] = None,
    *,
    json: Json = False,
    admin: WholeQueueAdmin,
) -> None:
    """
    List periodic entries: when each ticks next and did last, and how many ticks were missed or skipped, and why.

    Example: reliq cron list reports

    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue.
    """
    entries = admin.crons(queues or ())
    if json:
        print_json(entries)
        return
    if not entries:
        say("There is no periodic entry; @consumer.cron(…) makes one, and a worker brings it here.")
        return
    print_table(COLUMNS, map(_row, entries), long=("schedule", "last message"))
    for entry in entries:
        if entry.pause:
            say(f"{entry.name}: {describe_pause(entry.pause, time.time())}")
        if not entry.is_served:
            say(
                f"{entry.name}: no worker has it: none of them runs, or it is no more in the code (`reliq cron forget`)"
            )
        elif entry.late > TICK_LATE_SECONDS:
            say(f"{entry.name}: its tick is {format_duration(entry.late)} late: the logs of its workers say why")
        if entry.next is None:
            say(f"{entry.name}: its schedule cannot be read here")


@cron.command()
def run(*, entry: Entry, json: Json = False) -> None:
    """
    Have a worker publish the message of an entry at once, in its pause too; its ticks go on as they are.

    Example: reliq cron run daily-report

    Exit codes: 0 published, 1 Redis did not answer, 2 there is no such entry, or no worker that has it.
    """
    admin, queue, name = entry
    id = admin.run_cron(queue, name)
    print_json({"id": id, "queue": queue}) if json else say(f"published {id} to {queue}")


@cron.command()
def pause(
    *, entry: Entry, reason: Annotated[str, typer.Option(help="Why; shown by `cron list`.")] = "", json: Json = False
) -> None:
    """
    Have the ticks of an entry skipped, and counted, until it is resumed; what is published already goes on.

    Example: reliq cron pause daily-report --reason 'the warehouse moves'

    Exit codes: 0 done, 1 Redis did not answer, 2 there is no such entry.
    """
    admin, queue, name = entry
    admin.pause_cron(queue, name, reason=reason)
    print_json({"paused": True, "queue": queue}) if json else say(
        f"{name} is paused; `{shell_command('cron resume', name)}` ends it"
    )


@cron.command()
def resume(*, entry: Entry, json: Json = False) -> None:
    """
    Have the ticks of a paused entry published again, from the next one on.

    Example: reliq cron resume daily-report

    Exit codes: 0 it is published, also when it was not paused; 1 Redis did not answer; 2 there is no such entry.
    """
    admin, queue, name = entry
    was_paused = admin.resume_cron(queue, name)
    if json:
        print_json({"was_paused": was_paused, "queue": queue})
    else:
        say(f"{name} is resumed" if was_paused else f"{name} was not paused")


@cron.command()
def forget(*, entry: Entry, json: Json = False) -> None:
    """
    Remove what Redis knows of an entry that is no more in the code: its last tick, counts and pause.

    Example: reliq cron forget daily-report

    Exit codes: 0 done, 1 Redis did not answer, 2 there is no such entry, or a worker has it.
    """
    admin, queue, name = entry
    admin.forget_cron(queue, name)
    print_json({"forgotten": name, "queue": queue}) if json else say(f"{name} of {queue} is forgotten")


def _row(entry: "CronState") -> tuple[Any, ...]:
    coming = format_when(entry.next) or "?"
    last = format_when(entry.ticked) or "never"
    message = entry.last_id + (" (alive)" if entry.is_alive else "")
    skipped = (entry.skipped["paused"], entry.skipped["overlap"])
    return entry.name, entry.queue, entry.schedule, coming, last, entry.missed, *skipped, message
