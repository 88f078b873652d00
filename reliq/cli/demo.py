"""The command `reliq demo`: run jobs in two worker processes, kill a process, and count lost and repeated jobs."""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

from reliq.cli.demo_jobs import ERRANDS, JOURNAL_VARIABLE, Errand, mood_of
from reliq.cli.output import exit_on_signals, say
from reliq.distribution import command_of
from reliq.errors import ReliqError
from reliq.message import OutgoingMessage
from reliq.redis.server import URL_VARIABLE
from reliq.testing.server import EmbeddedRedis
from reliq.text import pluralize

#: The pyproject.toml of the demo's worker. Because it has a table [tool.reliq], the worker does not read a
#: pyproject.toml in a parent folder.
SETTINGS = """
[tool.reliq]
consumer = "reliq.cli.demo_jobs:consumer"
processes = 2
grace = 1.0
log-level = "error"
"""
#: The share of jobs that are published with a delay. The delay is at most LATEST_SECONDS.
LATE_SHARE = 0.3
LATEST_SECONDS = 3.0
POLL_SECONDS = 0.05

#: For each run of a job, its last event in the journal: `began`, `done` or `failed`. The keys of this dictionary
#: consist of process id, job number and attempt.
Runs = dict[tuple[int, int, int], str]


def run(jobs: int) -> bool:
    """Run the demo. Return True if no job was lost and all jobs that ran in the killed process ran again."""
    exit_on_signals()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reliq-")))
        journal = folder / "journal"
        journal.touch()
        (folder / "pyproject.toml").write_text(SETTINGS)
        server = stack.enter_context(EmbeddedRedis(options={"appendonly": "yes"}))
        os.environ[URL_VARIABLE] = server.url
        ERRANDS.publish_many(
            OutgoingMessage(
                body=Errand(number, mood_of(number)),
                delay=random.uniform(0, LATEST_SECONDS) if random.random() < LATE_SHARE else 0,
            )
            for number in range(jobs)
        )
        moods = Counter(map(mood_of, range(jobs)))
        say(
            f"{jobs:,} jobs are in a private Redis: {moods['slow']:,} slow, {moods['flaky']:,} fail twice, "
            f"{moods['poison']:,} fail always."
        )

        command, environment = command_of("reliq")
        environment = {name: value for name, value in environment.items() if not name.startswith("RELIQ_")}
        environment |= {URL_VARIABLE: server.url, JOURNAL_VARIABLE: str(journal)}
        log = stack.enter_context((folder / "log").open("w+"))
        worker = stack.enter_context(
            Popen(  # noqa: S603  the command is ours
                [*command, "worker"],
                env=environment,
                cwd=folder,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                process_group=0,  # so that Ctrl-C in the terminal does not signal the worker
            )
        )
        stack.callback(worker.terminate)

        killed = 0
        while (counts := ERRANDS.counts()).alive:
            if worker.poll() is not None:
                log.seek(0)
                raise ReliqError(f"the worker of the demo ended: {log.read().strip()}")
            if not killed and counts.alive < jobs / 2 and (killed := kill_busiest(journal)):
                say(f"Killed worker process {killed} of two with SIGKILL, half way.")
            time.sleep(POLL_SECONDS)

        is_well, lines = judge(read_journal(journal), killed, jobs, counts.totals)
        say(*lines)
        return is_well


def judge(runs: Runs, killed: int, jobs: int, totals: Mapping[str, int]) -> tuple[bool, list[str]]:
    """Return whether no job was lost and all jobs of the killed process ran again, and the lines to print."""
    again = killed_runs(runs, killed)
    done = {number for (_, number, _), last in runs.items() if last == "done"}
    acked, dead = totals.get("acked", 0), totals.get("dead", 0)
    lost = jobs - len(done) - dead
    verdict = f"LOST: {pluralize(lost, 'job')}" if lost else "Nothing was lost"
    repeated = f"{'all' if all(again) else 'only'} {sum(again)} ran again"
    return lost == 0 and again != [] and all(again), [
        f"{pluralize(len(again), 'job was', 'jobs were')} running in the killed process; {repeated}.",
        f"{verdict}: {jobs:,} published = {acked:,} acked + {pluralize(dead, 'dead letter')}.",
    ]


def read_journal(path: Path) -> Runs:
    """Read the journal, and return the last event of each run. Handlers write the journal to a file, not to Redis."""
    rows = [line.split() for line in path.read_text().rpartition("\n")[0].splitlines()]
    return {(int(pid), int(number), int(attempt)): last for pid, number, attempt, last in rows}


def killed_runs(runs: Runs, pid: int) -> list[bool]:
    """Return whether a later attempt of the job has ended, for each run that process `pid` began and did not end."""
    ended: dict[int, int] = {}
    for (_, number, attempt), last in runs.items():
        if last != "began":
            ended[number] = max(attempt, ended.get(number, 0))
    return [
        ended.get(number, 0) > attempt for (at, number, attempt), last in runs.items() if (at, last) == (pid, "began")
    ]


def kill_busiest(journal: Path) -> int:
    """Kill the worker process that runs the most jobs, and return its pid. Return 0 if no process runs a job."""
    running = Counter(pid for (pid, _, _), last in read_journal(journal).items() if last == "began")
    for pid, _ in running.most_common(1):
        os.kill(pid, signal.SIGSTOP)  # pause the process, so that no job ends before the kill
        if killed_runs(read_journal(journal), pid):
            os.kill(pid, signal.SIGKILL)
            return pid
        os.kill(pid, signal.SIGCONT)
    return 0
