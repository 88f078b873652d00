"""The stage of the story: a worker, an exporter, their Redis, a Prometheus, and what the dashboard shows of them."""

import math
import re
import time

import yaml
from panels import ANNOTATIONS, BY_TITLE, GRAFANA, PANELS, colour, filled, row
from waiting import eventually

#: A minute of the rules is a second of the story; what must hold for a while holds for much less.
WINDOWS_FASTER, HOLDS_FASTER = 60, 1200
#: Seconds that a rule compares with; an idle worker's claim rounds are a second apart, and so not made faster.
LIMITS = {
    "reliq:oldest_seconds > 180": "reliq:oldest_seconds > 3",
    "_timestamp_seconds) > 60": "_timestamp_seconds) > 4",
    "reliq:cron_late_seconds > 60": "reliq:cron_late_seconds > 8",
}
UNITS = {"s": 1, "m": 60, "h": 3600}
WELL = {"green", "#666", "transparent", "blue"}
TILES = [panel for panel in row("Now") if panel["type"] == "stat"]


def seconds(text):
    """Return the seconds of a duration such as 5m."""
    return int(text[:-1]) * UNITS[text[-1]]


def faster_rules():
    """Return the text of rules.yml with time compressed; each limit that is replaced is there."""
    text = (GRAFANA / "rules.yml").read_text("utf-8")
    for limit, instead in LIMITS.items():
        assert text.count(limit) == 1, limit
        text = text.replace(limit, instead)
    rules = yaml.safe_load(text)
    for group in rules["groups"]:
        for rule in group["rules"]:
            windows = lambda found: f"[{1000 * seconds(found[1]) // WINDOWS_FASTER}ms]"  # noqa: E731  one use
            rule["expr"] = re.sub(r"\[(\w+)\]", windows, rule["expr"])
            if "for" in rule:
                rule["for"] = f"{1000 * seconds(rule['for']) // HOLDS_FASTER}ms"
    return yaml.safe_dump(rules)


class Stage:
    """What is seen of the story."""

    def __init__(self, prometheus):
        self.prometheus = prometheus
        self.begun = time.time()

    def now(self):
        """Return the first row's tiles: title -> value."""
        told = {}
        for panel in TILES:
            answer = self.prometheus.ask(filled(panel["targets"][0]["expr"]))
            (told[panel["title"]],) = answer.values() or [math.nan]
        return told

    def shows(self, act, **wanted):
        """Wait until the tiles show `wanted`, by title with underscores; return all of them."""
        conditions = {title.replace("_", " "): value for title, value in wanted.items()}
        assert set(conditions) <= {panel["title"] for panel in TILES}
        seen = {}

        def is_shown():
            seen.update(self.now())
            return all(met(seen[title], value) for title, value in conditions.items())

        eventually(is_shown, Told(lambda: f"{act}: the first row shows {wanted}, not {seen}, {self.firing()}"))
        return seen

    def colours(self):
        """Return the tiles' colours: title -> colour."""
        told = self.now()
        return {panel["title"]: colour(panel["fieldConfig"]["defaults"], told[panel["title"]]) for panel in TILES}

    def firing(self):
        """Return the names of the alerts that fire."""
        return {dict(labels)["alertname"] for labels in self.prometheus.ask('ALERTS{alertstate="firing"}')}

    def fires(self, *alerts, meanwhile=lambda: None):
        """Wait until these alerts fire."""

        def all_fire():
            meanwhile()
            return set(alerts) <= self.firing()

        eventually(all_fire, Told(lambda: f"{alerts} fire, not {self.firing()}"))

    def table(self, title):
        """Return a table: label -> column -> value."""
        rows = {}
        for target in BY_TITLE[title]["targets"]:
            for labels, value in self.prometheus.ask(filled(target["expr"])).items():
                rows.setdefault(labels[0][1], {})[target["legendFormat"]] = value
        return rows

    def graph(self, title):
        """Return what a graph shows of the story: labels -> its values."""
        answers = {}
        for target in BY_TITLE[title]["targets"]:
            for one in self._range(target["expr"]):
                name = tuple(one["metric"].values()) or (target["legendFormat"],)
                answers[name] = [float(value) for _, value in one["values"]]
        return answers

    def last(self, title):
        """Return the last values of a graph."""
        return {name: values[-1] for name, values in self.graph(title).items()}

    def marked(self, name):
        """Whether an annotation has marked something of the story."""
        found = self._range(ANNOTATIONS[name])
        return any(float(value) for one in found for _, value in one["values"])

    def silent_panels(self):
        """Return the panels that show nothing: a graph of the story so far, a tile or a table now."""
        silent = set()
        for panel in PANELS:
            ask = self._range if panel["type"] == "timeseries" else lambda query: self.prometheus.ask(filled(query))
            if not any(ask(target["expr"]) for target in panel["targets"]):
                silent.add(panel["title"])
        return silent

    def speaks(self, act, may_be_silent):
        """Wait until every other panel shows something."""
        eventually(
            lambda: self.silent_panels() <= may_be_silent,
            Told(lambda: f"{act}: these panels show something: {self.silent_panels() - may_be_silent}"),
        )

    def _range(self, query):
        now = time.time()
        return self.prometheus.api("query_range", query=filled(query), start=self.begun, end=now, step=0.5)["result"]


class Told:
    """A text that is made when it is needed."""

    def __init__(self, make):
        self._make = make

    def __str__(self):
        return self._make()


def met(value, wanted):
    """Whether a value is the wanted one, or fulfils what is wanted."""
    return wanted(value) if callable(wanted) else value == wanted
