"""What a panel is, and the queries that panels are made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Every query is for what the variables choose. Figures of queues are the same wherever they are scraped: `max`.
SOURCE = 'cluster="$cluster",job=~"$job",instance=~"$instance"'
QUEUE = f'queue=~"$queue",{SOURCE}'
#: Of targets that do not answer there is only `up`; an alert of a whole cluster has no labels of its own.
UP = f'up{{job=~"reliq.*",{SOURCE}}}'
FIRING = 'alertname=~"Reliq.+",cluster=~"$cluster|",queue=~"$queue|"'
WINDOW = "[$__rate_interval]"
YELLOW, RED = "yellow", "red"


@dataclass(frozen=True)
class Column:
    """A column of a table: a label (`source` is its name in Prometheus), or the value of a query."""

    name: str
    width: int = 0
    label: bool = False
    source: str = ""
    unit: str = "none"
    decimals: int = 0
    limits: Mapping[float, str] = field(default_factory=dict)
    mappings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    link: tuple[str, str] | None = None


@dataclass(frozen=True)
class Panel:
    """A panel: `queries` are legend -> PromQL, `limits` are where a colour begins, `base` is the colour below them."""

    title: str
    description: str
    queries: Mapping[str, str]
    type: str = "timeseries"
    width: int = 8
    height: int = 7
    unit: str = "short"
    limits: dict[float, str] = field(default_factory=dict)
    base: str = "grey"
    mappings: dict[str, tuple[str, str]] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)
    bars: bool = False
    text: str = "value"
    columns: tuple[Column, ...] = ()
    sort: str = ""
    empty: str = ""


def of_queues(query: str, empty: str = "0") -> dict[str, str]:
    """Return a query with a line for every queue, so that a queue has the same place and colour in every panel."""
    return {"{{queue}}": f"{query} or {empty} * {gauge('reliq_paused')}"}


def gauge(name: str, more: str = "") -> str:
    """Return a gauge by queue."""
    return f"max by (queue) ({name}{{{more}{QUEUE}}})"


def rate(name: str, more: str = "") -> str:
    """Return what Redis counted, by queue and second."""
    return f"max by (queue) (rate({name}{{{more}{QUEUE}}}{WINDOW}))"


def quantile(share: float, name: str, more: str = "") -> str:
    """Return a quantile of the seconds that workers measured, by queue."""
    return f"histogram_quantile({share}, sum by (le, queue) (rate({name}_bucket{{{more}{QUEUE}}}{WINDOW})))"


def of(name: str, by: str = "instance", how: str = "sum", more: str = "") -> str:
    """Return a figure of worker processes."""
    return f"{how} by ({by}) ({name}{{{more}{SOURCE}}})"


def grown(name: str, by: str = "instance", who: str = SOURCE) -> str:
    """Return by how much a counter of processes grew, in whole numbers."""
    return f"round(sum by ({by}) (increase({name}{{{who}}}{WINDOW})))"


ACKED = 'outcome="ack",'
FAILED = f"{rate('reliq_nacked_total')} / ({rate('reliq_acked_total')} + {rate('reliq_nacked_total')} > 0)"
BUSY = f"{of('reliq_slots_busy')} / {of('reliq_slots')}"
OLDEST = gauge("reliq_oldest_seconds", 'state=~"pending|ready|retry",')
SLOW = {60: YELLOW, 300: RED}
