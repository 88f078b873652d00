"""Request pages from other processes over HTTP."""

import http.client
import json
import urllib.parse

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def get(port, path):
    """Return status and text of a page on this machine; 0 and the reason without a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def figures(text):
    """Return a page of metrics as {(name, labels): value}, with sorted labels and without creation timestamps."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def page(collector):
    """Return the metrics of a collector in a separate registry."""
    registry = CollectorRegistry()
    registry.register(collector)
    return figures(generate_latest(registry).decode())


def scrape(port):
    """Return the metrics at a port; fail without metrics."""
    status, text = get(port, "/metrics")
    assert status == 200, text
    return figures(text)


def value(found, name, **labels):
    """Return one value, None if it is missing."""
    return found.get((name, tuple(sorted(labels.items()))))


def only(found, name):
    """Return the value of a metric with a single series, None if it is missing."""
    values = [number for (metric, _), number in found.items() if metric == name]
    assert len(values) <= 1, values
    return values[0] if values else None


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port):
        self.port = port

    def api(self, path, **parameters):
        """Return the data of a reply of its API; None while there is no reply."""
        status, text = get(self.port, f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        if status in {0, 503}:
            return None
        answer = json.loads(text)
        assert answer["status"] == "success", answer
        return answer["data"]

    def ask(self, promql):
        """Return the result of an instant query: {labels: value}."""
        data = self.api("query", query=promql) or {"result": []}
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in data["result"]}
