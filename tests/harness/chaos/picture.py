"""A run as a picture: messages started each second, messages alive, faults shaded. Plain SVG."""

from collections import Counter
from itertools import chain
from xml.sax.saxutils import escape

from tests.harness.chaos.schedule import OF_PROCESSES
from tests.harness.chaos.story import Story

WIDTH, HEIGHT = 1000, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 40, 60
STARTED, ALIVE, PROCESS, SERVER = "#1f6fb2", "#c0392b", "#f5c26b", "#b9b3d9"


def draw(story: Story, title: str) -> str:
    """Return the picture of `story` as SVG."""
    started = _started_each_second(story)
    alive = _alive(story)
    seconds = max([story.seconds, *(at for at, _ in [*started, *alive])])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{escape(title)}</text>',
        *_shades(story, seconds),
        _line(started, seconds, max([1.0, *(y for _, y in started)]), STARTED),
        _line(alive, seconds, max([1.0, *(y for _, y in alive)]), ALIVE),
        *_axis(seconds),
        *_legend(started, alive),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _started_each_second(story: Story) -> list[tuple[float, float]]:
    starts = chain.from_iterable(message.starts for message in story.messages.values())
    by_second = Counter(int((one.started or 0.0) - story.start) for one in starts)
    return [(float(second), float(by_second[second])) for second in range(max(by_second, default=0) + 1)]


def _alive(story: Story) -> list[tuple[float, float]]:
    """Return the messages alive in all queues, look by look."""
    known: dict[str, int] = {}
    points = []
    for look in story.looks:
        known[look.facts["queue"]] = look.facts["alive"]
        points.append((look.t - story.start, float(sum(known.values()))))
    return points


def _x(at: float, seconds: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at / max(seconds, 1)


def _shades(story: Story, seconds: float) -> list[str]:
    """Return a bar for each fault: those of processes in the upper half, those of the server in the lower."""
    middle, half = (TOP + HEIGHT - BOTTOM) / 2, (HEIGHT - BOTTOM - TOP) / 2
    bars = []
    for fault in story.faults:
        of_process = fault.kind in OF_PROCESSES
        left = _x(fault.since - story.start, seconds)
        width = max(1.0, _x(fault.until - story.start, seconds) - left)
        bars.append(
            f'<rect x="{left:.1f}" y="{TOP if of_process else middle:.1f}" width="{width:.1f}" height="{half:.1f}"'
            f' fill="{PROCESS if of_process else SERVER}" opacity="0.6"><title>{fault.kind}</title></rect>'
        )
    return bars


def _line(points: list[tuple[float, float]], seconds: float, top: float, colour: str) -> str:
    height = HEIGHT - BOTTOM - TOP
    places = " ".join(f"{_x(x, seconds):.1f},{HEIGHT - BOTTOM - height * y / top:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.2"/>'


def _axis(seconds: float) -> list[str]:
    floor = HEIGHT - BOTTOM
    marks = [f'<line x1="{LEFT}" y1="{floor}" x2="{WIDTH - RIGHT}" y2="{floor}" stroke="black"/>']
    for tenth in range(11):
        at = seconds * tenth / 10
        marks.append(
            f'<text x="{_x(at, seconds):.1f}" y="{floor + 18}" font-size="11" text-anchor="middle">{at:.0f} s</text>'
        )
    return marks


def _legend(started: list[tuple[float, float]], alive: list[tuple[float, float]]) -> list[str]:
    words = [
        (STARTED, f"handlers started each second (most {max((y for _, y in started), default=0):.0f})"),
        (ALIVE, f"messages alive (most {max((y for _, y in alive), default=0):.0f})"),
        (PROCESS, "fault of a process"),
        (SERVER, "fault of the server or the network"),
    ]
    places = (LEFT, LEFT + 300, LEFT + 530, LEFT + 690)
    return [
        f'<rect x="{x}" y="{HEIGHT - 25}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{x + 18}" y="{HEIGHT - 15}" font-size="12">{text}</text>'
        for x, (colour, text) in zip(places, words, strict=True)
    ]
