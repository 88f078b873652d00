"""Inject faults for a while, then report whether a message was lost. Exit code 0: valid; 1: violated."""

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from tests.harness.chaos import history
from tests.harness.chaos.checker import check
from tests.harness.chaos.report import report
from tests.harness.chaos.run import run
from tests.harness.chaos.schedule import schedule
from tests.harness.chaos.teller import tell
from tests.messages import messages

#: Messages a second; low in a quick run, which shares its machine with other tests.
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
    kind = parser.add_mutually_exclusive_group()
    for name, help in (
        ("cluster", "break a Cluster of three primaries and three replicas"),
        ("keys", "queues with keys: in order, and two of a key at once"),
    ):
        kind.add_argument(f"--{name}", action="store_const", dest="kind", const=name, default="server", help=help)
    parser.add_argument("--shards", type=int, default=16, help="with --cluster: how many one of its queues gets")
    parser.add_argument("--folder", type=Path, help="keep histories, schedule, report and log messages there")
    parser.add_argument("--again", type=Path, help="judge the histories in this folder, and run nothing")
    given = parser.parse_args()
    given.seconds = given.minutes * 60 if given.minutes else given.seconds
    given.rate = given.rate or (LONG_RATE if given.minutes else QUICK_RATE)
    given.seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    return given


def main() -> int:
    given = options()
    if given.again:
        return judge(given.again)
    with tempfile.TemporaryDirectory(prefix="reliq-chaos-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        faults = schedule(given.seed, given.seconds, given.kind)
        text = f"seed {given.seed}\n" + "".join(f"{fault}\n" for fault in faults)
        (folder / "schedule.txt").write_text(text)
        print(text, flush=True)
        run(given, faults, folder)
        return judge(folder)


def judge(folder: Path) -> int:
    """Check the histories in `folder`; write the report and the log messages, and return the exit code."""
    events = history.read(folder)
    story = tell(events)
    violations = check(story)
    page = report(story, violations, len(events))
    (folder / "report.md").write_text(page)
    (folder / "messages.md").write_text(messages(folder))
    print(page)
    return 1 if any(violations.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
