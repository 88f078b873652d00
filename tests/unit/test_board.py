"""The status page that a worker process writes for its supervisor is correct at any moment."""

import os
import threading

import pytest
from begun import begun
from waiting import eventually

from reliq import Consumer, Queue
from reliq.supervisor.child import LOOK_CLOSER_SECONDS, HeartbeatMonitor
from reliq.supervisor.status import ProcessStatus, ProcessStatusView


@pytest.fixture
def sides(tmp_path):
    """Return a status page of one handler, the supervisor's view of it, and a function that begins a call."""
    consumer, path = Consumer(), tmp_path / "board"
    consumer.handler(Queue("q", str))(lambda body: None)
    view = ProcessStatusView(path, ["q"], 1)
    board = ProcessStatus(path, consumer, consumer.handlers, 1)

    def begin(id):
        run = begun(consumer.handlers[0], id)
        board.begins(run)
        return run

    return board, view, begin


def test_board_that_is_made_anew_leaves_the_one_that_is_read_as_it_was(tmp_path):
    """If a fork fails, the process is started again with the same number: the file must not shrink under its reader."""
    before = ProcessStatusView(tmp_path / "board", ["q"], 1)
    claimed_at = before.pulse._read().claimed_at

    after = ProcessStatusView(tmp_path / "board", ["q"], 1)
    after.pulse.beat()

    assert before.pulse._read().claimed_at == claimed_at < after.pulse._read().claimed_at


def test_board_has_the_running_calls_with_their_extended_timeouts(sides, monkeypatch):
    board, view, begin = sides
    begin("ended")
    board.look()
    assert view.rows() == []

    run = begin("goes on")
    monkeypatch.setattr(board._consumer, "running", lambda: [run])
    run.timeout_at += 7
    board.look()
    assert [(row.id, row.started_at, row.timeout_at) for row in view.rows()] == [
        ("goes on", run.started_at, run.timeout_at)
    ]


@pytest.mark.parametrize("moment", ["the calls are read", "a row is cleared"])
def test_call_that_begins_during_an_update_stays_on_the_board(sides, monkeypatch, moment):
    board, view, begin = sides
    begin("ended")
    change, running = board._change, (lambda: (begin("begun"), [])[1])
    if moment == "a row is cleared":
        monkeypatch.setattr(board, "_change", lambda *args: (begin("begun"), change(*args)))
    else:
        monkeypatch.setattr(board._consumer, "running", running)

    board.look()

    assert [row.id for row in view.rows()] == ["begun"]


def test_board_of_very_many_queues_has_a_lane_for_each(tmp_path):
    consumer, path = Consumer(), tmp_path / "board"
    names = [f"{number:038}" for number in range(2000)]
    for name in reversed(names):
        consumer.handler(Queue(name, str))(lambda body: None)
    view, board = ProcessStatusView(path, names, 1), ProcessStatus(path, consumer, consumer.handlers, 1)
    board._lanes = {name: f"lane-of-{name[-5:]}" for name in names}

    board._note_lanes()

    assert view.lanes == board._lanes


def test_handler_that_begins_ends_the_silence_of_its_process(sides):
    """From then on threads are compared, so a handler that begins between two checks is noticed."""
    board, view, begin = sides
    board.look()
    silence, before = HeartbeatMonitor(), view.beat
    silence.hear(before, before, os.getpid())
    silence.hear(before, before + LOOK_CLOSER_SECONDS + 0.1, os.getpid())  # the checking thread has to wait
    assert silence._before

    begin("begins")
    silence.hear(view.beat, before + LOOK_CLOSER_SECONDS + 0.2, os.getpid())

    assert (silence.seconds, silence.since) == (0.0, view.rows()[0].started_at)
    assert not silence._before


def test_failed_update_of_the_board_is_repeated(sides, caplog, monkeypatch):
    board, view, _ = sides
    fails = [MemoryError()]

    def running():
        if fails:
            raise fails.pop()
        return []

    monkeypatch.setattr(board._consumer, "running", running)

    threading.Thread(target=board.keep_up, daemon=True).start()

    eventually(lambda: view.beat > 0, "it looks again")
    assert "could not update the status that the supervisor reads" in caplog.text
