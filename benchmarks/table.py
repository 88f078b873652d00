"""The results as one page of Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.catalogue import Peer
from benchmarks.results import Results
from benchmarks.works import Work

NOTHING = "–"
#: Figures are shown with one decimal below this.
WHOLE_FROM = 20


@dataclass(frozen=True, slots=True)
class Column:
    """
    A column of figures, or of settings.

    Attributes:
        figures: their names; a cell shows the best of the rounds.
        measure: the measure that makes them.
        work: the kind of work whose setting is shown instead.
    """

    heading: str
    figures: tuple[str, ...] = ()
    measure: str = ""
    work: Work | None = None


FIGURES = (
    Column("set to", work="nothing"),
    Column("drain, 1 process", ("drain 1",), "drain 1"),
    Column("drain, 2 processes", ("drain 2",), "drain 2"),
    Column("publish one by one", ("one",), "one"),
    Column("bulk publish", ("bulk",), "bulk"),
    Column("late at 100/s, p50 / p99", ("late 100 p50", "late 100 p99"), "late"),
    Column("late at 1,000/s, p50 / p99", ("late 1000 p50", "late 1000 p99"), "late"),
    Column("pickup when idle, p50 / p99", ("pickup p50", "pickup p99"), "slow"),
    Column("bytes, ready / delayed", ("ready bytes", "delayed bytes"), "memory"),
    Column("commands a message", ("commands 1",), "drain 1"),
    Column("CPU µs a message, worker / Redis", ("worker cpu 1", "redis cpu 1"), "drain 1"),
)
BUSY_FIGURES = (
    Column("waits 5 ms: set to", work="wait"),
    Column("messages a second", ("drain wait",), "drain wait"),
    Column("CPU µs a message, worker / Redis", ("worker cpu wait", "redis cpu wait"), "drain wait"),
    Column("computes 2 ms: set to", work="compute"),
    Column("messages a second", ("drain compute",), "drain compute"),
    Column("CPU µs a message, worker / Redis", ("worker cpu compute", "redis cpu compute"), "drain compute"),
)
#: What the columns of the settings are headed with.
TRIED: tuple[tuple[Work, str], ...] = (
    ("nothing", "returns at once, 1 process"),
    ("wait", "waits 5 ms, 2 processes"),
    ("compute", "computes 2 ms, 2 processes"),
)
#: What is compared, and the figure's name; of times less is better.
RATIOS = (
    ("Drain, 1 process", "drain 1"),
    ("Drain, 2 processes", "drain 2"),
    ("Handlers that wait 5 ms, 2 processes", "drain wait"),
    ("Handlers that compute 2 ms, 2 processes", "drain compute"),
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
WITH_SPREAD = {"drain 1", "drain 2", "drain wait", "drain compute", "one", "bulk"}


def page(results: Results, peers: Sequence[Peer]) -> str:
    """Return the whole page; a measure that failed is a failure in its cell, with its reason below."""
    about = results.about
    lines = ["# Results", "", _how(about), ""]
    if about.get("note"):
        lines += [f"**{about['note']}**", ""]
    lines += ["## A handler that returns at once", "", *_table(results, peers, FIGURES), ""]
    busy = [peer for peer in peers if set(peer.tries) - {"nothing"}]
    lines += [
        "## A handler that takes its time: two processes, bodies of 1 KiB",
        "",
        *_table(results, busy, BUSY_FIGURES),
    ]
    lines += ["", "2,000 of the µs of whoever computes are the handler's own.", "", *_ratios(results, peers)]
    lines += ["## Settings tried", "", *_tried(results, peers), ""]
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
        f"Python {about['python']}{node}. {rounds} in turns{quick}; the best is shown, least–greatest below. "
        "Rates in messages a second, times in milliseconds. How: [README.md](README.md)."
    )


def _table(results: Results, peers: Sequence[Peer], columns: Sequence[Column]) -> list[str]:
    return [
        "| | " + " | ".join(column.heading for column in columns) + " |",
        "| --- |" + " ---: |" * len(columns),
        *(
            f"| {peer.name} | " + " | ".join(_cell(results, peer, column) for column in columns) + " |"
            for peer in peers
        ),
    ]


def _cell(results: Results, peer: Peer, column: Column) -> str:
    if column.work:
        return results.fastest(peer.name, column.work) or next(iter(peer.tries.get(column.work, ())), NOTHING)
    names = column.figures
    values = [results.best(peer.name, name) for name in names]
    if all(value is None for value in values):
        return "failed" if column.measure in results.failures.get(peer.name, {}) else NOTHING
    text = " / ".join(NOTHING if value is None else number(value) for value in values)
    spread = results.spread(peer.name, names[0])
    if names[0] in WITH_SPREAD and spread and spread[0] != spread[1]:
        text += f"<br><small>{number(spread[0])}–{number(spread[1])}</small>"
    return text


def _ratios(results: Results, peers: Sequence[Peer]) -> list[str]:
    """Say how reliq stands to the limit and to the best of the others."""
    rows = [f"- {heading}: {', '.join(said)}." for heading, name in RATIOS if (said := _compared(results, peers, name))]
    return ["reliq beside the others, in this run:", "", *rows, ""] if rows else []


def _compared(results: Results, peers: Sequence[Peer], name: str) -> list[str]:
    ours = results.best("reliq", name)
    if ours is None:
        return []
    acked = [peer.name for peer in peers if peer.kind == "theirs" and peer.is_acked and not peer.is_node]
    # What begins before it is due is not the most punctual.
    others = {one: value for one in acked if (value := results.best(one, name) or 0) > 0}
    said = []
    is_time = name.startswith(TIMES)
    if limit := results.best("bare scripts", name):
        share = f"{ours / limit:.1f} ×" if is_time else f"{ours / limit:.0%} of"
        said.append(f"{share} {LIMITS.get(name, 'the bare scripts')}")
    if others:
        best = (min if is_time else max)(others, key=lambda one: others[one])
        said.append(f"{ours / others[best]:.1f} × {best}, the best acked Python peer")
    if node := results.best("BullMQ (Node)", name):
        said.append(f"{ours / node:.1f} × BullMQ on Node")
    return said


def _tried(results: Results, peers: Sequence[Peer]) -> list[str]:
    """Show the rate with each setting, the fastest in bold."""
    headings = [title for _, title in TRIED]
    rows = [
        f"| {peer.name} | " + " | ".join(_rates(results, peer.name, work) for work, _ in TRIED) + " |"
        for peer in peers
        if any(results.tried.get(peer.name, {}).values())
    ]
    return [
        "One short drain with each, one after the other, in messages a second; the fastest is what the tables above show.",
        "",
        "| | " + " | ".join(headings) + " |",
        "| --- |" + " --- |" * len(headings),
        *rows,
    ]


def _rates(results: Results, peer: str, work: Work) -> str:
    best = results.fastest(peer, work)
    rates = results.tried.get(peer, {}).get(work, {})
    said = (f"{setting}: {number(rate)}" for setting, rate in rates.items())
    return "<br>".join(f"**{one}**" if one.startswith(f"{best}:") else one for one in said) or NOTHING


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
