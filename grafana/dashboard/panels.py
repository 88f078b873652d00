"""The panels, row by row, and the queries that they are made of. PANELS.md has their descriptions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Every query is for what the variables choose. Figures of queues are the same wherever they are scraped: `max`.
SOURCE = 'cluster="$cluster",job=~"$job",instance=~"$instance"'
QUEUE = f'queue=~"$queue",{SOURCE}'
#: Of targets that do not answer there is only `up`; an alert of a whole cluster has no labels of its own.
UP = f'up{{job=~"reliq.*",{SOURCE}}}'
FIRING = 'alertname=~"Reliq.+",cluster=~"$cluster|",queue=~"$queue|"'
WINDOW = "[$__rate_interval]"
YELLOW = "yellow"
RED = "red"


@dataclass(frozen=True)
class Column:
    """A column of a table: a label (`source` is its name in Prometheus), or the value of a query."""

    name: str
    width: int = 0
    label: bool = False
    source: str = ""
    unit: str = "none"
    decimals: int = 0
    limits: Mapping[float, str] = field(default_factory=dict)
    mappings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    link: tuple[str, str] | None = None


@dataclass(frozen=True)
class Panel:
    """A panel: `queries` are legend -> PromQL, `limits` are where a colour begins, `base` is the colour below them."""

    title: str
    queries: Mapping[str, str]
    type: str = "timeseries"
    width: int = 8
    height: int = 7
    unit: str = "short"
    limits: dict[float, str] = field(default_factory=dict)
    base: str = "grey"
    mappings: dict[str, tuple[str, str]] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)
    bars: bool = False
    text: str = "value"
    columns: tuple[Column, ...] = ()
    sort: str = ""
    empty: str = ""


def of_queues(query: str, empty: str = "0") -> dict[str, str]:
    """Return a query with a line for every queue, so that a queue has the same place and colour in every panel."""
    return {"{{queue}}": f"{query} or {empty} * {gauge('reliq_paused')}"}


def gauge(name: str, more: str = "") -> str:
    """Return a gauge by queue."""
    return f"max by (queue) ({name}{{{more}{QUEUE}}})"


def rate(name: str, more: str = "") -> str:
    """Return what Redis counted, by queue and second."""
    return f"max by (queue) (rate({name}{{{more}{QUEUE}}}{WINDOW}))"


def quantile(share: float, name: str, more: str = "") -> str:
    """Return a quantile of the seconds that workers measured, by queue."""
    return f"histogram_quantile({share}, sum by (le, queue) (rate({name}_bucket{{{more}{QUEUE}}}{WINDOW})))"


def of(name: str, by: str = "instance", how: str = "sum", more: str = "") -> str:
    """Return a figure of worker processes."""
    return f"{how} by ({by}) ({name}{{{more}{SOURCE}}})"


def grown(name: str, by: str = "instance", who: str = SOURCE) -> str:
    """Return by how much a counter of processes grew, in whole numbers."""
    return f"round(sum by ({by}) (increase({name}{{{who}}}{WINDOW})))"


ACKED = 'outcome="ack",'
FAILED = f"{rate('reliq_nacked_total')} / ({rate('reliq_acked_total')} + {rate('reliq_nacked_total')} > 0)"
BUSY = f"{of('reliq_slots_busy')} / {of('reliq_slots')}"
OLDEST = gauge("reliq_oldest_message_age_seconds", 'state=~"pending|ready|retry",')
SLOW = {60: YELLOW, 300: RED}

#: The colour of a state, the same in every panel.
STATES = {"pending": "blue", "ready": "green", "unack": "yellow", "retry": "orange"}
UNKNOWN = {"-1": ("unknown", "grey")}
THIS_QUEUE = (
    "Only ${__value.text}",
    (
        "/d/${__dashboard.uid}?var-queue=${__value.text}&${datasource:queryparam}&${cluster:queryparam}&${job:queryparam}"
        "&${__url_time_range}"
    ),
)


def known(query: str) -> str:
    """Return a query that answers -1 when nobody can tell."""
    return f"{query} or vector(-1)"


def now(title: str, query: str, **options: Any) -> Panel:
    """Return a tile of the first row."""
    return Panel(title, {"__auto": query}, "stat", 3, 4, **{"unit": "none", **options})


NOW = [
    now(
        "Redis",
        f"min(reliq_redis_up{{{SOURCE}}}) or vector(-1)",
        base="red",
        limits={1: "green"},
        mappings={"1": ("up", "green"), "0": ("DOWN", "red"), "-1": ("nobody tells", "red")},
    ),
    now("Targets down", f"count({UP} == 0) or vector(0)", limits={1: "red"}, base="green"),
    now("Processes", f"sum(reliq_workers{{{SOURCE}}}) or vector(0)", limits={1: "green"}, base="red"),
    now(
        "Fullest worker",
        known(f"max({BUSY})"),
        unit="percentunit",
        limits={0: "green", 0.8: YELLOW, 0.95: RED},
        mappings={"-1": ("no worker", "grey")},
    ),
    now(
        "Longest wait",
        known(f"max({OLDEST} unless {gauge('reliq_paused')} == 1)"),
        unit="s",
        limits={0: "green"} | SLOW,
        mappings=UNKNOWN,
    ),
    now("Paused", known(f"sum({gauge('reliq_paused')})"), limits={0: "green", 1: "blue"}, mappings=UNKNOWN),
    now(
        "Died in 1 hour",
        known(f"sum(round(max by (queue) (increase(reliq_dead_total{{{QUEUE}}}[1h]))))"),
        limits={0: "green", 1: YELLOW, 10: RED},
        mappings=UNKNOWN,
    ),
    now(
        "Alerts",
        f'count(count by (alertname, queue, instance) (ALERTS{{alertstate="firing",{FIRING}}})) or vector(0)',
        limits={1: "red"},
        base="green",
    ),
    Panel(
        "Queues now",
        {
            **{name: gauge("reliq_messages", f'state="{name}",') for name in (*STATES, "garbage")},
            "dead": gauge("reliq_dead_letters"),
            "late": OLDEST,
            "in /s": rate("reliq_published_total"),
            "done /s": rate("reliq_acked_total"),
            "failed": FAILED,
            "p95": quantile(0.95, "reliq_handler_seconds", ACKED),
            "paused": gauge("reliq_paused"),
        },
        "table",
        24,
        8,
        columns=(
            Column("queue", label=True, link=THIS_QUEUE),
            Column("pending", 82),
            Column("ready", 82, limits={1000: YELLOW, 10000: RED}),
            Column("unack", 72),
            Column("retry", 72, limits={100: YELLOW, 1000: RED}),
            Column("garbage", 82),
            Column("dead", 72, limits={1: YELLOW}),
            Column("late", 92, unit="s", limits=SLOW),
            Column("in /s", 72, decimals=1),
            Column("done /s", 82, decimals=1),
            Column("failed", 72, unit="percentunit", limits={0.05: YELLOW, 0.5: RED}),
            Column("p95", 92, unit="s"),
            Column("paused", 78, mappings={"0": ("no", "transparent"), "1": ("paused", "blue")}),
        ),
        sort="late",
    ),
    Panel(
        "Firing now",
        {
            "since": "1000 * max by (severity, alertname, queue, instance) "
            f'(ALERTS_FOR_STATE{{{FIRING}}} and ignoring (alertstate) ALERTS{{alertstate="firing",{FIRING}}})'
        },
        "table",
        24,
        5,
        columns=(
            Column("severity", 100, label=True, mappings={"critical": ("", "red"), "warning": ("", "yellow")}),
            Column("alert", 280, label=True, source="alertname", link=("Runbook", "${runbook}#${__value.text}")),
            Column("queue", 220, label=True),
            Column("instance", label=True),
            Column("since", 150, unit="dateTimeFromNow"),
        ),
        empty="nothing fires",
    ),
]

ENDS = ("dead", "expired", "cancelled", "purged", "snoozed", "released", "promoted", "redriven", "letters_dropped")
ACCOUNT = ("published", "redriven", "acked", "dead", "expired", "cancelled", "purged")
#: The colour of a kind, the same in every panel; red is for what is wrong.
KINDS = {"dead": "red", "expired": "dark-red", "cancelled": "yellow", "purged": "orange", "redriven": "blue"}


def state(name: str, query: str = "", **options: Any) -> Panel:
    """Return the panel of one state of a queue's messages."""
    return Panel(name, of_queues(query or gauge("reliq_messages", f'state="{name}",')), **options)


def flow(title: str, name: str) -> Panel:
    """Return the panel of one rate."""
    return Panel(title, of_queues(rate(name)), width=6, unit="mps")


HEALTH = [
    Panel("Backlog", of_queues(gauge("reliq_backlog")), limits={1000: YELLOW, 10000: RED}),
    Panel("Oldest message", of_queues(OLDEST), unit="s", limits=SLOW),
    Panel("Lag p99", of_queues(quantile(0.99, "reliq_lag_seconds"), "NaN"), unit="s", limits={10: YELLOW, 60: RED}),
    Panel("Failed", of_queues(FAILED), unit="percentunit", limits={0.05: YELLOW, 0.5: RED}),
    Panel(
        "Failures by exception",
        {
            "{{exception}}": f"sum by (exception) (rate(reliq_handler_failures_total{{{QUEUE}}}{WINDOW})) "
            'or label_replace(vector(0), "exception", "none", "", "")'
        },
        unit="mps",
    ),
    Panel("Slots used", {"{{instance}}": BUSY}, unit="percentunit", limits={0.8: YELLOW, 0.95: RED}),
]
FLOW = [
    flow("Publish rate", "reliq_published_total"),
    flow("Claim rate", "reliq_claimed_total"),
    flow("Ack rate", "reliq_acked_total"),
    flow("Nack rate", "reliq_nacked_total"),
    Panel(
        "Again after a failure",
        of_queues(rate("reliq_retried_total", 'cause="nack",')),
        unit="mps",
        limits={1: YELLOW, 10: RED},
    ),
    Panel(
        "Again after a lease",
        of_queues(rate("reliq_retried_total", 'cause="lease",')),
        unit="mps",
        limits={1: YELLOW, 10: RED},
    ),
    Panel(
        "Other ends and moves",
        {kind: f"sum({rate(f'reliq_{kind}_total')})" for kind in ENDS},
        unit="mps",
        colours=KINDS,
    ),
    Panel(
        "The account",
        {kind: gauge(f"reliq_{kind}_total") for kind in ACCOUNT}
        | {"alive": f"max by (queue) (sum without (state) (reliq_messages{{{QUEUE}}}))"}
        | {
            "missing": f"{gauge('reliq_messages_unaccounted')} != 0 or min by (queue) (reliq_messages_unaccounted{{{QUEUE}}})"
        }
        | {"map": gauge("reliq_shard_map_lost"), "layout": gauge("reliq_go_layout")},
        "table",
        24,
        8,
        columns=(
            Column("queue", label=True),
            *(Column(kind, max(86, 14 + 9 * len(kind))) for kind in (*ACCOUNT, "alive")),
            Column("missing", 85, limits={-1e15: RED, 0: "transparent", 1: RED}),
            Column("map", 75, mappings={"0": ("ok", "transparent"), "1": ("lost", RED)}),
            Column("layout", 75, mappings={"0": ("reliq", "transparent"), "1": ("Go", "blue")}),
        ),
    ),
]
STATE = [
    state("pending"),
    state("ready", limits={1000: YELLOW, 10000: RED}),
    state("unack"),
    state("retry"),
    state("garbage", limits={1000: YELLOW}),
    state("dead", gauge("reliq_dead_letters")),
    state("Leased", gauge("reliq_unack", 'kind="leased",')),
    state("In backoff", gauge("reliq_unack", 'kind="backoff",')),
    Panel(
        "Oldest by state",
        {"{{state}}": f"max by (state) (reliq_oldest_message_age_seconds{{{QUEUE}}})"},
        unit="s",
        limits=SLOW,
        colours=STATES,
    ),
]
KEYS = [
    Panel("Waiting for a turn", of_queues(gauge("reliq_messages", 'state="waiting",'))),
    Panel("Largest keys", {"{{key}}": f"max by (key) (reliq_key_waiting{{{QUEUE}}})"}),
    Panel("Keys in turn and asleep", {"{{state}}": f"max by (state) (reliq_keys{{{QUEUE}}})"}),
    Panel("Key held up for longest", of_queues(gauge("reliq_key_blocked_seconds")), unit="s"),
    flow("Held back by a rate", "reliq_limited_claims_total"),
]
PERIODIC = [
    Panel(
        "Late ticks",
        {"{{entry}}": f"clamp_min(min by (entry) (time() - reliq_cron_next_timestamp_seconds{{{QUEUE}}}), 0)"},
        unit="s",
        limits={60: YELLOW, 300: RED},
    ),
    Panel(
        "Since the last tick",
        {"{{entry}}": f"min by (entry) (time() - reliq_cron_last_timestamp_seconds{{{QUEUE}}})"},
        unit="s",
    ),
    Panel(
        "Missed and skipped ticks",
        {
            "{{entry}} missed": f"max by (entry) (increase(reliq_cron_missed_total{{{QUEUE}}}{WINDOW}))",
            "{{entry}} {{why}}": f"max by (entry, why) (increase(reliq_cron_skipped_total{{{QUEUE}}}{WINDOW}))",
        },
        bars=True,
    ),
]

#: The colour of a kind, the same in every panel; red is for what is wrong.
OUTCOMES = {
    "ack": "green",
    "nack": "orange",
    "reject": "red",
    "snooze": "blue",
    "rate_limited": "light-blue",
    "timeout": "purple",
}


def longest(title: str, name: str, limits: dict[float, str]) -> Panel:
    """Return the panel of a time in seconds, of each process the longest."""
    return Panel(title, {"{{instance}}": of(name, how="max")}, unit="s", limits=limits)


LATENCY = [
    Panel("Lag p50", of_queues(quantile(0.5, "reliq_lag_seconds"), "NaN"), unit="s", limits={10: YELLOW, 60: RED}),
    longest("Longest running handler", "reliq_longest_running_seconds", {300: YELLOW, 600: RED}),
    Panel(
        "Handlers by outcome",
        {"{{outcome}}": f"sum by (outcome) (rate(reliq_handler_seconds_count{{{QUEUE}}}{WINDOW}))"},
        unit="mps",
        colours=OUTCOMES,
    ),
    *(
        Panel(
            f"Handler time p{percent}",
            of_queues(quantile(percent / 100, "reliq_handler_seconds", ACKED), "NaN"),
            unit="s",
            limits=SLOW,
        )
        for percent in (50, 95, 99)
    ),
    Panel(
        "Publish time p99",
        of_queues(
            "histogram_quantile(0.99, sum by (le, queue) "
            f'(rate(reliq_publish_seconds_bucket{{queue=~"$queue",cluster="$cluster"}}{WINDOW})))',
            "NaN",
        ),
        unit="s",
        limits={0.5: YELLOW, 2: RED},
    ),
    Panel(
        "Publishes by outcome",
        {
            "{{outcome}}": "sum by (outcome) (rate(reliq_publish_messages_total"
            f'{{queue=~"$queue",cluster="$cluster"}}{WINDOW})) or label_replace(vector(0), "outcome", "published", "", "")'
        },
        unit="mps",
        colours={
            "published": "green",
            "duplicate": "blue",
            "tombstoned": "yellow",
            "refused": "red",
            "unknown": "orange",
        },
    ),
    Panel("In flight", {"{{phase}}": of("reliq_inflight", "phase")}, colours={"running": "green", "held": "yellow"}),
]
WORKERS = [
    Panel(
        "Worker processes", {"{{instance}}": f"{of('reliq_workers')} or 0 * max by (instance) ({UP} == 0)"}, limits={}
    ),
    Panel(
        "Restarts",
        {"{{reason}}": grown("reliq_restarts_total", "reason")},
        bars=True,
        colours={"killed": "red", "crashed": "orange", "hung": "purple", "overran": "yellow", "jobs": "green"},
    ),
    Panel(
        "Last claim age",
        {
            "{{instance}}": f"max by (instance) (timestamp(reliq_last_claim_timestamp_seconds{{{SOURCE}}}) "
            f"- reliq_last_claim_timestamp_seconds{{{SOURCE}}})"
        },
        unit="s",
        limits={10: YELLOW, 30: RED},
    ),
    Panel("Leases lost", of_queues(grown("reliq_leases_lost_total", "queue", QUEUE)), bars=True, limits={1: RED}),
    Panel("Late renewals", {"{{instance}}": grown("reliq_renewals_late_total")}, bars=True, limits={1: YELLOW}),
    Panel("Hung slots", {"{{instance}}": of("reliq_slots_hung")}, limits={1: RED}),
    Panel(
        "CPU",
        {"{{instance}}": f'sum by (instance) (rate(process_cpu_seconds_total{{process!="",{SOURCE}}}{WINDOW}))'},
        unit="percentunit",
    ),
    Panel("Memory", {"{{instance}}": of("process_resident_memory_bytes", more='process!="",')}, unit="bytes"),
    Panel(
        "Outbox",
        {
            "rows": f"max(reliq_outbox_rows{{{SOURCE}}})",
            "oldest, s": f"max(reliq_outbox_oldest_seconds{{{SOURCE}}})",
            "database away": f"round(sum(increase(reliq_outbox_database_errors_total{{{SOURCE}}}{WINDOW})))",
        },
        limits={1000: YELLOW},
    ),
    Panel(
        "Redis errors",
        {
            "{{reason}}": grown("reliq_redis_errors_total", "reason"),
            "reconnects": f"round(sum(increase(reliq_redis_reconnects_total{{{SOURCE}}}{WINDOW})))",
        },
        bars=True,
        colours={"away": "orange", "refused": "red", "reconnects": "green"},
    ),
    Panel(
        "Instances",
        {
            "processes": f"max by (instance, version, python, redis_py) (reliq_build_info{{{SOURCE}}}) "
            f"* on (instance) group_left () {of('reliq_workers')} "
            f"or 0 * max by (instance, version, python, redis_py) (reliq_build_info{{{SOURCE}}})",
            "up for": f'time() - max by (instance) (process_start_time_seconds{{process="supervisor",{SOURCE}}})',
            "open files": of("process_open_fds", how="max", more='process!="",'),
        },
        "table",
        24,
        7,
        columns=(
            Column("instance", label=True),
            Column("version", 140, label=True),
            Column("python", 140, label=True),
            Column("redis_py", 140, label=True),
            Column("processes", 120),
            Column("up for", 140, unit="s"),
            Column("open files", 140, limits={800: YELLOW}),
        ),
    ),
]
REDIS = [
    Panel(
        "Redis memory",
        {
            "used": f"max(reliq_redis_memory_bytes{{{SOURCE}}})",
            "maxmemory": f"max(reliq_redis_memory_limit_bytes{{{SOURCE}}})",
        },
        unit="bytes",
        colours={"used": "blue", "maxmemory": "red"},
    ),
    Panel("Redis clients", {"clients": f"max(reliq_redis_clients{{{SOURCE}}})"}, limits={1000: YELLOW, 9000: RED}),
    longest("Time to ask Redis", "reliq_redis_scrape_seconds", {0.1: YELLOW, 0.5: RED}),
    Panel(
        "Evicted keys",
        {"evicted": f"max(round(increase(reliq_redis_evicted_keys_total{{{SOURCE}}}{WINDOW})))"},
        bars=True,
        limits={1: RED},
    ),
    Panel(
        "Eviction",
        {"__auto": f"max(reliq_redis_eviction_enabled{{{SOURCE}}}) or vector(-1)"},
        "stat",
        4,
        unit="none",
        limits={0: "green", 1: RED},
        mappings={"0": ("off", "green"), "1": ("ON", "red"), "-1": ("unknown", "grey")},
    ),
    Panel(
        "Append-only file",
        {"__auto": f"min(reliq_redis_aof_enabled{{{SOURCE}}}) or vector(-1)"},
        "stat",
        4,
        unit="none",
        limits={0: YELLOW, 1: "green"},
        mappings={"0": ("off", "yellow"), "1": ("on", "green"), "-1": ("unknown", "grey")},
    ),
    Panel(
        "Queues not shown",
        {"{{reason}}": f"max by (reason) (reliq_queues_skipped{{{SOURCE}}})"},
        "stat",
        4,
        unit="none",
        text="value_and_name",
        limits={0: "green", 1: YELLOW},
    ),
    Panel(
        "Redis version",
        {"{{version}}": f"max by (version) (reliq_redis_info{{{SOURCE}}})"},
        "stat",
        4,
        unit="none",
        text="name",
    ),
]

ROWS = {
    "Now": NOW,
    "Health": HEALTH,
    "Flow": FLOW,
    "Latency": LATENCY,
    "States": STATE,
    "Keys": KEYS,
    "Periodic entries": PERIODIC,
    "Workers": WORKERS,
    "Redis": REDIS,
}
