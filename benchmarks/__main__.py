"""
The whole comparison in one command: `python -m benchmarks`.

Starts a private Redis, measures every peer in turns, and writes RESULTS.md, results.json and chart.svg.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.catalogue import PEERS, Peer
from benchmarks.chart import picture
from benchmarks.environments import WORK, InstallError, command
from benchmarks.measures import FULL, QUICK, Measures
from benchmarks.results import Results
from benchmarks.server import CountedRedis, private_server
from benchmarks.steps import StepError
from benchmarks.table import page

HERE = Path(__file__).parent
STATE = WORK / "state.json"
GIB = 1 << 30
#: An answer may take so long on a busy machine: emptying a full server does.
SERVER_SECONDS = 60.0


def main() -> int:
    """Measure, and write what was found."""
    options = _options()
    peers = [peer for peer in PEERS if not options.peers or peer.name in options.peers or peer.module in options.peers]
    rounds = options.rounds or (1 if options.quick else 3)
    minutes = options.minutes or (6 if options.quick else 20)
    with private_server() as server, CountedRedis.from_url(server.url, socket_timeout=SERVER_SECONDS) as client:
        results = _begin(options, client)
        run = Run(peers, client, server.url, results, quick=options.quick, until=time.monotonic() + 60 * minutes)
        try:
            run.install()
            run.rounds(rounds)
        except KeyboardInterrupt:
            print("\nStopped; python -m benchmarks --resume goes on from here.")
            return 130
    if options.out or options.resume or not options.peers:
        write(results, options.out or HERE)
    return 0


class OutOfTimeError(Exception):
    """Nothing more may be begun."""


class Run:
    """
    All rounds over all peers.

    Args:
        until: monotonic seconds after which nothing more is begun.
    """

    def __init__(
        self, peers: Sequence[Peer], client: CountedRedis, url: str, results: Results, *, quick: bool, until: float
    ) -> None:
        self._peers, self._client, self._url, self._results = peers, client, url, results
        self._scale, self._until = QUICK if quick else FULL, until

    def install(self) -> None:
        """Make every environment first, so that no round waits for it; one that cannot be made fails its measures."""
        for peer in self._peers:
            print(f"{peer.name}: ", end="", flush=True)
            try:
                command(peer, "work")
                print("ready")
            except InstallError as error:
                print(f"not installed: {error}")

    def rounds(self, number: int) -> None:
        """Measure each peer once in a round, each round beginning with another; one that cannot end is not begun."""
        for at in range(number):
            began = time.monotonic()
            turn = at % len(self._peers) if self._peers else 0
            try:
                for peer in [*self._peers[turn:], *self._peers[:turn]]:
                    if at not in self._results.done.get(peer.name, []):
                        self._measure(peer, at)
            except OutOfTimeError:
                print("There is no time left; --resume goes on from here.")
                return
            self._results.about["rounds"] = at + 1
            self._results.save(STATE)
            if 2 * time.monotonic() - began > self._until and at + 1 < number:
                print(f"No time for another round after {at + 1} of {number}.")
                return

    def _measure(self, peer: Peer, round_number: int) -> None:
        """Measure one peer; what is cut short leaves nothing, so that it is measured anew."""
        print(f"round {round_number + 1}, {peer.name}:", flush=True)
        found: dict[str, float] = {}
        failed: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, measure in Measures(peer, self._client, self._url, self._scale, Path(folder)).all():
                if time.monotonic() > self._until:
                    raise OutOfTimeError
                try:
                    figures = measure()
                except Exception as error:  # whatever a peer does, the others are measured
                    known = isinstance(error, StepError | InstallError)
                    failed[name] = str(error) if known else f"{type(error).__name__}: {error}"
                    print(f"  {name}: FAILED: {failed[name]}", flush=True)
                else:
                    found |= figures
                    print("  " + ", ".join(f"{key} {value:,.1f}" for key, value in figures.items()), flush=True)
        self._results.add(peer.name, found, failed)
        self._results.done.setdefault(peer.name, []).append(round_number)
        self._results.save(STATE)


def write(results: Results, folder: Path) -> None:
    """Write the table, the picture and the figures of every peer that was measured."""
    shown = [peer for peer in PEERS if peer.name in results.done]
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
    parser.add_argument("--quick", action="store_true", help="one short round, in 6 minutes at most")
    parser.add_argument("--rounds", type=int, help="rounds over all peers (3; quick: 1)")
    parser.add_argument("--peers", type=lambda text: text.split(","), help="only these, by name or module")
    parser.add_argument("--minutes", type=float, help="begin nothing after so many (20; quick: 6)")
    parser.add_argument("--resume", action="store_true", help="go on with the run that was stopped")
    parser.add_argument("--note", default="", help="a sentence above the table, such as what else the machine did")
    parser.add_argument("--out", type=Path, help="where to write; some peers alone are only printed without it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
