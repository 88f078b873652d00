"""`reliq cron`: periodic entries: list, run, pause, resume, forget."""

import time
from typing import TYPE_CHECKING, Annotated

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
from reliq.schedule import TICK_LATE_SECONDS
from reliq.text import format_duration, shell_command

if TYPE_CHECKING:
    from reliq.admin import Admin, CronView

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
    found = [one for one in admin.crons() if one.name == name]
    if not found:
        raise ConfigurationError(f"there is no periodic entry {name[:80]!r}; `reliq cron list` shows what there is")
    if len(found) > 1:
        queues = ", ".join(one.queue for one in found)
        raise ConfigurationError(f"entries of several queues are called {name!r}: {queues}; say which with --queue")
    [one] = found
    return admin.in_layout(Layout.parse(one.layout)), one.queue, name


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
    found = admin.crons(queues or ())
    if json:
        print_json(found)
        return
    if not found:
        say("There is no periodic entry; @consumer.cron(…) makes one, and a worker brings it here.")
        return
    print_table(COLUMNS, [_row(one) for one in found], long=("schedule", "last message"))
    for one in found:
        for told in _remarks(one):
            say(f"{one.name}: {told}")


@cron.command()
def run(*, entry: Entry, json: Json = False) -> None:
    """
    Have a worker publish the message of an entry at once, in its pause too; its ticks go on as they are.

    Example: reliq cron run daily-report

    Exit codes: 0 published, 1 Redis did not answer, 2 there is no such entry, or no worker that has it.
    """
    admin, of, name = entry
    id = admin.run_cron(of, name)
    print_json({"id": id, "queue": of}) if json else say(f"published {id} to {of}")


@cron.command()
def pause(
    *, entry: Entry, reason: Annotated[str, typer.Option(help="Why; shown by `cron list`.")] = "", json: Json = False
) -> None:
    """
    Have the ticks of an entry skipped, and counted, until it is resumed; what is published already goes on.

    Example: reliq cron pause daily-report --reason 'the warehouse moves'

    Exit codes: 0 done, 1 Redis did not answer, 2 there is no such entry.
    """
    admin, of, name = entry
    admin.pause_cron(of, name, reason=reason)
    print_json({"paused": True, "queue": of}) if json else say(
        f"{name} is paused; `{shell_command('cron resume', name)}` ends it"
    )


@cron.command()
def resume(*, entry: Entry, json: Json = False) -> None:
    """
    Have the ticks of a paused entry published again, from the next one on.

    Example: reliq cron resume daily-report

    Exit codes: 0 it is published, also when it was not paused; 1 Redis did not answer; 2 there is no such entry.
    """
    admin, of, name = entry
    was_paused = admin.resume_cron(of, name)
    if json:
        print_json({"was_paused": was_paused, "queue": of})
    else:
        say(f"{name} is resumed" if was_paused else f"{name} was not paused")


@cron.command()
def forget(*, entry: Entry, json: Json = False) -> None:
    """
    Remove what Redis knows of an entry that is no more in the code: its last tick, counts and pause.

    Example: reliq cron forget daily-report

    Exit codes: 0 done, 1 Redis did not answer, 2 there is no such entry, or a worker has it.
    """
    admin, of, name = entry
    admin.forget_cron(of, name)
    print_json({"forgotten": name, "queue": of}) if json else say(f"{name} of {of} is forgotten")


def _row(one: "CronView") -> list[str]:
    coming, last = format_when(one.next) or "?", format_when(one.ticked) or "never"
    skipped = [str(one.skipped[why]) for why in ("paused", "overlap")]
    message = one.last_id + (" (alive)" if one.is_alive else "")
    return [one.name, one.queue, one.schedule, coming, last, str(one.missed), *skipped, message]


def _remarks(one: "CronView") -> list[str]:
    """Return what an operator should see of an entry at once."""
    told = [describe_pause(one.pause, time.time())] if one.pause else []
    if not one.is_served:
        told.append("no worker has it: none of them runs, or it is no more in the code (`reliq cron forget`)")
    elif one.late > TICK_LATE_SECONDS:
        told.append(f"its tick is {format_duration(one.late)} late: the logs of its workers say why")
    if one.next is None:
        told.append("its schedule cannot be read here")
    return told
