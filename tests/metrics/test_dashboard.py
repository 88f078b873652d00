"""Grafana accepts the dashboard; each panel has a query, a unit and a description; tiles tell unknown from healthy."""

import json
import math
import re
import subprocess
import sys

import pytest
from panels import BY_TITLE, DASHBOARD, GRAFANA, PANELS, QUERIES, TILES, colour, column_field, filled

GREY = "#666"


def test_dashboard_json_is_the_output_of_its_program():
    made = subprocess.run([sys.executable, GRAFANA / "dashboard.py"], check=True, capture_output=True, text=True).stdout

    assert made == (GRAFANA / "dashboard.json").read_text(), "run: python grafana/dashboard.py > grafana/dashboard.json"


def test_panels_have_a_query_a_unit_and_a_description_and_distinct_ids():
    assert len(PANELS) <= 30
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        references = {target["refId"] for target in panel["targets"] if target["expr"] and target["legendFormat"]}
        assert len(references) == len(panel["targets"]) > 0, panel["title"]
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)


def test_every_data_source_is_the_chosen_one():
    found = []
    json.loads(json.dumps(DASHBOARD), object_hook=lambda part: found.extend(part.get("datasource", {}).items()) or part)

    assert len(found) > len(PANELS)
    assert {uid for name, uid in found if name == "uid"} == {"${datasource}"}


def test_every_query_of_queues_and_workers_selects_the_chosen_cluster():
    selectors = [one for _, _, query in QUERIES for one in re.findall(r"\{([^}]*)\}", query)]

    assert len(selectors) > len(QUERIES)
    assert [one for one in selectors if "$cluster" not in one and "alertname" not in one] == []


def test_figures_of_queues_are_not_summed_over_the_instances_that_repeat_them():
    text = json.dumps(PANELS).replace(" ", "")
    of_queues = "messages|oldest|unack|published|acked|nacked|backlog|dead"

    assert re.findall(rf"sum(?:by\(queue\))?\((?:rate\()?reliq_(?:{of_queues})", text) == []


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile["title"])
def test_tile_without_data_is_grey(tile):
    assert colour(tile["fieldConfig"]["defaults"], math.nan) == GREY


@pytest.mark.parametrize("title", [panel["title"] for panel in PANELS if panel["type"] == "table"])
def test_labels_in_tables_are_text(title):
    """Grafana shows a label that looks like a number as a number: 007 as 7, and blanks as 0."""
    columns = [one["matcher"]["options"] for one in BY_TITLE[title]["fieldConfig"]["overrides"]]
    values = {target["legendFormat"] for target in BY_TITLE[title]["targets"]}
    labels = [name for name in columns if name not in values]

    assert labels
    assert {column_field(title, name)["unit"] for name in labels} == {"string"}


def test_unreadable_queues_are_the_first_rows():
    """They have no value of late: sorted by that alone, they would be the last rows."""
    order = BY_TITLE["Queues now"]["options"]["sortBy"]

    assert [one["displayName"] for one in order] == ["state", "late", "key blocked"]
    assert all(one["desc"] for one in order)


WHERE = 'cluster="test",job="reliq"'
#: Series of a busy worker, a dead worker and an exporter that is gone, and the values of the panels.
FLEET = {
    "reliq_messages_unaccounted": {"a": "0x9", "b": "-3x9"},
    "up": {"a": "1x9", "gone": "1x2 0x7", "exporter": "0x9"},
    "reliq_workers": {"a": "2x9", "gone": "2x2 stale"},
    "reliq_slots": {"a": "16x9", "gone": "16x2 stale"},
}


def test_worker_processes_keep_a_line_for_a_dead_worker_and_none_for_an_exporter(promtool, tmp_path):
    fleet = [
        {"series": f'{name}{{{WHERE},instance="{instance}",queue="shop"}}', "values": str(value)}
        for name, values in FLEET.items()
        for instance, value in values.items()
    ]
    asked = [
        ("Worker processes", 0, [('{instance="a"}', 2), ('{instance="gone"}', 0)]),
        ("The account", -2, [('{queue="shop"}', -3)]),
    ]
    tests = [
        {
            "expr": filled(BY_TITLE[title]["targets"][at]["expr"]),
            "eval_time": "1m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
        }
        for title, at, samples in asked
    ]
    wanted = {"evaluation_interval": "15s"}
    wanted["tests"] = [{"interval": "15s", "input_series": fleet, "promql_expr_test": tests}]
    (tmp_path / "tests.yml").write_text(json.dumps(wanted))

    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yml")
