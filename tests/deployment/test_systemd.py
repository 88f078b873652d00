"""The units of examples/systemd: systemd accepts them, and worker and relay notify it of their state."""

import os
import re
import shutil
import socket
import sqlite3
from contextlib import closing

import pytest
from ports import free_port
from programs import answer, run
from required import must_run_in_ci
from unit import OURS, PROGRAM, UNITS, Manager, command, settings
from waiting import eventually

from reliq import Queue
from reliq.cli.app import Commands
from reliq.outbox.relay import notify_manager
from reliq.outbox.tables import ddl
from reliq.supervisor.plan import STOP_MARGIN_SECONDS
from reliq.supervisor.supervisor import EXIT_SECONDS, EXTEND_SECONDS, ServiceManager
from reliq.testing.server import EmbeddedRedis
from reliq.worker.health import PATIENT_SECONDS, Pulse, live

WORKER, EXPORTER, RELAY = "reliq-worker.service", "reliq-exporter.service", "reliq-relay.service"
GRACE = 25


@pytest.fixture
def managed(tmp_path):
    """Start services under a test manager, and end their processes."""
    started = []

    def start(words, url, **options):
        started.append(Manager(words, tmp_path, {**os.environ, "RELIQ_URL": url}, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_systemd_accepts_the_units_and_reliq_their_commands(tmp_path, monkeypatch):
    if shutil.which("systemd-analyze") is None:
        must_run_in_ci("systemd-analyze is not installed (Debian: apt-get install systemd)")
    monkeypatch.setenv("RELIQ_DATABASE", "sqlite:///shop.db")  # as in EnvironmentFile
    units = [tmp_path / name for name in (WORKER, EXPORTER, RELAY)]
    for unit in units:
        text = (UNITS / unit.name).read_text("utf-8")
        assert text.count(PROGRAM) == 1
        unit.write_text(text.replace(PROGRAM, OURS[PROGRAM]))
        _, word, *rest = command(unit.name, 9464)
        Commands.load(word).make_context(word, rest)

    done = run("systemd-analyze", "verify", *units)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_worker_unit_has_longer_to_stop_than_its_handlers_and_no_futile_restart():
    unit = settings(WORKER)
    [grace] = re.findall(r"--grace (\d+)", unit["ExecStart"])

    assert int(unit["TimeoutStopSec"]) > int(grace) + STOP_MARGIN_SECONDS + EXIT_SECONDS
    assert int(grace) == next(one.default for one in Commands.load("worker").params if one.name == "grace")
    assert (unit["Type"], unit["KillMode"], unit["OOMPolicy"]) == ("notify", "mixed", "continue")
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("always", "2 78")


@pytest.mark.slow
def test_worker_notifies_systemd_while_redis_is_away_ready_and_stopping(managed, server_path):
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
    service.hears("STOPPING=1")
    assert "READY=1" not in before
    assert "STATUS=starting: process 0, 1, 2, 3" in before
    assert service.lines().count("READY=1") == 1
    assert "STATUS=processes: 4" in service.lines()
    longest = int((GRACE + STOP_MARGIN_SECONDS + EXIT_SECONDS) * 1e6)
    assert service.told[-1].splitlines() == ["STOPPING=1", f"EXTEND_TIMEOUT_USEC={longest}", "STATUS=stopping"]
    eventually(lambda: not service.members(), "all its processes are gone")
    assert len(inherited) >= 4
    assert [name for one in inherited for name in one if name.startswith(("NOTIFY_", "WATCHDOG_"))] == []


@pytest.fixture
def outbox(tmp_path, monkeypatch):
    """An SQLite outbox, set in the environment."""
    monkeypatch.setenv("RELIQ_DATABASE", f"sqlite:///{tmp_path}/shop.db")
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        for statement in ddl("sqlite"):
            connection.execute(statement)
        connection.commit()
        yield connection


@pytest.mark.slow
def test_relay_notifies_systemd_while_redis_is_away_ready_and_stopping(managed, outbox, server_path):
    redis, port = free_port(), free_port()
    orders = Queue("orders", dict, url=f"redis://127.0.0.1:{redis}/0")
    orders.publish_in(outbox, {"order": 1})
    outbox.commit()
    service = managed(command(RELAY, port), f"redis://127.0.0.1:{redis}/0")
    service.hears("READY=1")
    service.hears("WATCHDOG=1", times=3)
    away = answer(port, "/live")[0], answer(port, "/ready")[0]

    with EmbeddedRedis(server=server_path, port=redis):
        eventually(lambda: orders.counts().ready == 1, "the row is moved")
        eventually(lambda: answer(port, "/ready")[0] == 200, "the relay is ready")
        back = answer(port, "/live")[0]
        code = service.stop()

    assert code == 0, service.said
    service.hears("STOPPING=1")
    assert (away, back) == ((200, 503), 200)
    assert service.lines().count("READY=1") == 1
    longest = int((STOP_MARGIN_SECONDS + EXIT_SECONDS) * 1e6)
    assert service.told[-1].splitlines() == ["STOPPING=1", f"EXTEND_TIMEOUT_USEC={longest}", "STATUS=stopping"]
    assert int(settings(RELAY)["TimeoutStopSec"]) * 1e6 >= longest
    eventually(lambda: not service.members(), "all its processes are gone")


def test_relay_with_a_hanging_round_sends_no_watchdog_message(monkeypatch, tmp_path):
    """Set the relay's pulse back by five minutes."""
    heard = Manager(["true"], tmp_path, {**os.environ})
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "2")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    pulse, teller = Pulse(rounds="round", seconds=PATIENT_SECONDS), ServiceManager()
    pulse.beat()
    notify_manager(teller, pulse)
    heard.hears("WATCHDOG=1")

    facts = pulse._read()
    pulse._write(facts._replace(claimed_at=facts.claimed_at - PATIENT_SECONDS - 1))
    for _ in range(3):
        notify_manager(teller, pulse)
    teller.stop(1.0)
    heard.hears("STOPPING=1")

    assert heard.lines().count("WATCHDOG=1") == 1
    assert live([pulse]).startswith("process 0: no round for 30")
    heard.close()


def test_abstract_socket_is_an_address_of_the_manager(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0reliq-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@reliq-{os.getpid()}")

        ServiceManager().look([])

        assert heard.recv(4096) == b"READY=1\nSTATUS=processes: 0"


@pytest.mark.parametrize(
    "address",
    ["", "/nowhere/notify", "vsock:2:1234", "@nobody-listens-there"],
    ids=["empty", "path", "vsock", "abstract"],
)
def test_manager_that_does_not_listen_is_ignored(monkeypatch, address):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    manager = ServiceManager()

    manager.look([])
    manager.stop(1.0)
