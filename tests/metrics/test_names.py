"""One name in the code, on the dashboard, in the rules: a metric that nobody shows, or that nobody has, is a mistake."""

import re

from panels import ALL_RULES, GRAFANA, QUERIES, RUNBOOK, metrics_in
from patience import eventually, get
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from reliq.metrics import names
from reliq.metrics.names import ALL
from reliq.metrics.workers import Build, Processes


def series_of(spec):
    """The names that the samples of a metric have."""
    return [spec.name + end for end in ("_bucket", "_sum", "_count")] if spec.kind == "histogram" else [spec.name]


SERIES = {series: spec.name for spec in ALL.values() for series in series_of(spec)}


def test_every_name_on_the_dashboard_and_in_the_rules_is_one_of_ours():
    used = {name for _, _, query in QUERIES for name in metrics_in(query)}
    used |= {name for rule in ALL_RULES for name in metrics_in(rule["expr"])}

    assert used - set(SERIES) == set()


def test_every_metric_is_on_the_dashboard():
    shown = {SERIES[name] for _, _, query in QUERIES for name in metrics_in(query)}

    assert set(ALL) - shown == set()


def test_every_label_in_a_query_is_one_that_its_metric_has():
    for title, _, query in QUERIES:
        for name, selector in re.findall(r"((?:reliq|process)_[a-z0-9_]+)\{([^}]*)\}", query):
            labels = set(re.findall(r"(\w+)=~?", selector)) - {"cluster", "job", "instance"}
            assert labels <= set(ALL[SERIES[name]].labels), title


def test_every_recorded_name_that_an_alert_uses_is_recorded():
    recorded = {rule["record"] for rule in ALL_RULES if "record" in rule}
    used = {name for rule in ALL_RULES for name in re.findall(r"reliq:[\w:]+", rule["expr"])}

    assert used <= recorded


def test_a_worker_serves_exactly_the_metrics_of_the_table_with_their_kinds_labels_and_help(worker, jobs):
    jobs.SHOP.publish_many(["good", "flaky"])
    _, port = worker(processes=1)

    def whole_page():
        text = get(port, "/metrics")[1]
        return text if "\nreliq_redis_up 1" in text and "ValueError" in text else ""

    families = list(text_string_to_metric_families(eventually(whole_page, "Redis is told of")))

    told = {family.name + ("_total" if family.type == "counter" else ""): family for family in families}
    ours = {name: family for name, family in told.items() if not name.startswith("shop_")}
    assert set(ours) == set(names.SERVED)
    for name, spec in names.SERVED.items():
        assert (ours[name].type, ours[name].documentation) == (spec.kind, spec.help), name
        for sample in ours[name].samples:
            assert set(sample.labels) - {"le"} == set(spec.labels), name


def test_the_table_of_totals_has_every_kind_that_a_script_counts():
    scripts = (GRAFANA.parent / "reliq" / "lua").glob("*.lua")
    counted = {kind for script in scripts for kind in re.findall(r"add\('(\w+)'", script.read_text())}

    moved = {"arrived", "left"}  # from shard to shard: the queue as a whole, of which figures tell, has neither
    assert counted - {f"retried_{cause}" for cause in names.CAUSES} - moved <= set(names.TOTALS)


def test_figures_can_be_registered_beside_those_of_others_without_asking_redis():
    registry = CollectorRegistry(auto_describe=True)

    for part in (Build(), Processes(lambda: 1)):
        registry.register(part)

    assert registry.get_sample_value("reliq_workers") == 1
    assert RUNBOOK
