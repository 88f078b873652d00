"""If a part of a worker process ends unexpectedly, the process logs it and is replaced."""

import asyncio
import os
import sys

import pytest
from waiting import eventually

from reliq.consumer import EXIT_HUNG
from reliq.events import Claimed
from reliq.settings import WorkerSettings
from reliq.worker.health import Pulse, live

PARTS = ["settler", "renewer", "scheduler", "janitor", "heartbeat", "fetcher", "event loop"]


def end_by_force(engine, part):
    if part == "event loop":
        engine._tasks.close()
    else:
        engine._loops[part].stop()
        assert engine._loops[part].join(30)


@pytest.mark.parametrize("part", PARTS)
def test_a_process_of_which_a_part_ended_names_it_and_must_be_replaced(acking, start, part, caplog):
    engine, pulse = start(), Pulse()
    pulse.note(engine.stats())
    assert (engine.dead_parts(), engine.must_be_replaced(), live([pulse])) == ([], False, "")

    end_by_force(engine, part)
    pulse.note(engine.stats())

    assert engine.dead_parts() == [part]
    assert engine.must_be_replaced()
    assert live([pulse]) == "process 0: one of its parts stopped unexpectedly"
    assert f"the {part} stopped unexpectedly" in caplog.text
    acking.stop(grace=0)
    assert engine.dead_parts() == []


@pytest.mark.parametrize("is_idle", [False, True], ids=["while it runs", "while it waits"])
def test_an_event_loop_whose_selector_is_closed_ends_its_thread_and_does_not_spin(
    queue, consumer, start, caplog, is_idle
):
    @consumer.handler(queue)
    async def handle(body):
        os.close(asyncio.get_running_loop()._selector.fileno())

    engine = start()
    if is_idle:
        # The fetcher has created its selector by then, so the closed file's number is not reused.
        eventually(lambda: engine.inflight._watched is not None, "the fetcher waits")
        eventually(lambda: waits_in_select(engine._tasks.thread_id), "the loop has nothing to do")
        os.close(engine._tasks._loop._selector.fileno())
    else:
        queue.publish("x")

    eventually(lambda: engine.dead_parts() == ["event loop"], "the loop's thread has ended")
    assert engine.must_be_replaced()
    assert caplog.text.count("the event loop of async handlers is broken") == 1


def waits_in_select(thread_id):
    frame = sys._current_frames().get(thread_id)
    return frame is not None and frame.f_code.co_name == "select"


def test_a_run_with_a_part_that_ended_is_over(queue, consumer):
    consumer.handler(queue)(lambda body: consumer._engine._loops["janitor"].stop())
    queue.publish("x")

    assert consumer.run(WorkerSettings(grace=5)) == EXIT_HUNG


def test_messages_that_a_stop_cannot_give_back_go_to_the_supervisor(queue, consumer, start, recorder, monkeypatch):
    monkeypatch.setattr("reliq.worker.engine.LAST_SETTLE_SECONDS", 0.1)
    consumer.handler(queue, batch=2, linger=60)(lambda bodies: None)
    engine = start()
    queue.publish("x", id="x")
    recorder.wait_for(Claimed)
    end_by_force(engine, "settler")

    assert consumer.stop()

    assert [held.delivery.id for held in consumer.unfinished] == ["x"]
