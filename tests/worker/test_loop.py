"""A part of the worker never dies: it backs off, and goes on."""

import logging
import threading

import pytest

from reliq.errors import RedisRefusedError, RedisUnavailableError
from reliq.events import RedisAway, RedisBack
from reliq.keys import Keys
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


def test_a_step_that_raises_is_made_again_and_the_failure_is_logged(run, caplog):
    made = threading.Semaphore(0)

    def step():
        made.release()
        raise ValueError("a bug")

    run(step)

    assert made.acquire(timeout=30)
    assert made.acquire(timeout=30)
    assert "the part failed and tries again" in caplog.text


def test_an_outage_is_an_event_and_is_told_to_whom_it_concerns(run, recorder, caplog):
    told = threading.Event()

    def step():
        raise RedisUnavailableError("away")

    run(step, observers=[recorder], away=told.set)

    recorder.wait_for(RedisAway, 2)
    assert told.is_set()
    assert recorder.of(RedisAway)[0] == RedisAway("", "part", "away")
    assert caplog.text == ""


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


def test_a_stop_ends_the_wait_for_redis_to_come_back(run):
    failed = threading.Event()

    def step():
        failed.set()
        raise RedisUnavailableError("away")

    loop = run(step)
    assert failed.wait(30)
    loop.wake()
    loop.stop()

    assert loop.join(30)


@pytest.mark.parametrize("wait", [9.3e9, 1e17, float("inf"), float("nan"), "soon", None], ids=str)
def test_a_wait_that_no_thread_can_wait_ends_no_loop(run, wait):
    made = threading.Semaphore(0)

    def step():
        made.release()
        return wait

    loop = run(step)
    for _ in range(3):
        assert made.acquire(timeout=30)
        loop.wake()


@pytest.mark.parametrize(
    "end", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), RecursionError(), MemoryError()], ids=repr
)
def test_no_exception_ends_a_loop(run, end):
    made = threading.Semaphore(0)

    def step():
        made.release()
        raise end

    run(step)
    for _ in range(3):
        assert made.acquire(timeout=30)


def test_whoever_is_told_of_an_outage_ends_no_loop(run):
    made = threading.Semaphore(0)

    def step():
        made.release()
        raise RedisUnavailableError("away")

    def refuse(*_):
        raise SystemExit

    run(step, observers=[refuse], away=refuse)
    for _ in range(3):
        assert made.acquire(timeout=30)


def test_a_log_that_raises_ends_no_loop(run):
    made = threading.Semaphore(0)

    def step():
        made.release()
        raise ValueError("a bug")

    def refuse(record):
        raise ValueError("the log is full")

    logging.getLogger("reliq.worker.loop").addFilter(refuse)
    try:
        run(step)
        for _ in range(3):
            assert made.acquire(timeout=30)
    finally:
        logging.getLogger("reliq.worker.loop").removeFilter(refuse)


def test_a_loop_that_was_never_started_has_ended():
    assert Loop("part", lambda: 0.0).join()


def test_a_queue_in_trouble_is_let_alone_longer_and_longer(caplog):
    troubles = QueueBackoff("settler")
    waits = []
    for _ in range(8):
        troubles.note(Q, RedisRefusedError("no"))
        waits.append(troubles.seconds_of(Q))

    assert waits[0] < 0.2
    assert waits[-1] > 1
    assert troubles.waits(Q)
    assert not troubles.waits(Keys("other"))
    assert troubles.seconds() > 0
    troubles.over(Q)
    assert not troubles.waits(Q)
    assert troubles.seconds() == troubles.seconds_of(Q) == 0


def test_trouble_that_lasts_is_logged_ever_more_rarely(caplog):
    troubles = QueueBackoff("settler")
    for _ in range(100):
        troubles.note(Q, RedisRefusedError("no rights"))

    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 7  # the 1st, 2nd, 4th, ... 64th
    assert lines[0] == "queue q: the settler failed for the 1. time: no rights"


def test_a_server_that_is_away_while_others_answer_is_told_by_the_queue_that_has_it(recorder, caplog):
    shards = [Q, Q.of_shard(1), Keys("other")]
    troubles = QueueBackoff("settler", [recorder])
    for keys in (*shards, Q):
        troubles.note(keys, RedisUnavailableError("gone"))
    assert recorder.of(RedisAway) == [RedisAway(name, "settler", "gone") for name in ("q", "q", "other", "q")]
    assert caplog.records == []  # an observer says it

    troubles.over(Q)
    assert recorder.of(RedisBack) == []  # its other shard is away
    for keys in shards:
        troubles.over(keys)

    assert recorder.of(RedisBack) == [RedisBack("q", "settler"), RedisBack("other", "settler")]


def test_what_redis_refuses_is_not_away(recorder):
    troubles = QueueBackoff("settler", [recorder])
    troubles.note(Q, RedisUnavailableError("gone"))
    assert (troubles.has(Q), troubles.refuses(Q)) == (True, False)

    troubles.note(Q, RedisRefusedError("no"))

    assert (troubles.has(Q), troubles.refuses(Q)) == (True, True)
    assert recorder.of(RedisBack) == [RedisBack("q", "settler")]
