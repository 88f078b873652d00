"""
One working tree of reliq against another one: `python -m benchmarks.guard TREE [--rounds 5]`.

Rounds of both trees alternate on one private Redis, so that a slow spell of the machine meets both. The table has the
medians of TREE and of this tree, and their ratio.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.server import private_server

HERE = Path(__file__).parents[1]


def main() -> None:
    """Run the rounds, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description="This tree against another one.")
    parser.add_argument("tree", type=Path, help="the other working tree")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each tree, after one that warms up (5)")
    options = parser.parse_args()
    other = options.tree.resolve()
    results: dict[Path, list[dict[str, float]]] = {other: [], HERE: []}
    with private_server() as server:
        for number in range(options.rounds + 1):
            for tree in (other, HERE) if number % 2 else (HERE, other):
                figures = run_round(tree, server.url)
                if number:
                    results[tree].append(figures)
    print(table(results[other], results[HERE]))


def run_round(tree: Path, url: str) -> dict[str, float]:
    """Run one round with the reliq of a tree, which need not be installed; return its figures by name."""
    name = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]["name"]
    with TemporaryDirectory() as folder:
        metadata = Path(folder) / f"{name.replace('-', '_')}-0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), folder))}
        command = [sys.executable, "-P", str(HERE / "benchmarks" / "guard_round.py"), url]
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=tree)
    figures: dict[str, float] = json.loads(ended.stdout)
    return figures


def table(before: list[dict[str, float]], now: list[dict[str, float]]) -> str:
    """Return the medians of two trees, and how much more the second has."""
    rows = [f"{'':<28}{'TREE':>12}{'this tree':>12}{'ratio':>8}"]
    for name in now[0]:
        old = median(figures[name] for figures in before)
        new = median(figures[name] for figures in now)
        rows.append(f"{name:<28}{old:>12,.2f}{new:>12,.2f}{new / old:>8.2f}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
