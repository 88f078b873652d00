"""examples/compose.yaml, its image and the provisioning fit together, and Prometheus finds every container of a service."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import dockerfile
import pytest
import yaml
from compose_file import EXAMPLES, SERVICES, VOLUMES, health_check, mounts
from panels import GRAFANA, ROOT
from required import must_run_in_ci

from reliq.cli.app import Commands

HERE = Path(__file__).parent
OURS = [name for name, service in SERVICES.items() if "build" in service]
each_service = pytest.mark.parametrize("name", SERVICES)
#: What the specification of compose files lets a service have, of what we use.
ALLOWED = {
    *("build", "image", "init", "command", "volumes", "environment", "depends_on", "healthcheck"),
    *("stop_grace_period", "ports", "restart"),
}
#: What the documentation of Alertmanager lets each part of its file have, of what we use.
ROUTE = {"receiver", "group_by", "group_wait", "group_interval", "repeat_interval", "matchers", "routes"}
INHIBITION = {"source_matchers", "target_matchers", "equal"}


def read(*names):
    return yaml.safe_load(GRAFANA.joinpath(*names).read_text("utf-8"))


def test_it_has_a_publisher_workers_and_everything_that_watches_them():
    assert set(SERVICES) == {"redis", "worker", "exporter", "shop", "web", "prometheus", "alertmanager", "grafana"}


@each_service
def test_every_service_is_well_formed_watched_and_started_again(name):
    service = SERVICES[name]

    assert set(service) <= ALLOWED
    assert ("build" in service) != ("image" in service)
    assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+[A-Za-z0-9.-]*", service.get("image", "built:1.0"))
    assert set(service.get("depends_on", ())) <= set(SERVICES) - {name}
    assert health_check(name)[0] == "CMD"
    assert service["restart"] == "unless-stopped"


@each_service
def test_no_port_is_open_to_other_machines_and_none_is_given_twice(name):
    ports = [port.split(":") for port in SERVICES[name].get("ports", ())]
    all_ports = [port.split(":")[1] for service in SERVICES.values() for port in service.get("ports", ())]

    assert {host for host, _, _ in ports} <= {"127.0.0.1"}
    assert len(all_ports) == len(set(all_ports))


@each_service
def test_every_file_that_is_mounted_is_there_and_every_volume_is_named(name):
    for place, source in mounts(name).items():
        assert place.startswith("/")
        assert source in VOLUMES or (EXAMPLES / source).exists(), source


def test_every_volume_is_used_and_each_database_has_one():
    used = {source for name in SERVICES for source in mounts(name).values() if source in VOLUMES}

    assert used == set(VOLUMES) == {"redis", "prometheus", "alertmanager", "grafana"}


@pytest.mark.parametrize("name", ["worker", "exporter"])
def test_a_scraped_service_can_be_scaled(name):
    assert {"ports", "container_name", "hostname"} & set(SERVICES[name]) == set()


@pytest.mark.parametrize("name", OURS)
def test_the_commands_of_our_services_are_ours_and_no_shell_stands_before_them(name):
    commands = [shlex.split(SERVICES[name]["command"]), health_check(name)[1:]]

    for program, *words in commands:
        if program == "reliq":
            command = Commands.load(words[0])
            command.make_context(words[0], words[1:])
        else:
            assert program == "python"
            assert words[0] in {"publish_errands.py", "-c"}


@pytest.mark.parametrize("name", OURS)
def test_our_services_have_longer_to_stop_than_their_handlers(name):
    grace = next(one.default for one in Commands.load("worker").params if one.name == "grace")

    assert name != "worker" or float(SERVICES[name]["stop_grace_period"].removesuffix("s")) > grace + 5


def test_prometheus_scrapes_each_address_of_what_the_services_serve():
    config = read("prometheus.yml")
    (job,) = config["scrape_configs"]
    places = {(*one["names"], one["port"]) for one in job["dns_sd_configs"]}

    assert {one["type"] for one in job["dns_sd_configs"]} == {"A"}
    assert places == {("worker", 9464), ("exporter", 9465)}
    assert "--metrics-port 9464 --metrics-host 0.0.0.0" in SERVICES["worker"]["command"]
    assert "exporter --host 0.0.0.0 --port 9465" in SERVICES["exporter"]["command"]
    assert {f"/etc/prometheus/{name}" for name in ("prometheus.yml", *config["rule_files"])} <= set(
        mounts("prometheus")
    )


def test_promtool_accepts_the_configuration(promtool):
    assert "is valid prometheus config file syntax" in promtool("check", "config", GRAFANA / "prometheus.yml")


def routes(route):
    return [route, *(one for child in route.get("routes", ()) for one in routes(child))]


def test_alertmanager_is_told_of_alerts_and_knows_whom_to_tell():
    config = read("alertmanager.yml")
    receivers = {one["name"] for one in config["receivers"]}
    targets = read("prometheus.yml")["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]

    assert targets == ["alertmanager:9093"]
    assert set(config) <= {"global", "route", "receivers", "inhibit_rules"}
    for route in routes(config["route"]):
        assert set(route) <= ROUTE
        assert route.get("receiver", "people") in receivers
        assert all(re.fullmatch(r"\d+[smh]", route[name]) for name in route if name.endswith(("_wait", "_interval")))
    assert all(set(rule) == INHIBITION for rule in config["inhibit_rules"])


def test_the_alerts_that_alertmanager_names_are_rules():
    rules = {rule.get("alert") for group in read("rules.yml")["groups"] for rule in group["rules"]}
    named = set(re.findall(r"Reliq\w+", (GRAFANA / "alertmanager.yml").read_text("utf-8")))

    assert len(named) > 1
    assert named - rules == set()


def test_grafana_finds_its_data_sources_and_its_home():
    sources = {one["uid"]: one for one in read("provisioning", "datasources", "prometheus.yml")["datasources"]}
    (provider,) = read("provisioning", "dashboards", "reliq.yml")["providers"]
    inside, environment = mounts("grafana"), SERVICES["grafana"]["environment"]
    home = environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]

    assert {one["url"] for one in sources.values()} == {"http://prometheus:9090", "http://alertmanager:9093"}
    assert sources["prometheus"]["jsonData"]["timeInterval"] == read("prometheus.yml")["global"]["scrape_interval"]
    assert inside["/etc/grafana/provisioning"] == "../grafana/provisioning"
    assert inside[home] == "../grafana/dashboard.json"
    assert str(Path(home).parent) == provider["options"]["path"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_grafana_finds_every_folder_that_it_looks_for():
    folders = {path.name: list(path.glob("*.yml")) for path in (GRAFANA / "provisioning").iterdir()}

    assert set(folders) == {"datasources", "dashboards", "plugins", "alerting"}
    assert all(
        yaml.safe_load(file.read_text("utf-8"))["apiVersion"] == 1 for files in folders.values() for file in files
    )


def test_the_image_runs_a_worker_without_root_and_without_a_shell():
    build, image = dockerfile.stages()
    steps = dict(image)
    command, health = json.loads(steps["CMD"]), json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])
    names = [name for name, _ in image]

    assert command[:2] == ["reliq", "worker"]
    assert health == ["reliq", "health", "live", "--port", steps["EXPOSE"]]
    assert f"--metrics-port {steps['EXPOSE']} " in SERVICES["worker"]["command"]
    assert int(steps["USER"]) > 0
    assert "RUN" not in names[names.index("USER") :]
    assert steps["STOPSIGNAL"] == "SIGTERM"
    assert {name for name, _ in build} == {"FROM", "WORKDIR", "COPY", "RUN"}


@pytest.mark.parametrize("name", OURS)
def test_each_of_our_services_runs_that_image(name):
    build = SERVICES[name]["build"]

    assert (EXAMPLES / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == dockerfile.DOCKERFILE


def test_what_is_sent_to_the_builder_suffices_for_the_wheel_and_is_no_more(tmp_path):
    build, _ = dockerfile.stages()
    for name, rest in build:
        if name == "COPY":
            dockerfile.copy(rest.split(), tmp_path / "src")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, tmp_path / "src"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    inside = {name for name in zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist() if name.startswith("reliq/")}

    kinds = {".py", ".lua", ".typed", ".html", ".css", ".js", ".svg"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "reliq").rglob("*") if path.suffix in kinds}
    assert inside == sources
    assert [name for name in ("reliq/__pycache__/a.pyc", ".git/HEAD", "secrets.env") if dockerfile.is_sent(name)] == []


ISOLATED = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_a_worker_scaled_to_three_is_scraped_three_times(tmp_path):
    for program, package in (("prometheus", "prometheus"), ("redis-cli", "redis-tools")):
        if shutil.which(program) is None:
            must_run_in_ci(f"{program} is not installed (Debian: apt-get install {package})")
    if subprocess.run([*ISOLATED, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a network namespace")

    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    command = [*ISOLATED, sys.executable, HERE / "composed.py", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    logs = {path.name: path.read_text("utf-8")[-2000:] for path in tmp_path.glob("*.log")}
    assert done.returncode == 0, (done.stderr, logs)
    said = json.loads(done.stdout)
    workers = [[f"127.0.0.{number}:9464", "reliq", "demo"] for number in (2, 3, 4)]
    assert said["targets"] == [*workers, ["127.0.0.5:9465", "reliq", "demo"]]
    assert said["alertmanagers"] == ["http://alertmanager:9093/api/v2/alerts"]
    assert said["unhealthy"] == []
    # The shop has `init: true`, because a Python program as the first process would not hear SIGTERM.
    assert said["ended"] == {"redis": 0, "worker": 0, "exporter": 0, "web": 0, "prometheus": 0, "shop": -15}
