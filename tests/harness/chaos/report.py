"""The report of a run in Markdown."""

from collections import Counter
from itertools import pairwise

from tests.harness.chaos.checker import why_again
from tests.harness.chaos.story import Message, Story

EXAMPLES = 5


def report(story: Story, violations: dict[str, list[str]], events: int) -> str:
    """Return the report of a run in Markdown, the verdict first."""
    word = "violated" if any(violations.values()) else "valid"
    (begun,) = story.facts("begun")
    drained = [f"drained in {one['seconds']:.1f} s" for one in story.facts("drained")] or ["not drained"]
    kinds = Counter(fault.kind for fault in story.faults)
    size = f"{len(story.messages):,} messages, {len(story.faults)} faults of {len(kinds)} kinds, {events:,} events"
    lines = [
        f"# Chaos, seed {begun['seed']}: {word}\n",
        f"{begun['seconds']:.0f} s, {size}; {drained[0]}.\n",
        "| count | found | pass |\n| --- | --- | --- |",
        *(f"| {name} | {len(found)} | 0 |" for name, found in violations.items()),
        *(f"| {name} | {number} | reported |" for name, number in _reported(story).items()),
    ]
    for name, found in violations.items():
        if found:
            lines += ["", f"{name}, for example:", *(f"- {one}" for one in found[:EXAMPLES])]
    starts = [message.starts for message in story.messages.values()]
    again = Counter(
        why_again(story, message, one, other.claimed) or "none"
        for message in story.messages.values()
        for one, other in pairwise(message.starts)
    )
    lines += [
        f"\nFaults: {_listed(kinds)}.",
        f"\nEnds: {_listed(Counter(map(_end, story.messages.values())))}.",
        f"{sum(map(len, starts)):,} starts. Started again after: {_listed(again)}.",
    ]
    return "\n".join(lines) + "\n"


def _reported(story: Story) -> dict[str, int]:
    """Return the counts that are no violations."""
    unknown = [m for m in story.messages.values() if m.outcome == "unknown"]
    confirmed = [m for m in story.messages.values() if m.outcome == "ok"]
    left = story.left_at_the_end()
    gone = [m for m in confirmed if not (m.is_done or m.called_off or m.id in left)]
    return {
        "recovered: started, publish unknown": sum(bool(m.starts) for m in unknown),
        "publish unknown": len(unknown),
        "publishes that a replica confirmed": sum(m.durable is True for m in confirmed),
        "publishes told that none did in time": sum(m.durable is False for m in confirmed),
        "items of long jobs": sum(len(m.walked) for m in story.messages.values()),
        "items of long jobs done again": sum(len(m.walked) - len({*m.walked}) for m in story.messages.values()),
        "gone with a primary before any replica had them": sum(map(story.is_forgotten, gone)),
    }


def _end(message: Message) -> str:
    """Return the end of a message."""
    if message.cancelled:
        return "cancelled"
    if message.is_done:
        return "acked"
    return "dead" if message.outcome == "ok" else message.outcome


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {number:,}" for kind, number in counts.most_common())
