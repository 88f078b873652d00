"""Break things for a while, then say whether anything was lost. Exit code 0: valid; 1: violated."""

import argparse
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.harness.chaos import history
from tests.harness.chaos.checker import check
from tests.harness.chaos.report import report
from tests.harness.chaos.run import Plan, run
from tests.harness.chaos.schedule import schedule
from tests.harness.chaos.teller import tell

if TYPE_CHECKING:
    from tests.harness.chaos.grounds import Kind

EXIT_CODES = {"valid": 0, "violated": 1}
#: Messages a second: a quick run shares its machine with other tests.
QUICK_RATE, LONG_RATE = 240.0, 480.0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.chaos", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=60)
    length.add_argument("--minutes", type=float, help="instead of --seconds; at twice the rate")
    parser.add_argument("--seed", type=int, help="makes the same schedule and the same choices again")
    parser.add_argument("--rate", type=float, help="messages a second")
    parser.add_argument("--drain", type=float, default=120, help="seconds in which everything must be worked off")
    parser.add_argument("--server", type=Path, help="the redis-server to run")
    ground = parser.add_mutually_exclusive_group()
    ground.add_argument("--cluster", action="store_true", help="break a Cluster of three primaries and three replicas")
    ground.add_argument("--keys", action="store_true", help="queues with keys: in order, and two of a key at once")
    parser.add_argument("--shards", type=int, default=16, help="with --cluster: how many one of its queues gets")
    parser.add_argument("--folder", type=Path, help="keep histories, schedule and report there")
    parser.add_argument("--again", type=Path, help="judge the histories in this folder, and run nothing")
    return parser.parse_args()


def main() -> int:
    given = options()
    if given.again:
        return judge(given.again)
    with tempfile.TemporaryDirectory(prefix="reliq-chaos-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run(prepared(given, folder), folder)
        return judge(folder)


def prepared(given: argparse.Namespace, folder: Path) -> Plan:
    """Return what is to be run; print and keep its schedule."""
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    seconds = given.seconds if given.minutes is None else given.minutes * 60
    rate = given.rate or (QUICK_RATE if given.minutes is None else LONG_RATE)
    kind: Kind = "cluster" if given.cluster else "keys" if given.keys else "server"
    plan = Plan(seed, seconds, rate, given.drain, given.server, kind, given.shards)
    text = f"seed {seed}\n" + "".join(f"{fault}\n" for fault in schedule(seed, seconds, plan.kind))
    (folder / "schedule.txt").write_text(text)
    print(text, flush=True)
    return plan


def judge(folder: Path) -> int:
    """Check the histories in `folder`; write and print the report, and return the exit code."""
    events = history.read(folder)
    story = tell(events)
    verdict = check(story)
    seed = int((folder / "schedule.txt").read_text().split(maxsplit=2)[1])
    page = report(story, verdict, seed=seed, events=len(events))
    (folder / "report.md").write_text(page)
    print(page)
    return EXIT_CODES[verdict.word]


if __name__ == "__main__":
    sys.exit(main())
