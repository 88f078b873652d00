"""The comparison's table and picture, from made-up results; the peers themselves are not run here."""

import ast
import json
import re
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.catalogue import PEERS
from benchmarks.chart import picture
from benchmarks.peers import kit
from benchmarks.results import Results
from benchmarks.table import page

ROOT = Path(__file__).parents[2]
ABOUT = {
    "when": "2026-01-02",
    "machine": "2 cores, 4 GiB",
    "redis": "7.0.0",
    "python": "3.11.0",
    "node": "",
    "quick": False,
    "rounds": 3,
    "note": "",
}
#: A cell without a figure; it stands between two of a spread, too.
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
        made_up.add(
            "RQ", {"late 100 p50": -200.0, "drain wait": 700, "worker cpu wait": 3000, "redis cpu wait": 400}, {}
        )
    made_up.add("arq", {}, {"drain 1": "worker ended with 1: <no such thing>"})
    made_up.tried["dramatiq"] = {"nothing": {"8 threads": 2000, "32 threads": 5000, "64 threads": 4900}}
    return made_up


def test_a_cell_has_the_best_and_the_spread(results):
    [row] = [line for line in page(results, PEERS).splitlines() if line.startswith("| dramatiq | 32 threads | 9,000")]

    assert "9,000<br><small>4,000\N{EN DASH}9,000</small>" in row
    assert "| 300 / 900 |" in row


def test_ratios_are_to_the_limit_and_to_the_best_that_acks(results):
    assert (
        "- Drain, 1 process: 64% of the bare scripts, 7.8 \N{MULTIPLICATION SIGN} dramatiq, the best acked Python peer."
        in page(results, PEERS)
    )


def test_of_times_the_least_is_the_best_unless_it_is_early(results):
    assert (
        "- Late at 100/s, p50: 1.8 \N{MULTIPLICATION SIGN} the bare scripts, "
        "0.5 \N{MULTIPLICATION SIGN} Celery, the best acked Python peer." in page(results, PEERS)
    )


def test_a_failure_is_shown_with_its_reason_and_what_a_peer_lacks_too(results):
    text = page(results, PEERS)

    assert "| arq | 8 at once | failed |" in text
    assert "- arq, drain 1: failed: worker ended with 1: <no such thing>" in text
    assert "- dramatiq, bulk: no bulk publish" in text


def test_every_setting_that_was_tried_is_shown_and_the_fastest_is_the_one_that_was_measured(results):
    assert results.fastest("dramatiq", "nothing") == "32 threads"
    assert results.fastest("dramatiq", "wait") is None
    assert f"| dramatiq | 8 threads: 2,000<br>**32 threads: 5,000**<br>64 threads: 4,900 | {NONE} | {NONE} |" in page(
        results, PEERS
    )


def test_handlers_that_take_their_time_have_a_table_of_their_own(results):
    text = page(results, PEERS)

    assert f"| RQ | 1 process | 700 | 3,000 / 400 | 1 process | {NONE} | {NONE} |" in text
    [busy] = re.findall(r"## A handler that takes its time.*?\n\n(.*?)\n\n", text, re.DOTALL)
    assert "reliq, batch handler" not in busy


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.tries], ids=lambda peer: peer.name)
def test_a_peer_is_tried_with_8_to_64_at_once_or_with_processes(peer):
    numbers = {kit.slots_of(setting) for setting in peer.tries["nothing"]}

    assert {8, 16, 32, 64} <= numbers or peer.tries["nothing"] == ("1 process",)


def test_bodies_are_of_100_bytes_and_of_1_kib():
    sizes = [len(json.dumps(kit.body_of(work), separators=(",", ":"))) for work in ("nothing", "wait", "compute")]

    assert sizes == [100, 1024, 1024]


def test_the_first_message_of_a_pickup_is_published_and_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "LOG", tmp_path / "times.txt")
    monkeypatch.setattr(kit, "PAUSE_SECONDS", 0)
    bodies = []

    kit.slowly(bodies.append, 2)
    for body in bodies:
        kit.note(body["sent"])

    assert len(bodies) == 3
    assert len((tmp_path / "times.txt").read_text().split()) == 2


def test_a_handler_that_computes_takes_2_ms_of_the_processor():
    before = time.thread_time()
    kit.compute()

    assert time.thread_time() - before >= 0.002


def test_every_peer_has_its_guarantee_and_version_in_the_table(results):
    text = page(results, PEERS)

    for peer in PEERS:
        assert peer.guarantee in text
        assert all(f"({requirement})" in text for requirement in peer.requirements[:1])


def test_the_picture_has_a_bar_for_each_figure_and_the_longest_is_the_greatest(results):
    root = ET.fromstring(picture(results, PEERS))
    bars = [element for element in root.iter() if element.tag.endswith("rect")]

    widths = {kind: [float(bar.get("width")) for bar in bars if bar.get("class") == kind] for kind in ("limit", "ours")}
    assert len(bars) == 4 + 1 + 2
    assert max(float(bar.get("width")) for bar in bars) == widths["limit"][0]
    assert widths["ours"][0] == pytest.approx(widths["limit"][0] * 7 / 11, abs=0.2)


def test_the_picture_can_be_read_on_light_and_on_dark_pages(results):
    text = picture(results, PEERS)

    colours = {tuple(bytes.fromhex(found)) for found in re.findall(r"#([0-9a-f]{6})", text)}
    assert colours
    assert [one for one in colours if not 0.2 < luminance(one) ** 0.5 < 0.85] == []
    assert "background" not in text


def luminance(colour) -> float:
    """How bright a colour is, 0 to 1, as the eye sees it."""
    return sum(weight * (part / 255) ** 2.2 for weight, part in zip((0.21, 0.72, 0.07), colour, strict=True))


def test_nothing_measured_makes_a_page_and_a_picture_all_the_same():
    empty = Results(dict(ABOUT))

    assert page(empty, PEERS).startswith("# Results")
    assert ET.fromstring(picture(empty, PEERS)) is not None


def test_results_come_back_as_they_were_saved(results, tmp_path):
    results.save(tmp_path / "deep" / "results.json")

    assert Results.load(tmp_path / "deep" / "results.json") == results


@pytest.mark.parametrize(
    "peer", [peer for peer in PEERS if peer.kind == "theirs" and not peer.is_node], ids=lambda peer: peer.name
)
def test_a_peers_module_has_every_step_but_those_that_it_is_said_to_lack(peer):
    tree = ast.parse((ROOT / "benchmarks" / "peers" / f"{peer.module}.py").read_text("utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}

    assert STEPS & functions == STEPS - set(peer.lacks)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_requirements_are_pinned(peer):
    assert all("=" in one or "@" in one for one in peer.requirements[:1])


def test_the_ignored_folder_is_where_environments_are_kept():
    assert "/benchmarks/.work/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()
