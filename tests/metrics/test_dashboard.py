"""The dashboard is one that Grafana takes, that reads well, and that works with any data source."""

import json
from itertools import combinations

import pytest
from panels import DASHBOARD, PANELS

ROWS = ["Health", "Flow", "Handlers", "States", "Redis", "Workers"]
COLUMNS = 24
#: Of Grafana 11: older versions refuse newer ones, newer ones move older ones on.
SCHEMA_VERSION = 39


def test_it_has_the_schema_of_a_current_grafana_and_no_id_of_a_database():
    assert DASHBOARD["schemaVersion"] >= SCHEMA_VERSION
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"] == "reliq"


def test_it_has_the_parts_that_grafana_knows_and_each_panel_those_it_needs():
    parts = {"annotations", "description", "editable", "fiscalYearStartMonth", "graphTooltip", "id", "links", "panels"}
    parts |= {"refresh", "schemaVersion", "tags", "templating", "time", "timepicker", "timezone", "title", "uid"}
    parts |= {"version", "weekStart"}
    needed = {"id", "type", "title", "description", "datasource", "gridPos", "fieldConfig", "options", "targets"}

    assert set(DASHBOARD) == parts
    for panel in PANELS:
        assert needed <= set(panel) <= needed | {"transformations"}, panel["title"]
        assert panel["type"] in {"timeseries", "stat", "table"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_its_rows_are_in_their_order():
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == ROWS


def test_ids_and_titles_are_unique():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in DASHBOARD["panels"]]

    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)


def test_panels_lie_on_the_grid_and_none_covers_another():
    places = [(panel["title"], panel["gridPos"]) for panel in DASHBOARD["panels"]]

    for title, place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= COLUMNS, title
        assert place["h"] > 0, title
    for (one, a), (other, b) in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (one, other)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_and_what_to_do_has_a_unit_and_coloured_thresholds(panel):
    defaults = panel["fieldConfig"]["defaults"]

    assert len(panel["description"].split(". ")) >= 2 or ":" in panel["description"]
    assert defaults["unit"] in {"short", "ops", "s", "bytes", "percentunit"}
    steps = defaults["thresholds"]["steps"]
    assert steps[0]["value"] is None
    assert all(step["color"] for step in steps)
    assert [step["value"] for step in steps[1:]] == sorted(step["value"] for step in steps[1:])
    assert all(target["legendFormat"] and target["refId"] for target in panel["targets"])


def test_no_data_source_is_hard_wired():
    def sources(part):
        if isinstance(part, dict):
            if "datasource" in part:
                yield part["datasource"]
            for inner in part.values():
                yield from sources(inner)
        elif isinstance(part, list):
            for inner in part:
                yield from sources(inner)

    ours = {"type": "prometheus", "uid": "${datasource}"}
    built_in = {"type": "grafana", "uid": "-- Grafana --"}
    found = list(sources(DASHBOARD))

    assert len(found) > len(PANELS)
    assert all(one in (ours, built_in) for one in found)
    assert DASHBOARD["templating"]["list"][0]["type"] == "datasource"


def test_queue_and_instance_can_be_chosen_several_at_once():
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}

    for name in ("queue", "instance"):
        assert variables[name]["multi"]
        assert variables[name]["includeAll"]
        assert variables[name]["allValue"] == ".*"
        assert variables[name]["query"]["query"].startswith("label_values(")


def test_a_figure_that_every_scraper_tells_the_same_is_never_summed_over_instances():
    of_queues = ("reliq_messages", "reliq_oldest", "reliq_unack", "reliq_published", "reliq_acked", "reliq_nacked")
    text = json.dumps(PANELS).replace(" ", "")

    for name in of_queues:
        assert f"sum({name}" not in text
        assert f"sum(rate({name}" not in text
        assert f"sumby(queue)({name}" not in text
        assert f"sumby(queue)(rate({name}" not in text
