"""
Metrics on their way to Prometheus: as text, or as the objects of Prometheus' client for a registry of the user's.

A page has tens of thousands of lines, and between two scrapes only their numbers change. So a page keeps what stands
before each number, and writes text without an object for each line.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Exemplar(NamedTuple):
    """A measured value with the id of the trace it is from, and when it was measured, in unix seconds."""

    trace_id: str
    value: float
    at: float


@dataclass(frozen=True, slots=True)
class Family:
    """
    One metric with all its series.

    Attributes:
        rows: values of the labels -> value; of a histogram the count of each bucket, not added up, and the sum.
        exemplars: of a histogram, by values of the labels and number of the bucket.
    """

    spec: Spec
    rows: Mapping[Labels, Any]
    exemplars: Mapping[tuple[Labels, int], Exemplar] = field(default_factory=dict)


class Collector(ABC):
    """Some metrics; a registry of Prometheus' client takes one, too."""

    @abstractmethod
    def families(self, *, exemplars: bool = False) -> Iterable[Family]:
        """Return the metrics as they are now, with exemplars where they are wanted and there are any."""

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
        self._collectors, self._foreign = collectors, foreign or CollectorRegistry()
        self._starts: dict[tuple[str, Labels], Sequence[str]] = {}

    def encode(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page in the format that an Accept header asks for, and its content type."""
        encoder, kind = _encoder(accept)
        is_open = "openmetrics" in kind
        pieces: list[str] = []
        starts: dict[tuple[str, Labels], Sequence[str]] = {}
        for collector in self._collectors:
            for family in collector.families(exemplars=is_open):
                self._write(family, pieces, starts, is_open=is_open)
        self._starts = starts  # what has no series any more is forgotten
        return "".join(pieces).encode("utf-8", "replace") + encoder(self._foreign), kind

    def _write(
        self, family: Family, pieces: list[str], starts: dict[tuple[str, Labels], Sequence[str]], *, is_open: bool
    ) -> None:
        spec = family.spec
        name = spec.name.removesuffix("_total") if is_open and spec.kind == "counter" else spec.name
        told = spec.help.translate(_ESCAPED if is_open else _ESCAPED_HELP)
        pieces.append(f"# HELP {name} {told}\n# TYPE {name} {spec.kind}\n")
        for labels, value in family.rows.items():
            key = (spec.name, labels)
            start = starts[key] = self._starts.get(key) or _line_starts(spec, labels)
            if spec.kind != "histogram":
                pieces.append(f"{start[0]}{_number(value)}\n")
                continue
            counts = [*accumulate(value[:-1])]
            lines = [f"{one}{count}\n" for one, count in zip(start, (*counts, counts[-1], value[-1]), strict=True)]
            for bucket in range(len(counts)) if family.exemplars else ():
                if told_by := family.exemplars.get((labels, bucket)):
                    lines[bucket] = f"{lines[bucket][:-1]} {_exemplar(told_by)}\n"
            pieces += lines


def _encoder(accept: str) -> tuple[Any, str]:
    """Return the format that an Accept header asks for; the text format for a header that makes no sense."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):
        return choose_encoder("")


def _line_starts(spec: Spec, labels: Labels) -> Sequence[str]:
    """Return what stands before each number of a series: of a histogram the buckets, their count, and the sum."""
    pairs = [f'{name}="{value.translate(_ESCAPED)}"' for name, value in zip(spec.labels, labels, strict=True)]
    if spec.kind != "histogram":
        return [_start(spec.name, pairs)]
    buckets = [_start(f"{spec.name}_bucket", [*pairs, f'le="{bound}"']) for bound in _bounds(spec)]
    return [*buckets, _start(f"{spec.name}_count", pairs), _start(f"{spec.name}_sum", pairs)]


def _start(name: str, pairs: Sequence[str]) -> str:
    return f"{name}{{{','.join(pairs)}}} " if pairs else f"{name} "


def _bounds(spec: Spec) -> list[str]:
    """Return the upper bounds of a histogram's buckets as Prometheus spells them."""
    return [floatToGoString(bound) for bound in (*spec.buckets, math.inf)]  # type: ignore[no-untyped-call]


def _number(value: float) -> str:
    """Return a number as Prometheus reads it."""
    return str(value) if math.isfinite(value) else str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _exemplar(one: Exemplar) -> str:
    return f'# {{trace_id="{one.trace_id}"}} {one.value} {one.at:.3f}'


def _metric(family: Family) -> Metric:
    """Return a metric as an object of Prometheus' client."""
    spec = family.spec
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
        for labels, value in family.rows.items():
            counts = zip(_bounds(spec), accumulate(value[:-1]), strict=True)
            histogram.add_metric(labels, [*counts], value[-1])
        return histogram
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    made = kind(spec.name, spec.help, labels=spec.labels)
    for labels, value in family.rows.items():
        made.add_metric(labels, value)
    return made
