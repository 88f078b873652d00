"""The results as one page of Markdown."""

from collections.abc import Sequence
from typing import Any

from benchmarks.catalogue import Peer
from benchmarks.results import Results

NOTHING = "–"
#: Figures are shown with one decimal below this.
WHOLE_FROM = 20

#: Heading, names of the figures in a cell, the measure that makes them.
COLUMNS = (
    ("drain, 1 process", ("drain 1",), "drain 1"),
    ("drain, 2 processes", ("drain 2",), "drain 2"),
    ("publish one by one", ("one",), "one"),
    ("bulk publish", ("bulk",), "bulk"),
    ("late at 100/s, p50 / p99", ("late 100 p50", "late 100 p99"), "late"),
    ("late at 1,000/s, p50 / p99", ("late 1000 p50", "late 1000 p99"), "late"),
    ("pickup when idle, p50 / p99", ("pickup p50", "pickup p99"), "slow"),
    ("bytes, ready / delayed", ("ready bytes", "delayed bytes"), "memory"),
    ("commands a message", ("commands 1",), "drain 1"),
    ("CPU µs a message, worker / Redis", ("worker cpu 1", "redis cpu 1"), "drain 1"),
)
#: What is compared, and the figure's name; of times less is better.
RATIOS = (
    ("Drain, 1 process", "drain 1"),
    ("Drain, 2 processes", "drain 2"),
    ("Publish one by one", "one"),
    ("Bulk publish", "bulk"),
    ("Late at 100/s, p50", "late 100 p50"),
    ("Late at 100/s, p99", "late 100 p99"),
    ("Late at 1,000/s, p50", "late 1000 p50"),
    ("Late at 1,000/s, p99", "late 1000 p99"),
    ("Pickup when idle, p50", "pickup p50"),
    ("Pickup when idle, p99", "pickup p99"),
)
TIMES = ("late", "pickup")
#: What the limit is called where it is not the bare scripts.
LIMITS = {"one": "a bare SET", "pickup p50": "a bare list", "pickup p99": "a bare list"}
#: Cells that also show the least and the greatest value.
WITH_SPREAD = {"drain 1", "drain 2", "one", "bulk"}


def page(results: Results, peers: Sequence[Peer]) -> str:
    """Return the whole page; a measure that failed is a failure in its cell, with its reason below."""
    about = results.about
    lines = ["# Results", "", _how(about), ""]
    if about.get("note"):
        lines += [f"**{about['note']}**", ""]
    lines += ["| | " + " | ".join(heading for heading, _, _ in COLUMNS) + " |", "| --- |" + " ---: |" * len(COLUMNS)]
    lines += [_row(results, peer) for peer in peers]
    lines += ["", *_ratios(results, peers)]
    lines += [
        "## What each promises, and how it was set",
        "",
        "| | when a worker dies | settings |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {_label(peer)} | {peer.guarantee} | {peer.settings} |" for peer in peers]
    if missing := _missing(results, peers):
        lines += ["", "## What failed or is not there", "", *missing]
    return "\n".join(lines) + "\n"


def _how(about: dict[str, Any]) -> str:
    node = f", Node {about['node']}" if about["node"] else ""
    rounds = "1 round" if about["rounds"] == 1 else f"{about['rounds']} rounds"
    quick = ", quick" if about["quick"] else ""
    return (
        f"{about['when']}, {about['machine']}, Redis {about['redis']} on loopback without persistence, "
        f"Python {about['python']}{node}. {rounds} in turns{quick}; medians, least–greatest below. "
        "Rates in messages a second, times in milliseconds. How: [README.md](README.md)."
    )


def _row(results: Results, peer: Peer) -> str:
    return f"| {peer.name} | " + " | ".join(_cell(results, peer, names, by) for _, names, by in COLUMNS) + " |"


def _cell(results: Results, peer: Peer, names: Sequence[str], measure: str) -> str:
    values = [results.median(peer.name, name) for name in names]
    if all(value is None for value in values):
        return "failed" if measure in results.failures.get(peer.name, {}) else NOTHING
    text = " / ".join(NOTHING if value is None else number(value) for value in values)
    spread = results.spread(peer.name, names[0])
    if names[0] in WITH_SPREAD and spread and results.about["rounds"] > 1:
        text += f"<br><small>{number(spread[0])}–{number(spread[1])}</small>"
    return text


def _ratios(results: Results, peers: Sequence[Peer]) -> list[str]:
    """Say how reliq stands to the limit and to the best of the others."""
    rows = [f"- {heading}: {', '.join(said)}." for heading, name in RATIOS if (said := _compared(results, peers, name))]
    return ["reliq beside the others, in this run:", "", *rows, ""] if rows else []


def _compared(results: Results, peers: Sequence[Peer], name: str) -> list[str]:
    ours = results.median("reliq", name)
    if ours is None:
        return []
    acked = [peer.name for peer in peers if peer.kind == "theirs" and peer.is_acked and not peer.is_node]
    others = {one: value for one in acked if (value := results.median(one, name))}
    said = []
    is_time = name.startswith(TIMES)
    if limit := results.median("bare scripts", name):
        share = f"{ours / limit:.1f} ×" if is_time else f"{ours / limit:.0%} of"
        said.append(f"{share} {LIMITS.get(name, 'the bare scripts')}")
    if others:
        best = (min if is_time else max)(others, key=lambda one: others[one])
        said.append(f"{ours / others[best]:.1f} × {best}, the best acked Python peer")
    if node := results.median("BullMQ (Node)", name):
        said.append(f"{ours / node:.1f} × BullMQ on Node")
    return said


def _missing(results: Results, peers: Sequence[Peer]) -> list[str]:
    lines = []
    for peer in peers:
        lines += [
            f"- {peer.name}, {measure}: failed: {why}" for measure, why in results.failures.get(peer.name, {}).items()
        ]
        lines += [f"- {peer.name}, {step}: {why}" for step, why in peer.lacks.items()]
    return lines


def _label(peer: Peer) -> str:
    return f"{peer.name} ({', '.join(peer.requirements[:1])})" if peer.requirements else peer.name


def number(value: float) -> str:
    """Return a figure with as many digits as it is good for."""
    return f"{value:,.0f}" if abs(value) >= WHOLE_FROM else f"{value:.1f}"
