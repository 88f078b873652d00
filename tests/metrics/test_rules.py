"""Run the alerts with promtool: each fires in time after its fault, and is silent without the fault."""

import json
import re
from dataclasses import dataclass, field

import pytest
from panels import ALERTS, GRAFANA, RULES, RUNBOOK

#: There is a sample every 15 s; a fault begins in minute 5, and the test ends in minute 30.
INTERVAL, BEFORE, ALL = 15, 20, 120
FAULT_SECONDS = INTERVAL * BEFORE
#: Labels of each series; environments must not mix.
WHERE = {"cluster": "eu", "job": "reliq"}
(SETTING,) = [rule for group in RULES["groups"] for rule in group["rules"] if rule.get("record") == "reliq:runbook"]


def steady(value):
    return f"{value}x{ALL}"


def then(before, after):
    """A value, then another value from the fault on."""
    return f"{before}x{BEFORE - 1} {after}x{ALL - BEFORE}"


def rising(a_minute, start=0):
    """A value that rises from the fault on."""
    return f"{start}x{BEFORE - 1} {start}{a_minute * INTERVAL / 60:+g}x{ALL - BEFORE}"


def stops(a_minute):
    """A counter that stops rising at the fault."""
    step = a_minute * INTERVAL / 60
    return f"0+{step:g}x{BEFORE} {step * BEFORE:g}x{ALL - BEFORE}"


def growing(a_minute):
    """A counter that always rises."""
    return f"0+{a_minute * INTERVAL / 60:g}x{ALL}"


def series(name, **labels):
    """A series of an instance."""
    labels = {"instance": "a", **WHERE, **labels}
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in labels.items() if value)}}}"


def shop(name, **labels):
    """A series of a queue."""
    return series(name, queue="shop", **labels)


@dataclass(frozen=True)
class Case:
    """Series for which an alert fires within `minutes` after the fault, and series for which it must not fire."""

    fires: dict[str, str]
    silent: dict[str, str]
    minutes: float
    summary: str
    #: The labels of the alert: the queue, or the instance or cluster of the fault.
    labels: dict[str, str] = field(default_factory=lambda: {"queue": "shop", **WHERE})


def values(series, fires, silent):
    """Return one series for which an alert fires, and one for which it does not."""
    return {series: fires}, {series: silent}


def server(name, **labels):
    """A series of a Redis server."""
    return series(name, server="redis:6379", **labels)


def queue(text):
    """Return the summary of an alert of a queue: the cluster and the queue come first."""
    return f"eu: shop: {text}"


PAUSED = {shop("reliq_paused"): steady(1)}
INSTANCE = {"instance": "a", **WHERE}
SERVER = {"server": "redis:6379", **WHERE}
BACKLOG, OLDEST = shop("reliq_backlog"), "reliq_oldest_message_age_seconds"
ALIVE, GONE = {series("up"): steady(1)}, {series("up"): then(1, 0)}
FLEET = {series("reliq_workers", instance=name): steady(2) for name in "abc"}
LIMIT = {server("reliq_redis_memory_limit_bytes"): steady(100)}
CASES = {
    "ReliqBacklogGrowing": Case(
        {BACKLOG: rising(110), shop(OLDEST, state="ready"): then(0, 90)},
        {BACKLOG: rising(110), shop(OLDEST, state="ready"): then(0, 5)},
        5,
        queue("550 messages wait, and their number grows"),
    ),
    "ReliqOldestMessageTooOld": Case(
        *values(shop(OLDEST, state="ready"), rising(60), then(0, 170)),
        5,
        queue("a message has been due for 5m 0s"),
    ),
    "ReliqPausedLong": Case(
        {shop("reliq_paused"): f"0x{BEFORE - 1} 1x400", BACKLOG: "7x420"},
        {shop("reliq_paused"): f"0x{BEFORE - 1} 1x230 0x170", BACKLOG: "7x420"},
        61,
        "eu: shop has been paused for more than an hour; 7 messages wait",
    ),
    "ReliqKeyHeldUp": Case(
        *values(
            shop("reliq_key_blocked_seconds"),
            f"0x{BEFORE - 1} 0+{INTERVAL}x400",
            f"0x{BEFORE - 1} 0+{INTERVAL}x230 0x170",
        ),
        61,
        queue("no message of one key has started for 1h 1m 0s"),
    ),
    "ReliqTickLate": Case(
        *values(
            shop("reliq_cron_next_timestamp_seconds", entry="daily"),
            steady(FAULT_SECONDS),
            f"{INTERVAL}+{INTERVAL}x{ALL}",
        ),
        2.5,
        queue("the periodic job daily is 2m 30s late"),
        {"queue": "shop", "entry": "daily", **WHERE},
    ),
    "ReliqDeadLettersRising": Case(
        *values(shop("reliq_dead_total"), then(3, 5), steady(3)),
        0.5,
        queue("2 messages became dead letters within 15 minutes"),
    ),
    "ReliqMessagesExpiring": Case(
        *values(shop("reliq_expired_total"), then(0, 4), steady(4)),
        0.5,
        queue("4 messages expired before they could start, within 15 minutes"),
    ),
    "ReliqFailuresHigh": Case(
        {shop("reliq_nacked_total"): rising(30), shop("reliq_acked_total"): growing(70)},
        {shop("reliq_nacked_total"): rising(3), shop("reliq_acked_total"): growing(70)},
        15,
        queue("30 % of all attempts fail"),
    ),
    "ReliqLeasesLost": Case(
        *values(shop("reliq_leases_lost_total"), then(0, 1), steady(2)),
        0.5,
        queue("1 attempts ended after their lease had expired, within 15 minutes"),
    ),
    "ReliqAccountBroken": Case(
        {shop("reliq_messages_unaccounted"): then(0, 3), shop("reliq_messages_unaccounted", instance="b"): then(0, 3)},
        # One of two scrapers read the queue between two moves.
        {shop("reliq_messages_unaccounted"): then(0, 3), shop("reliq_messages_unaccounted", instance="b"): steady(0)},
        5.5,
        queue("3 messages are unaccounted for"),
    ),
    "ReliqQueueUnreadable": Case(
        {shop("reliq_queue_unreadable"): then(0, 1), server("reliq_redis_up"): steady(1)},
        {shop("reliq_queue_unreadable"): then(0, 1), server("reliq_redis_up"): then(1, 0)},
        1.5,
        queue("reliq cannot read the queue: a Redis key has a wrong type, the shard map is lost, or a shard is slow"),
    ),
    "ReliqTargetDown": Case(GONE, ALIVE, 2.5, "eu: Exporter or producer a (reliq) does not answer", INSTANCE),
    "ReliqNoWorkers": Case(
        ALIVE | {series("reliq_workers"): f"2x{BEFORE - 1} _x{ALL - BEFORE}"},
        # A separate Prometheus job scrapes the exporter.
        ALIVE | {series("reliq_workers"): steady(2), series("up", instance="b", job="reliq-exporter"): steady(1)},
        7.5,
        "eu: No worker process runs",
        {"cluster": "eu"},
    ),
    "ReliqWorkersLost": Case(
        FLEET | {series("reliq_workers", instance=name): f"2x{BEFORE - 1} _x{ALL - BEFORE}" for name in "bc"},
        # These workers do not answer: ReliqTargetDown fires.
        FLEET
        | {series("reliq_workers", instance=name): f"2x{BEFORE - 1} _x{ALL - BEFORE}" for name in "bc"}
        | {series("up", instance="c"): then(1, 0)},
        16,
        "eu: reliq: service discovery lists only 1 workers; there were more within the last 30 minutes",
        WHERE,
    ),
    "ReliqSlotsFull": Case(
        {series("reliq_slots_busy"): then(3, 16), series("reliq_slots"): steady(16), BACKLOG: steady(9)},
        # One look in five minutes finds a free slot more often than a full worker has.
        {
            series("reliq_slots_busy"): f"3x{BEFORE - 1} " + "16 16 12 8 " * 25,
            series("reliq_slots"): steady(16),
            BACKLOG: steady(9),
        },
        6.5,
        "eu: a: 100 % of the slots were busy over 5 minutes while messages wait",
        INSTANCE,
    ),
    "ReliqSlotsHung": Case(
        *values(series("reliq_slots_hung"), then(0, 2), f"0x{BEFORE - 1} 2x10 0x{ALL - BEFORE - 10}"),
        5.5,
        "eu: a: 2 slots are blocked by handlers that reliq cannot stop",
        INSTANCE,
    ),
    "ReliqWorkerStalled": Case(
        {series("reliq_last_claim_timestamp_seconds"): stops(60), server("reliq_redis_up"): steady(1)},
        {series("reliq_last_claim_timestamp_seconds"): growing(60), server("reliq_redis_up"): steady(1)},
        2.5,
        "eu: a: a worker process has not asked Redis for messages for 2m 30s; idle processes ask every second",
        INSTANCE,
    ),
    "ReliqWorkersRestarting": Case(
        {series("reliq_restarts_total", reason="killed"): then(0, 5)},
        {series("reliq_restarts_total", reason="jobs"): then(0, 5)},
        0.5,
        "eu: a: 5 worker processes died within 15 minutes",
        INSTANCE,
    ),
    "ReliqOutboxLate": Case(
        *values(series("reliq_outbox_oldest_seconds"), rising(60), then(0, 50)),
        4,
        "eu: reliq: the oldest row of the outbox has waited for 4m 0s, or the relay no longer reports",
        WHERE,
    ),
    "ReliqRedisDown": Case(
        {server("reliq_redis_up"): then(1, 0), server("reliq_redis_up", instance="b"): then(1, 0)},
        {server("reliq_redis_up"): steady(1)},
        1.5,
        "eu: Redis redis:6379 does not answer 2 workers and exporters",
        SERVER,
    ),
    "ReliqRedisSlow": Case(
        *values(server("reliq_redis_scrape_seconds"), then(0.01, 0.8), then(0.01, 0.4)),
        2.5,
        "eu: Redis redis:6379 needs 0.8 s for one read of the queues",
        SERVER,
    ),
    "ReliqRedisMemoryHigh": Case(
        LIMIT | {server("reliq_redis_memory_bytes"): then(5, 95)},
        LIMIT | {server("reliq_redis_memory_bytes"): f"5x{BEFORE - 1} " + "95 95 85 95 " * 25},
        5.5,
        "eu: Redis redis:6379 uses 95 % of maxmemory; at 100 % it refuses publishes",
        SERVER,
    ),
    "ReliqRedisRefuses": Case(
        {series("reliq_redis_errors_total", reason="refused"): rising(40)},
        {series("reliq_redis_errors_total", reason="away"): rising(40)},
        2.5,
        "eu: Redis refused 80 commands of reliq within 2 minutes",
        WHERE,
    ),
    "ReliqRedisEvicts": Case(
        {server("reliq_redis_eviction_enabled"): then(0, 1)},
        {server("reliq_redis_eviction_enabled"): steady(0), server("reliq_redis_evicted_keys_total"): steady(9)},
        0.5,
        "eu: Redis redis:6379 may delete messages when memory is short",
        SERVER,
    ),
    "ReliqRedisAofOff": Case(
        *values(server("reliq_redis_aof_enabled"), then(1, 0), steady(1)),
        10.5,
        "eu: Redis redis:6379 writes no append-only file: a restart loses messages",
        SERVER,
    ),
}
#: Further series for which an alert fires, or must not fire.
ALSO_FIRES = [
    ("ReliqRedisEvicts", {server("reliq_redis_evicted_keys_total"): then(0, 5)}),
    ("ReliqOldestMessageTooOld", {shop(OLDEST, state="pending"): then(0, 400)}),
    # A queue of the same name in another environment is paused.
    (
        "ReliqOldestMessageTooOld",
        CASES["ReliqOldestMessageTooOld"].fires | {shop("reliq_paused", job="other"): steady(1)},
    ),
    ("ReliqBacklogGrowing", {BACKLOG: rising(110), shop("reliq_go_layout"): steady(1)}),
    ("ReliqAccountBroken", {shop("reliq_messages_unaccounted"): then(0, -2)}),
    ("ReliqQueueUnreadable", {shop("reliq_shard_map_lost"): then(0, 1)}),
    ("ReliqNoWorkers", {series("unrelated"): steady(1)}),
]
ALSO_SILENT = [
    ("ReliqBacklogGrowing", CASES["ReliqBacklogGrowing"].fires | PAUSED),
    ("ReliqOldestMessageTooOld", CASES["ReliqOldestMessageTooOld"].fires | PAUSED),
    ("ReliqOldestMessageTooOld", {shop(OLDEST, state="unack"): then(0, 400)}),
    ("ReliqBacklogGrowing", CASES["ReliqBacklogGrowing"].fires | {BACKLOG: rising(-50, 9000)}),
    ("ReliqBacklogGrowing", CASES["ReliqBacklogGrowing"].fires | {BACKLOG: rising(1)}),
    ("ReliqKeyHeldUp", CASES["ReliqKeyHeldUp"].fires | {shop("reliq_paused"): f"1x{BEFORE + 400}"}),
    # Two failures in five minutes, all of a quiet queue.
    ("ReliqFailuresHigh", {shop("reliq_nacked_total"): growing(0.4), shop("reliq_acked_total"): growing(0.4)}),
    ("ReliqWorkerStalled", CASES["ReliqWorkerStalled"].fires | {server("reliq_redis_up"): steady(0)}),
    ("ReliqTargetDown", {series("up", job="something-else"): then(1, 0)}),
    (
        "ReliqRedisMemoryHigh",
        {server("reliq_redis_memory_bytes"): then(5, 95), server("reliq_redis_memory_limit_bytes"): steady(0)},
    ),
    ("ReliqSlotsFull", CASES["ReliqSlotsFull"].fires | {BACKLOG: steady(0)}),
]


def sight(alert, shown, *, fires):
    """Return a promtool test: the alert is silent before the fault, and as expected after it."""
    due = f"{FAULT_SECONDS + int(CASES[alert].minutes * 60)}s"
    count = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    return {
        "name": f"{alert} {'fires' if fires else 'is silent'}",
        "interval": f"{INTERVAL}s",
        "input_series": [{"series": name, "values": values} for name, values in shown.items()],
        "promql_expr_test": [{"expr": count, "eval_time": due, "exp_samples": [{"labels": "{}", "value": 1}] * fires}],
    }


def in_full(alert):
    """Return a promtool test: the alert fires in time, with its labels and texts, and not before the fault."""
    made, case = sight(alert, CASES[alert].fires, fires=True), CASES[alert]
    (rule,) = [rule for rule in ALERTS if rule["alert"] == alert]
    told = {
        "exp_labels": {**case.labels, "severity": rule["labels"]["severity"]},
        "exp_annotations": {
            "summary": case.summary,
            "description": rule["annotations"]["description"].replace("{{ $labels.queue }}", "shop"),
            "runbook_url": f"{SETTING['labels']['url']}#{alert}",
            "dashboard_url": SETTING["labels"]["dashboard"],
        },
    }
    due = made["promql_expr_test"][0]["eval_time"]
    made["alert_rule_test"] = [
        {"alertname": alert, "eval_time": f"{FAULT_SECONDS - 1}s", "exp_alerts": []},
        {"alertname": alert, "eval_time": due, "exp_alerts": [told]},
    ]
    return made


def test_promtool_accepts_rules_and_configuration(promtool):
    assert "SUCCESS" in promtool("check", "rules", GRAFANA / "rules.yml")
    assert "SUCCESS" in promtool("check", "config", GRAFANA / "prometheus.yml")


@pytest.mark.slow
def test_alerts_fire_in_time_with_their_texts_and_only_for_their_fault(promtool, tmp_path):
    assert {rule["alert"] for rule in ALERTS} == set(CASES)
    tests = [in_full(alert) for alert in CASES]
    tests += [sight(alert, case.silent, fires=False) for alert, case in CASES.items()]
    tests += [sight(alert, shown, fires=True) for alert, shown in ALSO_FIRES]
    tests += [sight(alert, shown, fires=False) for alert, shown in ALSO_SILENT]
    wanted = {"rule_files": [str(GRAFANA / "rules.yml")], "evaluation_interval": "15s", "tests": tests}
    (tmp_path / "tests.yml").write_text(json.dumps(wanted))

    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yml")


def test_alerts_have_a_severity_and_a_section_in_the_runbook():
    assert {rule["labels"]["severity"] for rule in ALERTS} <= {"warning", "critical"}
    for rule in ALERTS:
        alert = rule["alert"]
        section = RUNBOOK.partition(f'<a id="{alert}"></a>\n\n## {alert}\n')[2].partition("\n## ")[0]
        assert rule["annotations"]["runbook_url"].endswith(f"#{alert}")
        assert "\nreliq " in section, alert
    assert re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE) == [rule["alert"] for rule in ALERTS]
