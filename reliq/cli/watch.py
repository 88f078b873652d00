"""`reliq watch`: a live screen of queues, workers and failures."""

from __future__ import annotations

import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.table import Column, Table
from rich.text import Text

from reliq.admin.filters import duration
from reliq.admin.screens import format_number, format_rate
from reliq.cli.frame import Answer, framed
from reliq.cli.options import WholeQueueAdmin, queue_names
from reliq.cli.output import console, format_when
from reliq.cli.queues import RATE_COLUMNS, describe_overview, describe_problems
from reliq.errors import ConfigurationError, ReliqError
from reliq.text import format_duration, pluralize, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reliq.admin import QueueSample, QueueSnapshot, Watcher, Worker

#: The shortest --interval, in seconds.
LEAST_SECONDS = 0.1
#: The lateness of a queue is shown in yellow if it is at least YELLOW_SECONDS, and in red if it is at least
#: RED_SECONDS.
YELLOW_SECONDS = 10.0
RED_SECONDS = 60.0
#: The table of queues has a column for the rate of failures only if the terminal is at least this many characters wide.
WIDE = 100
HEAD_LINES = 3
#: The screen shows at most JOBS_SHOWN running handlers of each worker process, and at most ERRORS_SHOWN errors of
#: messages that wait for a retry.
JOBS_SHOWN = 10
ERRORS_SHOWN = 3
#: The style of the numbers in each column, for the library rich.
STYLES = {
    "ready": "yellow",
    "waiting": "cyan",
    "pending": "blue",
    "running": "green",
    "backoff": "magenta",
    "retry": "red",
    "dead": "red",
}


@partial(framed, flags={})
def watch(
    queues: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUEUE", help="Queues to watch; all by default.", autocompletion=queue_names),
    ] = None,
    *,
    interval: Annotated[str, typer.Option(help="Time between two refreshes, for example 500ms.")] = "1s",
    admin: WholeQueueAdmin,
) -> Answer:
    """
    Watch queues live until Ctrl-C: backlog, lateness, rates, workers, running handlers, failures.

    The command needs a terminal; scripts use `reliq queues --json` and `reliq workers --json`. While Redis is
    unavailable, the last figures stay on the screen, and a red line shows the error. Exit codes: 0 ended by Ctrl-C or
    SIGTERM, 1 Redis was unavailable or refused at the start, 2 wrong usage or an unknown queue.

    Example: reliq watch orders mails --interval 2s
    """
    seconds = duration(interval)
    if seconds < LEAST_SECONDS:
        raise ConfigurationError(f"interval must be at least {LEAST_SECONDS} seconds, not {interval}")
    watcher = admin.watch(queues or ())
    if not sys.stdout.isatty():
        raise ConfigurationError("reliq watch needs a terminal; elsewhere use `reliq queues --json`")
    show(watcher, admin.place, seconds)
    return Answer(None, ())


def show(watcher: Watcher, place: str, seconds: float) -> None:
    """
    Show the screen and refresh it until Ctrl-C or SIGTERM.

    While Redis is unavailable, the screen keeps the last figures, and shows the error.
    """
    terminal = console()
    live = Live(console=terminal, screen=True, auto_refresh=False)
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        sample = watcher.look()  # before the full screen starts, so that an error stays visible
        live.start()
        trouble = ""
        while True:
            live.update(draw(terminal, sample, place, seconds, trouble), refresh=True)
            time.sleep(seconds)
            try:
                sample = watcher.look()
                trouble = ""
            except ReliqError as error:
                trouble = f"Redis does not answer, these figures are old: {printable(str(error))}"
    except KeyboardInterrupt:
        return
    finally:
        live.stop()


def draw(terminal: Console, sample: QueueSample, place: str, seconds: float, trouble: str = "") -> SegmentLines:
    """
    Return the lines of a screen that fits the terminal.

    If not everything fits, the screen shows only the queues with the greatest lateness, and leaves out other lines.
    """
    overview = sample.overview
    height = terminal.height
    problems = [line for entry in sample.crons for line in describe_problems(entry, overview.workers)]
    middle = _lines(
        terminal, height // 6, *(_line(line, "yellow") for line in [*describe_overview(overview), *problems])
    )
    middle += _lines(terminal, height // 4, "", *_workers(overview.workers))
    failures = _lines(terminal, height, "", *_failures(sample))
    room = max(2, height - HEAD_LINES - len(middle) - min(len(failures), height // 4))
    worst = sorted(overview.queues, key=lambda view: (view.late or 0.0, view.due), reverse=True)[: room - 1]
    queues = [view for view in overview.queues if view in worst]
    head = _lines(terminal, HEAD_LINES, *_head(sample, place, seconds, trouble, len(queues)))
    table = _lines(terminal, room, _queues(queues, terminal.width))
    return SegmentLines([*head, *table, *middle, *failures][:height], new_lines=True)


def _lines(terminal: Console, most: int, *parts: RenderableType) -> list[list[Segment]]:
    return terminal.render_lines(Group(*parts), pad=False)[:most]


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style, no_wrap=True, overflow="ellipsis")


def _head(sample: QueueSample, place: str, seconds: float, trouble: str, shown: int) -> Iterator[Text]:
    overview = sample.overview
    now = time.strftime("%H:%M:%S", time.gmtime())
    yield _line(f"reliq watch  {place}  {now} UTC, every {format_duration(seconds)}", "bold")
    facts = [pluralize(len(overview.queues), "queue")]
    if shown < len(overview.queues):
        facts.append(f"the {shown} latest are shown")
    if overview.workers is not None:
        busy, slots = (sum(getattr(worker, name) for worker in overview.workers) for name in ("busy", "slots"))
        facts += [pluralize(len(overview.workers), "worker"), f"{busy} of {pluralize(slots, 'slot')} busy"]
    if memory := [info["used_memory_human"] for info in overview.servers.values() if "used_memory_human" in info]:
        facts.append(f"Redis uses {' + '.join(memory)}")
    yield _line(trouble, "bold white on red") if trouble else _line(", ".join(facts))
    if ticks := [f"{entry.name} {format_when(entry.next)}" for entry in sample.crons if entry.next is not None]:
        yield _line(f"periodic: {', '.join(ticks)}")


def _queues(views: Sequence[QueueSnapshot], width: int) -> Table:
    """Return the table of queues. On a narrow terminal, it has no column for the rate of failures."""
    states = [state for state in STYLES if state != "waiting" or any(view.lines for view in views)]
    table = Table(
        Column("queue", style="bold", overflow="fold"),
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    rates = RATE_COLUMNS[: 3 if width >= WIDE else 2]
    for name in ("late", *states, *rates):
        style = STYLES.get(name, "")
        table.add_column(name, justify="right", no_wrap=True, style=style, header_style=style)
    for view in views:
        late = view.late or 0.0
        style = "bold red" if late >= RED_SECONDS else "yellow" if late >= YELLOW_SECONDS else ""
        running = view.unack - view.backoff
        counts = [running if state == "running" else getattr(view, state) for state in states]
        moved = (view.rates.arrived, view.rates.acked, view.rates.failed) if view.rates else ()
        table.add_row(
            printable(view.queue),
            Text("-" if view.late is None else format_duration(late if late >= 1 else 0), style),
            *(Text(format_number(count), "" if count else "dim") for count in counts),
            *map(format_rate, moved[: len(rates)]),
        )
    return table


def _workers(workers: Sequence[Worker] | None) -> Iterator[Text]:
    """Yield a line for each worker process, with its longest running handlers."""
    if workers is not None:
        yield Text("workers", "bold") if workers else Text("no worker is alive", "bold red")
    now = time.time()
    for worker in workers or ():
        up, claimed = (format_duration(max(0.0, now - at)) for at in (worker.started, worker.last_claim))
        running = [
            f"{format_duration(max(0.0, now - job.started))} {job.queue} {job.id}"
            for job in worker.running[:JOBS_SHOWN]
        ]
        busy = f"{worker.busy} of {worker.slots} busy, up {up}, claimed {claimed} ago"
        yield _line(f"{worker.host} pid {worker.pid}  {busy}: {', '.join(running) or 'idle'}")


def _failures(sample: QueueSample) -> Iterator[Text]:
    """
    Yield lines for messages that wait for a retry, and for the newest messages that ended without an ack.

    Messages that wait for a retry have a line for each error.
    """
    yield Text("failures", "bold") if sample.errors or sample.ends else Text("no failures", "dim")
    for failure in sample.errors[:ERRORS_SHOWN]:
        share = f"{failure.count} of {failure.sampled}"
        yield _line(f"retrying  {failure.queue} {share} sampled  {_error(failure.reason, failure.error)}", "magenta")
    for queue, end in sample.ends:
        at = time.strftime("%H:%M:%S", time.gmtime(end.at or 0.0))
        yield _line(f"{at}  {queue} {end.id} {end.kind}  {_error(end.reason, end.error)}", "red")


def _error(reason: str, error: str) -> str:
    """Return the text of an error, after its reason unless the reason is `failed` or `rejected`."""
    return error if error and reason in ("failed", "rejected") else f"{reason}: {error}" if error else reason
