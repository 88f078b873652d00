"""The manifests of examples/kubernetes: they fit together, their probes tell what they are asked, their queries count."""

import json
import shutil
import subprocess
import urllib.error
import urllib.request

import dockerfile
import pytest
import yaml
from manifests import FOLDER, ROOT, may_be_read_only, pod, read, rules, start
from ports import free_port
from required import must_run_in_ci
from waiting import eventually

from reliq.cli.app import Commands
from reliq.embedded import EmbeddedRedis
from reliq.metrics.names import ALL
from reliq.process.plan import STOP_MARGIN_SECONDS

WORKLOADS = ("worker.yaml", "exporter.yaml", "relay.yaml")
each_workload = pytest.mark.parametrize("name", WORKLOADS)


def test_every_file_is_applied_or_told_of():
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))["resources"]

    assert listed == ["worker.yaml", "exporter.yaml", "podmonitor.yaml"]
    assert {path.name for path in FOLDER.iterdir()} - {*listed} == {
        "kustomization.yaml",
        "relay.yaml",
        "rules.py",
        "scaledobject.yaml",
    }


@each_workload
def test_a_container_runs_one_of_our_commands_and_serves_the_port_that_is_probed_and_scraped(name, monkeypatch):
    _, container = pod(name)
    program, word, *rest = container["args"]
    given = {one["name"] for one in container["env"]}
    monkeypatch.setenv("RELIQ_DATABASE", "sqlite:///shop.db")  # as the environment of its pod
    command = Commands.load(word).make_context(word, rest)
    [port] = container["ports"]
    [endpoint] = read("podmonitor.yaml")["PodMonitor"]["spec"]["podMetricsEndpoints"]

    assert program == "reliq"
    assert given == {"RELIQ_URL"} | ({"RELIQ_DATABASE"} if word == "relay" else set())
    assert port["containerPort"] == command.params.get("metrics_port", command.params.get("port"))
    assert command.params.get("metrics_host", command.params.get("host")) == "0.0.0.0"
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe["path"] for probe in probes] == ["/live", "/live", "/ready"]
    assert {probe["port"] for probe in probes} == {port["name"]} == {endpoint["port"]}


@each_workload
def test_labels_select_their_own_pods(name):
    deployment = read(name)["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]

    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert read("podmonitor.yaml")["PodMonitor"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels[read("podmonitor.yaml")["PodMonitor"]["spec"]["jobLabel"]] == "reliq"
    assert {
        name for name in WORKLOADS if read(name)["Deployment"]["spec"]["selector"] == deployment["spec"]["selector"]
    } == {name}


def test_a_worker_has_longer_to_stop_than_its_handlers_and_may_be_moved_one_at_a_time():
    spec, container = pod("worker.yaml")
    objects = read("worker.yaml")
    grace = Commands.load("worker").make_context("worker", container["args"][2:]).params["grace"]

    assert spec["terminationGracePeriodSeconds"] > grace + STOP_MARGIN_SECONDS
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert objects["PodDisruptionBudget"]["spec"]["selector"] == objects["Deployment"]["spec"]["selector"]
    assert (
        read("scaledobject.yaml")["ScaledObject"]["spec"]["scaleTargetRef"]["name"]
        == objects["Deployment"]["metadata"]["name"]
    )


@each_workload
def test_a_pod_has_no_more_rights_than_it_needs(name):
    spec, container = pod(name)

    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == int(dict(dockerfile.stages()[-1])["USER"])
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def answers(port, path):
    """Return the status of a probe, None when nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None


def test_the_probes_of_a_worker_whose_files_are_read_only_tell_its_start_an_outage_and_its_stop(tmp_path, server_path):
    if not may_be_read_only(tmp_path):
        pytest.skip("this user may not make a namespace of mounts, or not mount in it")
    _, container = pod("worker.yaml")
    redis, port = free_port(), free_port()
    worker = start(container, f"redis://127.0.0.1:{redis}/0", port, tmp_path)
    try:
        live, ready = (container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness"))
        eventually(lambda: answers(port, live) == 200, "the startup probe")
        away = answers(port, ready), answers(port, live)
        with EmbeddedRedis(server=server_path, port=redis):
            eventually(lambda: answers(port, ready) == 200, "the worker is ready")
            worker.terminate()
            said = worker.communicate(timeout=60)[0]
    finally:
        worker.kill()
        worker.communicate()

    assert (away, worker.returncode) == ((503, 200), 0), said
    assert all(json.loads(line) for line in said.splitlines() if line.startswith("{"))


def test_the_alerts_are_those_of_the_rules_but_one_that_is_left_out():
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


def test_from_zero_a_worker_is_wanted_for_what_waits_what_is_delivered_and_a_tick_that_comes(tmp_path):
    """At each minute one of them changes; a message that is not due, and another environment, want no worker."""
    if shutil.which("promtool") is None:
        must_run_in_ci("promtool is not installed (Debian: apt-get install prometheus)")
    triggers = read("scaledobject.yaml")["ScaledObject"]["spec"]["triggers"]
    messages, periodic = (one["metadata"]["query"] for one in triggers)
    wanted = {messages: (0, 3, 2, 0, 0), periodic: (0, 0, 0, 0, 1)}
    test = {
        "rule_files": [],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in QUEUES],
                "promql_expr_test": [
                    {"expr": query, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": value}]}
                    for query, values in wanted.items()
                    for minute, value in enumerate(values)
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))

    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert {name.partition("{")[0] for name, _ in QUEUES} <= set(ALL)
