"""The tables of the comparison and of the CI guard, from made-up figures; no other queue runs here."""

import ast
import math
from pathlib import Path

from benchmarks.__main__ import table
from benchmarks.catalogue import PEERS
from benchmarks.guard import table as guard_table

ROOT = Path(__file__).parents[2]
STEPS = {"one", "bulk", "late", "slow"}


def test_table_has_best_figures_spreads_failures_and_requirements():
    results = {
        "reliq": {"drain 1": [60_000.0, 70_000.0], "late p50": [0.9], "late p99": [3.5]},
        "RQ": {"drain 1": [math.nan]},
    }

    rows = table(results, list(PEERS), "Redis 7.0", 2).splitlines()

    assert [row for row in rows if row.startswith("| reliq | 70,000<br><small>60,000\N{EN DASH}70,000</small> |")]
    assert [row for row in rows if row.startswith("| reliq |") and "| 0.9 / 3.5 |" in row]
    assert [row for row in rows if row.startswith("| RQ | failed |")]
    assert [row for row in rows if row.startswith("| RQ (rq==")]


def test_guard_table_has_medians_of_both_trees_and_their_ratio():
    before = [{"drain, messages/s": value} for value in (10.0, 20.0, 90.0)]
    now = [{"drain, messages/s": value} for value in (5.0, 30.0, 31.0)]

    _, row = guard_table(before, now).splitlines()

    assert row.split()[-3:] == ["20.00", "30.00", "1.50"]


def test_peers_are_pinned_and_have_every_step_but_those_they_lack():
    for peer in PEERS:
        assert all("=" in one or "@" in one for one in peer.requirements[:1]), peer.name
        if not peer.module.endswith(".mjs") and peer.worker == "work":
            tree = ast.parse((ROOT / "benchmarks" / "peers" / f"{peer.module}.py").read_text("utf-8"))
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert STEPS & functions == STEPS - set(peer.lacks), peer.name
            assert "work" in functions, peer.name
