"""The supervisor survives a missing folder, a broken report, and a child process that does not finish its shutdown."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import venv
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import msgspec
import psutil
import pytest
from programs import run
from transition import run_transition
from waiting import eventually
from worker_process import AT_ONCE, Worker, environment_for, works

import reliq
from reliq import Queue, WorkerSettings
from reliq.lua.transitions import CallNumber
from reliq.supervisor.child import Folder
from reliq.supervisor.plan import ChildPlan
from reliq.supervisor.status import ProcessStatusView
from reliq.supervisor.supervisor import Supervisor

pytestmark = pytest.mark.slow


@pytest.fixture
def board():
    """The status of a child process with two handlers."""
    return ProcessStatusView(["once", "slow"], 2)


@pytest.fixture
def plan(board):
    """The plan of a child process that stops after one job."""
    settings = WorkerSettings(concurrency=2, grace=0.2, max_jobs=1)
    own = {"settings": settings, "log_level": "info", "board": board.descriptor}
    return ChildPlan(consumer="stubborn:consumer", queues=("once",), **own)


#: A child with a short stop margin, to keep the test short; in this time it settles and reports also on a busy machine.
IMPATIENT = "import os, reliq.supervisor.main as c; c.STOP_MARGIN_SECONDS = 3.0; os._exit(c.main())"


@pytest.fixture
def child(program):
    """Start a child process as a supervisor does; it ends with the test."""

    def start(plan):
        process = program(IMPATIENT, pass_fds=[plan.board])
        process.stdin.write(plan.as_line())
        process.stdin.flush()
        return process

    return start


def test_process_that_stops_itself_ends_although_its_lifespan_hangs(child, plan, jobs, client):
    process = child(plan)
    jobs.ONCE.publish(1)

    assert process.wait(100) == 75
    assert jobs.ONCE.counts().totals["acked"] == 1


def test_process_that_stops_itself_reports_the_messages_that_it_cut_off(child, plan, board, jobs, client):
    process = child(replace(plan, queues=("once", "slow")))
    id = jobs.SLOW.publish(1.0).id
    eventually(lambda: client.scard("note:started"), "a handler runs that never ends")
    process.terminate()

    assert process.wait(100) == 75
    assert [(row["queue"], row["id"]) for row in json.loads(board.report)] == [("slow", id)]


@pytest.fixture
def folder_of(environment, tmp_path):
    """Return the folder that the next worker shares with its child processes."""
    environment["TMPDIR"] = str(tmp_path)
    return lambda: next(tmp_path.glob("reliq-*"))


def test_worker_whose_folder_was_deleted_replaces_a_killed_process(folder_of, worker, jobs):
    process = worker("--queue", "once", "--metrics-port", "0")
    jobs.ONCE.publish(1)
    eventually(lambda: jobs.ONCE.counts().totals.get("acked") == 1, "it works")
    first = process.children()[0]

    shutil.rmtree(folder_of())
    first.kill()
    jobs.ONCE.publish(2)

    eventually(lambda: jobs.ONCE.counts().totals.get("acked") == 2, "another child works")
    assert not process.said("Traceback"), "".join(process.lines)


def test_folder_that_another_user_made_anew_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Folder()
    first = folder.path
    shutil.rmtree(first)
    first.mkdir(mode=0o777)

    folder.restore()

    assert folder.path != first
    assert list(first.iterdir()) == []
    folder.close()


def test_folder_that_cannot_be_made_anew_closes_nothing_but_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Folder()
    shutil.rmtree(folder.path)
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=OSError("no space")))
    others = []
    for _ in range(2):
        with pytest.raises(OSError, match="no space"):
            folder.restore()
        others += os.pipe()

    assert [os.fstat(descriptor) for descriptor in others]
    for descriptor in others:
        os.close(descriptor)


def test_long_handlers_beside_max_jobs_leave_no_worker_idle(worker, jobs, client):
    """Only as many processes may be ending as there are slots; the last of them keeps claiming until then."""
    queues = ("--queue", "once", "--queue", "lasting")
    process = worker(*queues, "--max-jobs", "2", "--concurrency", "2", change=AT_ONCE)
    for number in (1, 2):
        jobs.LASTING.publish(0.0)
        eventually(lambda count=number: client.scard("note:started") == count, "a long handler runs")
        jobs.ONCE.publish_many(range(10))
        eventually(lambda count=number: jobs.ONCE.counts().totals.get("acked") == 10 * count, "others go on")

    assert len(process.children()) <= 3


JOBS = """
from reliq import Consumer, Queue
consumer = Consumer()
@consumer.handler(Queue("{}"))
def work(body):
    pass
"""


def test_processes_of_changed_code_leave_and_the_worker_says_what_to_do(tmp_path, url):
    module, queue = tmp_path / "shop.py", Queue("old", url=url)
    module.write_text(JOBS.format("old"))
    change = f"{AT_ONCE}; import reliq.supervisor.supervisor as supervisor; supervisor.START_TRIES = 1"
    words = "shop:consumer", tmp_path, environment_for(tmp_path, url), "--processes", "2"
    with closing(Worker(*words, change=change)) as worker:
        eventually(lambda: sum("ready" in line for line in worker.lines) == 2, "it works")
        first, second = worker.children()
        module.write_text(JOBS.format("another-name"))
        first.kill()
        eventually(lambda: worker.said("the code has changed since its worker started"), "its successor leaves")
        queue.publish({})
        eventually(lambda: queue.counts().totals.get("acked"), "the other process works")

        second.kill()

        assert worker.wait() == 1  # a service manager restarts it
        assert not worker.said("Traceback"), "".join(worker.lines)


def test_module_beside_the_application_hides_none_that_reliq_imports(tmp_path, url, environment):
    """Neither `reliq` nor its processes import modules from the current folder in place of reliq's dependencies."""
    (tmp_path / "queue.py").write_text("")
    (tmp_path / "shop.py").write_text(JOBS.format("old"))
    command = [Path(sys.executable).with_name("reliq"), "worker", "shop:consumer", "--burst"]
    own = {name: value for name, value in environment.items() if name != "PYTHONPATH"}

    done = run(*command, cwd=tmp_path, env=own)

    assert done.returncode == 0, done.stderr


@pytest.fixture
def checkout(tmp_path):
    """
    A folder with the package and an application, and a Python without an installed reliq.

    Packages are found through the entries of a .pth file; Python ignores further .pth files in those folders, such as
    the .pth file of an editable install.
    """
    folder, environment = tmp_path / "checkout", tmp_path / "venv"
    folder.mkdir()
    (folder / "reliq").symlink_to(Path(reliq.__file__).parent)
    # The application changes the search path, as many applications do.
    (folder / "shop.py").write_text("import sys\nsys.path.insert(0, 'src')\n" + JOBS.format("old"))
    venv.create(environment, symlinks=True)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder, environment / "bin" / "python"


@pytest.mark.parametrize("started", ["-m reliq", "PYTHONPATH=. -m reliq", "PYTHONPATH=. -P -m reliq"])
def test_processes_of_a_checkout_that_is_not_installed_import_reliq(checkout, environment, started):
    folder, python = checkout
    words = started.removeprefix("PYTHONPATH=. ").split()
    own = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    if started.startswith("PYTHONPATH"):
        own["PYTHONPATH"] = "."
    command = [python, *words, "worker", "shop:consumer", "--burst"]

    done = run(*command, cwd=folder, env=own)

    assert done.returncode == 0, done.stderr


def test_process_that_ends_with_78_after_a_good_start_is_replaced(worker, jobs, client):
    process = worker("--queue", "deadly", "--processes", "1", change=AT_ONCE)
    jobs.DEADLY.publish("misconfigured")
    eventually(lambda: process.said("ended with exit code 78"), "its handler has ended a process")
    client.config_set("maxmemory-policy", "volatile-lru")
    try:
        eventually(
            lambda: process.said("maxmemory-policy must be noeviction"), "the set-up is refused at a later start"
        )
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    jobs.DEADLY.publish("good")

    eventually(lambda: client.sismember("note:done", "good"), "a process works again")


@pytest.fixture
def unread(environment, jobs):
    """A worker that writes to a full pipe: no process reads its standard error."""
    reading, writing = os.pipe()
    words = ["--queue", "deadly", "--processes", "2", "--log-format", "json"]
    command = [sys.executable, "-m", "reliq", "worker", "jobs:consumer", *words]
    process = subprocess.Popen(command, cwd=Path(__file__).parent, env=environment, stderr=writing)
    jobs.DEADLY.publish("first")
    eventually(lambda: jobs.DEADLY.counts().totals.get("acked") == 1, "it works")
    filling = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(filling, b"x")
    yield process
    process.kill()
    process.wait()
    for one in (reading, writing, filling):
        os.close(one)


def test_worker_whose_log_nobody_reads_replaces_processes_and_stops(unread, jobs, redis_server):
    killed = [one for one in psutil.Process(unread.pid).children() if works(one)]
    jobs.DEADLY.publish("killer")
    for one in killed:
        one.kill()
    eventually(lambda: jobs.DEADLY.counts().dead == 1, "new processes work, die, and are replaced")
    redis_server.kill()  # each process logs a line
    redis_server.start()
    jobs.DEADLY.publish("good")
    eventually(lambda: jobs.DEADLY.counts().totals.get("acked") == 1, "they work again")

    unread.terminate()

    assert unread.wait(60) == 0


def test_supervisor_starts_processes_anew_while_redis_is_silent(worker, jobs, client):
    jobs.GATHERED.publish_many(["x"] * 40)
    process = worker("--queue", "gathered", "--processes", "4", "--grace", "1", change=AT_ONCE)
    eventually(lambda: jobs.GATHERED.counts().unack == 40 and len(process.children()) == 4, "they hold messages")
    silent, killed = psutil.Process(client.info("server")["process_id"]), process.children()
    silent.suspend()
    try:
        for one in killed:
            one.kill()
        eventually(lambda: len({one.pid for one in process.children()} - {one.pid for one in killed}) == 4, "new ones")
        assert sum("could not renew or return" in line for line in process.lines) < 4

        eventually(lambda: process.process.send_signal(signal.SIGTERM) or process.process.poll() is not None, "it ends")
    finally:
        silent.resume()
    assert process.wait() == 130


def test_supervisor_looks_on_while_the_recovery_of_dead_processes_is_blocked(supervisor, monkeypatch):
    """A check that waited for Redis would delay the next watchdog message to systemd."""
    monkeypatch.setattr(sys, "executable", os.devnull)  # starting a process fails
    answers, ended = threading.Event(), []
    monkeypatch.setattr(supervisor._recovery, "give_back", lambda _, pid: ended.append((pid, answers.wait(20))))
    reaped = []
    for _ in range(12):
        supervisor.children[0].process = dead = subprocess.Popen(["false"])
        dead.wait()
        supervisor._look()
        reaped.append(dead.pid)
        assert ended == []

    answers.set()
    assert supervisor._background.wait(60)
    assert ended == [(pid, True) for pid in reaped]


def test_child_that_cannot_be_looked_after_holds_up_no_other(supervisor, caplog):
    healthy = supervisor.children[0]
    broken = Mock(process=None, done=False, pid=0, may_start=Mock(side_effect=RuntimeError))
    supervisor.children.insert(0, broken)

    supervisor._look()

    assert healthy.pid
    assert "internal error in its supervisor" in caplog.text
    with healthy.process as process:
        process.kill()


@pytest.fixture
def supervisor(jobs, plan):
    supervisor = Supervisor(jobs.consumer, plan, processes=1)
    yield supervisor
    supervisor._background.close()


def reap(supervisor, child, report):
    """End a child process with a report, and let its supervisor handle the end."""
    child.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(75)"])
    child.process.wait()
    os.pwrite(child.board.descriptor, report.encode(), len(child.board._memory))
    supervisor._reap(child)
    assert supervisor._background.wait(60)


@pytest.mark.parametrize(
    "half",
    ['[{"queue": "slow", "id"', "[1]", '[{"queue": "slow", "shard": 0, "no": "receipt"}]'],
    ids=["cut off", "a number", "no receipt"],
)
def test_process_with_an_unreadable_report_is_logged_and_replaced(supervisor, caplog, half):
    child = supervisor.children[0]

    reap(supervisor, child, half)

    assert supervisor.children != [child]
    assert "cannot read the report of this dead process" in caplog.text


def all_claimed(queue, lane):
    turns = (CallNumber(lane, number) for number in range(1, 17))
    return [one for turn in turns for one in run_transition(queue, "claim", turn, limit=500, lease_ms=600_000).claimed]


def test_unfinished_large_batches_go_back_in_bounded_steps_in_order(supervisor, jobs, caplog):
    jobs.SLOW.publish_many(0.0 for _ in range(8000))
    claimed = all_claimed(jobs.SLOW, "dead")
    report = [{"queue": "slow", "shard": 0, **msgspec.structs.asdict(one)} for one in claimed]

    reap(supervisor, supervisor.children[0], json.dumps(report))

    counts = jobs.SLOW.counts()
    assert (counts.ready, counts.unack, counts.totals["released"]) == (8000, 0, 8000), caplog.text
    assert [one.id for one in all_claimed(jobs.SLOW, "next")] == [one.id for one in claimed]


def test_process_that_cannot_be_started_is_tried_again(supervisor, caplog, monkeypatch):
    child = supervisor.children[0]
    monkeypatch.setattr(sys, "executable", os.devnull)

    supervisor._look()

    assert "worker: could not start a process; retrying" in caplog.text
    assert (child.process, child.done) == (None, False)
