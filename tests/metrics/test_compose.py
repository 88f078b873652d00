"""examples/compose.yaml, its image and Grafana's provisioning files match each other."""

import json
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import dockerfile
import pytest
import yaml
from panels import ALERTS, GRAFANA, ROOT

from reliq.cli.app import Commands

EXAMPLES = ROOT / "examples"
#: Without environment variables each setting has its default.
TEXT = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", (EXAMPLES / "compose.yaml").read_text("utf-8"))
COMPOSE = yaml.safe_load(TEXT)
SERVICES = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]


def mounts(name):
    """Return the mounts of a service: {place in the container: source}."""
    return {place: source for source, place, *_ in (one.split(":") for one in SERVICES[name].get("volumes", ()))}


def read(*names):
    return yaml.safe_load(GRAFANA.joinpath(*names).read_text("utf-8"))


def test_services_have_a_fixed_image_existing_files_and_ports_on_the_loopback_only():
    ports = [port.split(":") for service in SERVICES.values() for port in service.get("ports", ())]

    assert [one for one in SERVICES.values() if not re.search(r":v?\d+\.\d+", one.get("image", "built:1.0"))] == []
    assert {host for host, _, _ in ports} == {"127.0.0.1"}
    assert len({port for _, port, _ in ports}) == len(ports)
    assert {"ports", "container_name", "hostname"} & {*SERVICES["worker"], *SERVICES["exporter"]} == set(), "they scale"
    sources = {source for name in SERVICES for source in mounts(name).values()}
    assert [source for source in sources - set(COMPOSE["volumes"]) if not (EXAMPLES / source).exists()] == []


def test_commands_of_our_services_are_those_of_reliq_and_workers_have_time_to_stop():
    of_image = ["CMD", *json.loads(dict(dockerfile.stages()[-1])["HEALTHCHECK"].partition("CMD ")[2])]
    for name in OURS:
        check = SERVICES[name].get("healthcheck", {"test": of_image})["test"]
        for program, word, *rest in (shlex.split(SERVICES[name]["command"]), check[1:]):
            if program == "reliq":
                Commands.load(word).make_context(word, rest)
            else:
                assert (program, word) in {("python", "publish_errands.py"), ("python", "-c")}, name


def test_prometheus_reads_its_files_and_scrapes_workers_exporters_and_publishers():
    config = read("prometheus.yml")
    (job,) = config["scrape_configs"]
    files = {f"/etc/prometheus/{name}" for name in ("prometheus.yml", *config["rule_files"])}

    assert files <= set(mounts("prometheus"))
    assert {one["type"] for one in job["dns_sd_configs"]} == {"A"}, "each address of a scaled service"
    scraped = {(*one["names"], one["port"]) for one in job["dns_sd_configs"]}
    assert scraped == {("worker", 9464), ("exporter", 9465), ("shop", 9466)}
    assert "--metrics-port 9464 --metrics-host 0.0.0.0" in SERVICES["worker"]["command"]
    assert "exporter --host 0.0.0.0 --port 9465" in SERVICES["exporter"]["command"]
    assert SERVICES["shop"]["command"].endswith(" 0.0.0.0:9466")
    assert config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == ["alertmanager:9093"]
    grace = next(one.default for one in Commands.load("worker").params if one.name == "grace")

    assert float(SERVICES["worker"]["stop_grace_period"].removesuffix("s")) > grace + 5


def test_alerts_and_receivers_that_alertmanager_names_exist():
    text = (GRAFANA / "alertmanager.yml").read_text("utf-8")
    named = set(re.findall(r"Reliq\w+", text))

    assert len(named) > 1
    assert named <= {rule["alert"] for rule in ALERTS}
    assert set(re.findall(r"receiver: (\w+)", text)) <= {one["name"] for one in yaml.safe_load(text)["receivers"]}


def test_grafana_finds_its_data_sources_and_its_home():
    sources = {one["url"] for one in read("provisioning", "datasources", "prometheus.yml")["datasources"]}
    (provider,) = read("provisioning", "dashboards", "reliq.yml")["providers"]
    inside, environment = mounts("grafana"), SERVICES["grafana"]["environment"]
    home = environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]

    assert sources == {"http://prometheus:9090", "http://alertmanager:9093"}
    assert inside["/etc/grafana/provisioning"] == "../grafana/provisioning"
    assert inside[home] == "../grafana/dashboard.json"
    assert str(Path(home).parent) == provider["options"]["path"]


def test_image_runs_a_worker_without_root_and_without_a_shell():
    steps = dict(dockerfile.stages()[-1])
    health = json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])

    assert json.loads(steps["CMD"])[:2] == ["reliq", "worker"]
    assert health == ["reliq", "health", "live", "--port", steps["EXPOSE"]]
    assert int(steps["USER"]) > 0
    assert steps["STOPSIGNAL"] == "SIGTERM"
    for name in OURS:
        build = SERVICES[name]["build"]
        assert (EXAMPLES / build["context"]).resolve() == ROOT
        assert ROOT / build["dockerfile"] == dockerfile.DOCKERFILE


@pytest.mark.slow
def test_files_sent_to_the_builder_are_those_of_the_wheel(tmp_path):
    build, _ = dockerfile.stages()
    for name, rest in build:
        if name == "COPY":
            dockerfile.copy(rest.split(), tmp_path / "src")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, tmp_path / "src"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    inside = {name for name in zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist() if name.startswith("reliq/")}

    kinds = {".py", ".lua", ".typed", ".html", ".css", ".js", ".svg", ".toml", ".yaml"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "reliq").rglob("*") if path.suffix in kinds}
    assert inside == sources
    assert [name for name in ("reliq/__pycache__/a.pyc", ".git/HEAD", "secrets.env") if dockerfile.is_sent(name)] == []
