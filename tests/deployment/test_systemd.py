"""The units of examples/systemd: systemd accepts them, and their worker tells it what it waits for."""

import os
import re
import shutil
import socket
import subprocess

import pytest
from ports import free_port
from required import must_run_in_ci
from unit import OURS, PROGRAM, UNITS, Manager, command, settings

from reliq.cli.app import Commands
from reliq.embedded import EmbeddedRedis
from reliq.process.plan import STOP_MARGIN_SECONDS
from reliq.process.service_manager import EXIT_SECONDS, EXTEND_SECONDS, ServiceManager

WORKER, EXPORTER = "reliq-worker.service", "reliq-exporter.service"
GRACE = 25


@pytest.fixture
def managed(tmp_path):
    """Start a service under a manager of ours; what it leaves is ended."""
    started = []

    def start(words, url, **options):
        started.append(Manager(words, tmp_path, {**os.environ, "RELIQ_URL": url}, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.parametrize("name", [WORKER, EXPORTER])
def test_systemd_accepts_a_unit_without_a_word(name, tmp_path):
    if shutil.which("systemd-analyze") is None:
        must_run_in_ci("systemd-analyze is not installed (Debian: apt-get install systemd)")
    text = (UNITS / name).read_text("utf-8")
    assert text.count(PROGRAM) == 1
    (tmp_path / name).write_text(text.replace(PROGRAM, OURS[PROGRAM]))

    done = subprocess.run(["systemd-analyze", "verify", tmp_path / name], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", [WORKER, EXPORTER])
def test_the_command_of_a_unit_is_one_of_ours(name):
    _, word, *rest = command(name, 9464)

    Commands.load(word).make_context(word, rest)


def test_a_stop_has_more_time_than_handlers_and_what_cannot_work_is_not_started_again():
    unit = settings(WORKER)
    [grace] = re.findall(r"--grace (\d+)", unit["ExecStart"])

    assert int(unit["TimeoutStopSec"]) > int(grace) + STOP_MARGIN_SECONDS + EXIT_SECONDS
    assert int(grace) == next(one.default for one in Commands.load("worker").params if one.name == "grace")
    assert (unit["Type"], unit["KillMode"], unit["OOMPolicy"]) == ("notify", "mixed", "continue")
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("always", "2 78")


def test_a_worker_asks_for_time_while_redis_is_away_is_ready_alive_and_stopping_and_leaves_nothing(
    managed, server_path
):
    port = free_port()
    service = managed(command(WORKER, free_port()), f"redis://127.0.0.1:{port}/0")
    service.hears(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1e6:.0f}")
    before = service.lines()

    with EmbeddedRedis(server=server_path, port=port):
        service.hears("READY=1")
        service.hears("WATCHDOG=1", times=3)
        inherited = [one.environ() for one in service.members() if one.pid != service.process.pid]
        code = service.stop()

    assert code == 0, service.said
    assert "READY=1" not in before
    assert "STATUS=starting: process 0, 1, 2, 3" in before
    assert service.lines().count("READY=1") == 1
    assert "STATUS=processes: 4" in service.lines()
    longest = int((GRACE + STOP_MARGIN_SECONDS + EXIT_SECONDS) * 1e6)
    assert service.told[-1].splitlines() == ["STOPPING=1", f"EXTEND_TIMEOUT_USEC={longest}", "STATUS=stopping"]
    assert service.members() == []
    assert len(inherited) >= 4
    assert [one for one in inherited if "NOTIFY_SOCKET" in one or "WATCHDOG_USEC" in one] == []


def test_a_name_in_linuxs_own_namespace_is_an_address_too(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0reliq-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@reliq-{os.getpid()}")

        ServiceManager().look([])

        assert heard.recv(4096) == b"READY=1\nSTATUS=processes: 0"


def test_what_handlers_start_does_not_speak_for_the_worker(monkeypatch):
    for name, value in {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}.items():
        monkeypatch.setenv(name, value)

    ServiceManager()

    assert {name for name in os.environ if name.startswith(("NOTIFY_", "WATCHDOG_"))} == set()


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "vsock:2:1234", "@nobody-listens-there"])
def test_a_manager_that_is_not_there_or_does_not_listen_changes_nothing(monkeypatch, address):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    manager = ServiceManager()

    manager.look([])
    manager.stop(1.0)
