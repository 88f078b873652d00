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


PAUSED = {shop("reliq_paused"): steady(1)}
INSTANCE = {"instance": "a", **WHERE}
STUCK = {shop("reliq_backlog"): then(0, 7), shop("reliq_claimed_total"): stops(60)}
WAITING = shop("reliq_messages", state="waiting")
ALIVE, GONE = {series("up"): steady(1)}, {series("up"): then(1, 0)}
CASES = {
    "ReliqBacklogGrowing": Case(
        *values(shop("reliq_backlog"), rising(110), rising(-50, 9000)),
        7,
        "shop: 770 messages wait, and their number grows",
    ),
    "ReliqOldestMessageTooOld": Case(
        *values(shop("reliq_oldest_message_age_seconds", state="ready"), rising(60), then(0, 170)),
        5,
        "shop: a message has been due for 5m 0s",
    ),
    "ReliqNobodyClaims": Case(
        STUCK,
        {shop("reliq_backlog"): then(0, 7), shop("reliq_claimed_total"): growing(60)},
        5,
        "shop: 7 messages wait and no worker takes them",
    ),
    "ReliqPausedLong": Case(
        *values(shop("reliq_paused"), f"0x{BEFORE - 1} 1x400", f"0x{BEFORE - 1} 1x230 0x170"),
        61,
        "shop has been paused for more than an hour",
    ),
    "ReliqKeyHeldUp": Case(
        *values(
            shop("reliq_key_blocked_seconds"),
            f"0x{BEFORE - 1} 0+{INTERVAL}x400",
            f"0x{BEFORE - 1} 0+{INTERVAL}x230 0x170",
        ),
        61,
        "shop: nothing of a key has started for 1h 1m 0s",
    ),
    "ReliqTickLate": Case(
        *values(
            shop("reliq_cron_next_timestamp_seconds", entry="daily"),
            steady(FAULT_SECONDS),
            f"{INTERVAL}+{INTERVAL}x{ALL}",
        ),
        2.5,
        "shop: a tick of the periodic entry daily is 2m 30s late",
        {"queue": "shop", "entry": "daily", **WHERE},
    ),
    "ReliqDeadLettersRising": Case(
        *values(shop("reliq_dead_total"), then(3, 5), steady(3)), 0.5, "shop: 2 messages died within 15 minutes"
    ),
    "ReliqLeasesLost": Case(
        *values(shop("reliq_leases_lost_total"), then(0, 1), steady(2)),
        0.5,
        "shop: 1 answers came after their lease, within 15 minutes",
    ),
    "ReliqRetryStorm": Case(
        {shop("reliq_nacked_total"): rising(60), shop("reliq_claimed_total"): growing(70)},
        {shop("reliq_nacked_total"): rising(20), shop("reliq_claimed_total"): growing(70)},
        14,
        "shop: more than half of all deliveries fail",
    ),
    "ReliqMessagesExpiring": Case(
        *values(shop("reliq_expired_total"), then(0, 4), steady(4)),
        0.5,
        "shop: 4 messages were gone before they could start",
    ),
    "ReliqAccountBroken": Case(
        {shop("reliq_messages_unaccounted"): then(0, 3), shop("reliq_messages_unaccounted", instance="b"): then(0, 3)},
        # One of two scrapers read the queue between two moves.
        {shop("reliq_messages_unaccounted"): then(0, 3), shop("reliq_messages_unaccounted", instance="b"): steady(0)},
        5.5,
        "shop: the account is wrong by 3 messages",
    ),
    "ReliqShardMapLost": Case(
        *values(shop("reliq_shard_map_lost"), then(0, 1), steady(0)), 2.5, "shop: Redis has lost the map of its shards"
    ),
    "ReliqTargetDown": Case(GONE, ALIVE, 2.5, "a (reliq) does not answer: a worker or exporter is gone", INSTANCE),
    "ReliqNoWorkers": Case(
        ALIVE | {series("reliq_workers"): f"2x{BEFORE - 1} _x{ALL - BEFORE}"},
        # A separate Prometheus job scrapes the exporter.
        ALIVE | {series("reliq_workers"): steady(2), series("up", instance="b", job="reliq-exporter"): steady(1)},
        7.5,
        "No worker process runs in eu",
        {"cluster": "eu"},
    ),
    "ReliqSlotsFull": Case(
        {series("reliq_slots_busy"): then(3, 16), series("reliq_slots"): steady(16), shop("reliq_backlog"): steady(9)},
        {series("reliq_slots_busy"): then(3, 16), series("reliq_slots"): steady(16), shop("reliq_backlog"): steady(0)},
        5.5,
        "a: 100 % of its slots are taken while messages wait",
        INSTANCE,
    ),
    "ReliqSlotsHung": Case(
        *values(series("reliq_slots_hung"), then(0, 2), f"0x{BEFORE - 1} 2x10 0x{ALL - BEFORE - 10}"),
        5.5,
        "a: 2 slots are lost to handlers that cannot be ended",
        INSTANCE,
    ),
    "ReliqWorkerStalled": Case(
        {series("reliq_last_claim_timestamp_seconds"): stops(60), series("reliq_redis_up"): steady(1)},
        {series("reliq_last_claim_timestamp_seconds"): growing(60), series("reliq_redis_up"): steady(1)},
        2.5,
        "a: a process has completed no claim round for 2m 30s",
        INSTANCE,
    ),
    "ReliqWorkersRestarting": Case(
        {series("reliq_restarts_total", reason="killed"): then(0, 5)},
        {series("reliq_restarts_total", reason="jobs"): then(0, 5)},
        0.5,
        "a: 5 processes died within 15 minutes",
        INSTANCE,
    ),
    "ReliqRedisDown": Case(
        *values(series("reliq_redis_up"), then(1, 0), steady(1)), 1.5, "a cannot reach Redis", INSTANCE
    ),
    "ReliqRedisMemoryHigh": Case(
        {series("reliq_redis_memory_bytes"): then(5, 95), series("reliq_redis_memory_limit_bytes"): steady(100)},
        {series("reliq_redis_memory_bytes"): then(5, 95), series("reliq_redis_memory_limit_bytes"): steady(0)},
        5.5,
        "Redis uses 95 % of its maxmemory: publishes will be refused",
        WHERE,
    ),
    "ReliqRedisEvicts": Case(
        {series("reliq_redis_eviction_enabled"): then(0, 1)},
        {series("reliq_redis_eviction_enabled"): steady(0), series("reliq_redis_evicted_keys_total"): steady(9)},
        0.5,
        "Redis may delete messages when memory is short",
        WHERE,
    ),
    "ReliqRedisAofOff": Case(
        *values(series("reliq_redis_aof_enabled"), then(1, 0), steady(1)),
        10.5,
        "Redis writes no append-only file: a restart loses messages",
        WHERE,
    ),
}
#: Further series for which an alert fires, or must not fire.
ALSO_FIRES = [
    ("ReliqRedisEvicts", {series("reliq_redis_evicted_keys_total"): then(0, 5)}),
    ("ReliqOldestMessageTooOld", {shop("reliq_oldest_message_age_seconds", state="pending"): then(0, 400)}),
    ("ReliqNobodyClaims", STUCK | {shop("reliq_go_layout"): steady(0)}),
    # Some keys wait for a worker, others sleep.
    ("ReliqNobodyClaims", STUCK | {WAITING: then(0, 7), shop("reliq_keys", state="in_turn"): then(0, 1)}),
    # A queue of the same name in another environment is healthy, or paused.
    ("ReliqNobodyClaims", STUCK | {shop("reliq_claimed_total", cluster="us"): growing(60)}),
    ("ReliqNobodyClaims", STUCK | {shop("reliq_paused", job="reliq-staging"): steady(1)}),
    ("ReliqAccountBroken", {shop("reliq_messages_unaccounted"): then(0, -2)}),
    ("ReliqNoWorkers", GONE),
    ("ReliqNoWorkers", {series("unrelated"): steady(1)}),
]
ALSO_SILENT = [
    ("ReliqBacklogGrowing", CASES["ReliqBacklogGrowing"].fires | PAUSED),
    ("ReliqOldestMessageTooOld", CASES["ReliqOldestMessageTooOld"].fires | PAUSED),
    ("ReliqNobodyClaims", STUCK | PAUSED),
    ("ReliqBacklogGrowing", {shop("reliq_backlog"): rising(1)}),
    # A Go program serves the queue; reliq claimed from it earlier, or never.
    ("ReliqNobodyClaims", STUCK | {shop("reliq_go_layout"): steady(1)}),
    ("ReliqNobodyClaims", STUCK | {shop("reliq_claimed_total"): steady(0), shop("reliq_go_layout"): steady(1)}),
    ("ReliqNobodyClaims", STUCK | {shop("reliq_backlog"): steady(0)}),
    # All waiting messages belong to keys that sleep or have no free place.
    ("ReliqNobodyClaims", STUCK | {WAITING: then(0, 7), shop("reliq_keys", state="in_turn"): steady(0)}),
    ("ReliqKeyHeldUp", CASES["ReliqKeyHeldUp"].fires | {shop("reliq_paused"): f"1x{BEFORE + 400}"}),
    ("ReliqOldestMessageTooOld", {shop("reliq_oldest_message_age_seconds", state="waiting"): then(0, 400)}),
    ("ReliqRetryStorm", {shop("reliq_nacked_total"): growing(1), shop("reliq_claimed_total"): growing(1)}),
    ("ReliqOldestMessageTooOld", {shop("reliq_oldest_message_age_seconds", state="unack"): then(0, 400)}),
    ("ReliqWorkerStalled", CASES["ReliqWorkerStalled"].fires | {series("reliq_redis_up"): steady(0)}),
    ("ReliqTargetDown", {series("up", job="something-else"): then(1, 0)}),
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
        "exp_annotations": {"summary": case.summary, "runbook_url": f"{SETTING['labels']['url']}#{alert}"},
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
