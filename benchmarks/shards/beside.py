"""An unsharded queue on one Redis by this tree and by another one, in rounds by turns: what shards cost who has none."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from reliq.testing.server import EmbeddedRedis

STEPS = ("publish", "publish_many", "drain")
COSTS = ("process, us", "Redis, us", "commands")
_ROUND = Path(__file__).with_name("one_round.py")
_HERE = Path(__file__).parents[2]


def beside(other: Path, server: Path, rounds: int) -> None:
    """Print the medians for a message of both trees, and how much more this one takes."""
    found: dict[Path, list[list[list[float]]]] = {other: [], _HERE: []}
    with EmbeddedRedis(server=server) as one:
        for at in range(rounds + 1):
            for tree in (other, _HERE) if at % 2 else (_HERE, other):
                figures = _round(tree, one.url)
                if at:  # the first one warms up
                    found[tree].append(figures)
    print(f"{'a message':<28}{'before':>10}{'now':>10}{'more':>9}")
    for step, name in enumerate(STEPS):
        for cost, unit in enumerate(COSTS):
            before, now = (median(figures[step][cost] for figures in found[tree]) for tree in (other, _HERE))
            print(f"{f'{name}: {unit}':<28}{before:>10.2f}{now:>10.2f}{now / before - 1:>+9.1%}")


def _round(tree: Path, url: str) -> list[list[float]]:
    """Run one round by the reliq of a tree, which need not be installed: what pip would say of it is written here."""
    name = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]["name"]
    with TemporaryDirectory() as folder:
        told = Path(folder) / f"{name.replace('-', '_')}-0.dist-info" / "METADATA"
        told.parent.mkdir()
        told.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), folder))}
        command = [sys.executable, str(_ROUND), url]
        ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=tree)
    figures: list[list[float]] = json.loads(ran.stdout)
    return figures
