"""`reliq watch`: the queues live, on the whole screen, or a line for each look over a pipe."""

import os
import signal
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from reliq.admin.filters import duration
from reliq.cli.ends import why
from reliq.cli.options import Json, WholeDesk, queue_names
from reliq.cli.output import complain, console, print_json, say
from reliq.cli.screen import Screen
from reliq.consumer.signals import STOPS, take
from reliq.errors import ConfigurationError, ReliqError
from reliq.foreign import printable
from reliq.readable import rate, spoken

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from reliq.admin import Moment, Watcher

LEAST_SECONDS = 0.1


def watch(
    queues: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUEUE", help="Only these; else all of the registry.", autocompletion=queue_names),
    ] = None,
    *,
    interval: Annotated[str, typer.Option(help="Between two looks.")] = "1s",
    json: Json = False,
    desk: WholeDesk,
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
    watcher, interrupts = desk.watch(queues or ()), Interrupts()
    before = {number: take(number, interrupts.take) for number in STOPS}
    try:
        if json or not sys.stdout.isatty():
            _write(watcher, seconds, json=json)
        else:
            show(watcher, desk.place, seconds, interrupts)
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

    def take(self, _number: int, _frame: "FrameType | None") -> None:
        """Raise KeyboardInterrupt, now or when the drawing is done; this is a handler for `signal.signal`."""
        self._came = True
        if not self._is_drawing:
            raise KeyboardInterrupt

    @contextmanager
    def held_back(self) -> "Iterator[None]":
        """Draw something within this block."""
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False
        if self._came:
            raise KeyboardInterrupt


def show(watcher: "Watcher", place: str, seconds: float, interrupts: Interrupts) -> None:
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
                moment, trouble = watcher.look(), ""
            except ReliqError as error:
                trouble = str(error)
    finally:
        with interrupts.held_back():
            live.stop()


def _write(watcher: "Watcher", seconds: float, *, json: bool) -> None:
    moment = watcher.look()
    while True:
        print_json(_told(moment)) if json else say(line_of(moment))
        sys.stdout.flush()
        time.sleep(seconds)
        try:
            moment = watcher.look()
        except ReliqError as error:
            complain(error)


def _told(moment: "Moment") -> dict[str, object]:
    overview = moment.overview
    return {
        "at": round(time.time(), 3),
        "queues": overview.queues,
        "unreadable": overview.unreadable,
        "left_out": overview.left_out,
        "workers": overview.workers,
        "ends": moment.ends,
        "errors": moment.errors,
    }


def line_of(moment: "Moment") -> str:
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
    said = [time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), f"queues={len(views)}", f"late={spoken(late)}"]
    said += [f"{'leased' if name == 'unack' else name}={number}" for name, number in sums.items()]
    for name, of in (("in/s", "arrived"), ("acked/s", "acked"), ("failed/s", "failed")):
        said.append(f"{name}={rate(sum(getattr(view.rates, of) for view in views if view.rates))}")
    busy, slots = (sum(getattr(one, name) for one in workers or ()) for name in ("busy", "slots"))
    said += ["workers=?", "busy=?"] if workers is None else [f"workers={len(workers)}", f"busy={busy}/{slots}"]
    if paused := [view.queue for view in views if view.pause is not None]:
        said.append(f"paused={','.join(paused)}")
    if moment.ends and (end := moment.ends[0].ended) is not None:
        said.append(f"last={moment.ends[0].queue}/{end.id} {end.kind} {why(end)}".rstrip())
    return printable(" ".join(said))
