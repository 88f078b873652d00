"""Make dashboard.json: `python grafana/dashboard > grafana/dashboard.json`. Panels are data; their JSON is made here."""

import json
import re
from pathlib import Path
from typing import Any

from panels import ROWS, SOURCE, Panel, gauge

DATA = {"type": "prometheus", "uid": "${datasource}"}
SECTIONS = re.findall(
    r"^### (.+)\n\n([^#]+)", (Path(__file__).parents[1] / "PANELS.md").read_text("utf-8"), re.MULTILINE
)
#: Title of a panel -> its description.
DESCRIPTIONS = {title: " ".join(text.split()) for title, text in SECTIONS}
COLUMNS = 24
COLOURS = {"grey": "#666", "yellow": "#EAB839"}
WHERE = 'cluster="$cluster",job=~"$job"'
VARIABLES: list[dict[str, Any]] = [
    {"name": "cluster", "label": "Cluster", "query": "label_values(reliq_build_info, cluster)", "many": False},
    {"name": "job", "label": "Job", "query": 'label_values(reliq_build_info{cluster="$cluster"}, job)', "many": True},
    {
        "name": "instance",
        "label": "Instance",
        "query": f"label_values(reliq_build_info{{{WHERE}}}, instance)",
        "many": True,
    },
    {"name": "queue", "label": "Queue", "query": f"label_values(reliq_paused{{{WHERE}}}, queue)", "many": True},
    {"name": "runbook", "label": "Runbook", "query": "label_values(reliq:runbook, url)", "many": False, "hide": 2},
]
#: Name, colour, query and text of what every graph marks; Grafana ignores answers of 0.
ANNOTATIONS = [
    (
        "Processes replaced",
        "orange",
        f"sum by (instance, reason) (increase(reliq_restarts_total{{{SOURCE}}}[1m])) > 0.5",
        "{{instance}}: process {{reason}}",
    ),
    ("Paused", "blue", f"{gauge('reliq_paused')} == 1", "{{queue}} paused"),
    ("Redis away", "red", f"1 - min(reliq_redis_up{{{SOURCE}}}) > 0", "Redis does not answer"),
    (
        "Version",
        "purple",
        (
            f"count by (instance, version) (reliq_build_info{{{SOURCE}}}) "
            f"unless count by (instance, version) (reliq_build_info{{{SOURCE}}} offset 1m)"
        ),
        "{{instance}} now runs {{version}}",
    ),
]
#: Beside the queries of a table that is joined, Grafana numbers the column of the time.
TIMES = {"Time": True, **{f"Time {number}": True for number in range(1, 20)}}


def steps(limits: dict[float, str], base: str) -> dict[str, Any]:
    """Return thresholds: `base` below the first limit, then the colour of each."""
    rows = [(None, base), *limits.items()]
    return {"mode": "absolute", "steps": [{"color": COLOURS.get(colour, colour), "value": at} for at, colour in rows]}


def words(mappings: dict[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """Return value mappings: a value -> its text and its colour; an empty text leaves the value as it is."""
    options: dict[str, dict[str, Any]] = {}
    for index, (value, (text, colour)) in enumerate(mappings.items()):
        shown = {"text": text, "color": COLOURS.get(colour, colour)}
        options[value] = {**{part: said for part, said in shown.items() if said}, "index": index}
    return [{"type": "value", "options": options}] if options else []


def target(ref: int, legend: str, query: str, *, instant: bool, table: bool) -> dict[str, Any]:
    """Return one query."""
    made = {"refId": chr(ord("A") + ref), "datasource": DATA, "editorMode": "code", "expr": query}
    made |= {"legendFormat": legend, "range": not instant, "instant": instant}
    return made | ({"format": "table"} if table else {})


def override(name: str, **properties: Any) -> dict[str, Any]:
    """Return what is special about one field; `custom_width` is Grafana's `custom.width`."""
    parts = [{"id": part.replace("custom_", "custom."), "value": value} for part, value in properties.items()]
    return {"matcher": {"id": "byName", "options": name}, "properties": parts}


def graph(panel: Panel) -> dict[str, Any]:
    """Return the parts of a graph: dashed thresholds, a legend sorted by the last value."""
    custom = {"drawStyle": "bars" if panel.bars else "line", "lineWidth": 1, "fillOpacity": 80 if panel.bars else 5}
    custom |= {"showPoints": "never", "spanNulls": False, "stacking": {"mode": "none", "group": "A"}}
    custom |= {"thresholdsStyle": {"mode": "dashed" if panel.limits else "off"}}
    custom |= {} if panel.unit in {"s", "percentunit", "bytes"} else {"axisSoftMax": 4}
    defaults = {"unit": panel.unit, "color": {"mode": "palette-classic"}, "thresholds": steps(panel.limits, "green")}
    defaults |= {"mappings": [], "min": 0, "custom": custom} | ({"max": 1} if panel.unit == "percentunit" else {})
    fixed = [override(name, color={"mode": "fixed", "fixedColor": colour}) for name, colour in panel.colours.items()]
    legend = {"displayMode": "table", "placement": "right", "calcs": ["lastNotNull", "max"], "showLegend": True}
    legend |= {"sortBy": "Last *", "sortDesc": True}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": fixed},
        "options": {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}},
    }


def tile(panel: Panel) -> dict[str, Any]:
    """Return the parts of a tile: one figure on a ground whose colour says how it is."""
    defaults = {"unit": panel.unit, "noValue": "no data", "color": {"mode": "thresholds"}}
    defaults |= {"decimals": 0, "mappings": words(panel.mappings), "thresholds": steps(panel.limits, panel.base)}
    shown = {"colorMode": "background_solid", "graphMode": "none", "justifyMode": "center"}
    shown |= {"textMode": panel.text, "wideLayout": True}
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": shown | {"reduceOptions": reduced}}


def table(panel: Panel) -> dict[str, Any]:
    """Return the parts of a table: its first columns are labels, each query is one more."""
    overrides = []
    for column in panel.columns:
        special: dict[str, Any] = {"custom_width": column.width} if column.width else {"custom_minWidth": 120}
        special |= {"custom_align": "left"} if column.label else {"unit": column.unit, "decimals": column.decimals}
        if column.limits or column.mappings:
            special["thresholds"] = steps(column.limits, "transparent")
            special["mappings"] = words(column.mappings)
            special["custom_cellOptions"] = {"type": "color-background", "mode": "basic"}
        if column.link:
            special["links"] = [{"title": column.link[0], "url": column.link[1]}]
        overrides.append(override(column.name, **special))
    defaults = {"unit": "none", "noValue": panel.empty, "custom": {"align": "right", "minWidth": 50}}
    defaults |= {"mappings": [], "thresholds": steps({}, "transparent")}
    shown: dict[str, Any] = {"showHeader": True, "cellHeight": "sm"}
    if panel.sort:
        shown["sortBy"] = [{"displayName": panel.sort, "desc": True}]
    return {
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": shown,
        "transformations": transformations(panel),
    }


def transformations(panel: Panel) -> list[dict[str, Any]]:
    """Return how the answers become one table: joined by their label, in the order of the columns."""
    only = len(panel.queries) == 1
    names = {column.source: column.name for column in panel.columns if column.label and column.source}
    values = [column.name for column in panel.columns if not column.label]
    names |= {"Value": values[0]} if only else {f"Value #{chr(ord('A') + at)}": name for at, name in enumerate(values)}
    hidden = {f"Value #{chr(ord('A') + at)}": True for at in range(len(values), len(panel.queries))}
    sources = {name: source for source, name in names.items()}
    order = {sources.get(column.name, column.name): at for at, column in enumerate(panel.columns)}
    organized = {"excludeByName": TIMES | hidden, "renameByName": names, "indexByName": order}
    joined = [{"id": "joinByField", "options": {"byField": panel.columns[0].name, "mode": "outer"}}]
    return [*([] if only else joined), {"id": "organize", "options": organized}]


FORMS = {"timeseries": graph, "stat": tile, "table": table}


def built(panel: Panel, id: int, place: dict[str, int]) -> dict[str, Any]:
    """Return a panel in Grafana's form."""
    instant = panel.type != "timeseries"
    made = {
        "id": id,
        "type": panel.type,
        "title": panel.title,
        "description": DESCRIPTIONS[panel.title],
        "datasource": DATA,
    }
    targets = [
        target(at, legend, query, instant=instant, table=panel.type == "table")
        for at, (legend, query) in enumerate(panel.queries.items())
    ]
    return made | {"gridPos": place} | FORMS[panel.type](panel) | {"targets": targets}


def laid_out() -> list[dict[str, Any]]:
    """Return rows and panels, each at its place: panels fill a line from left to right, then the next begins."""
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        made.append({"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "panels": []})
        made[-1]["gridPos"] = place
        x = 0
        y += 1
        tallest = 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x = 0
                y += tallest
                tallest = 0
            place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            made.append(built(panel, len(made) + 1, place))
            x += panel.width
            tallest = max(tallest, panel.height)
        y += tallest
    return made


def variable(name: str, label: str, query: str, *, many: bool, hide: int = 0) -> dict[str, Any]:
    """Return a variable that Grafana fills by a query."""
    made: dict[str, Any] = {"name": name, "label": label, "type": "query", "datasource": DATA, "definition": query}
    made |= {"query": {"query": query, "refId": name}, "refresh": 2, "sort": 1, "regex": "", "options": []}
    made |= {"multi": many, "includeAll": many, "hide": hide, "skipUrlSync": False}
    everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return made | ({"allValue": ".*", "current": everything} if many else {"current": {}})


def annotation(name: str, colour: str, query: str, text: str) -> dict[str, Any]:
    """Return events that every graph marks."""
    made = {"name": name, "datasource": DATA, "enable": True, "hide": False, "iconColor": colour, "expr": query}
    return made | {"step": "15s", "titleFormat": text, "useValueForTime": False}


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard as Grafana imports it."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}
    source |= {"regex": "", "multi": False, "includeAll": False, "current": {}, "hide": 0, "options": []}
    built_in = {"builtIn": 1, "datasource": {"type": "grafana", "uid": "-- Grafana --"}, "enable": True, "hide": True}
    built_in |= {"iconColor": "rgba(0, 211, 255, 1)", "name": "Annotations & Alerts", "type": "dashboard"}
    runbook = {"type": "link", "title": "Runbook", "icon": "doc", "url": "${runbook}", "targetBlank": True}
    runbook |= {"tooltip": "What to do about each alert", "tags": [], "asDropdown": False, "includeVars": False}
    return {
        "annotations": {"list": [built_in, *(annotation(*fields) for fields in ANNOTATIONS)]},
        "description": "Queues, handlers, workers and Redis of reliq. What to do about each alert is in RUNBOOK.md.",
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [runbook | {"keepTime": False}],
        "panels": laid_out(),
        "refresh": "30s",
        "schemaVersion": 39,
        "tags": ["reliq"],
        "templating": {"list": [source | {"skipUrlSync": False}, *(variable(**fields) for fields in VARIABLES)]},
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": "reliq",
        "uid": "reliq",
        "version": 1,
        "weekStart": "",
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
