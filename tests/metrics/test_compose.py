"""examples/compose.yaml and the provisioning fit together: every file is there, every name is a service."""

import re

import yaml
from panels import GRAFANA, ROOT

COMPOSE = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text("utf-8"))
SERVICES = COMPOSE["services"]
#: What the specification of compose files allows a service to have, of what we use.
ALLOWED = {"image", "command", "volumes", "environment", "depends_on", "healthcheck", "stop_grace_period", "ports"}


def mounts(service):
    return [volume.split(":") for volume in service.get("volumes", ())]


def test_it_has_redis_worker_exporter_prometheus_and_grafana():
    assert {"redis", "worker", "exporter", "prometheus", "grafana"} <= set(SERVICES)


def test_every_service_is_well_formed():
    for name, service in SERVICES.items():
        assert set(service) <= ALLOWED, name
        assert re.fullmatch(r"[a-z0-9./-]+:[A-Za-z0-9.-]+", service["image"]), name
        depends = service.get("depends_on", [])
        assert set(depends) <= set(SERVICES), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_every_file_that_is_mounted_is_there_and_every_volume_is_named():
    for name, service in SERVICES.items():
        for source, target, *_ in mounts(service):
            assert target.startswith("/"), name
            assert source in COMPOSE["volumes"] or (ROOT / "examples" / source).exists(), (name, source)


def test_prometheus_scrapes_what_the_services_serve():
    config = yaml.safe_load((GRAFANA / "prometheus.yml").read_text("utf-8"))
    targets = {job["static_configs"][0]["targets"][0] for job in config["scrape_configs"]}

    assert targets == {"worker:9464", "exporter:9465"}
    assert "--metrics-port 9464 --metrics-host 0.0.0.0" in SERVICES["worker"]["command"]
    assert "exporter --host 0.0.0.0" in SERVICES["exporter"]["command"]
    inside = {target for _, target, *_ in mounts(SERVICES["prometheus"])}
    assert {f"/etc/prometheus/{name}" for name in ("prometheus.yml", *config["rule_files"])} == inside


def test_grafana_finds_its_data_source_and_its_dashboard():
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/reliq.yml").read_text())["providers"]
    inside = {target: source for source, target, *_ in mounts(SERVICES["grafana"])}

    assert source["url"] == "http://prometheus:9090"
    assert inside["/etc/grafana/provisioning"] == "../grafana/provisioning"
    assert inside[f"{provider['options']['path']}/reliq.json"] == "../grafana/dashboard.json"
