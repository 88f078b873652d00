"""Read the files in grafana/ as Grafana and Prometheus do."""

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboard.json").read_text("utf-8"))
RULES = yaml.safe_load((GRAFANA / "rules.yml").read_text("utf-8"))
RUNBOOK = (GRAFANA / "RUNBOOK.md").read_text("utf-8")

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
BY_TITLE = {panel["title"]: panel for panel in PANELS}
ANNOTATIONS = {one["name"]: one["expr"] for one in DASHBOARD["annotations"]["list"] if "expr" in one}
QUERIES = [
    (f"{panel['title']}: {target['legendFormat']}", panel, target["expr"])
    for panel in PANELS
    for target in panel["targets"]
]
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]

#: Values of Grafana's variables: the tests' cluster, everything in it, a window of some scrapes.
FILLED = {"$cluster": "test", "$queue": ".*", "$job": ".*", "$instance": ".*", "$__rate_interval": "8s"}


def row(title):
    """Return the panels below a row's title."""
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    below = DASHBOARD["panels"][titles.index(title) + 1 :]
    ends = [at for at, panel in enumerate(below) if panel["type"] == "row"]
    return below[: ends[0]] if ends else below


def filled(promql):
    """Return a panel's query with its variables filled in."""
    for variable, text in FILLED.items():
        promql = promql.replace(variable, text)
    assert "$" not in promql, promql
    return promql


def metrics_in(text):
    """Return the names of reliq's metrics in a query; names of recorded metrics contain colons."""
    return set(re.findall(r"(?<![\w:])(?:reliq|process)_[a-z0-9_]+(?![\w:])", text))


def colour(field, value):
    """Return Grafana's colour of a value: from its mapping, else from the highest threshold that it reaches."""
    for mapping in field.get("mappings", ()):
        if (said := mapping["options"].get(f"{value:g}")) and "color" in said:
            return said["color"]
    reached = [one["color"] for one in field["thresholds"]["steps"] if one["value"] is None or value >= one["value"]]
    return reached[-1]
