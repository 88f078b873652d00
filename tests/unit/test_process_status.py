"""The status page that a worker process writes for its supervisor is correct at any moment."""

import os
import signal
import subprocess
import threading

import pytest
from begun import begun
from waiting import eventually

from reliq import Consumer, Queue
from reliq.supervisor.child import LOOK_CLOSER_SECONDS, HeartbeatMonitor, has_stopped
from reliq.supervisor.status import ProcessStatus, ProcessStatusView


@pytest.fixture
def sides():
    """Return a status page of one handler, the supervisor's view of it, and a function that begins a call."""
    consumer = Consumer()
    consumer.handler(Queue("q", str))(lambda body: None)
    view = ProcessStatusView(["q"], 1)
    page = ProcessStatus(view.descriptor, consumer, consumer.handlers, 1)

    def begin(id):
        run = begun(consumer.handlers[0], id)
        page.begins(run)
        return run

    return page, view, begin


def test_status_page_has_the_running_calls_with_their_extended_timeouts(sides, monkeypatch):
    page, view, begin = sides
    begin("ended")
    page.look()
    assert view.rows() == []

    run = begin("goes on")
    monkeypatch.setattr(page._consumer, "running", lambda: [run])
    run.timeout_at += 7
    page.look()
    assert [(row.id, row.started_at, row.timeout_at) for row in view.rows()] == [
        ("goes on", run.started_at, run.timeout_at)
    ]


@pytest.mark.parametrize("moment", ["the calls are read", "a row is cleared"])
def test_call_that_begins_during_an_update_stays_on_the_status_page(sides, monkeypatch, moment):
    page, view, begin = sides
    begin("ended")
    change, running = page._change, (lambda: (begin("begun"), [])[1])
    if moment == "a row is cleared":
        monkeypatch.setattr(page, "_change", lambda *args: (begin("begun"), change(*args)))
    else:
        monkeypatch.setattr(page._consumer, "running", running)

    page.look()

    assert [row.id for row in view.rows()] == ["begun"]


def test_status_page_of_very_many_queues_has_a_lane_for_each():
    consumer = Consumer()
    names = [f"{number:038}" for number in range(2000)]
    for name in reversed(names):
        consumer.handler(Queue(name, str))(lambda body: None)
    view = ProcessStatusView(names, 1)
    page = ProcessStatus(view.descriptor, consumer, consumer.handlers, 1)
    page._lanes = {name: f"lane-of-{name[-5:]}" for name in names}

    page._note_lanes()

    assert view.lanes == page._lanes


def test_handler_that_begins_ends_the_silence_of_its_process(sides):
    """From then on threads are compared, so a handler that begins between two checks is noticed."""
    page, view, begin = sides
    page.look()
    silence, before = HeartbeatMonitor(), view.beat
    silence.hear(before, before, os.getpid())
    silence.hear(before, before + LOOK_CLOSER_SECONDS + 0.1, os.getpid())  # the checking thread has to wait
    assert silence._before

    begin("begins")
    silence.hear(view.beat, before + LOOK_CLOSER_SECONDS + 0.2, os.getpid())

    assert (silence.seconds, silence.since) == (0.0, view.rows()[0].started_at)
    assert not silence._before


def test_failed_update_of_the_status_page_is_repeated(sides, caplog, monkeypatch):
    page, view, _ = sides
    fails = [MemoryError()]

    def running():
        if fails:
            raise fails.pop()
        return []

    monkeypatch.setattr(page._consumer, "running", running)

    threading.Thread(target=page.keep_up, daemon=True).start()

    eventually(lambda: view.beat > 0, "it looks again")
    assert "could not update the status that the supervisor reads" in caplog.text


@pytest.mark.parametrize("has_waitid", [True, False], ids=["Linux", "macOS before Python 3.13"])
def test_stopped_process_is_found_with_and_without_waitid(has_waitid, monkeypatch):
    if not has_waitid:
        monkeypatch.delattr(os, "waitid")
    with subprocess.Popen(["sleep", "60"]) as child:
        assert not has_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        eventually(lambda: has_stopped(child.pid), "the process has stopped")
        child.kill()
