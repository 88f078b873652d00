"""The story of `reliq demo`: two worker processes run jobs, one process is killed meanwhile, no job may be lost."""

import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from reliq.admin import calls
from reliq.admin.bench import remove_queue
from reliq.cli.demo_jobs import ERRANDS, FOLDER_VARIABLE, JOURNAL, LOG, Errand, Mood, consumer
from reliq.cli.output import complain, console as terminal
from reliq.consumer import SignalNotes, handle_signal
from reliq.errors import (
    EXIT_CONFIG,
    ConfigurationError,
    PublishFailed,
    RedisRefusedError,
    RedisUnavailableError,
    ReliqError,
)
from reliq.message import Outgoing
from reliq.redis.client import Client
from reliq.redis.server import URL_VARIABLE, Connection
from reliq.redis.url import check_url, masked
from reliq.settings import WorkerSettings
from reliq.supervisor.plan import ChildPlan
from reliq.supervisor.supervisor import EXIT_NO_START, Supervisor
from reliq.testing.server import EmbeddedRedis
from reliq.text import pluralize
from reliq.worker.engine import check_server

#: The share of the jobs by mood; the rest are good. At least 20 are slow, so that some run when a process is killed.
SHARES: dict[Mood, float] = {"slow": 0.04, "flaky": 0.1, "poison": 0.01}
LEAST_SLOW = 20
#: The share of the jobs that are scheduled for later, by up to LATEST_SECONDS.
LATE_SHARE = 0.3
LATEST_SECONDS = 3.0
PROCESSES = 2
CONCURRENCY = 16
#: The demo fails after 300 s.
DEMO_SECONDS = 300.0
LOOK_SECONDS = 0.05
STOPPED_SECONDS = 1.0

#: The last line that the journal has of each run of a handler: (process id, number, attempt) -> began, done or failed.
Runs = dict[tuple[int, int, int], str]


def read_journal(path: Path) -> Runs:
    """Read the journal: it shows which jobs ran, independently of Redis."""
    rows = [line.split() for line in path.read_text().rpartition("\n")[0].splitlines()]
    return {(int(pid), int(number), int(attempt)): last for pid, number, attempt, last in rows}


def killed_runs(runs: Runs, pid: int) -> list[bool]:
    """Return, for each run that process `pid` began and did not end, whether a later attempt has ended."""
    ended: dict[int, int] = {}
    for (_, number, attempt), last in runs.items():
        if last != "began":
            ended[number] = max(attempt, ended.get(number, 0))
    return [
        ended.get(number, 0) > attempt for (at, number, attempt), last in runs.items() if (at, last) == (pid, "began")
    ]


def run(jobs: int, url: str | None, seed: int) -> bool:
    """Run the demo; return whether nothing was lost and every job of the killed process ran again."""
    signals = SignalNotes()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handle_signal(number, signals.note)
    console = terminal()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reliq-")))
        if url is None:
            server = EmbeddedRedis(options={"appendonly": "yes"})
            stack.callback(server.stop)
            os.environ[URL_VARIABLE] = server.start().url
            place = "a private Redis"
        else:
            check_url(url)
            os.environ[URL_VARIABLE] = url
            place = masked(url)
        os.environ[FOLDER_VARIABLE] = str(folder)
        logging.basicConfig(filename=folder / LOG, level=logging.ERROR)
        journal = folder / JOURNAL
        journal.touch()
        try:
            if url is not None:
                _check_redis(url)
                stack.callback(_remove_keys, url)
            ERRANDS.publish_many(_errands(jobs, random.Random(seed), signals))
        except (RedisUnavailableError, RedisRefusedError, PublishFailed) as error:
            why = str(error.why if isinstance(error, PublishFailed) else error).rstrip(".")
            raise ConfigurationError(
                f"the demo cannot use {place}: {why}; name another Redis, or leave out --url: then it starts a private one"
            ) from error
        counts = _counts(jobs)
        console.print(
            f"{jobs:,} jobs are in {place}: {counts['slow']:,} slow, {counts['flaky']:,} fail twice, "
            f"{counts['poison']:,} fail always.",
            soft_wrap=True,
        )
        return _work(folder / LOG, journal, signals, console)


def _remove_keys(url: str) -> None:
    """Remove the keys of the demo; say so when Redis is away, and let the demo end as it would have."""
    try:
        remove_queue(url, ERRANDS.name)
    except ReliqError as error:
        complain(f"keys of queue {ERRANDS.name!r} are left in {masked(url)}: {error}")


def _check_redis(url: str) -> None:
    """Raise an error when the demo cannot write to this Redis, or a queue of its name is there."""
    client = Client(Connection.to(url).wire())
    check_server(client, allow_eviction=True)
    if client.run(calls.is_registered(ERRANDS.keys)) or client.run(calls.key_count(ERRANDS.keys)):
        raise ConfigurationError(
            f"{masked(url)} has a queue {ERRANDS.name!r} already, which the demo would mix with its own; name another "
            "Redis, or leave out --url: then it starts a private one"
        )
    client.run(calls.unregister(ERRANDS.keys))  # changes nothing; a Redis that is read-only refuses it


def _errands(jobs: int, chance: random.Random, signals: SignalNotes) -> Iterator[Outgoing[Errand]]:
    """Yield the jobs in a random order; stop at a signal."""
    moods = [mood for mood, count in _counts(jobs).items() for _ in range(count)]
    chance.shuffle(moods)
    for number, mood in enumerate(moods):
        if signals.numbers:
            raise KeyboardInterrupt
        delay = round(chance.uniform(0.5, LATEST_SECONDS), 1) if chance.random() < LATE_SHARE else 0.0
        yield Outgoing(body=Errand(number, mood), id=f"errand-{number}", delay=delay)


def _counts(jobs: int) -> dict[Mood, int]:
    """Return how many jobs have each mood."""
    counts: dict[Mood, int] = {mood: round(share * jobs) for mood, share in SHARES.items()}
    counts["slow"] = max(counts["slow"], LEAST_SLOW)
    return {**counts, "good": jobs - sum(counts.values())}


def _work(log: Path, journal: Path, signals: SignalNotes, console: Console) -> bool:
    """Run two worker processes and, in a thread, the story; return what the story returns."""
    plan = ChildPlan(
        consumer="reliq.cli.demo_jobs:consumer",
        queues=(),
        settings=WorkerSettings(concurrency=CONCURRENCY, grace=1.0, allow_eviction=True),
        log_level="error",
    )
    supervisor = Supervisor(consumer, plan, processes=PROCESSES)
    over = threading.Event()

    def run_story() -> bool | None:
        try:
            return _story(supervisor, journal, signals, over, console)
        finally:
            supervisor.stop()

    with ThreadPoolExecutor(1) as threads:
        story = threads.submit(run_story)
        try:
            code = supervisor.run()
        finally:
            over.set()
    passed = story.result()
    if passed is None and code in (EXIT_CONFIG, EXIT_NO_START):
        *_, last = log.read_text("utf-8", "replace").splitlines() or ["they logged nothing"]
        raise ReliqError(f"the demo's worker processes did not start: {last}")
    if passed is None:
        raise KeyboardInterrupt
    return passed


def _story(
    supervisor: Supervisor, journal: Path, signals: SignalNotes, over: threading.Event, console: Console
) -> bool | None:
    """
    Kill a process half way, wait until no job is alive, then print the result.

    Return whether all is well, None when the worker stopped before.
    """
    killed = 0
    until = time.monotonic() + DEMO_SECONDS
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("jobs that have ended")
        while time.monotonic() < until:
            counts = ERRANDS.counts()
            published = counts.totals["published"]
            bar.update(task, completed=published - counts.alive, total=published)
            if counts.alive == 0:
                break
            if not killed and counts.alive * 2 <= published and (killed := _kill_one(supervisor, journal)):
                console.print(f"Killed worker process {killed} of two with SIGKILL, half way.", soft_wrap=True)
            if over.wait(LOOK_SECONDS) or signals.numbers:
                return None
    runs = read_journal(journal)
    again = killed_runs(runs, killed)
    done = Counter(number for (_, number, _), last in runs.items() if last == "done")
    acked = counts.totals.get("acked", 0)
    dead = counts.totals.get("dead", 0)
    lost = max(counts.missing, published - len(done) - dead - counts.alive)
    say = partial(console.print, soft_wrap=True)
    if killed:
        say(
            f"{pluralize(len(again), 'job was', 'jobs were')} running in the killed process; "
            f"{'all' if all(again) else 'only'} {sum(again)} ran again."
        )
    else:
        say("No process was killed: none ran a job in the second half of the demo.")
    if twice := sum(times > 1 for times in done.values()):
        say(
            f"{pluralize(twice, 'job')} had just finished there, before the ack, and ran twice: delivery is at least once."
        )
    verdict = f"LOST: {pluralize(lost, 'job')}" if lost else "Nothing was lost"
    left = f" + {counts.alive:,} not finished after {DEMO_SECONDS:g} s" if counts.alive else ""
    say(f"{verdict}: {published:,} published = {acked:,} acked + {pluralize(dead, 'dead letter')}{left}.")
    return lost == 0 and counts.alive == 0 and again != [] and all(again)


def _kill_one(supervisor: Supervisor, journal: Path) -> int:
    """Kill the process that runs the most jobs, and return its id; return 0 when none runs a job."""
    runs = read_journal(journal)
    pids = [pid for label, pid in supervisor.pids().items() if label != "supervisor"]
    pid = max(pids, key=lambda pid: len(killed_runs(runs, pid)), default=0)
    with suppress(psutil.Error):  # it has ended by itself
        process = psutil.Process(pid)
        process.suspend()  # no job ends between reading the journal and the kill
        until = time.monotonic() + STOPPED_SECONDS
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < until:
            time.sleep(0.001)
        if killed_runs(read_journal(journal), pid):
            process.kill()
            return pid
        process.resume()
    return 0
