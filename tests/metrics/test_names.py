"""Dashboard, rules and worker use the same metrics: each served metric is shown, each shown metric is served."""

import re

from panels import ALL_RULES, GRAFANA, QUERIES, metrics_in
from patience import get
from prometheus_client.parser import text_string_to_metric_families
from waiting import eventually

from reliq.metrics import names
from reliq.metrics.names import ALL


def series_of(spec):
    """Return the names of a metric's samples."""
    return [spec.name + end for end in ("_bucket", "_sum", "_count")] if spec.kind == "histogram" else [spec.name]


SERIES = {series: spec.name for spec in ALL.values() for series in series_of(spec)}


def test_metrics_of_dashboard_and_rules_exist():
    used = {name for _, _, query in QUERIES for name in metrics_in(query)}
    used |= {name for rule in ALL_RULES for name in metrics_in(rule["expr"])}

    assert used - set(SERIES) == set()


def test_worker_serves_the_declared_metrics_with_kind_labels_and_help(worker, jobs):
    jobs.SHOP.publish_many(["good", "flaky"])
    _, port = worker(processes=1)

    def whole_page():
        text = get(port, "/metrics")[1]
        return text if re.search(r"\nreliq_redis_up.* 1\n", text) and "ValueError" in text else ""

    families = list(
        text_string_to_metric_families(eventually(whole_page, "the page has figures of Redis and of the failure"))
    )

    told = {family.name + ("_total" if family.type == "counter" else ""): family for family in families}
    ours = {name: family for name, family in told.items() if not name.startswith("shop_")}
    served = {name: spec for name, spec in names.ALL.items() if spec not in (names.PUBLISH, names.PUBLISHED)}
    assert set(ours) == set(served)
    for name, spec in served.items():
        assert (ours[name].type, ours[name].documentation) == (spec.kind, spec.help), name
        for sample in ours[name].samples:
            assert set(sample.labels) - {"le"} == set(spec.labels), name


def test_totals_have_every_kind_that_a_script_counts():
    scripts = (GRAFANA.parent / "reliq" / "lua").glob("*.lua")
    counted = {kind for script in scripts for kind in re.findall(r"add\('(\w+)'", script.read_text())}

    moved = {"arrived", "left"}  # between shards; metrics are of the whole queue
    assert counted - {f"retried_{cause}" for cause in names.CAUSES} - moved - {names.LIMITED} <= set(names.TOTALS)
