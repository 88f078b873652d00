"""Three in the morning: what is stuck, why, and how it is put right, through the real command on a terminal."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from terminal import PATIENCE_SECONDS, Terminal
from waiting import eventually

from reliq import Queue

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
POISON = {"m7", "m23", "m41"}


@pytest.fixture
def environment(url):
    paths = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"RELIQ_URL": url, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture
def person(url):
    """Type a command; `person(…)` returns its terminal."""
    with ExitStack() as stack:

        def run(*words):
            terminal = Terminal(*words, url=url)
            stack.callback(terminal.close)
            return terminal

        yield run


@pytest.fixture
def worker(environment):
    """Start a worker; it ends with the test."""
    started = []

    def start(**more):
        command = [sys.executable, "-m", "reliq", "worker", "incident_jobs:consumer", "--log-level", "error"]
        started.append(subprocess.Popen(command, env={**os.environ, **environment, **more}, stderr=subprocess.DEVNULL))
        return started[-1]

    yield start
    for one in started:
        one.send_signal(signal.SIGTERM)
    for one in started:
        one.wait(PATIENCE_SECONDS)


def stop(worker):
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE_SECONDS) == 0


@pytest.mark.timeout(300)
def test_operator_solves_an_incident_from_the_backlog_to_the_account(person, command, worker, url):
    orders = Queue("orders", url=url)
    totals = lambda: orders.counts().totals  # noqa: E731
    publish(orders, ["before"])
    first = worker()
    eventually(lambda: totals().get("acked") == 1, "the first order", PATIENCE_SECONDS)

    # The worker stops; the backlog grows, and how late it is can be seen.
    stop(first)
    publish(orders, [f"m{number}" for number in range(60)])
    seen = command("queues", "--interval", "0")
    assert seen.code == 0
    [row] = [line.split() for line in seen.out.splitlines() if line.startswith("orders")]
    assert row[1].endswith(("s", "m"))
    assert row[2] == "60"
    watch = person("watch", "orders")
    watch.wait_for(r"orders.*60", "ready")
    assert watch.end(signal.SIGINT) == 0
    assert b"\x1b[?1049l" in watch.raw, "the terminal is given back"

    # The worker is back: the good ones are handled, the poison dies.
    second = worker()
    eventually(lambda: (totals().get("acked"), totals().get("dead")) == (58, 3), "58 handled, 3 dead", PATIENCE_SECONDS)
    listed = command("dead", "list", "orders", "--error", "no cvv")
    assert (listed.code, set(re.findall(r"^(m\d+) ", listed.out, re.MULTILINE))) == (0, POISON)
    letter = command("dead", "show", "orders", "m23")
    assert letter.code == 0
    assert "card declined: no cvv in order m23" in letter.out
    assert '"card": "4242 4242"' in letter.out

    # The handler is mended, and the letters go back.
    stop(second)
    worker(MENDED="yes")
    redrive = person("dead", "redrive", "orders", "--all")
    redrive.wait_for(r"Redrive all 3 dead letters of orders\?")
    redrive.type("y\n")
    assert (redrive.end(), redrive.text.splitlines()[-1]) == (0, "3 redriven")
    eventually(lambda: totals().get("acked") == 61, "all handled", PATIENCE_SECONDS)

    account = command("account", "orders")
    assert (account.code, "It adds up." in account.out) == (0, True)
    assert (orders.counts().alive, orders.counts().dead, orders.counts().missing) == (0, 0, 0)


def publish(orders, ids):
    for id in ids:
        card = "4242 4242" if id in POISON else "4242 4242 cvv 123"
        orders.publish({"number": id, "card": card}, id=id)


def test_interrupted_redrive_reports_its_progress_and_continues_when_repeated(person, command, url):
    orders = Queue("orders", url=url)
    publish(orders, [f"m{number}" for number in range(200)])
    with orders.receive(limit=500) as jobs:
        for job in jobs:
            job.reject()
    orders.moves.collect([job.id for job in jobs], letters_max=1000, letters_ms=10**9)

    slow = person("dead", "redrive", "orders", "--all", "--yes", "--rate", "10/s")
    eventually(lambda: orders.counts().ready > 0, "the first letters", PATIENCE_SECONDS)

    assert slow.end(signal.SIGINT) == 130
    assert "interrupted: " in slow.text
    assert "redriven; run it again to go on" in slow.text
    counts = orders.counts()
    assert 0 < counts.ready < 200
    assert (counts.ready + counts.dead, counts.missing) == (200, 0)
    assert command("dead", "redrive", "orders", "--all", "--yes").code == 0
    assert orders.counts().ready == 200


def test_bulk_publish_shows_a_progress_bar_on_a_terminal(person, url, tmp_path):
    file = tmp_path / "orders.jsonl"
    file.write_text('{"n":1}\n' * 2000)

    terminal = person("publish", "orders", "--jsonl", str(file))

    assert terminal.end() == 0
    assert b"\x1b[" in terminal.raw
    assert "bytes" in terminal.text
    assert terminal.text.splitlines()[-1] == "2000 published, 0 were before"
    assert Queue("orders", url=url).counts().ready == 2000
