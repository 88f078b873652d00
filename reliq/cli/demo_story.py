"""The work of `reliq demo`: two processes, one of them killed half way, and an account that must balance."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reliq.admin.places import PLACES
from reliq.cli.demo_jobs import ERRANDS, Errand, Mood
from reliq.cli.output import console as terminal
from reliq.embedded import EmbeddedRedis
from reliq.errors import ConfigurationError
from reliq.message import Counts
from reliq.outgoing import Outgoing
from reliq.text import count_of
from reliq.transport.connection import URL_VARIABLE
from reliq.transport.url import check_url

ENDS = ("acked", "dead", "expired", "cancelled", "purged")
#: The share of the jobs by mood; the rest are good.
SHARES: dict[Mood, float] = {"slow": 0.1, "flaky": 0.1, "poison": 0.01}
LATE_SHARE = 0.3
#: A demo that takes longer, in seconds, has failed.
DEMO_SECONDS = 300.0
REDRAW_SECONDS = 0.2
BAR_WIDTH = 40


def run(jobs: int, url: str | None, seed: int) -> bool:
    """Run the demo; return whether the account balances."""
    console = terminal()
    with _redis(url, console):
        if ERRANDS.counts().totals:
            raise ConfigurationError(f"this Redis has a queue {ERRANDS.name!r} already; the demo needs an empty one")
        counts = _story(jobs, random.Random(seed), console)
    return _print_account(counts, console)


@contextmanager
def _redis(url: str | None, console: Console) -> Iterator[None]:
    """Use the Redis given, or a private one that goes with the demo."""
    with ExitStack() as stack:
        if url is not None:
            check_url(url)
            os.environ[URL_VARIABLE] = url
        elif not os.environ.get(URL_VARIABLE):
            server = stack.enter_context(EmbeddedRedis(options={"appendonly": "yes"}))
            os.environ[URL_VARIABLE] = server.url
            stack.callback(os.environ.pop, URL_VARIABLE)
            console.print("A private Redis runs on a Unix socket, with its append-only file on.")
        yield


def _story(jobs: int, chance: random.Random, console: Console) -> Counts:
    """Publish, work, cancel some, kill a process half way; return the counts when nothing is alive."""
    with _worker() as worker:
        console.print(f"Publishing {count_of(jobs, 'job')}: some late, some slow, some failing twice, some poisonous.")
        ids = [f"errand-{number}" for number in range(jobs)]
        ERRANDS.publish_many(_errands(ids, chance))
        cancelled = [ERRANDS.cancel(id) for id in chance.sample(ids, jobs // 50)].count("cancelled")
        console.print(f"Cancelled {cancelled} that had not started.")
        return _watch(worker, console)


def _errands(ids: list[str], chance: random.Random) -> Iterator[Outgoing[Errand]]:
    moods: list[Mood] = [*SHARES, "good"]
    weights = [*SHARES.values(), 1 - sum(SHARES.values())]
    for number, id in enumerate(ids):
        mood = chance.choices(moods, weights)[0]
        delay = round(chance.uniform(0.5, 5), 1) if chance.random() < LATE_SHARE else 0.0
        yield Outgoing(body=Errand(number, mood), id=id, delay=delay)


@contextmanager
def _worker() -> Iterator[subprocess.Popen[bytes]]:
    """Run the demo's handlers in two processes, quietly."""
    command = [sys.executable, "-m", "reliq", "worker", "reliq.cli.demo_jobs:consumer"]
    command += ["--processes", "2", "--log-level", "error", "--grace", "5"]
    worker = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: S603  our own command
    try:
        yield worker
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(30)


def _watch(worker: subprocess.Popen[bytes], console: Console) -> Counts:
    """Show the states until nothing is alive; kill a process when half the jobs have ended."""
    killed: int | None = None
    until = time.monotonic() + DEMO_SECONDS
    with Live(console=console, refresh_per_second=10, transient=False) as live:
        while time.monotonic() < until:
            counts = ERRANDS.counts()
            live.update(_picture(counts, killed))
            if counts.alive == 0:
                return counts
            if killed is None and _ended(counts) * 2 >= counts.totals.get("published", 0):
                killed = _kill_one(worker.pid)
            time.sleep(REDRAW_SECONDS)
    return ERRANDS.counts()


def _kill_one(pid: int) -> int | None:
    """End one of the worker's processes with SIGKILL; return its id."""
    children = psutil.Process(pid).children()
    if not children:
        return None
    children[0].kill()
    return children[0].pid


def _ended(counts: Counts) -> int:
    return sum(counts.totals.get(kind, 0) for kind in ENDS)


def _picture(counts: Counts, killed: int | None) -> Group:
    whole_count = max(1, counts.totals.get("published", 1))
    table = Table.grid(padding=(0, 1))
    for state in PLACES:
        number = getattr(counts, state)
        table.add_row(state, str(number), Text("█" * round(BAR_WIDTH * number / whole_count), style="cyan"))
    table.add_row("ended", str(_ended(counts)), Text("█" * round(BAR_WIDTH * _ended(counts) / whole_count), "green"))
    news = "both processes at work" if killed is None else f"process {killed} was killed with SIGKILL; work goes on"
    return Group(table, Text(news, style="yellow" if killed else "dim"))


def _print_account(counts: Counts, console: Console) -> bool:
    """Print the account; return whether it balances."""
    totals = counts.totals
    table = Table(title="The account", title_justify="left", show_header=False)
    table.add_row("published", str(totals.get("published", 0)))
    for kind in ENDS:
        table.add_row(f"  {kind}", str(totals.get(kind, 0)))
    table.add_row("  alive", str(counts.alive))
    table.add_row("lost", str(counts.missing))
    console.print("\n", table)
    retries = totals.get("retried_nack", 0), totals.get("retried_lease", 0)
    console.print(
        f"{count_of(retries[0], 'delivery', 'deliveries')} again after a failure, {retries[1]} after the kill."
    )
    balanced = counts.missing == 0 and counts.alive == 0
    console.print("The account balances: nothing was lost." if balanced else "The account does NOT balance.")
    return balanced
