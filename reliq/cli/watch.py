"""`reliq watch`: a screen of queues, workers and failures that fits any terminal, or a line for each look over a pipe."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len, set_cell_size
from rich.live import Live
from rich.text import Text

from reliq.admin.filters import duration
from reliq.admin.screens import format_number, format_rate
from reliq.cli.messages import format_when
from reliq.cli.options import Json, WholeQueueAdmin, queue_names
from reliq.cli.output import complain, console, print_json, say
from reliq.cli.queues import describe_end, describe_pause
from reliq.errors import ConfigurationError, ReliqError
from reliq.metrics.crons import TICK_LATE_SECONDS
from reliq.text import format_duration, pluralize, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from rich.console import Console, ConsoleOptions, RenderResult

    from reliq.admin import CronState, Failure, QueueSample, QueueSnapshot, Rates, RunningJob, Watcher, Worker


#: On a terminal of this many columns a queue has one line instead of two.
WIDE = 150
#: The workers and the failures have at least this many lines each, with their titles.
LEAST_LINES = 4
#: A message that has been due for this many seconds is shown as late.
YELLOW_SECONDS = 10.0
#: A message that has been due for this many seconds is shown as very late.
RED_SECONDS = 60.0
SLOT_WIDTH = 38
LATE_WIDTH = 7
INDENT = 2
#: The shortest --interval.
LEAST_SECONDS = 0.1
#: A picture beside the numbers has at least this many columns.
LEAST_PICTURE = 24
SPARKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "ready": "yellow",
    "waiting": "cyan",
    "pending": "blue",
    "leased": "green",
    "backoff": "magenta",
    "retry": "red",
}


@dataclass(frozen=True, slots=True)
class Screen:
    """
    The screen of `reliq watch`.

    Attributes:
        place: the Redis, as its URL without the password.
        interval: seconds between two looks.
        trouble: why the moment is not the latest; empty when it is.
    """

    moment: QueueSample
    place: str
    interval: float
    trouble: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give rich the lines that fit."""
        for line in self.lines(options.max_width, options.height or console.height):
            line.plain = "".join(
                character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line.plain
            )
            line.truncate(options.max_width, overflow="ellipsis")
            line.no_wrap = True
            yield line

    def lines(self, width: int, height: int) -> list[Text]:
        """Return at most `height` lines: queues first, then workers and what they run, then failures."""
        head = self._head(width)
        room = height - len(head)
        queues = _queues(self.moment, width, max(LEAST_LINES, room - 2 * LEAST_LINES))
        room -= len(queues)
        workers = _workers(self.moment.overview.workers, width, room)
        failures = _failures(self.moment)
        gap = [Text()] if len(workers) + LEAST_LINES + 3 <= room else []
        room -= 3 * len(gap)
        failures = failures[: max(LEAST_LINES, room - len(workers))]
        workers = workers[: max(0, room - len(failures))]
        return [*head, *gap, *queues, *gap, *workers, *gap, *failures][:height]

    def _head(self, width: int) -> list[Text]:
        overview = self.moment.overview
        now = time.strftime("%H:%M:%S", time.gmtime())
        first = _sides(
            Text(f"reliq watch  {self.place}", "bold"),
            Text(f"{now} UTC, every {format_duration(self.interval)}"),
            width,
        )
        second = Text(f"{pluralize(len(overview.queues), 'queue')}, ")
        if overview.workers is None:
            second.append("workers unknown: the Redis of their registry is away", "red")
        else:
            busy, slots = (sum(getattr(one, name) for one in overview.workers) for name in ("busy", "slots"))
            second.append(f"{pluralize(len(overview.workers), 'worker')}, {busy} of {pluralize(slots, 'slot')} busy")
        if memory := overview.facts.get("used_memory_human"):
            second.append(f", Redis uses {memory}")
        if overview.left_out:
            second.append(f", {pluralize(overview.left_out, 'more queue')} not shown", "yellow")
        if partial := [view.queue for view in overview.queues if view.away]:
            second.append(f", partial: {printable(', '.join(partial))}", "red")
        if overview.unreadable:
            second.append(f", cannot read {printable(', '.join(overview.unreadable))}", "red")
        if self.trouble:
            second = Text(f"Redis does not answer, this is old: {printable(self.trouble)}", "bold white on red")
        return [first, second, *_periodic(self.moment.crons)]


def _periodic(crons: Sequence[CronState]) -> list[Text]:
    """Return a line of the periodic entries, what is wrong first; none where there is no entry."""
    line = Text("periodic:")
    wrong = {cron.name: f"{format_duration(cron.late)} late" for cron in crons if cron.late > TICK_LATE_SECONDS}
    wrong |= {cron.name: "no worker" for cron in crons if not cron.is_served}
    paused = {cron.name: "paused" for cron in crons if cron.pause and cron.name not in wrong}
    for remarks, style in ((wrong, "red"), (paused, "yellow")):
        for name, remark in remarks.items():
            line.append(f"  {name} {remark}", style)
    for cron in crons:
        if cron.next is not None and cron.name not in wrong | paused:
            line.append(f"  {cron.name} {format_when(cron.next)}")
    return [line] if crons else []


def _sides(left: Text, right: Text, width: int) -> Text:
    """Return two texts at the two ends of one line; on a narrow terminal the left one gives way."""
    left.truncate(max(0, width - len(right) - 2), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - len(left) - len(right)), right)


# ---- queues -----------------------------------------------------------------


def _queues(moment: QueueSample, width: int, most: int) -> list[Text]:
    """Return a title and the queues that fit; when not all do, the latest and largest."""
    views = list(moment.overview.queues)
    states = [state for state in STATE_STYLES if state != "waiting" or any(view.lines for view in views)]
    columns = [*states, "dead", "in/s", "acked/s", "failed/s"]
    named = max(map(cell_len, ("queue", *(view.queue for view in views)))) + 1
    beside = LATE_WIDTH + sum(_cell(name, width) for name in columns) + (LEAST_PICTURE if width >= WIDE else 0)
    stacked = named > width - beside  # a name is never cut: it has a line with the picture then
    title = Text(f"{'' if stacked else 'queue':<{INDENT if stacked else named}}{'late':>{LATE_WIDTH}}")
    for name in columns:
        title.append(f"{name:>{_cell(name, width)}}", STATE_STYLES.get(name, ""))  # the colours of the bars
    title.stylize("bold underline")
    room = max(1, (most - 1) // (1 if width >= WIDE and not stacked else 2))
    if len(views) > room:
        worst = sorted(views, key=lambda view: (-(view.late or 0.0), -view.due))[: max(1, room - 1)]
        views = [view for view in views if view in worst]
    lines = [title]
    for view in views:
        numbers = _numbers(view, states, width)
        if stacked:
            picture = _picture(view, moment.trends, max(0, width - cell_len(view.queue) - INDENT))
            lines.append(Text.assemble((view.queue, "bold"), " " * INDENT, picture))
            lines.append(Text.assemble(" " * INDENT, numbers))
            continue
        numbers = Text.assemble((set_cell_size(view.queue, named), "bold"), numbers)
        if width < WIDE:
            lines += [numbers, Text.assemble(" " * INDENT, _picture(view, moment.trends, width - INDENT))]
        else:
            picture = _picture(view, moment.trends, width - numbers.cell_len - INDENT)
            lines.append(Text.assemble(numbers, " " * INDENT, picture))
    if hidden := len(moment.overview.queues) - len(views):
        lines.append(Text(f"and {pluralize(hidden, 'more queue')}, less late than these", "dim"))
    return lines


def _cell(name: str, width: int) -> int:
    """Return the width of a column: its name or six digits, and a space."""
    return max(len(name), 6 if width >= WIDE else 4) + 1


def _numbers(view: QueueSnapshot, states: Sequence[str], width: int) -> Text:
    late = "-" if view.late is None else format_duration(view.late if view.late >= 1 else 0)
    seconds = view.late or 0.0
    style = "bold red" if seconds >= RED_SECONDS else "yellow" if seconds >= YELLOW_SECONDS else ""
    line = Text(f"{late:>{LATE_WIDTH}}", style)
    sizes = _sizes(view) | {"dead": view.dead}
    for state in (*states, "dead"):
        style = STATE_STYLES.get(state, "red") if sizes[state] else "dim"
        line.append(f"{_short(sizes[state]):>{_cell(state, width)}}", style)
    if view.rates is not None:
        rates = (view.rates.arrived, view.rates.acked, view.rates.failed)
        for column, per_second in zip(("in/s", "acked/s", "failed/s"), rates, strict=True):
            line.append(f"{format_rate(per_second):>{_cell(column, width)}}")
    return line


def _short(number: int) -> str:
    """Return a number in at most five characters."""
    return str(number) if number < 10_000 else format_number(number) if number >= 100_000 else f"{number // 1000}k"  # noqa: PLR2004


def _sizes(view: QueueSnapshot) -> dict[str, int]:
    leased = view.unack - view.backoff
    sizes = (view.ready, view.waiting, view.pending, leased, view.backoff, view.retry)
    return dict(zip(STATE_STYLES, sizes, strict=True))


def _picture(view: QueueSnapshot, trends: Mapping[str, Sequence[Rates]], width: int) -> Text:
    """Return a bar of the states and the trend of the rates; for a paused queue, who paused it."""
    if view.pause is not None:
        return Text(printable(describe_pause(view.pause, time.time()))[: max(0, width)], "black on yellow")
    bar = max(0, min(60, width * 2 // 5))
    line = Text.assemble(_bar(_sizes(view), bar))
    trend = trends.get(view.queue)
    room = (width - bar - len("  in   acked ")) // 2
    if trend and room > 0:
        line.append_text(Text.assemble("  in ", (_spark([rates.arrived for rates in trend], room), "cyan")))
        line.append_text(Text.assemble(" acked ", (_spark([rates.acked for rates in trend], room), "green")))
    return line


def _bar(sizes: Mapping[str, int], width: int) -> Text:
    """Return the shares of the states as one bar: what is there at all has at least one cell."""
    whole = sum(sizes.values())
    if not whole:
        return Text("·" * width, "dim")
    there = {state: size for state, size in sizes.items() if size}
    cells = {state: max(1, size * width // whole) for state, size in there.items()}
    largest = max(cells, key=lambda state: there[state])
    cells[largest] = max(1, cells[largest] + width - sum(cells.values()))
    return Text.assemble(*(("█" * number, STATE_STYLES[state]) for state, number in cells.items()))


def _spark(numbers: Sequence[float], width: int) -> str:
    """Return the last `width` numbers as a line of blocks, the highest of them the tallest."""
    last = list(numbers)[-width:]
    top = max(last, default=0.0)
    blocks = [SPARKS[min(len(SPARKS) - 1, int(number / top * len(SPARKS)))] if top else SPARKS[0] for number in last]
    return "".join(blocks).rjust(width)


# ---- workers ----------------------------------------------------------------


def _workers(workers: Sequence[Worker] | None, width: int, most: int) -> list[Text]:
    """Return each worker process and what its slots are doing, the longest running first; about `most` lines."""
    lines = [Text("workers and what they run, told every 5 s, the longest first", "bold underline")]
    if not workers:
        return [*lines, Text("unknown" if workers is None else "no worker is alive", "bold red")]
    now = time.time()
    columns = max(1, (width - 2) // SLOT_WIDTH)
    for worker in workers:
        if len(lines) > most:
            break
        up = format_duration(max(0.0, now - worker.started))
        line = Text(printable(f"{worker.host} pid {worker.pid}"), "bold")
        line.append(f"  {worker.busy} of {worker.slots} busy, up {up}", "not bold")
        line.append(f", claimed {format_duration(max(0.0, now - worker.last_claim))} ago", "not bold")
        lines.append(line)
        slots = [_slot(job, now) for job in worker.running[: columns * most]]
        rows = [slots[at : at + columns] for at in range(0, len(slots), columns)]
        lines += [Text("  ").append_text(Text().join(row)) for row in rows]
    return lines


def _slot(job: RunningJob, now: float) -> Text:
    took = format_duration(max(0.0, now - job.started))
    room = SLOT_WIDTH - len(took) - 3
    name = printable(f"{job.queue} {job.id}")
    if len(name) > room:
        name = name[: room - 1] + "…"
    return Text.assemble((f"{took} ", "green"), name.ljust(SLOT_WIDTH - len(took) - 1))


# ---- failures ---------------------------------------------------------------


def _failures(moment: QueueSample) -> list[Text]:
    """Return what living messages fail with, then the newest abnormal ends."""
    lines = [Text("failures", "bold underline")]
    failing = []
    for failure in moment.errors:
        share = f"{failure.count} of {failure.sampled}" if failure.count < failure.sampled else "all"
        title = (f"retrying, {share} looked at: ", "magenta")
        failing.append(Text.assemble(title, f"{failure.queue} ", printable(_reason(failure))))
    ended = []
    for failure in moment.ends:
        if (end := failure.ended) is not None:
            at = time.strftime("%H:%M:%S", time.gmtime(end.at))
            title = (f"{at} {printable(end.kind):<9} ", "red")
            ended.append(Text.assemble(title, f"{failure.queue} ", printable(f"{end.id}  {_reason(failure)}")))
    if not failing and not ended:
        return [*lines, Text("none", "dim")]
    half = max(1, LEAST_LINES - 2)
    return [*lines, *failing[:half], *ended, *failing[half:]]


def _reason(failure: Failure) -> str:
    """Return the error, and the reason where it says more."""
    if not failure.error or failure.reason not in ("failed", "rejected"):
        return f"{failure.reason}: {failure.error}" if failure.error else failure.reason
    return failure.error


def watch(
    queues: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUEUE", help="Only these; else all of the registry.", autocompletion=queue_names),
    ] = None,
    *,
    interval: Annotated[str, typer.Option(help="Between two looks.")] = "1s",
    json: Json = False,
    admin: WholeQueueAdmin,
) -> None:
    """
    Watch queues live until Ctrl-C: states, rates, how late they are, workers and what each runs, newest failures.

    Over a pipe it writes a line for each look, with --json all that it sees. Exit codes: 0 ended by Ctrl-C, 1 Redis
    was away or refused at the start, 2 wrong usage or an unknown queue.

    Example: reliq watch orders mails --interval 2s
    """
    seconds = duration(interval)
    if seconds < LEAST_SECONDS:
        raise ConfigurationError(f"interval must be at least {LEAST_SECONDS} seconds, not {interval}")
    watcher = admin.watch(queues or ())
    interrupts = Interrupts()
    from reliq.consumer import STOPS, handle_signal  # noqa: PLC0415  completion does not wait for it

    before = {number: handle_signal(number, interrupts.handle_signal) for number in STOPS}
    try:
        if json or not sys.stdout.isatty():
            _write(watcher, seconds, json=json)
        else:
            show(watcher, admin.place, seconds, interrupts)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # the reader of the pipe has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts:
    """Ctrl-C and SIGTERM end anything but a drawing: cut off, it would lose the way back from the full screen."""

    def __init__(self) -> None:
        self._is_drawing = self._came = False

    def handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, now or when the drawing is done; this is a handler for `signal.signal`."""
        self._came = True
        if not self._is_drawing:
            raise KeyboardInterrupt

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Draw something within this block."""
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False
        if self._came:
            raise KeyboardInterrupt


def show(watcher: Watcher, place: str, seconds: float, interrupts: Interrupts) -> None:
    """Draw each moment over the last one; while Redis is away the last one stays, and says so."""
    moment = watcher.look()  # an error at the start is shown without the full screen
    trouble = ""
    live = Live(Screen(moment, place, seconds), console=console(), screen=True, auto_refresh=False)
    try:
        with interrupts.held_back():
            live.start()
        while True:
            with interrupts.held_back():
                live.update(Screen(moment, place, seconds, trouble), refresh=True)
            time.sleep(seconds)
            try:
                moment = watcher.look()
                trouble = ""
            except ReliqError as error:
                trouble = str(error)
    finally:
        with interrupts.held_back():
            live.stop()


def _write(watcher: Watcher, seconds: float, *, json: bool) -> None:
    moment = watcher.look()
    while True:
        if json:
            overview = moment.overview
            print_json(
                {
                    "at": round(time.time(), 3),
                    "queues": overview.queues,
                    "unreadable": overview.unreadable,
                    "left_out": overview.left_out,
                    "workers": overview.workers,
                    "ends": moment.ends,
                    "errors": moment.errors,
                }
            )
        else:
            say(line_of(moment))
        sys.stdout.flush()
        time.sleep(seconds)
        try:
            moment = watcher.look()
        except ReliqError as error:
            complain(error)


def line_of(moment: QueueSample) -> str:
    """Return a moment in one line: sums over the queues, and the newest failure."""
    views = moment.overview.queues
    workers = moment.overview.workers
    late = max((view.late for view in views if view.late is not None), default=0.0)
    sums = {
        name: sum(getattr(view, name) for view in views)
        for name in ("ready", "waiting", "pending", "unack", "backoff", "retry", "dead")
        if name != "waiting" or any(view.lines for view in views)
    }
    sums["unack"] -= sums["backoff"]
    words = [
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        f"queues={len(views)}",
        f"late={format_duration(late)}",
    ]
    words += [f"{'leased' if name == 'unack' else name}={number}" for name, number in sums.items()]
    for name, of in (("in/s", "arrived"), ("acked/s", "acked"), ("failed/s", "failed")):
        words.append(f"{name}={format_rate(sum(getattr(view.rates, of) for view in views if view.rates))}")
    busy, slots = (sum(getattr(worker, name) for worker in workers or ()) for name in ("busy", "slots"))
    words += ["workers=?", "busy=?"] if workers is None else [f"workers={len(workers)}", f"busy={busy}/{slots}"]
    if paused := [view.queue for view in views if view.pause is not None]:
        words.append(f"paused={','.join(paused)}")
    if moment.ends and (end := moment.ends[0].ended) is not None:
        words.append(f"last={moment.ends[0].queue}/{end.id} {end.kind} {describe_end(end)}".rstrip())
    return printable(" ".join(words))
