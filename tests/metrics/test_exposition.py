"""The metrics page for Prometheus: both formats, and compression."""

import gzip
from urllib.request import Request, urlopen

import pytest
from patience import figures
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from reliq import events
from reliq.metrics import names
from reliq.metrics.exposition import Collector, Family, Page
from reliq.metrics.process import ProcessMetrics
from reliq.metrics.serving import Endpoint

OPEN = "application/openmetrics-text; version=1.0.0; q=0.7, text/plain; q=0.3"
EVIL = 'a "quoted"\\ name\nof two lines'


class Told(Collector):
    """Made-up metrics."""

    told = ()

    def families(self):
        return self.told


@pytest.fixture
def metrics():
    """The metrics of a process that has handled messages of two queues."""
    found = ProcessMetrics([("calm", ""), (EVIL, "")])
    found(events.Handled("calm", "id", 1, "ack", 0.25))
    found(events.Handled("calm", "id", 1, "ack", 1e9))
    found(events.Handled(EVIL, "id", 1, "nack", 0.004, raised="ValueError at x.py:1", failed=True))
    return found


def read(page, accept=""):
    """Parse a page with Prometheus' client: {(name, labels): value}."""
    text = page.encode(accept)[0].decode()
    if not accept:
        return figures(text)
    samples = [sample for family in read_openmetrics(text) for sample in family.samples]
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for one in samples}


def test_both_formats_and_a_registry_have_the_same_values(metrics):
    registry = CollectorRegistry()
    registry.register(metrics)

    plain, opened = read(Page([metrics])), read(Page([metrics]), OPEN)

    assert plain == opened == figures(generate_latest(registry).decode())
    assert (
        plain["reliq_handler_seconds_bucket", (("le", "+Inf"), ("outcome", "ack"), ("queue", "calm"), ("task", ""))]
        == 2
    )
    assert (
        plain["reliq_handler_seconds_bucket", (("le", "0.3"), ("outcome", "ack"), ("queue", "calm"), ("task", ""))] == 1
    )
    assert plain["reliq_handler_failures_total", (("exception", "ValueError"), ("queue", EVIL), ("task", ""))] == 1


def test_infinity_nan_and_surrogates_are_spelled_as_prometheus_reads_them():
    told = Told()
    told.told = (Family(names.OLDEST, {("q", "ready"): float("inf"), ("\ud800", "retry"): float("nan")}),)
    text = Page([told]).encode()[0].decode()

    assert '{queue="q",state="ready"} +Inf\n' in text
    assert '{queue="?",state="retry"} NaN\n' in text


def test_metrics_of_a_registry_follow_and_the_page_ends_once(metrics):
    registry = CollectorRegistry()
    Counter("mine", "of the application", registry=registry).inc(3)
    page = Page([metrics], registry)

    assert [read(page, accept)["mine_total", ()] for accept in ("", OPEN)] == [3, 3]
    assert page.encode(OPEN)[0].count(b"# EOF") == 1


def fetched(port, encodings):
    """Return the encoding of a page, and the page."""
    request = Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept-Encoding": encodings})
    with urlopen(request, timeout=30) as answer:
        return answer.headers["Content-Encoding"], answer.read()


def test_page_larger_than_a_packet_is_compressed_on_request(metrics):
    told = Told()
    with Endpoint(0, None, page=Page([told]), live=str, ready=str) as endpoint:
        short, _ = fetched(endpoint.port, "gzip")
        told.told = tuple(metrics.families())
        plain, body = fetched(endpoint.port, "identity")
        packed, small = fetched(endpoint.port, "deflate, gzip;q=0.5")
        refused, large = fetched(endpoint.port, "gzip;q=0, deflate")

    assert (short, plain, packed, refused) == (None, None, "gzip", None)
    assert gzip.decompress(small) == body == large
    assert len(small) < len(body) / 5
