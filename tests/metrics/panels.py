"""Read the files in grafana/ as Grafana and Prometheus do."""

import json
import math
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboard.json").read_text("utf-8"))
RULES = yaml.safe_load((GRAFANA / "rules.yml").read_text("utf-8"))
RUNBOOK = (GRAFANA / "RUNBOOK.md").read_text("utf-8")

#: A collapsed row contains its panels.
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
PANELS += [panel for row in ROWS for panel in row["panels"]]
BY_TITLE = {panel["title"]: panel for panel in PANELS}
TILES = [panel for panel in PANELS if panel["type"] == "stat"]
ANNOTATIONS = {one["name"]: one["expr"] for one in DASHBOARD["annotations"]["list"]}
QUERIES = [
    (f"{panel['title']}: {target['legendFormat']}", panel, target["expr"])
    for panel in PANELS
    for target in panel["targets"]
]
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]

#: Values of Grafana's variables: the cluster of the tests, all its jobs and queues, and a time window of some scrapes.
FILLED = {"$cluster": "test", "$queue": ".*", "$job": ".*", "$instance": ".*", "$__rate_interval": "8s"}


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
        options = mapping["options"]
        if mapping["type"] == "range" and options["from"] <= value <= options["to"]:
            return options["result"]["color"]
        if mapping["type"] == "value" and (result := options.get(f"{value:g}")) and "color" in result:
            return result["color"]
    reached = [one["color"] for one in field["thresholds"]["steps"] if one["value"] is None or value >= one["value"]]
    return reached[0] if math.isnan(value) else reached[-1]


def column_field(title, column):
    """Return the settings of a column in a table."""
    (properties,) = [
        {part["id"]: part["value"] for part in one["properties"]}
        for one in BY_TITLE[title]["fieldConfig"]["overrides"]
        if one["matcher"]["options"] == column
    ]
    return properties


def shown_in(field, query, wanted):
    """Return a query for the values of `query` that Grafana shows in this colour; empty if it shows none in it."""
    mapped, found = [], []
    for mapping in field.get("mappings", ()):
        options = mapping["options"]
        ranges = [(options["from"], options["to"], options["result"])] if mapping["type"] == "range" else []
        ranges += [(value, value, result) for value, result in options.items() if mapping["type"] == "value"]
        for least, most, result in ranges:
            part = f"(({query}) >= {least} <= {most})"
            mapped.append(part)
            found += [part] if result.get("color") == wanted else []
    steps = [(one["value"], one["color"]) for one in field["thresholds"]["steps"]]
    for (least, colour), (most, _) in zip(steps, [*steps[1:], ("Inf", "")], strict=True):
        if colour == wanted:
            part = f"(({query}) >= {'-Inf' if least is None else least} < {most})"
            found.append(f"({' unless '.join([part, *mapped])})")
    return " or ".join(found)
