"""A run as a page of Markdown."""

from collections import Counter
from itertools import pairwise

from tests.harness.chaos.checker import Verdict, is_done, is_forgotten, why_again
from tests.harness.chaos.story import Story

EXAMPLES = 5


def report(story: Story, verdict: Verdict, *, seed: int, events: int) -> str:
    """Return what a reader wants to know of the run, the verdict first."""
    drained = "not drained" if story.drained is None else f"drained in {story.drained:.1f} s"
    kinds = Counter(fault.kind for fault in story.faults)
    size = f"{len(story.messages):,} messages, {len(story.faults)} faults of {len(kinds)} kinds, {events:,} events"
    lines = [
        f"# Chaos, seed {seed}: {verdict.word}",
        "",
        f"{story.seconds:.0f} s, {size}; {drained}.",
        "",
        *_counts(story, verdict),
        "",
        "Faults: " + ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())) + ".",
        "",
        *_again(story),
    ]
    return "\n".join(lines) + "\n"


def _counts(story: Story, verdict: Verdict) -> list[str]:
    lines = ["| count | found | pass |", "| --- | --- | --- |"]
    lines += [f"| {name} | {len(found)} | 0 |" for name, found in verdict.violations.items()]
    unknown = [m for m in story.messages.values() if m.outcome == "unknown"]
    lines.append(f"| recovered: started, publish unknown | {sum(bool(m.starts) for m in unknown)} | reported |")
    lines.append(f"| publish unknown | {len(unknown)} | reported |")
    if any(story.rewinds.values()):
        lines += _forgotten(story)
    for name, found in verdict.violations.items():
        if found:
            lines += ["", f"{name}, for example:", *(f"- {one}" for one in found[:EXAMPLES])]
    return lines


def _forgotten(story: Story) -> list[str]:
    """Return how many publishes a replica confirmed, and how many that none had confirmed were gone with a primary."""
    confirmed = [m for m in story.messages.values() if m.outcome == "ok"]
    known = {id for final in story.finals.values() for place in ("dead", "alive") for id in final.facts[place]}
    gone = [m for m in confirmed if not (is_done(m) or m.called_off or m.id in known)]
    return [
        f"| publishes that a replica confirmed | {sum(m.durable is True for m in confirmed)} | reported |",
        f"| publishes told that none did in time | {sum(m.durable is False for m in confirmed)} | reported |",
        f"| gone with a primary before any replica had them | {sum(is_forgotten(story, m) for m in gone)} | reported |",
    ]


def _again(story: Story) -> list[str]:
    """Return how messages ended, and why some were delivered again."""
    ended = Counter(
        "cancelled" if m.cancelled else "acked" if is_done(m) else m.outcome if m.outcome != "ok" else "dead"
        for m in story.messages.values()
    )
    starts = [m.starts for m in story.messages.values()]
    reasons = Counter(
        why_again(story, m, one, other.claimed) or "none"
        for m in story.messages.values()
        for one, other in pairwise(m.starts)
    )
    return [
        "Ends: " + ", ".join(f"{kind} {number:,}" for kind, number in ended.most_common()) + ".",
        f"{sum(map(len, starts)):,} starts. Started again after: "
        + ", ".join(f"{kind} {number:,}" for kind, number in reasons.most_common())
        + ".",
    ]
