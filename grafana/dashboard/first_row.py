"""The first row: what is wrong now, seen in ten seconds."""

from typing import Any

from parts import (
    ACKED,
    BUSY,
    FAILED,
    FIRING,
    OLDEST,
    QUEUE,
    RED,
    SLOW,
    SOURCE,
    UP,
    YELLOW,
    Column,
    Panel,
    gauge,
    quantile,
    rate,
)

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


def now(title: str, description: str, query: str, **options: Any) -> Panel:
    """Return a tile of the first row."""
    return Panel(title, description, {"__auto": query}, "stat", 3, 4, **{"unit": "none", **options})


NOW = [
    now(
        "Redis",
        "Whether every worker and exporter reaches Redis. DOWN: nothing is published or handled; bring Redis back first.",
        f"min(reliq_redis_up{{{SOURCE}}}) or vector(-1)",
        base="red",
        limits={1: "green"},
        mappings={"1": ("up", "green"), "0": ("DOWN", "red"), "-1": ("nobody tells", "red")},
    ),
    now(
        "Targets down",
        "Workers and exporters that Prometheus knows and that do not answer: their hosts, containers or networks are gone.",
        f"count({UP} == 0) or vector(0)",
        limits={1: "red"},
        base="green",
    ),
    now(
        "Processes",
        "Processes that run handlers. Fewer than you started: read the log of the worker.",
        f"sum(reliq_workers{{{SOURCE}}}) or vector(0)",
        limits={1: "green"},
        base="red",
    ),
    now(
        "Fullest worker",
        "Slots in use, of the worker that has fewest left. Full while messages wait: see Slots used and Handler time.",
        known(f"max({BUSY})"),
        unit="percentunit",
        limits={0: "green", 0.8: YELLOW, 0.95: RED},
        mappings={"-1": ("no worker", "grey")},
    ),
    now(
        "Longest wait",
        "How long the oldest message that is due has waited, over all queues: the next table says which queue it is.",
        known(f"max({OLDEST} unless {gauge('reliq_paused')} == 1)"),
        unit="s",
        limits={0: "green"} | SLOW,
        mappings=UNKNOWN,
    ),
    now(
        "Paused",
        "Queues that somebody paused: `reliq queues` says which, `reliq resume` ends it.",
        known(f"sum({gauge('reliq_paused')})"),
        limits={0: "green", 1: "blue"},
        mappings=UNKNOWN,
    ),
    now(
        "Died in 1 hour",
        "Messages that became dead letters: `reliq dead list` shows them, with the error.",
        known(f"sum(round(max by (queue) (increase(reliq_dead_total{{{QUEUE}}}[1h]))))"),
        limits={0: "green", 1: YELLOW, 10: RED},
        mappings=UNKNOWN,
    ),
    now(
        "Alerts",
        "Alerts that fire, listed below: each has a section in the runbook.",
        f'count(count by (alertname, queue, instance) (ALERTS{{alertstate="firing",{FIRING}}})) or vector(0)',
        limits={1: "red"},
        base="green",
    ),
    Panel(
        "Queues now",
        "Each queue in one line: how many messages are in each state, for how long the oldest that is due has waited, "
        "what comes and goes. A click on a queue shows it alone.",
        {
            **{
                one: gauge("reliq_messages", f'state="{one}",')
                for one in ("pending", "ready", "unack", "retry", "garbage")
            },
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
        "Alerts of rules.yml that fire, the newest since when. A click on one opens its section of the runbook.",
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
