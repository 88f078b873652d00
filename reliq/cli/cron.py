"""`reliq cron`: periodic entries. `pause`, `resume` and `forget` take them too, by --cron."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reliq.cli.frame import Answer, Table, command
from reliq.cli.messages import format_when
from reliq.cli.options import QueueName, QueueNames, WholeQueueAdmin
from reliq.cli.queues import describe_pause
from reliq.metrics.crons import TICK_LATE_SECONDS
from reliq.text import format_duration, shell_command

if TYPE_CHECKING:
    from reliq.admin import CronState

cron = typer.Typer(help="Periodic entries: list them, run one.", no_args_is_help=True, add_completion=False)

COLUMNS = ("name", "queue", "schedule", "next", "last", "missed", "paused", "overlap", "last message")


@cron.command("list")
@command
def list_crons(queues: QueueNames = None, *, admin: WholeQueueAdmin) -> Answer:
    """
    List periodic entries: when each ticks next and did last, and how many ticks were missed or skipped, and why.

    Example: reliq cron list reports

    Exit codes: 0 done, 1 Redis did not answer, 2 an unknown queue.
    """
    entries = admin.crons(queues or ())
    if not entries:
        return Answer([], ["There is no periodic entry; @consumer.cron(…) makes one, and a worker brings it here."])
    table = Table(COLUMNS, [_row(entry) for entry in entries], ("schedule", "last message"))
    return Answer(entries, [table, *(line for entry in entries for line in describe_problems(entry))])


@cron.command()
@command
def run(
    queue: QueueName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The entry's name, as `cron list` prints it.")],
    *,
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Have a worker publish the message of an entry at once, in its pause too; its ticks go on as they are.

    Example: reliq cron run reports daily-report

    Exit codes: 0 published, 1 Redis did not answer, 2 there is no such entry, or no worker that has it.
    """
    id = admin.run_cron(queue, name)
    return Answer({"id": id, "queue": queue}, [f"published {id} to {queue}"])


def describe_problems(entry: "CronState") -> Iterator[str]:
    """Yield a line for the pause of a periodic entry and for each of its problems."""
    if entry.pause:
        yield f"{entry.name}: {describe_pause(entry.pause, time.time())}"
    if not entry.is_served:
        forget = shell_command("forget", entry.queue, options=["--cron", entry.name], layout=entry.layout)
        yield f"{entry.name}: no worker has it: none of them runs, or it is no more in the code (`{forget}`)"
    elif entry.late > TICK_LATE_SECONDS:
        yield f"{entry.name}: its tick is {format_duration(entry.late)} late: the logs of its workers say why"
    if entry.next is None:
        yield f"{entry.name}: its schedule cannot be read here"


def _row(entry: "CronState") -> tuple[Any, ...]:
    coming = format_when(entry.next) or "?"
    last = format_when(entry.ticked) or "never"
    message = entry.last_id + (" (alive)" if entry.is_alive else "")
    skipped = (entry.skipped["paused"], entry.skipped["overlap"])
    return entry.name, entry.queue, entry.schedule, coming, last, entry.missed, *skipped, message
