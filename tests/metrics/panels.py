"""What the files in grafana/ say, as their readers see it."""

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
QUERIES = [
    (f"{panel['title']}: {target['legendFormat']}", panel, target["expr"])
    for panel in PANELS
    for target in panel["targets"]
]
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]

#: What Grafana puts in place of its variables: everything, and a window that holds the whole test.
FILLED = {"$queue": ".*", "$instance": ".*", "$__rate_interval": "10m"}


def filled(promql):
    """Return a panel's query with its variables filled in."""
    for variable, text in FILLED.items():
        promql = promql.replace(variable, text)
    assert "$" not in promql, promql
    return promql


def metrics_in(text):
    """The names of our metrics in a query; recorded ones have colons."""
    return set(re.findall(r"(?<![\w:])(?:reliq|process)_[a-z0-9_]+(?![\w:])", text))
