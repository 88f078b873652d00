"""What a supervisor does when its own ground gives way: its folder, a report, a child that does not come to its end."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from waiting import eventually

from reliq.consumer.board import BoardView
from reliq.process.plan import ChildPlan
from reliq.process.supervisor import Supervisor
from reliq.transitions import CallNumber


@pytest.fixture
def plan(tmp_path):
    """The plan of a child that stops itself after one job."""
    board = tmp_path / "board"
    BoardView(board, ["once", "slow"], 2)
    return ChildPlan(
        consumer="stubborn:consumer",
        queues=("once",),
        concurrency=2,
        grace=0.2,
        max_jobs=1,
        burst=False,
        allow_eviction=False,
        log_level="info",
        board=str(board),
        report=str(tmp_path / "report"),
    )


#: A child whose patience is short, so that the test's need not be long.
IMPATIENT = "import os, reliq.process.main as c; c.STOP_MARGIN_SECONDS = 0.5; os._exit(c.main())"


@pytest.fixture
def child(environment):
    """Start a child as a supervisor does; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(plan):
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", IMPATIENT], stdin=subprocess.PIPE, text=True, env=environment)
            )
            stack.callback(process.kill)
            process.stdin.write(plan.as_line())
            process.stdin.flush()
            return process

        yield start


def test_a_stop_of_a_childs_own_choice_comes_to_an_end_although_its_lifespan_does_not(child, plan, jobs, client):
    process = child(plan)
    jobs.ONCE.publish(1)

    assert process.wait(100) == 75
    assert jobs.ONCE.counts().totals["acked"] == 1


def test_such_a_child_names_what_its_stop_cut_off(child, plan, jobs, client):
    process = child(replace(plan, queues=("once", "slow")))
    id = jobs.SLOW.publish(1.0).id
    eventually(lambda: client.scard("note:started"), "a handler runs that never ends")
    process.terminate()

    assert process.wait(100) == 75
    assert [(row["queue"], row["id"]) for row in json.loads(Path(plan.report).read_text())] == [("slow", id)]


@pytest.fixture
def folder_of(environment, tmp_path):
    """Where the next worker keeps the files it shares with its children."""
    environment["TMPDIR"] = str(tmp_path)
    return lambda: next(tmp_path.glob("reliq-*"))


def test_a_worker_goes_on_when_somebody_has_cleaned_up_its_folder(folder_of, worker, jobs):
    process = worker("--queue", "once")
    jobs.ONCE.publish(1)
    eventually(lambda: jobs.ONCE.counts().totals.get("acked") == 1, "it works")
    first = process.children()[0]

    shutil.rmtree(folder_of())
    first.kill()
    jobs.ONCE.publish(2)

    eventually(lambda: jobs.ONCE.counts().totals.get("acked") == 2, "another child works")
    assert not process.said("Traceback"), "".join(process.lines)


def test_a_child_whose_folder_is_gone_still_stops_in_peace(folder_of, worker, jobs, client):
    process = worker("--queue", "slow", "--grace", "20")
    jobs.SLOW.publish(1.0)
    eventually(lambda: client.scard("note:started"), "the handler runs")

    shutil.rmtree(folder_of())
    process.process.terminate()

    assert process.wait() == 0
    assert jobs.SLOW.counts().totals["acked"] == 1


@pytest.fixture
def supervisor(jobs, plan):
    supervisor = Supervisor(jobs.consumer, plan, processes=1)
    yield supervisor
    supervisor._folder.remove()


@pytest.mark.parametrize(
    "half", ['[{"queue": "slow", "id"', "", "[1]", '[{"queue": "slow", "shard": 0, "no": "receipt"}]']
)
def test_a_report_that_cannot_be_read_is_told_and_the_child_is_replaced_all_the_same(supervisor, caplog, half):
    child = supervisor.children[0]
    child.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(75)"])
    child.process.wait()
    child.report.write_text(half)

    supervisor._reap(child)

    assert child.process is None
    assert "what a process could not finish is unknown" in caplog.text


def all_claimed(queue, lane):
    turns = (CallNumber(lane, number) for number in range(1, 17))
    return [one for turn in turns for one in queue.moves.claim(turn, limit=500, lease_ms=600_000).claimed]


def test_what_large_batches_could_not_finish_goes_back_in_bounded_steps_in_its_order(supervisor, jobs, caplog):
    jobs.SLOW.publish_many(0.0 for _ in range(8000))
    claimed = all_claimed(jobs.SLOW, "dead")
    child = supervisor.children[0]
    child.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(75)"])
    child.process.wait()
    child.report.write_text(
        json.dumps([{"queue": "slow", "shard": 0, **msgspec.structs.asdict(one)} for one in claimed])
    )

    supervisor._reap(child)

    counts = jobs.SLOW.counts()
    assert (counts.ready, counts.unack, counts.totals["released"]) == (8000, 0, 8000), caplog.text
    assert [one.id for one in all_claimed(jobs.SLOW, "next")] == [one.id for one in claimed]


def test_a_process_that_cannot_be_started_is_tried_again(supervisor, caplog, monkeypatch):
    child = supervisor.children[0]
    monkeypatch.setattr(sys, "executable", os.devnull)

    supervisor._look()

    assert "a process could not be started; trying again" in caplog.text
    assert (child.process, child.done) == (None, False)
