"""Each committed order has its effect once, and no other order has an effect, whichever process is killed when."""

import os
import random
import subprocess
import sys
from pathlib import Path

import kills
import pytest
from databases import all_of
from waiting import eventually

pytestmark = pytest.mark.slow

#: Number of killed processes in CI, and with `--long`.
KILLS, LONG_KILLS = 6, 200
ROLES = ("worker-1", "worker-2", "relay", "producer")


@pytest.fixture
def processes(url, database):
    """Start a process of each role; yield them by role, and a function that restarts a role."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment, running = {**os.environ, "RELIQ_URL": url, "PYTHONPATH": path}, {}

    def start(role):
        command = [sys.executable, kills.__file__, role, database.url]
        running[role] = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    yield running, start
    for process in running.values():
        process.kill()
        process.wait()


def test_committed_orders_have_their_effect_once_despite_kills(database, processes, pytestconfig):
    (running, start), chance = processes, random.Random(int(os.environ.get("RELIQ_SEED", "1")))
    for role in ROLES:
        start(role)

    def shipped():
        return len(all_of(database, "SELECT * FROM effects"))

    def kill(role):
        running[role].kill()
        running[role].wait()

    for number in range(LONG_KILLS if pytestconfig.getoption("--long") else KILLS):
        role = ROLES[number] if number < len(ROLES) else chance.choice(ROLES)
        enough = shipped() + chance.randint(5, 60)
        eventually(lambda enough=enough: shipped() > enough, "orders are shipped")
        kill(role)
        start(role)
    kill("producer")
    missing = "SELECT id FROM orders WHERE id NOT IN (SELECT id FROM effects)"
    waiting = "SELECT id FROM reliq_outbox WHERE sent_ms IS NULL"
    eventually(lambda: not all_of(database, missing) + all_of(database, waiting), "all orders are shipped")
    for role in ROLES[:-1]:
        kill(role)

    assert sorted(all_of(database, "SELECT * FROM effects")) == sorted(all_of(database, "SELECT * FROM orders"))
    assert len(all_of(database, "SELECT * FROM orders")) > KILLS
