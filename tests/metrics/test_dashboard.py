"""Grafana accepts the dashboard; each panel has a query, a unit and a description; any data source works."""

import json
import re
import subprocess
import sys

from panels import BY_TITLE, DASHBOARD, GRAFANA, PANELS, QUERIES, filled


def test_dashboard_json_is_the_output_of_its_program():
    made = subprocess.run([sys.executable, GRAFANA / "dashboard"], check=True, capture_output=True, text=True).stdout

    assert made == (GRAFANA / "dashboard.json").read_text(), "run: python grafana/dashboard > grafana/dashboard.json"


def test_panels_have_a_query_a_unit_and_a_description_and_distinct_ids():
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        references = {target["refId"] for target in panel["targets"] if target["expr"] and target["legendFormat"]}
        assert len(references) == len(panel["targets"]) > 0, panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_data_source_is_the_chosen_one():
    found = []
    json.loads(json.dumps(DASHBOARD), object_hook=lambda part: found.extend(part.get("datasource", {}).items()) or part)

    assert len(found) > len(PANELS)
    assert {uid for name, uid in found if name == "uid"} == {"${datasource}", "-- Grafana --"}


def test_every_query_selects_the_chosen_cluster():
    selectors = [one for _, _, query in QUERIES for one in re.findall(r"\{([^}]*)\}", query)]

    assert len(selectors) > len(QUERIES)
    assert [one for one in selectors if "$cluster" not in one] == []


def test_figures_of_queues_are_not_summed_over_the_instances_that_repeat_them():
    text = json.dumps(PANELS).replace(" ", "")
    of_queues = "messages|oldest|unack|published|acked|nacked|backlog|dead"

    assert re.findall(rf"sum(?:by\(queue\))?\((?:rate\()?reliq_(?:{of_queues})", text) == []


#: Series of a busy worker, an idle worker and a dead worker, and the values of the panels.
FLEET = {
    "reliq_slots_busy": {"a": 16, "b": 0},
    "reliq_slots": {"a": 16, "b": 32},
    "reliq_messages_unaccounted": {"a": 0, "b": -3},
    "up": {"a": 1, "b": 1, "gone": 0},
    "reliq_workers": {"a": 2, "b": 4},
    "reliq_paused": {"a": 0, "b": 0},
}
SHOWN = {
    "Fullest worker": [("{}", 1)],
    "Targets down": [("{}", 1)],
    "Worker processes": [('{instance="a"}', 2), ('{instance="b"}', 4), ('{instance="gone"}', 0)],
}


def test_panels_of_a_fleet_keep_a_line_for_a_dead_worker(promtool, tmp_path):
    where = 'cluster="test",job="reliq"'
    fleet = [
        {"series": f'{name}{{{where},instance="{instance}",queue="shop"}}', "values": f"{value}x9"}
        for name, values in FLEET.items()
        for instance, value in values.items()
    ]
    expressions = {title: BY_TITLE[title]["targets"][0]["expr"] for title in SHOWN}
    expressions["missing"] = BY_TITLE["The account"]["targets"][8]["expr"]
    wanted = {title: SHOWN.get(title, [('{queue="shop"}', -3)]) for title in expressions}
    asked = []
    for title, expression in expressions.items():
        samples = [{"labels": labels, "value": value} for labels, value in wanted[title]]
        asked.append({"expr": filled(expression), "eval_time": "1m", "exp_samples": samples})
    tests = [{"interval": "15s", "input_series": fleet, "promql_expr_test": asked}]
    (tmp_path / "tests.yml").write_text(json.dumps({"evaluation_interval": "15s", "tests": tests}))

    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yml")
