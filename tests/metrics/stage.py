"""The monitored system of test_story.py: worker, exporter, Redis, Prometheus, and the data of the dashboard."""

import math
import re
import time

import yaml
from panels import ANNOTATIONS, BY_TITLE, GRAFANA, PANELS, TILES, colour, filled
from waiting import eventually

#: The test shortens a minute in the rules to a second; it shortens `for` durations even more.
WINDOWS_FASTER, HOLDS_FASTER = 60, 1200
#: These limits and windows are shortened less: idle workers still claim once a second, and processes need seconds to start.
LIMITS = {
    '"jobs|memory"}[15m]': '"jobs|memory"}[1h]',
    "reliq:oldest_seconds > 180": "reliq:oldest_seconds > 3",
    "_timestamp_seconds) > 60": "_timestamp_seconds) > 4",
    "reliq:tick_late_seconds > 60": "reliq:tick_late_seconds > 8",
    "(reliq_outbox_oldest_seconds) > 60": "(reliq_outbox_oldest_seconds) > 3",
}
UNITS = {"s": 1, "m": 60, "h": 3600}


def faster(duration, times):
    """Return a duration such as 5m, divided by `times`."""
    return f"{1000 * int(duration[:-1]) * UNITS[duration[-1]] // times}ms"


def faster_rules():
    """Return rules.yml with shorter durations; each replaced limit must occur in it once."""
    text = (GRAFANA / "rules.yml").read_text("utf-8")
    for limit, instead in LIMITS.items():
        assert text.count(limit) == 1, limit
        text = text.replace(limit, instead)
    text = re.sub(r"\[(\d+[smh])", lambda found: f"[{faster(found[1], WINDOWS_FASTER)}", text)
    rules = yaml.safe_load(text)
    for rule in (rule for group in rules["groups"] for rule in group["rules"] if "for" in rule):
        rule["for"] = faster(rule["for"], HOLDS_FASTER)
    return yaml.safe_dump(rules)


class Stage:
    """The observable state of the monitored system: tiles, tables, graphs and alerts."""

    def __init__(self, prometheus):
        self.prometheus = prometheus
        self.begun = time.time()

    def now(self):
        """Return the values of the tiles: title -> value, NaN without data."""
        told = {}
        for panel in TILES:
            answer = self.prometheus.ask(filled(panel["targets"][0]["expr"]))
            (told[panel["title"]],) = answer.values() or [math.nan]
        return told

    def shows(self, **wanted):
        """Wait until the tiles show the values `wanted`, in whose names `_` stands for a blank."""
        conditions = {title.replace("_", " "): value for title, value in wanted.items()}
        seen = {}

        def is_shown():
            seen.update(self.now())
            return all(met(seen[title], value) for title, value in conditions.items())

        eventually(is_shown, seen)

    def coloured(self, wanted, *titles):
        """Wait until these tiles have a colour, by default all."""
        seen = {}

        def is_coloured():
            told = self.now()
            seen.update((one["title"], colour(one["fieldConfig"]["defaults"], told[one["title"]])) for one in TILES)
            return {seen[title] for title in titles or seen} == {wanted}

        eventually(is_coloured, seen)

    def firing(self):
        """Return the names of the alerts that fire."""
        return {dict(labels)["alertname"] for labels in self.prometheus.ask('ALERTS{alertstate="firing"}')}

    def fires(self, *alerts):
        """Wait until each of these alerts has fired; on a busy machine the first may end before the last begins."""
        fired = set()
        eventually(lambda: fired.update(self.firing()) or set(alerts) <= fired, f"{alerts} fire")

    def table(self, title):
        """Return a table: label -> column -> value."""
        rows = {}
        for target in BY_TITLE[title]["targets"]:
            for labels, value in self.prometheus.ask(filled(target["expr"])).items():
                rows.setdefault(labels[0][1], {})[target["legendFormat"]] = value
        return rows

    def row(self, title, label, **wanted):
        """Wait until a row of a table has these values or satisfies these conditions."""
        seen = {}

        def is_shown():
            seen.clear()
            seen.update(self.table(title).get(label, {}))
            return wanted.keys() <= seen.keys() and all(met(seen[column], value) for column, value in wanted.items())

        eventually(is_shown, seen)

    def graph(self, title):
        """Return the series of a graph: labels -> values."""
        answers = {}
        for target in BY_TITLE[title]["targets"]:
            for one in self._range(target["expr"]):
                name = tuple(one["metric"].values()) or (target["legendFormat"],)
                answers[name] = [float(value) for _, value in one["values"]]
        return answers

    def marked(self, name):
        """Return whether an annotation has marked an event."""
        found = self._range(ANNOTATIONS[name])
        return any(float(value) for one in found for _, value in one["values"])

    def silent_panels(self):
        """Return the panels without data: graphs since the start, tiles and tables at this moment."""
        silent = set()
        for panel in PANELS:
            ask = self._range if panel["type"] == "timeseries" else lambda query: self.prometheus.ask(filled(query))
            if not any(ask(target["expr"]) for target in panel["targets"]):
                silent.add(panel["title"])
        return silent

    def _range(self, query):
        now = time.time()
        data = self.prometheus.api("query_range", query=filled(query), start=self.begun, end=now, step=0.5)
        return data["result"] if data else []


def met(value, wanted):
    """Return whether a value equals the expected value, or satisfies the expected condition."""
    return wanted(value) if callable(wanted) else value == wanted
