"""
Metrics on their way to Prometheus: as text, or as prometheus_client's objects for a registry of the user.

A page has tens of thousands of lines, and between two scrapes only their numbers change. So `Page` keeps the text before
each number, and writes its lines without an object for each of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from reliq.metrics.names import Spec

Labels = tuple[str, ...]

_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_ESCAPED_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Family:
    """
    One metric with all its series.

    Attributes:
        rows: label values -> value; of a histogram the count of each bucket, not added up, and the sum.
    """

    spec: Spec
    rows: Mapping[Labels, Any]


class Collector(ABC):
    """A source of metrics; a registry of prometheus_client accepts it as a collector, too."""

    @abstractmethod
    def families(self) -> Iterable[Family]:
        """Return the metrics as they are now."""

    def describe(self) -> list[Metric]:
        """Return no descriptions: registering must not ask Redis."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for a registry."""
        return map(_metric, self.families())


class Page:
    """
    All metrics of one endpoint as text.

    Args:
        foreign: a registry whose metrics come after those of `collectors`.
    """

    def __init__(self, collectors: Sequence[Collector] = (), foreign: CollectorRegistry | None = None) -> None:
        self._collectors = collectors
        self._foreign = foreign or CollectorRegistry()
        self._prefixes: dict[tuple[str, Labels], Sequence[str]] = {}

    def encode(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page in the format that an Accept header asks for, and its content type."""
        try:
            encoder, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a malformed header
            encoder, content_type = choose_encoder("")
        is_open = "openmetrics" in content_type
        pieces: list[str] = []
        prefixes: dict[tuple[str, Labels], Sequence[str]] = {}
        for collector in self._collectors:
            for family in collector.families():
                spec = family.spec
                name = spec.name.removesuffix("_total") if is_open and spec.kind == "counter" else spec.name
                help_text = spec.help.translate(_ESCAPED if is_open else _ESCAPED_HELP)
                pieces.append(f"# HELP {name} {help_text}\n# TYPE {name} {spec.kind}\n")
                for labels, value in family.rows.items():
                    series = (spec.name, labels)
                    starts = prefixes[series] = self._prefixes.get(series) or _line_starts(spec, labels)
                    if spec.kind == "histogram":
                        counts = [*accumulate(value[:-1])]
                        numbers = (*counts, counts[-1], value[-1])
                        pieces += [f"{start}{number}\n" for start, number in zip(starts, numbers, strict=True)]
                    elif math.isfinite(value):
                        pieces.append(f"{starts[0]}{value}\n")
                    else:
                        pieces.append(f"{starts[0]}{floatToGoString(value)}\n")  # type: ignore[no-untyped-call]
        self._prefixes = prefixes  # forgets the series that are no more
        return "".join(pieces).encode("utf-8", "replace") + encoder(self._foreign), content_type


def _line_starts(spec: Spec, labels: Labels) -> Sequence[str]:
    """Return the text before each number of a series; a histogram has its buckets, their count, and the sum."""
    pairs = [f'{name}="{value.translate(_ESCAPED)}"' for name, value in zip(spec.labels, labels, strict=True)]
    if spec.kind != "histogram":
        return [_line_start(spec.name, pairs)]
    buckets = [_line_start(f"{spec.name}_bucket", [*pairs, f'le="{bound}"']) for bound in _bounds(spec)]
    return [*buckets, _line_start(f"{spec.name}_count", pairs), _line_start(f"{spec.name}_sum", pairs)]


def _line_start(name: str, pairs: Sequence[str]) -> str:
    return f"{name}{{{','.join(pairs)}}} " if pairs else f"{name} "


def _bounds(spec: Spec) -> list[str]:
    """Return the upper bounds of a histogram's buckets as Prometheus spells them."""
    return [floatToGoString(bound) for bound in (*spec.buckets, math.inf)]  # type: ignore[no-untyped-call]


def _metric(family: Family) -> Metric:
    """Return a metric as an object of prometheus_client."""
    spec = family.spec
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
        for labels, value in family.rows.items():
            counts = zip(_bounds(spec), accumulate(value[:-1]), strict=True)
            histogram.add_metric(labels, [*counts], value[-1])
        return histogram
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    metric = kind(spec.name, spec.help, labels=spec.labels)
    for labels, value in family.rows.items():
        metric.add_metric(labels, value)
    return metric
