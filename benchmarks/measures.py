"""What is measured of one peer in one round."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.drains import Watch, drain
from benchmarks.stage import Stage
from benchmarks.works import WORKS, Tries, Work

LEAD_SECONDS = 1.0
#: Messages a second that every peer surely publishes with a delay.
SLOWEST_PUBLISH = 700
RATES = (100, 1000)
#: Messages that a worker handles before the clock counts.
WARM_UP = 5

Measure = Callable[[], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """
    How much is measured.

    Attributes:
        one, bulk, slow, stored: messages.
        drain: how long a measured drain is watched.
        trial: how long one is that tries a setting.
        every: of the settings, which are tried: every so manieth.
    """

    one: int = 2500
    bulk: int = 20_000
    late_seconds: float = 2.0
    slow: int = 100
    stored: int = 3000
    drain: Watch
    trial: Watch
    every: int = 1


FULL = Scale(drain=Watch(3.0), trial=Watch(0.8, share=0.35))
QUICK = Scale(
    one=800,
    bulk=10_000,
    late_seconds=1.0,
    slow=25,
    stored=1500,
    drain=Watch(1.5, share=0.4),
    trial=Watch(0.4, share=0.25),
    every=2,
)


class Measures:
    """One peer on one Redis; each method returns figures by name, or raises StepError."""

    def __init__(self, stage: Stage, scale: Scale) -> None:
        self._stage, self._scale = stage, scale

    def all(self) -> Iterator[tuple[str, Measure]]:
        """Yield every measure with its name; those that the peer lacks are left out."""
        peer = self._stage.peer
        measures: dict[str, Measure] = {
            "one": self.one,
            "bulk": self.bulk,
            "memory": self.memory,
            "late": self.late,
            "slow": self.slow,
        }
        if peer.kind == "limit":
            measures["drain 1"] = self.bare_drain
        for name, measure in ({} if peer.of else measures).items():
            if name not in peer.lacks:
                yield name, measure
        for name, work, processes in drains_of(peer.tries):
            yield f"drain {name}", partial(self.drain, name, work, processes)

    def one(self) -> dict[str, float]:
        """Publish one by one."""
        self._stage.empty()
        return {"one": self._scale.one / self._stage.step("one", self._scale.one)}

    def bulk(self) -> dict[str, float]:
        """Publish many at once."""
        self._stage.empty()
        return {"bulk": self._scale.bulk / self._stage.step("bulk", self._scale.bulk)}

    def bare_drain(self) -> dict[str, float]:
        """Work a full queue without a worker."""
        count = round(self._stage.peer.drained * self._scale.drain.share)
        self._stage.empty()
        return {"drain 1": count / self._stage.step("drain", count)}

    def drain(self, name: str, work: Work, processes: int) -> dict[str, float]:
        """Work a full queue."""
        found = drain(self._stage, work, processes, self._scale.drain)
        return {
            f"drain {name}": found.rate,
            f"commands {name}": found.commands,
            f"worker cpu {name}": found.worker_cpu,
            f"redis cpu {name}": found.redis_cpu,
        }

    def memory(self) -> dict[str, float]:
        """Weigh messages that wait."""
        count = self._scale.stored
        figures = {"ready bytes": self._weighed(lambda: self._stage.fill(count)) / count}
        if "delayed" not in self._stage.peer.lacks:
            figures["delayed bytes"] = self._weighed(lambda: self._stage.step("delayed", count)) / count
        return figures

    def late(self) -> dict[str, float]:
        """Have messages come due while a worker is idle."""
        figures: dict[str, float] = {}
        stage = self._stage
        stage.empty()
        with stage.worker(1, setting=stage.peer.timed) as running:
            stage.forget_times()
            stage.step("slow", WARM_UP)
            stage.times(WARM_UP, running.check)
            for rate in RATES:
                count = round(rate * self._scale.late_seconds)
                lead = LEAD_SECONDS + count / SLOWEST_PUBLISH
                stage.forget_times()
                stage.step("late", rate, self._scale.late_seconds, lead)
                figures |= percentiles(f"late {rate}", stage.times(count, running.check))
        return figures

    def slow(self) -> dict[str, float]:
        """Publish to an idle worker, one after another."""
        stage = self._stage
        stage.empty()
        with stage.worker(1, setting=stage.peer.timed) as running:
            for count in (WARM_UP, self._scale.slow):
                stage.forget_times()
                stage.step("slow", count)
                times = stage.times(count, running.check)
        return percentiles("pickup", times)

    def _weighed(self, publish: Callable[[], object]) -> int:
        """Return by how many bytes Redis' memory grows."""
        self._stage.empty()
        before = self._used()
        publish()
        self._stage.wait_until_alone()
        return self._used() - before

    def _used(self) -> int:
        return int(self._stage.client.info("memory")["used_memory"])


def drains_of(works: Tries) -> Iterator[tuple[str, Work, int]]:
    """Yield the name, the work and the number of processes of each drain of a peer that does these kinds of work."""
    if "nothing" in works:
        yield from (("1", "nothing", 1), ("2", "nothing", 2))
    for work in ("wait", "compute"):
        if work in works:
            yield work, work, WORKS[work]


def percentiles(name: str, late: list[float]) -> dict[str, float]:
    """Return the least, the median and the 99th of a hundred, by name."""
    ordered = sorted(late)
    ranks = {"least": 0, "p50": math.ceil(len(ordered) * 0.5) - 1, "p99": math.ceil(len(ordered) * 0.99) - 1}
    return {f"{name} {label}": ordered[rank] for label, rank in ranks.items()}
