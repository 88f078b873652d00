"""Every alert fires when it should and is silent when it should not, by Prometheus' own tool."""

import json
from typing import NamedTuple

import pytest
from panels import ALERTS, GRAFANA, RUNBOOK

Q = '{queue="shop",instance="a"}'


class Case(NamedTuple):
    """Series (a value each minute) with which an alert fires within `minutes`, and with which it must not."""

    fires: dict[str, str]
    silent: dict[str, str]
    minutes: int = 40


def state(name, which, **more):
    labels = {"queue": "shop", "state": which, "instance": "a", **more}
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in labels.items())}}}"


READY = state("reliq_messages", "ready")
PAUSED = {f"reliq_paused{Q}": "1x60"}
CASES = {
    "ReliqBacklogGrowing": Case({READY: "0+50x60"}, {READY: "5000-50x60"}),
    "ReliqOldestMessageTooOld": Case(
        {state("reliq_oldest_seconds", "ready"): "0+60x60"}, {state("reliq_oldest_seconds", "ready"): "250x60"}
    ),
    "ReliqNobodyClaims": Case(
        {READY: "7x60", f"reliq_claimed_total{Q}": "5x60"}, {READY: "7x60", f"reliq_claimed_total{Q}": "5+60x60"}
    ),
    "ReliqDeadLettersRising": Case({f"reliq_dead_total{Q}": "0x30 1x30"}, {f"reliq_dead_total{Q}": "3x60"}),
    "ReliqLeasesLost": Case({f"reliq_leases_lost_total{Q}": "0x30 1x30"}, {f"reliq_leases_lost_total{Q}": "2x60"}),
    "ReliqRetryStorm": Case(
        {f"reliq_nacked_total{Q}": "0+60x60", f"reliq_claimed_total{Q}": "0+70x60"},
        {f"reliq_nacked_total{Q}": "0+20x60", f"reliq_claimed_total{Q}": "0+70x60"},
    ),
    "ReliqMessagesExpiring": Case({f"reliq_expired_total{Q}": "0x30 4x30"}, {f"reliq_expired_total{Q}": "4x60"}),
    "ReliqWorkerStalled": Case(
        {'reliq_last_claim_timestamp_seconds{instance="a"}': "0x60", 'reliq_redis_up{instance="a"}': "1x60"},
        {'reliq_last_claim_timestamp_seconds{instance="a"}': "0+60x60", 'reliq_redis_up{instance="a"}': "1x60"},
    ),
    "ReliqWorkersRestarting": Case(
        {'reliq_restarts_total{reason="killed",instance="a"}': "0+1x60"},
        {'reliq_restarts_total{reason="jobs",instance="a"}': "0+1x60"},
    ),
    "ReliqRedisDown": Case({'reliq_redis_up{instance="a"}': "1x30 0x30"}, {'reliq_redis_up{instance="a"}': "1x60"}),
    "ReliqRedisEvicts": Case(
        {'reliq_redis_eviction_enabled{instance="a"}': "1x60"},
        {
            'reliq_redis_eviction_enabled{instance="a"}': "0x60",
            'reliq_redis_evicted_keys_total{instance="a"}': "9x60",
        },
    ),
    "ReliqRedisAofOff": Case(
        {'reliq_redis_aof_enabled{instance="a"}': "0x60"}, {'reliq_redis_aof_enabled{instance="a"}': "1x60"}
    ),
}
#: Further sights with which an alert fires, or must not.
ALSO_FIRES = [
    ("ReliqRedisEvicts", {'reliq_redis_evicted_keys_total{instance="a"}': "0x30 5x30"}),
    ("ReliqOldestMessageTooOld", {state("reliq_oldest_seconds", "pending"): "400x60"}),
    ("ReliqOldestMessageTooOld", CASES["ReliqOldestMessageTooOld"].fires | {f"reliq_shared{Q}": "1x60"}),
    ("ReliqNobodyClaims", CASES["ReliqNobodyClaims"].fires | {f"reliq_shared{Q}": "0x60"}),
]
ALSO_SILENT = [
    *(
        (name, CASES[name].fires | PAUSED)
        for name in ("ReliqBacklogGrowing", "ReliqOldestMessageTooOld", "ReliqNobodyClaims")
    ),
    ("ReliqBacklogGrowing", {READY: "0+1x60"}),
    # A Go program works on the queue; reliq has claimed from it before, or never.
    ("ReliqNobodyClaims", CASES["ReliqNobodyClaims"].fires | {f"reliq_shared{Q}": "1x60"}),
    ("ReliqNobodyClaims", {READY: "7x60", f"reliq_claimed_total{Q}": "0x60", f"reliq_shared{Q}": "1x60"}),
    ("ReliqNobodyClaims", {READY: "0x60", f"reliq_claimed_total{Q}": "5x60"}),
    ("ReliqRetryStorm", {f"reliq_nacked_total{Q}": "0+1x60", f"reliq_claimed_total{Q}": "0+1x60"}),
    ("ReliqOldestMessageTooOld", {state("reliq_oldest_seconds", "unack"): "400x60"}),
    ("ReliqWorkerStalled", CASES["ReliqWorkerStalled"].fires | {'reliq_redis_up{instance="a"}': "0x60"}),
]


def sight(alert, series, *, fires):
    """One test in promtool's own words."""
    return {
        "name": f"{alert} {'fires' if fires else 'is silent'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": f"{CASES[alert].minutes}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }


def test_every_alert_has_a_case():
    assert {rule["alert"] for rule in ALERTS} == set(CASES)


def test_promtool_is_content_with_config_and_rules(promtool):
    assert "SUCCESS" in promtool("check", "rules", GRAFANA / "rules.yml")
    assert "SUCCESS" in promtool("check", "config", GRAFANA / "prometheus.yml")


def test_every_alert_fires_when_it_should_and_is_silent_when_it_should_not(promtool, tmp_path):
    tests = [sight(alert, case.fires, fires=True) for alert, case in CASES.items()]
    tests += [sight(alert, case.silent, fires=False) for alert, case in CASES.items()]
    tests += [sight(alert, series, fires=True) for alert, series in ALSO_FIRES]
    tests += [sight(alert, series, fires=False) for alert, series in ALSO_SILENT]
    wanted = {"rule_files": [str(GRAFANA / "rules.yml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(json.dumps(wanted))

    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yml")


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_severity_a_summary_and_a_section_in_the_runbook(rule):
    file, _, anchor = rule["annotations"]["runbook_url"].partition("#")

    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"]
    assert file == "grafana/RUNBOOK.md"
    assert anchor == rule["alert"].lower()
    section = RUNBOOK.partition(f"\n## {rule['alert']}\n")[2].partition("\n## ")[0]
    assert "**Look**" in section
    assert "**Do**" in section
