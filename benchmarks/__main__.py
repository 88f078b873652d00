"""
The whole comparison in one command: `python -m benchmarks`.

Starts a private Redis, tries every peer with several settings, measures each with its fastest in turns, and writes
RESULTS.md, results.json and chart.svg.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.catalogue import PEERS
from benchmarks.chart import picture
from benchmarks.results import Results
from benchmarks.run import STATE, Run
from benchmarks.server import CountedRedis, private_server
from benchmarks.table import page

HERE = Path(__file__).parent
GIB = 1 << 30
#: An answer may take so long on a busy machine: emptying a full server does.
SERVER_SECONDS = 60.0


def main() -> int:
    """Measure, and write what was found."""
    options = _options()
    peers = [peer for peer in PEERS if not options.peers or peer.name in options.peers or peer.module in options.peers]
    usual = 1 if options.quick else 2
    rounds = usual if options.rounds is None else options.rounds
    minutes = options.minutes or (10 if options.quick else 30)
    with private_server() as server, CountedRedis.from_url(server.url, socket_timeout=SERVER_SECONDS) as client:
        results = _begin(options, client)
        run = Run(peers, client, server.url, results, quick=options.quick, until=time.monotonic() + 60 * minutes)
        try:
            run.install()
            run.all(rounds)
        except KeyboardInterrupt:
            print("\nStopped; python -m benchmarks --resume goes on from here.")
            return 130
    if options.out or options.resume or not options.peers:
        write(results, options.out or HERE)
    return 0


def write(results: Results, folder: Path) -> None:
    """Write the table, the picture and the figures of every peer that was measured."""
    shown = [peer for peer in PEERS if peer.name in results.done or peer.name in results.tried]
    folder.mkdir(parents=True, exist_ok=True)
    results.save(folder / "results.json")
    (folder / "RESULTS.md").write_text(page(results, shown))
    (folder / "chart.svg").write_text(picture(results, shown))
    print(f"Written: {folder / 'RESULTS.md'}, results.json, chart.svg")


def _begin(options: argparse.Namespace, client: CountedRedis) -> Results:
    """Return the results of the run that was stopped, or new ones."""
    about = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{psutil.cpu_count()} cores, {round(psutil.virtual_memory().total / GIB)} GiB",
        "redis": client.info("server")["redis_version"],
        "python": platform.python_version(),
        "node": _node_version(),
        "quick": options.quick,
        "rounds": 0,
        "note": options.note,
    }
    if options.resume and STATE.exists():
        results = Results.load(STATE)
        if results.about["quick"] != options.quick:
            sys.exit("the run that was stopped was of the other length: say, or leave out, --quick")
        return results
    return Results(about)


def _node_version() -> str:
    if shutil.which("node") is None:
        return ""
    return subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout.strip().lstrip("v")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="reliq beside other queues on Redis.")
    parser.add_argument(
        "--quick", action="store_true", help="half of the settings, one short round: 10 minutes at most"
    )
    parser.add_argument("--rounds", type=int, help="rounds over all peers (2; quick: 1; 0: settings only)")
    parser.add_argument("--peers", type=lambda text: text.split(","), help="only these, by name or module")
    parser.add_argument("--minutes", type=float, help="begin nothing after so many (30; quick: 10)")
    parser.add_argument("--resume", action="store_true", help="go on with the run that was stopped")
    parser.add_argument("--note", default="", help="a sentence above the table, such as what else the machine did")
    parser.add_argument("--out", type=Path, help="where to write; some peers alone are only printed without it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
