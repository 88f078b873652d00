"""A worker obeys a signal from its first moment, and a replaced or stopped worker leaves no work unfinished."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from waiting import eventually
from worker_process import AT_ONCE

from reliq.supervisor.child import PREFIX, Folder

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture
def beginning(worker, client):
    """Start a worker whose consumer starts up in the given way."""
    return partial(worker, place="beginnings:consumer")


@pytest.mark.parametrize("how", ["import", "lifespan", "async lifespan"])
def test_sigterm_while_a_worker_starts_ends_it(beginning, client, how):
    process = beginning("--grace", "300", how=how)
    eventually(lambda: client.sismember("note:hangs", how), "it hangs at its start")
    process.process.send_signal(signal.SIGUSR1)

    assert process.stop() == 0


def test_worker_stops_although_its_lifespan_set_a_signal_handler(beginning, client, jobs):
    process = beginning("--grace", "300", how="takes signals")
    jobs.ONCE.publish(1)
    eventually(lambda: client.scard("note:done"), "it works")

    assert process.stop() == 0
    assert not client.exists("note:taken")


def test_sigterm_at_worker_ready_stops_the_worker(beginning, client):
    beginning("--grace", "300", how="is stopped when it is ready")

    eventually(lambda: client.exists("note:atexit"), "the stop that came when it said that it is ready has ended it")
    assert not client.exists("note:taken")


def test_process_that_stops_runs_its_atexit_functions(beginning, client, jobs):
    process = beginning()
    jobs.ONCE.publish(1)
    eventually(lambda: client.scard("note:done"), "it works")
    (child,) = process.children()

    assert process.stop() == 0
    assert client.sismember("note:atexit", str(child.pid))


def test_replaced_process_finishes_its_handlers_beside_its_successor(beginning, client, jobs):
    process = beginning("--max-jobs", "3", "--grace", "0.1", "--concurrency", "2", change=AT_ONCE)
    jobs.SLOW.publish(1.0)
    eventually(lambda: client.scard("note:started") == 1, "a long handler runs")
    (first,) = process.children()
    jobs.ONCE.publish_many(range(10))

    eventually(lambda: jobs.ONCE.counts().totals.get("acked") == 10, "others go on with the rest")
    assert first.is_running()
    client.sadd("note:go", "1")

    eventually(lambda: jobs.SLOW.counts().totals.get("acked") == 1, "the long one ends well")
    assert client.smembers("note:ended") == client.smembers("note:started")
    assert jobs.SLOW.counts().totals["claimed"] == 1
    eventually(lambda: not first.is_running(), "and its process is gone")


@pytest.mark.parametrize(
    ("how", "concurrency"), [("", "1"), ("", "4"), ("yields", "4")], ids=["one slot", "four slots", "yields"]
)
def test_cancelled_coroutine_has_time_to_clean_up(beginning, client, jobs, how, concurrency):
    process = beginning("--queue", "lasting", "--concurrency", concurrency, how=how)
    id = jobs.LASTING.publish(2.5).id

    eventually(lambda: client.sismember("note:cleaned up", id), "it cleans up for longer than a thread would have")

    assert not process.said("exceeded its timeout; killed")


def test_worker_whose_processes_all_fail_to_start_gives_up(beginning, jobs):
    process = beginning(change=AT_ONCE, how="dies")

    assert process.wait(100) == 1
    assert sum("starting another" in line for line in process.lines) == 4
    assert process.said("worker: all processes failed to start 4 times; exiting with code 1")


def test_folder_of_a_killed_worker_is_removed_and_a_living_one_kept(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = Folder()
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    mine = tmp_path / "reliq-something-else"
    mine.mkdir()
    for path in (living.path, left, mine):
        os.utime(path, (0, 0))

    other = Folder()

    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, other.path.name, mine.name}
    living.close()
    other.close()
    assert list(tmp_path.iterdir()) == [mine]


def test_worker_without_a_temporary_folder_ends_in_one_line(worker, environment, jobs, tmp_path):
    code = "import tempfile, reliq.cli.app as app; tempfile.mkdtemp = lambda **_: open('/nowhere/x'); app.main()"
    command = [sys.executable, "-c", code, "worker", "jobs:consumer", "--log-format", "json", "--metrics-port", "0"]

    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "a worker needs a folder for its metrics" in done.stderr
    assert "Traceback" not in done.stderr


def test_worker_whose_standard_error_is_closed_works_and_reports_it(environment, jobs):
    jobs.ONCE.publish(1)
    command = f"exec {sys.executable} -m reliq worker jobs:consumer --queue once --burst 2>&-"

    done = subprocess.run(["sh", "-c", command], cwd=HERE, env=environment, stdout=-1, text=True, check=False)

    assert done.returncode == 0
    assert "standard error is closed" in done.stdout
    assert jobs.ONCE.counts().totals["acked"] == 1


RUN_TWICE = """
import os, signal, threading
from beginnings import consumer
before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
for _ in range(2):
    consumer.observers.append(lambda event: os.kill(os.getpid(), signal.SIGTERM) if type(event).__name__ == "Acked" else None)
    assert consumer.run(queues=["once"]) == 0
    consumer.observers.pop()
    print("ran", flush=True)
assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
"""


def test_consumer_runs_twice_and_restores_the_signal_handlers(program, jobs, client):
    running = program(RUN_TWICE)
    for number in (1, 2):
        jobs.ONCE.publish(number)
        assert running.stdout.readline() == "ran\n"
    assert running.wait(60) == 0


RUN = """
from reliq import WorkerSettings
from beginnings import consumer
consumer.run(WorkerSettings(grace=1000), queues=["lasting"])
"""


def test_second_signal_ends_a_program_whose_threads_hang(program, jobs, client):
    jobs.LASTING.publish(1.0)
    running = program(RUN, "thread")
    eventually(lambda: client.scard("note:started"), "a handler waits for a thread of its own")

    running.terminate()
    running.send_signal(signal.SIGINT)  # the same signal within a second counts once

    assert running.wait(60) == 130


def test_worker_whose_module_starts_a_thread_ends_when_its_queues_are_empty(beginning, jobs):
    jobs.ONCE.publish(1)

    assert beginning("--burst", how="module thread").wait(60) == 0


def test_program_whose_threads_hang_ends_with_its_grace_period(program, jobs, client):
    jobs.LASTING.publish_many([1.0] * 3)
    running = program(RUN.replace("grace=1000", "grace=0.1"), "thread")
    eventually(lambda: client.scard("note:started") == 3, "handlers wait for threads of their own")

    running.terminate()

    assert running.wait(60) == 0


STARTED = """
from beginnings import consumer
from reliq.events import RedisUnavailable
consumer.observers.append(lambda event: print("away", flush=True) if isinstance(event, RedisUnavailable) else None)
consumer.start(queues=["slow", "once"])
print("started", flush=True)
input()
"""


def test_program_that_ends_without_a_stop_returns_its_messages(program, jobs, client):
    running = program(STARTED)
    assert running.stdout.readline() == "started\n"
    jobs.SLOW.publish(1.0)
    eventually(lambda: client.scard("note:started"), "a handler runs")
    threading.Timer(0.2, client.sadd, ("note:go", "1")).start()
    running.communicate("\n", timeout=60)

    assert running.returncode == 0
    assert (jobs.SLOW.counts().unack, jobs.SLOW.counts().totals["acked"]) == (0, 1)


def test_program_starts_while_redis_is_away_and_its_worker_follows(program, redis_server, jobs, client):
    redis_server.kill()
    try:
        running = program(STARTED)
        assert "started\n" in running.stdout
    finally:
        redis_server.start()
    client.sadd("note:go", "1")
    jobs.SLOW.publish(0.0)
    eventually(lambda: jobs.SLOW.counts().totals.get("acked"), "the worker handles the message")

    running.communicate("\n", timeout=60)
    assert running.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="process namespaces are Linux's")
def test_worker_as_pid_1_reaps_orphans(environment, jobs, client):
    isolated = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*isolated, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a process namespace")
    command = [*isolated, sys.executable, "-m", "reliq", "worker", "beginnings:consumer"]
    wanted = {**environment, "HOW": "orphans"}
    with subprocess.Popen(command, cwd=HERE, env=wanted, stderr=subprocess.DEVNULL) as process:
        try:
            jobs.ONCE.publish_many(range(5))
            eventually(lambda: client.scard("note:done") == 5, "its handlers have left orphans")
            (first,) = psutil.Process(process.pid).children()
            eventually(lambda: not any(map(is_dead, first.children())), "no orphan that has died is left")
            first.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def is_dead(process):
    """Return whether a process is a zombie; a process that has been reaped is not."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return False
