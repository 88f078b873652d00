"""
The comparison in one command: `python -m benchmarks`.

Starts a private Redis, measures every peer in turns, and prints a table in Markdown.
"""

import argparse
import math
import platform
from datetime import UTC, datetime

import psutil
import redis

from benchmarks.catalogue import PEERS, Peer
from benchmarks.runner import PeerError, run
from benchmarks.server import private_server

COLUMNS = {
    "drain, 1 process": ("drain 1",),
    "drain, 2 processes": ("drain 2",),
    "publish one by one": ("one",),
    "bulk publish": ("bulk",),
    "late at 1,000/s, p50 / p99": ("late p50", "late p99"),
    "pickup when idle, p50 / p99": ("pickup p50", "pickup p99"),
    "CPU µs a message, worker / Redis": ("worker cpu 1", "redis cpu 1"),
}
RATES = ("drain", "one", "bulk")
#: Figures are shown with one decimal below this.
WHOLE_FROM = 20
#: Peer -> figure -> one value for each round.
Results = dict[str, dict[str, list[float]]]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="reliq beside other queues on Redis.")
    parser.add_argument("--peers", type=lambda text: text.split(","), help="only these, by module, such as reliq,rq")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all peers (2)")
    options = parser.parse_args()
    peers = [peer for peer in PEERS if not options.peers or peer.module.removesuffix(".mjs") in options.peers]
    results: Results = {}
    with private_server() as server, redis.Redis.from_url(server.url) as client:
        version = client.info("server")["redis_version"]
        for number in range(options.rounds):
            first = number % len(peers)
            for peer in (*peers[first:], *peers[:first]):
                print(f"round {number + 1}, {peer.name}:", flush=True)
                try:
                    figures = run(peer, client, server.url)
                except PeerError as error:
                    print(f"  not installed: {error}", flush=True)
                    continue
                for name, value in figures.items():
                    results.setdefault(peer.name, {}).setdefault(name, []).append(value)
    print(table(results, peers, f"Redis {version}", options.rounds))


def table(results: Results, peers: list[Peer], server: str, rounds: int) -> str:
    """Return the results in Markdown."""
    memory = round(psutil.virtual_memory().total / 2**30)
    about = (
        f"{datetime.now(UTC):%Y-%m-%d}, {psutil.cpu_count()} cores, {memory} GiB, {server} on loopback without "
        f"persistence, Python {platform.python_version()}. The best of the rounds ({rounds}), least–greatest below. "
        "Rates in messages a second, times in milliseconds."
    )
    rows = [
        about,
        "",
        "| | " + " | ".join(COLUMNS) + " |",
        "| --- |" + " ---: |" * len(COLUMNS),
    ]
    for peer in peers:
        cells = [_cell(results.get(peer.name, {}), names) for names in COLUMNS.values()]
        rows.append(f"| {peer.name} | " + " | ".join(cells) + " |")
    rows += ["", "| | at once | when a worker dies | settings |", "| --- | ---: | --- | --- |"]
    for peer in peers:
        label = f"{peer.name} ({peer.requirements[0]})" if peer.requirements else peer.name
        rows.append(f"| {label} | {peer.slots} | {peer.guarantee} | {peer.settings} |")
    return "\n".join(rows) + "\n"


def _cell(figures: dict[str, list[float]], names: tuple[str, ...]) -> str:
    """Return the best of the rounds, because whatever else a machine does can only slow a peer; below it the spread."""
    best = []
    for name in names:
        values = [value for value in figures.get(name, []) if not math.isnan(value)]
        if not values:
            return "failed" if name in figures else "–"
        best.append(_number(max(values) if name.startswith(RATES) else min(values)))
    if len(names) == 1 and len(values) > 1:
        return f"{best[0]}<br><small>{_number(min(values))}–{_number(max(values))}</small>"
    return " / ".join(best)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= WHOLE_FROM else f"{value:.1f}"


if __name__ == "__main__":
    main()
