"""`Bench`: the parts of a benchmark in their order, on a queue of its own that leaves no key behind."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from reliq.bench import delays, drain, publish, resting
from reliq.bench.cleaner import Cleaner
from reliq.bench.node import AWAY_SECONDS, node_of
from reliq.bench.report import PARTS, Figure, Report
from reliq.bench.stage import FULL, Scale, Stage
from reliq.client.client import Client
from reliq.commands import server_facts
from reliq.errors import ConfigurationError
from reliq.ids import new_id
from reliq.server_version import ServerVersion
from reliq.text import count_of
from reliq.transport.connection import default_url
from reliq.transport.url import check_url, masked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Step = tuple[str, Callable[[], list[Figure]]]
    #: Called with the name of the step that begins, how many are done, and how many there are.
    Progress = Callable[[str, int, int], None]

LATENESS_RATES = (100, 1000)
_MIB = 1_048_576


class Bench:
    """
    A benchmark of reliq on the Redis at `url`.

    Args:
        url: None for RELIQ_URL.
        only: some of PARTS; none means all.
        scale: how many messages are worked: FULL takes three minutes, QUICK half a minute and has rougher figures.

    Raises:
        ConfigurationError: there is no such part, or no Redis is named.
    """

    def __init__(self, url: str | None = None, *, only: Sequence[str] = (), scale: Scale = FULL) -> None:
        if unknown := [part for part in only if part not in PARTS]:
            raise ConfigurationError(f"the benchmark's parts are {', '.join(PARTS)}, not {unknown[0]!r}")
        self.url = default_url() if url is None else url
        check_url(self.url)
        self._only, self._scale, self._name = tuple(only) or PARTS, scale, f"bench-{new_id()}"

    @property
    def bytes_needed(self) -> int:
        """About how many bytes the benchmark takes in Redis while it runs."""
        return self._scale.bytes_needed

    def in_use(self) -> str:
        """
        Return what else is in this Redis, empty when it holds nothing.

        Raises:
            ConfigurationError: its `maxmemory` leaves no room for the benchmark.
        """
        memory, keyspace = (self._facts(section) for section in ("memory", "keyspace"))
        limit, used = int(memory.get("maxmemory", 0)), int(memory.get("used_memory", 0))
        if limit and used + self.bytes_needed > limit:
            raise ConfigurationError(
                f"the benchmark needs about {self.bytes_needed // _MIB} MiB, and this Redis has "
                f"{max(0, limit - used) // _MIB} MiB left below its maxmemory; use --quick, or another Redis"
            )
        sizes = [int(facts.partition("keys=")[2].partition(",")[0]) for facts in keyspace.values() if "keys=" in facts]
        return count_of(sum(sizes), "key") if sum(sizes) else ""

    def run(self, progress: Progress = lambda _name, _done, _of: None) -> Report:
        """
        Measure, and return what was found; whatever happens, no key of the benchmark stays.

        Raises:
            ReliqError: a part did not end, or Redis is away.
        """
        report = Report(redis=ServerVersion.read(self._facts("server")).text, place=masked(self.url))
        with Cleaner(self.url, self._name) as cleaner:
            stage = Stage(self.url, self._name, self._scale, cleaner.lifeline)
            steps = self._steps(stage)
            for number, (title, step) in enumerate(steps):
                progress(title, number, len(steps))
                report.figures.extend(step())
                stage.empty()
            progress("removing its keys", len(steps), len(steps))
        return report

    def _steps(self, stage: Stage) -> list[Step]:
        steps: dict[str, list[Step]] = {
            "drain": [
                (f"drain: {kind}, {processes}", partial(drain.drain, stage, kind, processes))
                for kind, processes in drain.COURSES
            ],
            "publish": [
                ("publish: one by one", partial(publish.one_by_one, stage)),
                ("publish: many", partial(publish.many, stage)),
                ("publish: concurrently", partial(publish.concurrently, stage)),
            ],
            "lateness": [(f"lateness: {rate}/s", partial(delays.lateness, stage, rate)) for rate in LATENESS_RATES],
            "pickup": [("pickup", partial(delays.pickup, stage))],
            "idle": [("idle", partial(resting.idle, stage))],
            "memory": [("memory", partial(resting.memory, stage))],
        }
        return [step for part in PARTS if part in self._only for step in steps[part]]

    def _facts(self, section: str) -> dict[str, str]:
        return Client(node_of(self.url, self._name)).run(server_facts(section), for_seconds=AWAY_SECONDS)
