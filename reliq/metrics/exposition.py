"""
Write metrics as text in the formats of Prometheus, or as objects for an application's prometheus_client registry.

The text can have tens of thousands of lines, and only their numbers change between two scrapes. To save time, `Page`
stores the text before each number, and does not create a Python object for each line.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reliq.metrics.names import Spec

Labels = tuple[str, ...]

_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_METRICS: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(frozen=True, slots=True)
class Family:
    """
    A metric with all its series.

    Attributes:
        rows: the value of each series, by label values. The value of a histogram is a sequence: the count of each
            bucket, without the counts of smaller buckets, and then the sum.
    """

    spec: Spec
    rows: Mapping[Labels, Any]


class Collector(ABC):
    """A source of metrics, which an application can also register in a registry of prometheus_client."""

    @abstractmethod
    def families(self) -> Iterable[Family]:
        """Return the current metrics."""

    def describe(self) -> list[Metric]:
        """Return an empty list, so that the registration of this collector sends no requests to Redis."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics as objects of prometheus_client."""
        for family in self.families():
            spec = family.spec
            metric = _METRICS[spec.kind](spec.name, spec.help, labels=spec.labels)
            for labels, value in family.rows.items():
                if spec.kind == "histogram":
                    metric.add_metric(labels, [*zip(_bounds(spec), accumulate(value[:-1]), strict=True)], value[-1])
                else:
                    metric.add_metric(labels, value)
            yield metric


class Page:
    """
    The text of all metrics that an HTTP endpoint serves.

    Args:
        foreign: a prometheus_client registry, whose metrics are added after the metrics of reliq.
    """

    def __init__(self, collectors: Sequence[Collector] = (), foreign: CollectorRegistry | None = None) -> None:
        self._collectors = collectors
        self._foreign = foreign or CollectorRegistry()
        self._prefixes: dict[tuple[Spec, Labels], Sequence[str]] = {}

    def encode(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text in the format that the HTTP header Accept requests, and the content type of the text."""
        try:
            encoder, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # the Accept header is malformed
            encoder, content_type = choose_encoder("")
        is_open = "openmetrics" in content_type
        pieces: list[str] = []
        prefixes: dict[tuple[Spec, Labels], Sequence[str]] = {}
        for collector in self._collectors:
            for family in collector.families():
                spec = family.spec
                name = spec.name.removesuffix("_total") if is_open and spec.kind == "counter" else spec.name
                pieces.append(f"# HELP {name} {spec.help}\n# TYPE {name} {spec.kind}\n")
                for labels, value in family.rows.items():
                    series = (spec, labels)
                    starts = prefixes[series] = self._prefixes.get(series) or _line_starts(spec, labels)
                    if spec.kind == "histogram":
                        counts = [*accumulate(value[:-1])]
                        numbers = (*counts, counts[-1], value[-1])
                        pieces += [f"{start}{number}\n" for start, number in zip(starts, numbers, strict=True)]
                    elif math.isfinite(value):
                        pieces.append(f"{starts[0]}{value}\n")
                    else:
                        pieces.append(f"{starts[0]}{floatToGoString(value)}\n")  # type: ignore[no-untyped-call]
        self._prefixes = prefixes  # keep only the series of this scrape, so that old series take no memory
        return "".join(pieces).encode("utf-8", "replace") + encoder(self._foreign), content_type


def _line_starts(spec: Spec, labels: Labels) -> list[str]:
    """Return the text before each number of a series. A histogram has a number for each bucket, a count and a sum."""
    pairs = [f'{name}="{value.translate(_ESCAPED)}"' for name, value in zip(spec.labels, labels, strict=True)]
    lines = [(spec.name, pairs)]
    if spec.kind == "histogram":
        lines = [(f"{spec.name}_bucket", [*pairs, f'le="{bound}"']) for bound in _bounds(spec)]
        lines += [(f"{spec.name}_count", pairs), (f"{spec.name}_sum", pairs)]
    return [f"{name}{{{','.join(all)}}} " if all else f"{name} " for name, all in lines]


def _bounds(spec: Spec) -> list[str]:
    """Return the upper bounds of a histogram's buckets, +Inf included, as Prometheus spells them."""
    return [floatToGoString(bound) for bound in (*spec.buckets, math.inf)]  # type: ignore[no-untyped-call]
