"""The results as one picture: SVG on a clear ground, readable on light and on dark pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.catalogue import Peer
from benchmarks.results import Results
from benchmarks.table import number

WIDTH, PANEL_GAP, LABEL_WIDTH, VALUE_WIDTH = 900, 24, 160, 58
#: Panels beside each other.
COLUMNS = 2
ROW_HEIGHT, BAR_HEIGHT, TOP, BOTTOM = 24, 14, 66, 34
#: Between two rows of panels.
ROW_GAP = 20

#: Middle tones: a page's ground is not always that of the system's setting, which is all that a picture can ask for.
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #768390 }
.title { font-size: 15px; font-weight: 600 }
.small { font-size: 11.5px }
.ours { fill: #e8590c } text.ours { font-weight: 600 }
.theirs { fill: #8c959f } .limit { fill: none; stroke: #8c959f; stroke-dasharray: 3 2 }
text.theirs, text.limit { fill: #768390; stroke: none }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """
    A column of bars.

    Attributes:
        figure: the name of what the bars show.
        logarithmic: for figures that differ by a thousand.
        best_first: whether the greatest value is the best.
    """

    title: str
    remark: str
    figure: str
    logarithmic: bool = False
    best_first: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """Where a panel is."""

    left: float
    top: int
    width: float


PANELS = (
    Panel("Messages worked a second", "handler returns at once, one process", "drain 1"),
    Panel("Messages worked a second", "handler waits 5 ms, 1 KiB, two processes", "drain wait"),
    Panel("Messages worked a second", "handler computes 2 ms, 1 KiB, two processes", "drain compute"),
    Panel("Lateness of delayed messages, p99", "ms, 100 come due a second, logarithmic", "late 100 p99", True, False),
)


def picture(results: Results, peers: Sequence[Peer]) -> str:
    """Return the SVG; a peer without a figure has no bar."""
    rows = [PANELS[at : at + COLUMNS] for at in range(0, len(PANELS), COLUMNS)]
    heights = [TOP + max(len(_bars(results, peers, panel)) for panel in row) * ROW_HEIGHT + ROW_GAP for row in rows]
    height = sum(heights) + BOTTOM
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="reliq beside other queues on Redis"><style>{STYLE}</style>'
    )
    parts = [head]
    width = (WIDTH - PANEL_GAP * (COLUMNS - 1)) / COLUMNS
    for number_of_row, row in enumerate(rows):
        for at, panel in enumerate(row):
            place = Place(at * (width + PANEL_GAP), sum(heights[:number_of_row]), width)
            parts += _panel(panel, _bars(results, peers, panel), place)
    foot = (
        f"{results.about['machine']}, Redis {results.about['redis']}, {results.about['when']}. {results.about['note']}"
    )
    parts.append(f'<text class="small" x="0" y="{height - 8}">{escape(foot)}</text></svg>')
    return "\n".join(parts) + "\n"


def _bars(results: Results, peers: Sequence[Peer], panel: Panel) -> list[tuple[Peer, float]]:
    found = [(peer, value) for peer in peers if (value := results.best(peer.name, panel.figure)) is not None]
    return sorted(found, key=lambda bar: bar[1], reverse=panel.best_first)


def _panel(panel: Panel, bars: list[tuple[Peer, float]], place: Place) -> list[str]:
    left, room = place.left, place.width - LABEL_WIDTH - VALUE_WIDTH
    most = max((value for _, value in bars), default=1.0)
    parts = [
        f'<text class="title" x="{left:.0f}" y="{place.top + 18:.0f}">{escape(panel.title)}</text>',
        f'<text class="small" x="{left:.0f}" y="{place.top + 38:.0f}">{escape(panel.remark)}</text>',
    ]
    for at, (peer, value) in enumerate(bars):
        y = place.top + TOP + at * ROW_HEIGHT
        length = max(2.0, room * _share(value, most, logarithmic=panel.logarithmic))
        start = left + LABEL_WIDTH
        parts += [
            f'<text class="{peer.kind}" x="{start - 8:.0f}" y="{y + 11}" text-anchor="end">{escape(peer.name)}</text>',
            f'<rect class="{peer.kind}" x="{start:.0f}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" rx="2"/>',
            f'<text class="{peer.kind}" x="{start + length + 6:.1f}" y="{y + 11}">{number(value)}</text>',
        ]
    return parts


def _share(value: float, most: float, *, logarithmic: bool) -> float:
    """Return a bar's length as a share of the longest; a logarithmic one begins at a tenth of a millisecond."""
    if not logarithmic:
        return value / most
    least = 0.1
    return math.log10(max(value, least) / least) / math.log10(max(most, 10 * least) / least)
