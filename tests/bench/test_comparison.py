"""The comparison's table and picture, from made-up results; no peer runs here."""

import ast
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.catalogue import PEERS
from benchmarks.chart import picture
from benchmarks.peers import kit
from benchmarks.results import Results
from benchmarks.table import page

ROOT = Path(__file__).parents[2]
ABOUT = dict.fromkeys(("when", "machine", "redis", "python", "node", "note"), "") | {"quick": False, "rounds": 3}
#: A cell without a figure.
NONE = "\N{EN DASH}"
STEPS = {"one", "bulk", "late", "delayed", "slow", "work"}


@pytest.fixture
def results() -> Results:
    made_up = Results(dict(ABOUT))
    for bare, ours, theirs in ((90_000, 60_000, 5000), (110_000, 50_000, 4000), (100_000, 70_000, 9000)):
        made_up.add("bare scripts", {"drain 1": bare, "late 100 p50": 0.5}, {})
        made_up.add("reliq", {"drain 1": ours, "late 100 p50": 0.9, "late 100 p99": 3.5}, {})
        made_up.add("dramatiq", {"drain 1": theirs, "late 100 p50": 300.0, "late 100 p99": 900.0}, {})
        made_up.add("Celery", {"late 100 p50": 1.8}, {})
        made_up.add("huey (no acks)", {"drain 1": 50_000}, {})
        waiting = {"drain wait": 700, "worker cpu wait": 3000, "redis cpu wait": 400}
        made_up.add("RQ", waiting | {"late 100 p50": -200.0}, {})
    made_up.add("arq", {}, {"drain 1": "worker ended with 1: <no such thing>"})
    made_up.tried["dramatiq"] = {"nothing": {"8 threads": 2000, "32 threads": 5000, "64 threads": 4900}}
    return made_up


def test_page_has_best_figures_spreads_failures_ratios_and_each_tried_setting(results):
    text, times = page(results, PEERS), "\N{MULTIPLICATION SIGN}"

    [row] = [line for line in text.splitlines() if line.startswith("| dramatiq | 32 threads | 9,000")]
    assert "9,000<br><small>4,000\N{EN DASH}9,000</small>" in row
    assert "| 300 / 900 |" in row
    assert "| arq | 8 at once | failed |" in text
    assert "- arq, drain 1: failed: worker ended with 1: <no such thing>" in text
    assert "- dramatiq, bulk: no bulk publish" in text
    drain = f"- Drain, 1 process: 64% of the bare scripts, 7.8 {times} dramatiq, the best acked Python peer."
    assert drain in text
    # RQ's negative lateness is no best figure: it delivers early.
    late = f"- Late at 100/s, p50: 1.8 {times} the bare scripts, 0.5 {times} Celery, the best acked Python peer."
    assert late in text
    assert f"| dramatiq | 8 threads: 2,000<br>**32 threads: 5,000**<br>64 threads: 4,900 | {NONE} | {NONE} |" in text
    assert (results.fastest("dramatiq", "nothing"), results.fastest("dramatiq", "wait")) == ("32 threads", None)
    assert f"| RQ | 1 process | 700 | 3,000 / 400 | 1 process | {NONE} | {NONE} |" in text
    [busy] = re.findall(r"## A handler that takes its time.*?\n\n(.*?)\n\n", text, re.DOTALL)
    assert "reliq, batch handler" not in busy


def test_first_message_of_a_pickup_is_published_and_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "LOG", tmp_path / "times.txt")
    monkeypatch.setattr(kit, "PAUSE_SECONDS", 0)
    bodies = []

    kit.slowly(bodies.append, 2)
    for body in bodies:
        kit.note(body["sent"])

    assert len(bodies) == 3
    assert len((tmp_path / "times.txt").read_text().split()) == 2


def test_picture_has_a_bar_for_each_figure_in_proportion(results):
    root = ET.fromstring(picture(results, PEERS))
    bars = [element for element in root.iter() if element.tag.endswith("rect")]

    widths = {kind: [float(bar.get("width")) for bar in bars if bar.get("class") == kind] for kind in ("limit", "ours")}
    assert len(bars) == 4 + 1 + 2
    assert max(float(bar.get("width")) for bar in bars) == widths["limit"][0]
    assert widths["ours"][0] == pytest.approx(widths["limit"][0] * 7 / 11, abs=0.2)


def test_empty_or_saved_results_make_a_page_and_a_picture(results, tmp_path):
    empty = Results(dict(ABOUT))
    results.save(tmp_path / "deep" / "results.json")

    assert page(empty, PEERS).startswith("# Results")
    assert ET.fromstring(picture(empty, PEERS)) is not None
    assert Results.load(tmp_path / "deep" / "results.json") == results


def test_peers_are_pinned_and_have_every_step_but_those_they_lack():
    for peer in PEERS:
        assert all("=" in one or "@" in one for one in peer.requirements[:1]), peer.name
        if peer.kind == "theirs" and not peer.is_node:
            tree = ast.parse((ROOT / "benchmarks" / "peers" / f"{peer.module}.py").read_text("utf-8"))
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert STEPS & functions == STEPS - set(peer.lacks), peer.name
