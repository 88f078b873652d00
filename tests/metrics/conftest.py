"""Real workers, a real exporter and a real Prometheus."""

import json
import shutil
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from patience import Prometheus, get
from ports import free_port
from required import must_run_in_ci
from waiting import eventually
from worker_process import Command, environment_for

from reliq.metrics.snapshot import SnapshotReader
from reliq.redis.client import Client
from reliq.redis.server import Connection

HERE = Path(__file__).parent
GRAFANA = HERE.parents[1] / "grafana"


@pytest.fixture
def environment(url, monkeypatch):
    """Return a user's environment, with the jobs in this folder and the test's Redis."""
    monkeypatch.setenv("RELIQ_URL", url)
    monkeypatch.syspath_prepend(str(HERE))
    return environment_for(HERE, url)


@pytest.fixture
def jobs(environment):
    """Return the module with the workers' handlers."""
    import monitored

    return monitored


@pytest.fixture
def patient_looks(monkeypatch):
    """Let reads of metrics wait longer for Redis, because the machine of the tests may be slow."""
    monkeypatch.setattr("reliq.metrics.serving.SCRAPE_REPLY_SECONDS", 30.0)
    monkeypatch.setattr("reliq.metrics.queues.SCRAPE_SECONDS", 60.0)


@pytest.fixture
def connection(url, patient_looks):
    yield Connection.to(url)
    Connection.to(url).close()


@pytest.fixture
def reader(connection):
    """Return a reader of snapshots of the queues with these keys, or of the queues in the registry."""

    def of(*keys, **options):
        return SnapshotReader(Client(connection.wire(5.0)), *([lambda: list(keys)] if keys else []), **options)

    return of


@pytest.fixture
def command(environment):
    """Start `reliq` commands; stop them at the end of the test."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(closing(Command(HERE, environment, *arguments)))


@pytest.fixture
def worker(command):
    """Start a worker; return it with its metrics port when all processes are ready."""

    def start(*options, processes=2, app="monitored:consumer"):
        port = free_port()
        options = ("--processes", str(processes), "--metrics-port", str(port), "--grace", "1", *options)
        running = command("worker", app, *options)
        eventually(lambda: get(port, "/ready")[0] == 200, f"the worker is ready: {running.lines}")
        return running, port

    return start


@pytest.fixture
def promtool():
    """Run promtool and return its output; it must succeed."""
    found = shutil.which("promtool") or must_run_in_ci("promtool is not installed (Debian: apt-get install prometheus)")

    def run(*arguments):
        done = subprocess.run([found, *map(str, arguments)], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def prometheus(tmp_path):
    """Start a Prometheus with rules that scrapes local ports twice a second."""
    found = shutil.which("prometheus") or must_run_in_ci("Prometheus is not installed (apt-get install prometheus)")
    with ExitStack() as stack:

        def start(rules, *ports):
            targets = {"targets": [f"127.0.0.1:{port}" for port in ports], "labels": {"cluster": "test"}}
            config = {
                "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
                "rule_files": [str(rules)],
                "scrape_configs": [{"job_name": "reliq", "static_configs": [targets]}],
            }
            (tmp_path / "prometheus.yml").write_text(json.dumps(config))
            running = Prometheus(free_port())
            options = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
            options += [f"--web.listen-address=127.0.0.1:{running.port}", "--log.level=error"]
            process = stack.enter_context(subprocess.Popen([found, *options], stderr=subprocess.DEVNULL))
            stack.callback(process.kill)
            eventually(lambda: running.ask(f"count(up == 1) == {len(ports)}"), "Prometheus scrapes")
            return running

        yield start
