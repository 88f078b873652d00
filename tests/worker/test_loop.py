"""A part of the worker survives all errors: it backs off and continues."""

import logging
import threading

import pytest
from waiting import eventually

from reliq.errors import RedisRefusedError, RedisUnavailableError
from reliq.events import RedisRecovered, RedisUnavailable
from reliq.keys import Keys
from reliq.worker.health import sampler
from reliq.worker.loop import Loop, QueueBackoff

Q = Keys("q")


@pytest.fixture
def run():
    """Run steps as a loop until `enough` is set."""
    loops = []

    def make(step, **options):
        loop = Loop("part", step, **options)
        loops.append(loop)
        loop.start()
        return loop

    yield make
    for loop in loops:
        loop.stop()
        assert loop.join(30)


def test_an_outage_is_an_event_and_no_log_line_and_a_stop_ends_the_wait_for_its_end(run, recorder, caplog):
    told = threading.Event()

    def step():
        raise RedisUnavailableError("away")

    loop = run(step, observers=[recorder], away=told.set)

    recorder.wait_for(RedisUnavailable, 2)
    assert told.is_set()
    assert recorder.of(RedisUnavailable)[0] == RedisUnavailable("", "part", "away")
    assert caplog.text == ""
    loop.wake()
    loop.stop()
    assert loop.join(30)
    assert Loop("never started", step).join()


def test_a_wake_ends_the_wait_and_one_during_a_step_is_not_forgotten(run):
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def step():
        begun.release()
        assert go_on.acquire(timeout=30)
        return 3600.0

    loop = run(step)
    for _ in range(3):
        assert begun.acquire(timeout=30)
        loop.wake()
        go_on.release()

    assert begun.acquire(timeout=30)
    go_on.release()


def test_no_exception_and_no_odd_wait_ends_a_loop(run, caplog):
    raised = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError()]
    waits = [9.3e9, float("inf"), float("nan"), "soon"]
    made = threading.Semaphore(0)

    def step():
        made.release()
        if raised:
            raise raised.pop()
        return waits.pop() if waits else 0.0

    loop = run(step)
    for _ in range(9):
        assert made.acquire(timeout=30)
        loop.wake()
    assert "the part failed; retrying" in caplog.text


def test_no_observer_and_no_log_that_raises_ends_a_loop(run):
    made, errors = threading.Semaphore(0), [ValueError("a bug"), RedisUnavailableError("away")] * 2

    def step():
        made.release()
        raise errors.pop()

    def refuse(*_):
        raise SystemExit

    logging.getLogger("reliq.worker.loop").addFilter(refuse)
    try:
        run(step, observers=[refuse], away=refuse)
        for _ in range(4):
            assert made.acquire(timeout=30)
    finally:
        logging.getLogger("reliq.worker.loop").removeFilter(refuse)


def test_a_queue_in_trouble_is_left_alone_ever_longer_and_logged_ever_more_rarely(caplog):
    troubles, waits = QueueBackoff("settler"), []
    for _ in range(100):
        troubles.note(Q, RedisRefusedError("no rights"))
        waits.append(troubles.seconds_of(Q))

    assert waits[0] < 0.2
    assert waits[-1] > 1
    assert (troubles.waits(Q), troubles.waits(Keys("other")), troubles.seconds() > 0) == (True, False, True)
    troubles.over(Q)
    assert not troubles.waits(Q)
    assert troubles.seconds() == troubles.seconds_of(Q) == 0
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 7  # the 1st, 2nd, 4th, ... 64th
    assert lines[0] == "queue q: the settler failed (attempt 1); retrying: no rights"


def test_a_server_that_is_away_while_others_answer_is_reported_with_its_queues(recorder, caplog):
    shards = [Q, Q.of_shard(1), Keys("other")]
    troubles = QueueBackoff("settler", [recorder])
    for keys in (*shards, Q):
        troubles.note(keys, RedisUnavailableError("gone"))
    assert recorder.of(RedisUnavailable) == [
        RedisUnavailable(name, "settler", "gone") for name in ("q", "q", "other", "q")
    ]
    assert caplog.records == []  # an observer logs it instead

    troubles.over(Q)
    assert recorder.of(RedisRecovered) == []  # its other shard is away
    for keys in shards:
        troubles.over(keys)

    assert recorder.of(RedisRecovered) == [RedisRecovered("q", "settler"), RedisRecovered("other", "settler")]

    troubles.note(Q, RedisUnavailableError("gone"))
    assert (troubles.has(Q), troubles.refuses(Q)) == (True, False)
    troubles.note(Q, RedisRefusedError("no"))  # a reply, so Redis is reachable
    assert (troubles.has(Q), troubles.refuses(Q)) == (True, True)
    assert len(recorder.of(RedisRecovered)) == 3


def test_a_look_at_the_figures_that_failed_is_repeated():
    fails, seen = [MemoryError()], []

    def look():
        if fails:
            raise fails.pop()

    loop = sampler(look, seen.append)
    loop.start()

    eventually(lambda: seen, "it looks again")
    loop.stop()
    assert loop.join(60)
