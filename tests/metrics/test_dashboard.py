"""The dashboard is one that Grafana takes, that reads well, and that works with any data source."""

import json
import re
import subprocess
import sys
from itertools import combinations

import pytest
import yaml
from panels import ANNOTATIONS, BY_TITLE, DASHBOARD, GRAFANA, PANELS, QUERIES, filled, properties, row

ROWS = ["Now", "Health", "Flow", "Latency", "States", "Keys", "Periodic entries", "Workers", "Redis"]
COLUMNS = 24
#: Of Grafana 11: older versions refuse newer ones, newer ones move older ones on.
SCHEMA_VERSION = 39
#: What a table has to fit in: a screen of 1,366 px with Grafana's menu open.
TABLE_PIXELS = 1076
#: A letter of a header, and the space around it.
LETTER_PIXELS, PADDING_PIXELS = 9, 14
TABLES = [panel for panel in PANELS if panel["type"] == "table"]
GRAPHS = [panel for panel in PANELS if panel["type"] == "timeseries"]
every_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
every_graph = pytest.mark.parametrize("panel", GRAPHS, ids=lambda panel: panel["title"])
every_table = pytest.mark.parametrize("panel", TABLES, ids=lambda panel: panel["title"])


def test_it_is_what_its_program_makes():
    made = subprocess.run([sys.executable, GRAFANA / "dashboard"], check=True, capture_output=True, text=True).stdout

    assert made == (GRAFANA / "dashboard.json").read_text("utf-8"), (
        "run: python grafana/dashboard > grafana/dashboard.json"
    )


def test_it_has_the_schema_of_a_current_grafana_and_no_id_of_a_database():
    assert DASHBOARD["schemaVersion"] >= SCHEMA_VERSION
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"] == "reliq"


@every_panel
def test_a_panel_has_the_parts_that_grafana_needs_and_a_query_for_each_reference(panel):
    needed = {"id", "type", "title", "description", "datasource", "gridPos", "fieldConfig", "options", "targets"}

    assert needed <= set(panel) <= needed | {"transformations"}
    assert panel["type"] in {"timeseries", "stat", "table"}
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)


def test_its_rows_are_in_their_order():
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == ROWS


def test_ids_and_titles_are_unique():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in PANELS]

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


def test_the_first_screen_has_a_tile_for_each_way_to_be_wrong_then_the_queues_and_what_fires():
    titles = [panel["title"] for panel in row("Now")]
    tiles = [
        "Redis",
        "Targets down",
        "Processes",
        "Fullest worker",
        "Longest wait",
        "Paused",
        "Died in 1 hour",
        "Alerts",
    ]

    assert titles == [*tiles, "Queues now", "Firing now"]
    assert all(len(title) <= 14 for title in tiles), "a tile of three columns has no room for more"
    assert all(BY_TITLE[title]["gridPos"]["y"] == 1 for title in tiles)
    # Below Grafana's own 110 px, a unit of height is 38 px: all of it is on a screen of 1,080.
    assert max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in row("Now")) * 38 + 110 <= 1080


@every_panel
def test_a_panel_says_what_it_shows_and_what_to_do_has_a_unit_and_coloured_thresholds(panel):
    defaults = panel["fieldConfig"]["defaults"]

    assert len(panel["description"].split(". ")) >= 2 or ":" in panel["description"] or "?" in panel["description"]
    assert defaults["unit"] in {"short", "none", "mps", "s", "bytes", "percentunit"}
    steps = defaults["thresholds"]["steps"]
    assert steps[0]["value"] is None
    assert all(step["color"] for step in steps)
    assert [step["value"] for step in steps[1:]] == sorted(step["value"] for step in steps[1:])
    assert all(target["legendFormat"] and target["refId"] for target in panel["targets"])


@every_graph
def test_a_graph_has_dashed_limits_and_a_legend_that_is_sorted_with_last_and_max(panel):
    limits = len(panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) > 1
    legend = panel["options"]["legend"]

    assert panel["fieldConfig"]["defaults"]["custom"]["thresholdsStyle"]["mode"] == ("dashed" if limits else "off")
    assert (legend["displayMode"], legend["calcs"]) == ("table", ["lastNotNull", "max"])
    assert (legend["sortBy"], legend["sortDesc"]) == ("Last *", True)


@every_graph
def test_a_graph_by_queue_has_one_line_for_each_so_that_a_queue_keeps_its_colour(panel):
    legends = [target["legendFormat"] for target in panel["targets"]]
    by_queue = [legend for legend in legends if "{{queue}}" in legend]

    assert by_queue in ([], ["{{queue}}"])
    assert not by_queue or legends == by_queue
    assert not by_queue or " or " in panel["targets"][0]["expr"], "a queue that this metric does not have lacks a line"


@every_table
def test_the_columns_of_a_table_fit_their_headers_and_the_screen(panel):
    widths = {}
    for special in panel["fieldConfig"]["overrides"]:
        column = special["matcher"]["options"]
        told = properties(panel, column)
        widths[column] = told.get("custom.width") or told["custom.minWidth"]

    assert {name for name, width in widths.items() if len(name) * LETTER_PIXELS + PADDING_PIXELS > width} == set()
    assert sum(widths.values()) <= TABLE_PIXELS
    assert panel["gridPos"]["w"] == COLUMNS


@every_table
def test_every_query_of_a_table_has_its_column_and_the_rest_is_hidden(panel):
    organized = panel["transformations"][-1]["options"]
    values = {f"Value #{target['refId']}" for target in panel["targets"]} if len(panel["targets"]) > 1 else {"Value"}
    columns = {special["matcher"]["options"] for special in panel["fieldConfig"]["overrides"]}

    assert values <= set(organized["renameByName"])
    assert set(organized["renameByName"].values()) <= columns
    assert all(target["format"] == "table" and target["instant"] for target in panel["targets"])


def test_the_account_has_every_column_exact():
    account = BY_TITLE["The account"]
    columns = ["published", "redriven", "acked", "dead", "expired", "cancelled", "purged", "alive", "missing"]

    assert [target["legendFormat"] for target in account["targets"]] == [*columns, "layout"]
    for column in columns:
        told = properties(account, column)
        assert (told["unit"], told["decimals"]) == ("none", 0), "none shows every digit"


def test_a_click_on_a_queue_shows_it_alone_and_a_click_on_an_alert_opens_its_section():
    (queue,) = properties(BY_TITLE["Queues now"], "queue")["links"]
    (alert,) = properties(BY_TITLE["Firing now"], "alert")["links"]

    assert "var-queue=${__value.text}" in queue["url"]
    assert alert["url"] == "${runbook}#${__value.text}"
    assert DASHBOARD["links"][0]["url"] == "${runbook}"


@every_panel
def test_a_figure_of_0_or_1_is_told_in_words(panel):
    flags = ("reliq_redis_up", "reliq_redis_eviction_enabled", "reliq_redis_aof_enabled")

    if panel["type"] == "stat" and any(flag in panel["targets"][0]["expr"] for flag in flags):
        (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
        assert {"0", "1"} <= set(mapping["options"])


def test_a_flag_in_a_table_is_told_in_words():
    for title, column in (("Queues now", "paused"), ("The account", "layout")):
        (mapping,) = properties(BY_TITLE[title], column)["mappings"]
        assert set(mapping["options"]) == {"0", "1"}


def test_quantiles_of_handlers_are_of_acked_ones_alone():
    quantiles = [query for _, _, query in QUERIES if "reliq_handler_seconds_bucket" in query]

    assert len(quantiles) == 4
    assert all('outcome="ack"' in query for query in quantiles)


def test_restarts_pauses_outages_and_versions_are_marked_in_every_graph():
    assert list(ANNOTATIONS) == ["Processes replaced", "Paused", "Redis away", "Version"]


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


def test_environments_are_chosen_one_at_a_time_and_jobs_instances_and_queues_several():
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}

    assert not variables["cluster"]["multi"]
    for name in ("job", "queue", "instance"):
        assert variables[name]["multi"]
        assert variables[name]["includeAll"]
        assert variables[name]["allValue"] == ".*"
        assert variables[name]["query"]["query"].startswith("label_values(")


def test_every_query_is_of_the_chosen_cluster():
    selectors = [one for _, _, query in QUERIES for one in re.findall(r"\{([^}]*)\}", query)]

    assert len(selectors) > len(QUERIES)
    assert [one for one in selectors if "$cluster" not in one] == []


def test_a_refresh_is_not_faster_than_a_scrape_and_grafana_knows_its_interval():
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    (source,) = [one for one in sources if one["type"] == "prometheus"]
    scrapes = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())["global"]["scrape_interval"]

    assert DASHBOARD["refresh"] == "30s"
    assert source["jsonData"]["timeInterval"] == scrapes == "15s"


def test_a_figure_that_every_scraper_tells_the_same_is_never_summed_over_instances():
    of_queues = ("reliq_messages", "reliq_oldest", "reliq_unack", "reliq_published", "reliq_acked", "reliq_nacked")
    text = json.dumps(PANELS).replace(" ", "")

    for name in (*of_queues, "reliq_backlog", "reliq_dead"):
        assert f"sum({name}" not in text
        assert f"sum(rate({name}" not in text
        assert f"sumby(queue)({name}" not in text
        assert f"sumby(queue)(rate({name}" not in text


#: Series of two workers, of which one is full and one does not answer any more, and what panels then show.
FLEET = {
    "reliq_slots_busy": {"a": 16, "b": 0},
    "reliq_slots": {"a": 16, "b": 32},
    "reliq_account_missing": {"a": 0, "b": -3},
    "up": {"a": 1, "b": 1, "gone": 0},
    "reliq_workers": {"a": 2, "b": 4},
    "reliq_paused": {"a": 0, "b": 0},
}
SHOWN = {
    "Fullest worker": [("{}", 1)],
    "Targets down": [("{}", 1)],
    "Worker processes": [('{instance="a"}', 2), ('{instance="b"}', 4), ('{instance="gone"}', 0)],
}


def test_slots_are_told_by_instance_and_a_worker_that_is_gone_has_a_line_at_nothing(promtool, tmp_path):
    where = 'cluster="test",job="reliq"'
    fleet = [
        {"series": f'{name}{{{where},instance="{instance}",queue="shop"}}', "values": f"{value}x9"}
        for name, values in FLEET.items()
        for instance, value in values.items()
    ]
    expressions = {title: BY_TITLE[title]["targets"][0]["expr"] for title in SHOWN}
    expressions["missing"] = BY_TITLE["The account"]["targets"][8]["expr"]
    wanted = {title: SHOWN.get(title, [('{queue="shop"}', -3)]) for title in expressions}
    asked = [
        {
            "expr": filled(expression),
            "eval_time": "1m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in wanted[title]],
        }
        for title, expression in expressions.items()
    ]
    tests = [{"interval": "15s", "input_series": fleet, "promql_expr_test": asked}]
    (tmp_path / "tests.yml").write_text(json.dumps({"evaluation_interval": "15s", "tests": tests}))

    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yml")
