"""How soon: after a fault until work goes on, and after its due time until a message starts."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from tests.harness.chaos.story import Story
from tests.harness.chaos.workload import LEASE_SECONDS

RECOVERY_P99_SECONDS = LEASE_SECONDS + 1
LATENESS_P50_SECONDS, LATENESS_P99_SECONDS = 0.03, 1.0
#: What comes due so soon after a fault may be late because of it.
AFTERMATH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Quantiles in seconds; `undisturbed` is how many messages came due outside of faults and their aftermath."""

    recovery_p50: float
    recovery_p99: float
    lateness_p50: float
    lateness_p99: float
    undisturbed: int

    @property
    def passes(self) -> bool:
        """Whether the pass marks of a run that has the machine to itself are met."""
        lateness = self.lateness_p50 <= LATENESS_P50_SECONDS and self.lateness_p99 <= LATENESS_P99_SECONDS
        return self.recovery_p99 <= RECOVERY_P99_SECONDS and lateness


def measure(story: Story) -> Timing:
    """Return the quantiles of a run."""
    recovered, late = recoveries(story), latenesses(story)
    return Timing(
        quantile(recovered, 0.5), quantile(recovered, 0.99), quantile(late, 0.5), quantile(late, 0.99), len(late)
    )


def recoveries(story: Story) -> list[float]:
    """Return, for each fault, the seconds from its end to the next confirmed ack; one without any is left out."""
    deliveries = chain.from_iterable(message.deliveries for message in story.messages.values())
    acks = sorted(
        s.ended for one in deliveries for s in one.settlings if s.verb == "acked" and s.result == "ok" and s.ended
    )
    found = []
    for fault in story.faults:
        at = bisect_right(acks, fault.until)
        if at < len(acks):
            found.append(acks[at] - fault.until)
    return found


def latenesses(story: Story) -> list[float]:
    """Return how late each message that came due in peace was started."""
    disturbed = [(fault.since, fault.until + AFTERMATH_SECONDS) for fault in story.faults]
    found = []
    for message in story.messages.values():
        due = message.asked + message.delay
        if message.starts and not any(since <= due <= until for since, until in disturbed):
            found.append(message.started - due)
    return found


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which `part` of them lie, 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
