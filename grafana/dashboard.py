"""
Print the dashboard as Grafana's JSON: `python grafana/dashboard.py > grafana/dashboard.json`.

ROWS defines the panels. The functions below it convert them to JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Label filters with the dashboard's variables, for every query. All workers and exporters report the same values for queues,
#: so queries aggregate them with `max`.
SOURCE = 'cluster="$cluster",job=~"$job",instance=~"$instance"'
QUEUE = f'queue=~"$queue",{SOURCE}'
#: Label filters for recorded metrics of a queue, which have no instance.
RULE = 'queue=~"$queue",cluster="$cluster",job=~"$job"'
#: `up` is the only metric of a target that does not answer.
UP = f'up{{job=~"reliq.*",{SOURCE}}}'
#: Firing alerts of all clusters, also of clusters that are not selected.
FIRING = 'alertstate="firing",alertname=~"Reliq.+"'
WINDOW = "[$__rate_interval]"
DASH = "\N{EN DASH}"
GREY, GREEN, YELLOW, RED, BLUE = "#666", "green", "#EAB839", "red", "blue"
Limits = Mapping[float, str]
SLOW: Limits = {30: YELLOW, 180: RED}
FAILING: Limits = {0.05: YELLOW, 0.2: RED}
#: A value, or a range of values -> its text and colour. An empty text leaves the number as it is.
Mappings = Mapping[float | str | tuple[float, float], tuple[str, str]]


@dataclass(frozen=True)
class Column:
    """
    A column of a table.

    It shows a label, whose name in Prometheus is `source`, or with `query` the values of a query.
    """

    name: str
    query: str = ""
    width: int = 0
    source: str = ""
    unit: str = "none"
    decimals: int = 0
    limits: Limits = field(default_factory=dict)
    mappings: Mappings = field(default_factory=dict)
    link: tuple[str, str] | None = None


@dataclass(frozen=True)
class Panel:
    """
    A panel: a tile or a graph with `queries` (legend -> PromQL), or a table with `columns`.

    `limits` are the values at which a colour begins. `sort` has the columns by which a table is sorted, the most important
    first. Its values are True for a descending order.
    """

    title: str
    description: str
    queries: Mapping[str, str] = field(default_factory=dict)
    kind: str = "timeseries"
    unit: str = "short"
    limits: Limits = field(default_factory=dict)
    mappings: Mappings = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)
    bars: bool = False
    columns: tuple[Column, ...] = ()
    sort: Mapping[str, bool] = field(default_factory=dict)


def gauge(name: str, more: str = "") -> str:
    """Return the query of a gauge by queue."""
    return f"max by (queue) ({name}{{{more}{QUEUE}}})"


def rate(name: str, more: str = "", window: str = WINDOW) -> str:
    """Return the query of a counter's growth per second, by queue."""
    return f"max by (queue) (rate({name}{{{more}{QUEUE}}}{window}))"


def quantile(share: float, name: str, more: str = "") -> str:
    """Return the query of a quantile of a histogram of seconds, by queue."""
    return f"histogram_quantile({share}, sum by (le, queue) (rate({name}_bucket{{{more}{QUEUE}}}{WINDOW})))"


def of(name: str, by: str = "instance", how: str = "sum", more: str = "") -> str:
    """Return the query of a metric of worker processes or Redis servers."""
    return f"{how} by ({by}) ({name}{{{more}{SOURCE}}})"


def grown(name: str, by: str = "instance", where: str = SOURCE) -> str:
    """Return the query of a counter's growth in worker processes, as a whole number."""
    return f"round(sum by ({by}) (increase({name}{{{where}}}{WINDOW})))"


def always(query: str, empty: str = "0") -> str:
    """Return a query with a value for every queue, so that every queue keeps its row, position and colour."""
    return f"{query} or {empty} * {KNOWN}"


def by_queue(query: str, empty: str = "0") -> dict[str, str]:
    """Return the queries of a graph with a line for each queue."""
    return {"{{queue}}": always(query, empty)}


def tile(title: str, description: str, query: str, **options: Any) -> Panel:
    """Return a tile for the top of the dashboard."""
    return Panel(title, description, {"__auto": query}, "stat", **{"unit": "none", **options})


KNOWN = gauge("reliq_queue_unreadable")
REDIS_UP = of("reliq_redis_up", "server", "min")
SCRAPE = of("reliq_redis_scrape_seconds", "server", "max")
REFUSED = f'increase(reliq_redis_errors_total{{reason="refused",{SOURCE}}}[2m])'
LATE = f"max by (queue) (reliq:oldest_seconds{{{RULE}}} or reliq:tick_late_seconds{{{RULE}}})"
ARRIVED = f"{rate('reliq_published_total')} + {rate('reliq_redriven_total')}"
#: Like the rule reliq:failed_ratio over two minutes: a tile shows a fault within a minute.
RECENT_NACKS = rate("reliq_nacked_total", window="[2m]")
RECENT_FAILED = f"({RECENT_NACKS} > 0.02) / ({RECENT_NACKS} + {rate('reliq_acked_total', window='[2m]')})"
P95 = quantile(0.95, "reliq_handler_seconds", 'outcome="ack",')
READY = f'max by (queue) (sum without (state) (reliq_messages{{state=~"ready|waiting",{QUEUE}}}))'
STATE = f"2 * {KNOWN} > 0 or {gauge('reliq_paused')}"
MEMORY = (
    f"{of('reliq_redis_memory_bytes', 'server', 'max')} / ({of('reliq_redis_memory_limit_bytes', 'server', 'max')} > 0)"
)
USED = f"max by (instance) (reliq:slots_used{{{SOURCE}}})"
RESTARTED = f"sum by (instance, reason) (increase(reliq_restarts_total{{{SOURCE}}}[1m])) > 0.5"
BUILD = f"max by (instance, version, python, redis_py) (reliq_build_info{{{SOURCE}}})"
PROCESSES = f"{BUILD} * on (instance) group_left () ({of('reliq_workers')} or 0 * max by (instance) ({BUILD}))"
ENDS = {"dead": RED, "expired": "dark-red", "cancelled": YELLOW, "purged": "orange"}
ACCOUNT = ("published", "redriven", "acked", "dead", "expired", "cancelled", "purged")
MISSING = f"{gauge('reliq_messages_unaccounted')} != 0 or min by (queue) (reliq_messages_unaccounted{{{QUEUE}}})"
LISTED = f"count(reliq_workers{{{SOURCE}}})"
HAD_SLOTS = f"max by (instance) (last_over_time(reliq_slots{{{SOURCE}}}[1h]))"
FIRES = f'label_join(ALERTS_FOR_STATE{{alertname=~"Reliq.+"}} and ignoring (alertstate) ALERTS{{{FIRING}}}, "where", " ", "instance", "server", "entry")'
NOTHING_FIRES = 'label_replace(label_replace(NaN * max(reliq:runbook), "alertname", "nothing fires", "", ""), "severity", "ok", "", "")'
#: Without any queue among the alerts, Grafana would leave out the column.
FIRES_SINCE = f'label_replace(1000 * max by (severity, alertname, cluster, queue, where) ({FIRES}), "queue", "{DASH}", "queue", "")'
SINCE = f"{FIRES_SINCE} or ({NOTHING_FIRES} unless on () ALERTS{{{FIRING}}})"
HERE = "/d/${__dashboard.uid}?var-queue=${__value.text}&${datasource:queryparam}&${cluster:queryparam}&${job:queryparam}&${__url_time_range}"
EXCEPTIONS = f"sum by (queue, exception) (rate(reliq_handler_failures_total{{{QUEUE}}}{WINDOW}))"

#: Title of a row -> its panels.
# fmt: off
ROWS: dict[str, list[Panel]] = {
    "": [
        tile("Redis",
            "Whether the Redis servers answer. `partly`: some servers do not answer. `slow`: reading the queues takes over"
            " 0.5 s. `refuses`: Redis refused commands of workers within the last 2 minutes.",
            f"(min({REDIS_UP}) + max({REDIS_UP})) / 2 - (0.1 * (max({SCRAPE}) > bool 0.5) or 0 * max({REDIS_UP}))"
            f" - (0.2 * (sum({REFUSED}) > bool 0) or 0 * max({REDIS_UP}))",
            limits={0: RED, 0.2: "orange", 0.7: RED, 0.9: YELLOW, 1: GREEN},
            mappings={(-1, 0): ("DOWN", RED), (0.1, 0.5): ("partly", "orange"), (0.6, 0.8): ("refuses", RED),
                0.9: ("slow", YELLOW), 1: ("up", GREEN)}),
        tile("Memory",
            "Memory of the fullest Redis server as a share of its maxmemory. At 100 % Redis refuses publishes.",
            f"max({MEMORY}) or -1 * max({REDIS_UP} == 1)", unit="percentunit", limits={0.75: YELLOW, 0.9: RED},
            mappings={-1: ("no limit", GREEN)}),
        tile("Targets",
            "Number of workers, exporters and producers that do not answer Prometheus. `fewer`: service discovery lists over"
            " 30 % fewer workers than within the last 30 minutes.",
            f"count({UP} == 0) or 0.5 * ({LISTED} < bool 0.7 * max_over_time({LISTED}[30m:1m])) or 0 * count({UP})",
            unit="suffix: down", limits={0.5: YELLOW, 1: RED},
            mappings={0: ("all up", GREEN), 0.5: ("fewer", YELLOW)}),
        tile("Busy 5m",
            "Share of busy slots in the busiest worker, the mean of 5 minutes. If it is over 95 % and messages wait, add slots"
            " or processes.",
            f"max({USED}) and on () sum(reliq_workers{{{SOURCE}}}) > 0 or -1 * max({UP} >= bool 0)",
            unit="percentunit", limits={0.8: YELLOW, 0.95: RED}, mappings={-1: ("no worker", RED)}),
        tile("Oldest",
            "Waiting time of the oldest due message, late periodic job or outbox row. Paused queues do not count.",
            f"max(({LATE} unless max by (queue) (reliq:paused{{{RULE}}} == 1)) or max(reliq_outbox_oldest_seconds{{{SOURCE}}}))",
            unit="s", limits=SLOW),
        tile("Failed",
            "Share of failed attempts over 2 minutes, in the queue with the highest share. Messages without a retry left become"
            " dead letters.",
            f"max(({always(RECENT_FAILED)}) unless {KNOWN} == 1)", unit="percentunit", limits=FAILING),
        tile("Died 1h",
            "Messages that became dead letters within the last hour. `reliq list QUEUE --state dead --group` counts them by"
            " cause.",
            f"sum({gauge('reliq_dead_total')} - min by (queue) (min_over_time(reliq_dead_total{{{QUEUE}}}[1h])))",
            limits={1: RED}),
        tile("Alerts", "Number of firing alerts in all clusters. The table *Firing now* lists them.",
            f"count(ALERTS{{{FIRING}}}) or 0 * max(reliq:runbook)", limits={1: RED}),
        Panel("Firing now",
            "Firing alerts of all clusters, critical alerts first. Click an alert to open its section of the runbook.",
            kind="table",
            columns=(
                Column("severity", width=100,
                    mappings={"critical": ("", RED), "warning": ("", YELLOW), "ok": ("", GREEN)}),
                Column("alert", width=280, source="alertname", link=("Runbook", "${runbook}#${__value.text}")),
                Column("cluster", width=150),
                Column("queue", width=250),
                Column("where"),
                Column("since", SINCE, 160, unit="dateTimeFromNow"),
            ), sort={"severity": False}),
        Panel("Queues now",
            "ready includes messages that wait under a message key. running and backoff together are the state unack. late is"
            " the age of the oldest due message or periodic job.",
            kind="table",
            columns=(
                Column("queue", link=("Only ${__value.text}", HERE)),
                Column("pending", gauge("reliq_messages", 'state="pending",'), 80),
                Column("ready", READY, 80, limits={1000: YELLOW, 10000: RED}),
                Column("running", gauge("reliq_unack", 'kind="running",'), 80),
                Column("backoff", gauge("reliq_unack", 'kind="backoff",'), 80, limits={100: YELLOW}),
                Column("retry", gauge("reliq_messages", 'state="retry",'), 65, limits={100: YELLOW, 1000: RED}),
                Column("dead", gauge("reliq_dead_letters"), 70, limits={1: YELLOW}),
                Column("late", LATE, 85, unit="s", limits=SLOW),
                Column("key blocked", gauge("reliq_key_blocked_seconds"), 125, unit="s",
                    limits={30: YELLOW, 3600: RED}),
                Column("in /s", ARRIVED, 75, decimals=1),
                Column("done /s", rate("reliq_acked_total"), 75, decimals=1),
                Column("failed", f"({RECENT_FAILED} or 0 * {RECENT_NACKS}) unless {KNOWN} == 1", 70, unit="percentunit",
                    limits=FAILING),
                Column("p95", P95, 80, unit="s"),
                Column("state", STATE, 100, mappings={0: ("ok", ""), 1: ("paused", BLUE), 2: ("unreadable", RED)}),
            ), sort={"state": True, "late": True, "key blocked": True}),
        Panel("Backlog",
            "Messages that are due and wait for a worker. If the number keeps growing, more messages are published than handled.",
            by_queue(gauge("reliq_backlog"), "NaN"), limits={1000: YELLOW, 10000: RED}),
        Panel("Oldest message",
            "Age of the oldest due message: so long do users wait. An alert fires when it exceeds 3 minutes.",
            by_queue(f"max by (queue) (reliq:oldest_seconds{{{RULE}}})", "NaN"), unit="dthms", limits=SLOW),
        Panel("Failed attempts",
            "Share of attempts that failed, over 2 minutes. An alert fires when it is over 5 % for 10 minutes.",
            by_queue(RECENT_FAILED), unit="percentunit", limits=FAILING),
    ],
    "Why": [
        Panel("Handler time p95",
            "95 % of successful handlers took at most this long, rounded up to the limit of a histogram bucket.",
            by_queue(P95, "NaN"), unit="s"),
        Panel("Slots used, 5 min",
            "Share of busy slots of each worker, the mean of 5 minutes. An alert fires over 95 % if messages wait.",
            {"{{instance}}": USED}, unit="percentunit", limits={0.8: YELLOW, 0.95: RED}),
        Panel("Failures by queue and exception", "Failed attempts a second by the class of the exception.",
            {"{{queue}}: {{exception}}": f'{EXCEPTIONS} or 0 * label_replace({KNOWN}, "exception", "none", "", "")'},
            unit="ops"),
        Panel("In and done",
            "Messages a second. in: published or redriven. done: acked. in, a week ago: published one week earlier.",
            {"in": f"sum({ARRIVED})", "done": f"sum({rate('reliq_acked_total')})",
             "in, a week ago": f"sum({rate('reliq_published_total', window=WINDOW + ' offset 1w')})"},
            unit="mps", colours={"in": BLUE, "done": GREEN, "in, a week ago": GREY}),
        Panel("Dead, expired, cancelled",
            "Messages a second that ended without an ack: dead letters, expired before an attempt, cancelled or purged.",
            {kind: f"sum({rate(f'reliq_{kind}_total')})" for kind in ENDS}, unit="mps", colours=ENDS),
    ],
    "Processes and Redis": [
        Panel("Worker processes",
            "Running worker processes by instance. An instance that went down within the last hour shows 0.",
            {"{{instance}}": f"{of('reliq_workers')} or 0 * ({HAD_SLOTS} and on (instance) {UP} == 0)"}),
        Panel("Restarts", "Worker processes that ended and were replaced, by reason.",
            {"{{reason}}": grown("reliq_restarts_total", "reason")}, bars=True,
            colours={"killed": RED, "crashed": "orange", "hung": "purple", "overran": YELLOW, "jobs": GREEN}),
        Panel("Leases lost", "Attempts that ended after their lease had expired. Another worker may have run the message too.",
            by_queue(grown("reliq_leases_lost_total", "queue", QUEUE)), bars=True, limits={1: RED}),
        Panel("Redis memory",
            "Memory of each Redis server as a share of its maxmemory; without maxmemory there is no line.",
            {"{{server}}": f"{MEMORY} or NaN * {REDIS_UP}"}, unit="percentunit", limits={0.75: YELLOW, 0.9: RED}),
        Panel("Redis errors",
            "Failed calls of workers: Redis did not answer (away), or refused a command. reconnects: new connections after"
            " a failure.",
            {"{{reason}}": grown("reliq_redis_errors_total", "reason"),
             "reconnects": f"round(sum(increase(reliq_redis_reconnects_total{{{SOURCE}}}{WINDOW})))"},
            bars=True, colours={"away": "orange", "refused": RED, "reconnects": GREEN}),
        Panel("Time to ask Redis", "Seconds that each Redis server needs to return the metrics of all its queues.",
            {"{{server}}": SCRAPE}, unit="s", limits={0.5: YELLOW}),
        Panel("Outbox", "Age of the oldest row of the outbox, and how many rows wait; empty without an outbox.",
            {"oldest, s": f"max(reliq_outbox_oldest_seconds{{{SOURCE}}})",
             "rows": f"max(reliq_outbox_rows{{{SOURCE}}})",
             "database errors": f"round(sum(increase(reliq_outbox_database_errors_total{{{SOURCE}}}{WINDOW})))"},
            limits={60: YELLOW}),
        Panel("Memory of workers", "Resident memory of all processes of each worker.",
            {"{{instance}}": of("process_resident_memory_bytes", more='process!="",')}, unit="bytes"),
    ],
    "Keys and periodic jobs": [
        Panel("Key blocked for longest",
            "For the key that has been blocked for longest: how long no message of it has started. `reliq keys QUEUE` shows the"
            " reason.",
            by_queue(gauge("reliq_key_blocked_seconds")), unit="dthms", limits={3600: RED}),
        Panel("Late periodic jobs",
            "How late each periodic job is. If it stays over one minute, an alert fires. `reliq cron list` shows the reason.",
            {"{{queue}}: {{entry}}": f"clamp_min(max by (queue, entry) (reliq:tick_late_seconds{{{RULE}}}), 0)"},
            unit="dthms", limits={60: RED}),
    ],
    "Account": [
        Panel("The account",
            "published + redriven = acked + dead + expired + cancelled + purged + alive. missing must be 0.",
            kind="table",
            columns=(
                Column("queue"),
                *(Column(kind, gauge(f"reliq_{kind}_total"), 100) for kind in ACCOUNT),
                Column("alive", f"max by (queue) (sum without (state) (reliq_messages{{{QUEUE}}}))", 100),
                Column("missing", MISSING, 100, limits={-1e15: RED, 0: "transparent", 1: RED}),
                Column("layout", gauge("reliq_go_layout"), 90, mappings={0: ("reliq", ""), 1: ("Go", BLUE)}),
            )),
        Panel("Instances",
            "For each worker and exporter: versions, number of worker processes, time since its start, and open files.",
            kind="table",
            columns=(
                Column("instance"),
                *(Column(label, width=140) for label in ("version", "python", "redis_py")),
                Column("processes", PROCESSES, 120),
                Column("up for", f"time() - max by (instance) (process_start_time_seconds{{{SOURCE}}})", 140, unit="s"),
                Column("open files", of("process_open_fds", how="max"), 140, limits={800: YELLOW}),
            )),
    ],
}
# fmt: on
COLLAPSED = {"Keys and periodic jobs", "Account"}

DATA = {"type": "prometheus", "uid": "${datasource}"}
#: Width and height of panels; Grafana's grid has COLUMNS.
SIZES = {"stat": (3, 3), "table": (24, 6), "timeseries": (8, 6)}
COLUMNS = 24
WHERE = 'cluster="$cluster",job=~"$job"'
#: Name, label, query, and whether several values can be chosen.
VARIABLES = [
    ("cluster", "Cluster", "label_values(reliq_build_info, cluster)", False),
    ("job", "Job", 'label_values(reliq_build_info{cluster="$cluster"}, job)', True),
    ("instance", "Instance", f"label_values(reliq_build_info{{{WHERE}}}, instance)", True),
    ("queue", "Queue", f"label_values(reliq_queue_unreadable{{{WHERE}}}, queue)", True),
    ("runbook", "Runbook", "label_values(reliq:runbook, url)", False),
]
#: Name, colour, query and text of the events that every graph marks; Grafana ignores results of 0.
ANNOTATIONS = [
    ("Redis away", "red", f"1 - min(reliq_redis_up{{{SOURCE}}}) > 0", "A Redis server does not answer"),
    ("Processes replaced", "orange", RESTARTED, "{{instance}}: process {{reason}}"),
]


def steps(limits: Limits, base: str) -> dict[str, Any]:
    """Return thresholds: `base` below the first limit, then the colour of each."""
    return {
        "mode": "absolute",
        "steps": [{"color": colour, "value": at} for at, colour in [(None, base), *limits.items()]],
    }


def texts(mappings: Mappings) -> list[dict[str, Any]]:
    """Return value mappings; NaN is shown as a dash."""
    made: list[dict[str, Any]] = [
        {"type": "special", "options": {"match": "nan", "result": {"text": DASH, "index": 0}}}
    ]
    for index, (value, (text, colour)) in enumerate(mappings.items(), 1):
        result = {"index": index} | {name: value for name, value in (("text", text), ("color", colour)) if value}
        if isinstance(value, tuple):
            made.append({"type": "range", "options": {"from": value[0], "to": value[1], "result": result}})
        else:
            made.append({"type": "value", "options": {str(value): result}})
    return made


def override(name: str, **properties: Any) -> dict[str, Any]:
    """Return the settings of one field. A name such as `custom_width` becomes Grafana's `custom.width`."""
    parts = [{"id": part.replace("custom_", "custom."), "value": value} for part, value in properties.items()]
    return {"matcher": {"id": "byName", "options": name}, "properties": parts}


def graph(panel: Panel) -> dict[str, Any]:
    """Return the settings of a graph: dashed thresholds, and a legend below the plot."""
    custom: dict[str, Any] = {
        "drawStyle": "bars" if panel.bars else "line",
        "lineWidth": 1,
        "fillOpacity": 80 if panel.bars else 5,
    }
    custom |= {"showPoints": "never", "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"}}
    custom |= {} if panel.unit in {"s", "dthms", "percentunit", "bytes"} else {"axisSoftMax": 4}
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic"},
        "thresholds": steps(panel.limits, GREEN),
    }
    defaults |= {"min": 0, "custom": custom} | ({"max": 1} if panel.unit == "percentunit" else {})
    fixed = [override(name, color={"mode": "fixed", "fixedColor": colour}) for name, colour in panel.colours.items()]
    legend = {"displayMode": "list", "placement": "bottom", "calcs": [], "showLegend": True}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {"fieldConfig": {"defaults": defaults, "overrides": fixed}, "options": options}


def stat(panel: Panel) -> dict[str, Any]:
    """Return the settings of a tile: a number on a coloured background, which is grey while the number is unknown."""
    defaults = {"unit": panel.unit, "noValue": "unknown", "color": {"mode": "thresholds"}, "decimals": 0}
    defaults |= {"mappings": texts(panel.mappings), "thresholds": steps({0: GREEN, **panel.limits}, GREY)}
    shown = {"colorMode": "background_solid", "graphMode": "none", "justifyMode": "center", "textMode": "value"}
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": shown | {"reduceOptions": reduced}}


def table(panel: Panel) -> dict[str, Any]:
    """Return the settings of a table: the results of its queries, joined by the first column."""
    overrides = []
    for column in panel.columns:
        special: dict[str, Any] = {"custom_width": column.width} if column.width else {"custom_minWidth": 120}
        # Without the unit, Grafana reads a label such as 007 as a number, and blanks as 0.
        label = {"unit": "string", "custom_align": "left"}
        special |= {"unit": column.unit, "decimals": column.decimals} if column.query else label
        special |= {"mappings": texts(column.mappings), "thresholds": steps(column.limits, "transparent")}
        if column.limits or column.mappings:
            special["custom_cellOptions"] = {"type": "color-background", "mode": "basic"}
        if column.link:
            special["links"] = [{"title": column.link[0], "url": column.link[1]}]
        overrides.append(override(column.name, **special))
    defaults = {"unit": "none", "noValue": DASH, "custom": {"align": "right", "minWidth": 50}}
    values = [column.name for column in panel.columns if column.query]
    # Grafana numbers the columns of values and times when a table has several queries.
    is_joined = len(values) > 1
    names = {f"Value #{chr(ord('A') + at)}" if is_joined else "Value": name for at, name in enumerate(values)}
    names |= {column.source: column.name for column in panel.columns if column.source}
    sources = {name: source for source, name in names.items()}
    organized = {
        "excludeByName": {"Time": True, **{f"Time {number}": True for number in range(1, len(values) + 1)}},
        "renameByName": names,
        "indexByName": {sources.get(column.name, column.name): at for at, column in enumerate(panel.columns)},
    }
    joined = {"id": "joinByField", "options": {"byField": panel.columns[0].name, "mode": "outer"}}
    sort = [{"displayName": name, "desc": is_desc} for name, is_desc in panel.sort.items()]
    return {
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": {"showHeader": True, "cellHeight": "sm", "sortBy": sort},
        "transformations": [*([joined] if is_joined else []), {"id": "organize", "options": organized}],
    }


def built(panel: Panel, id: int) -> dict[str, Any]:
    """Return a panel in Grafana's form."""
    is_table = panel.kind == "table"
    queries = {column.name: column.query for column in panel.columns if column.query} or panel.queries
    if is_table and panel.columns[0].name == "queue":  # a column without data would disappear
        queries = {name: always(query, "NaN") for name, query in queries.items()}
    how = {"range": False, "instant": True} if panel.kind != "timeseries" else {"range": True, "instant": False}
    targets = [
        {"refId": chr(ord("A") + at), "datasource": DATA, "editorMode": "code", "legendFormat": legend, **how}
        | {"expr": query}
        | ({"format": "table"} if is_table else {})
        for at, (legend, query) in enumerate(queries.items())
    ]
    made = {"id": id, "type": panel.kind, "title": panel.title, "description": panel.description, "datasource": DATA}
    return made | {"targets": targets} | {"timeseries": graph, "stat": stat, "table": table}[panel.kind](panel)


def laid_out() -> list[dict[str, Any]]:
    """Return rows and panels with their positions: panels fill each line from left to right."""
    made: list[dict[str, Any]] = []
    y = 0
    number = 0
    for title, panels in ROWS.items():
        row: dict[str, Any] = {"id": 100 + y, "type": "row", "title": title, "panels": []}
        row["collapsed"] = title in COLLAPSED
        if title:
            made.append(row | {"gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
            y += 1
        x = height = 0
        for panel in panels:
            width, tall = SIZES[panel.kind]
            if x + width > COLUMNS:
                x, y = 0, y + height
            number += 1
            place = {"h": tall, "w": width, "x": x, "y": y}
            (made[-1]["panels"] if row["collapsed"] else made).append(built(panel, number) | {"gridPos": place})
            x, height = x + width, tall
        y += height
    return made


def variable(name: str, label: str, query: str, *, many: bool) -> dict[str, Any]:
    """Return a variable of the dashboard; a query to Prometheus returns its values."""
    made: dict[str, Any] = {"name": name, "label": label, "type": "query", "datasource": DATA, "definition": query}
    made |= {"query": {"query": query, "refId": name}, "refresh": 2, "sort": 1, "multi": many, "includeAll": many}
    made |= {"hide": 2 if name == "runbook" else 0}
    everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return made | ({"allValue": ".*", "current": everything} if many else {"current": {}})


def annotation(name: str, colour: str, query: str, text: str) -> dict[str, Any]:
    """Return an annotation: events that every graph marks. The dashboard shows no switch for it."""
    made = {"name": name, "datasource": DATA, "enable": True, "hide": True, "iconColor": colour, "expr": query}
    return made | {"step": "15s", "titleFormat": text, "useValueForTime": False}


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard as Grafana imports it."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}
    runbook = {"type": "link", "title": "Runbook", "icon": "doc", "url": "${runbook}", "targetBlank": True}
    made: dict[str, Any] = {"title": "reliq", "uid": "reliq", "id": None, "version": 1, "schemaVersion": 39}
    made |= {"editable": True, "graphTooltip": 1, "refresh": "30s", "tags": ["reliq"], "timezone": "browser"}
    made["description"] = (
        "Queues, handlers, workers and Redis of reliq. RUNBOOK.md describes what to do about each alert."
    )
    made |= {"time": {"from": "now-1h", "to": "now"}, "links": [runbook | {"tooltip": "What to do about each alert"}]}
    made |= {"annotations": {"list": [annotation(*fields) for fields in ANNOTATIONS]}, "panels": laid_out()}
    return made | {"templating": {"list": [source, *(variable(*fields, many=many) for *fields, many in VARIABLES)]}}


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
