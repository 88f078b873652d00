"""The manifests of examples/kubernetes fit together; their probes and queries work."""

import json
import shutil

import dockerfile
import pytest
import yaml
from manifests import ROOT, may_be_read_only, pod, read, rules, start
from ports import free_port
from programs import answer, run
from required import must_run_in_ci
from waiting import eventually

from reliq.cli.app import Commands
from reliq.metrics.names import ALL
from reliq.supervisor.plan import STOP_MARGIN_SECONDS
from reliq.testing.server import EmbeddedRedis

WORKLOADS = ("worker.yaml", "exporter.yaml", "relay.yaml")


def test_containers_run_our_commands_and_serve_the_probed_port(monkeypatch):
    monkeypatch.setenv("RELIQ_DATABASE", "sqlite:///shop.db")  # as in the pod
    [endpoint] = read("podmonitor.yaml")["PodMonitor"]["spec"]["podMetricsEndpoints"]
    for name in WORKLOADS:
        _, container = pod(name)
        program, word, *rest = container["args"]
        command = Commands.load(word).make_context(word, rest)
        [port] = container["ports"]

        assert program == "reliq"
        assert {"RELIQ_URL"} <= {one["name"] for one in container["env"]}
        assert port["containerPort"] == command.params.get("metrics_port", command.params.get("port"))
        assert command.params.get("metrics_host", command.params.get("host")) == "0.0.0.0"
        probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
        assert [probe["path"] for probe in probes] == ["/live", "/live", "/ready"]
        assert {probe["port"] for probe in probes} == {port["name"]} == {endpoint["port"]}


def test_labels_select_the_pods_of_their_own_deployment():
    monitor = read("podmonitor.yaml")["PodMonitor"]["spec"]
    for name in WORKLOADS:
        deployment = read(name)["Deployment"]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        selector = deployment["spec"]["selector"]

        assert selector["matchLabels"].items() | monitor["selector"]["matchLabels"].items() <= labels.items()
        assert labels[monitor["jobLabel"]] == "reliq"
        assert [one for one in WORKLOADS if read(one)["Deployment"]["spec"]["selector"] == selector] == [name]


def test_worker_has_longer_to_stop_than_its_handlers_and_is_moved_one_at_a_time():
    spec, container = pod("worker.yaml")
    objects = read("worker.yaml")
    grace = Commands.load("worker").make_context("worker", container["args"][2:]).params["grace"]
    scaled = read("scaledobject.yaml")["ScaledObject"]["spec"]["scaleTargetRef"]["name"]

    assert spec["terminationGracePeriodSeconds"] > grace + STOP_MARGIN_SECONDS
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert objects["PodDisruptionBudget"]["spec"]["selector"] == objects["Deployment"]["spec"]["selector"]
    assert scaled == objects["Deployment"]["metadata"]["name"]


def test_pods_have_no_rights_that_they_do_not_need():
    for name in WORKLOADS:
        spec, container = pod(name)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == int(dict(dockerfile.stages()[-1])["USER"])
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.slow
def test_probes_of_a_worker_with_read_only_files_report_start_outage_and_stop(tmp_path, server_path):
    if not may_be_read_only(tmp_path):
        pytest.skip("this user may not make a namespace of mounts, or not mount in it")
    _, container = pod("worker.yaml")
    redis, port = free_port(), free_port()
    worker = start(container, f"redis://127.0.0.1:{redis}/0", port, tmp_path)
    try:
        live, ready = (container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness"))
        eventually(lambda: answer(port, live)[0] == 200, "the startup probe")
        away = answer(port, ready)[0], answer(port, live)[0]
        with EmbeddedRedis(server=server_path, port=redis):
            eventually(lambda: answer(port, ready)[0] == 200, "the worker is ready")
            worker.terminate()
            said = worker.communicate(timeout=60)[0]
    finally:
        worker.kill()
        worker.communicate()

    assert (away, worker.returncode) == ((503, 200), 0), said
    assert all(json.loads(line) for line in said.splitlines() if line.startswith("{"))


def test_prometheus_rule_has_our_alerts_without_those_left_out():
    ours = yaml.safe_load((ROOT / "grafana" / "rules.yml").read_text("utf-8"))["groups"]
    every, fewer = (yaml.safe_load(rules(*words).stdout) for words in ((), ("--without", "ReliqNoWorkers")))
    [group], [left] = every["spec"]["groups"], fewer["spec"]["groups"]

    assert every["kind"] == "PrometheusRule"
    assert [group] == ours
    assert [rule for rule in group["rules"] if rule not in left["rules"]] == [
        rule for rule in group["rules"] if rule.get("alert") == "ReliqNoWorkers"
    ]
    assert "no alert of " in rules("--without", "NoSuchAlert").stderr


QUEUES = [
    ('reliq_backlog{cluster="demo", queue="orders", instance="a"}', "0 3 0 0 0"),
    ('reliq_backlog{cluster="demo", queue="orders", instance="b"}', "0 3 0 0 0"),
    ('reliq_backlog{cluster="other", queue="orders"}', "9 9 9 9 9"),
    ('reliq_messages{cluster="demo", queue="orders", state="unack"}', "0 0 2 0 0"),
    ('reliq_messages{cluster="demo", queue="orders", state="pending"}', "5 5 5 5 5"),
    ('reliq_cron_next_timestamp_seconds{cluster="demo", queue="orders", entry="report"}', "3600 3600 3600 3600 330"),
]


def test_scaling_from_zero_counts_backlog_deliveries_and_the_next_tick(tmp_path):
    """One value changes each minute; messages that are not due, or in another environment, need no worker."""
    if shutil.which("promtool") is None:
        must_run_in_ci("promtool is not installed (Debian: apt-get install prometheus)")
    triggers = read("scaledobject.yaml")["ScaledObject"]["spec"]["triggers"]
    messages, periodic = (one["metadata"]["query"] for one in triggers)
    wanted = {messages: (0, 3, 2, 0, 0), periodic: (0, 0, 0, 0, 1)}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in QUEUES],
        "promql_expr_test": [
            {"expr": query, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": value}]}
            for query, values in wanted.items()
            for minute, value in enumerate(values)
        ],
    }
    test = {"rule_files": [], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))

    done = run("promtool", "test", "rules", tmp_path / "test.yml")

    assert done.returncode == 0, done.stdout + done.stderr
    assert {name.partition("{")[0] for name, _ in QUEUES} <= set(ALL)
