"""The clock of Redis or of a worker is wrong: no message is lost, and no message is stuck."""

import time

import pytest
from shifted import Clock, library
from transition import run_transition
from waiting import eventually

from reliq.lua.transitions import CallNumber

pytestmark = pytest.mark.slow

HOUR = 3600


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    return library(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def clock(shim, tmp_path):
    return Clock(shim, tmp_path)


@pytest.fixture
def server(own_server, clock):
    """A server that uses `clock`."""
    with clock.of_processes():
        return own_server()


@pytest.fixture
def set_clock(clock, admin):
    """Set the clock of the server this many hours ahead."""

    def make(hours):
        clock.set(hours * HOUR)
        assert round((admin.time()[0] - time.time()) / HOUR) == hours

    return make


@pytest.fixture
def long_job(worker, faulty, admin):
    """A worker that runs a job of 3 s."""
    process = worker("--queue", "long", "--queue", "counted", "--processes", "2")
    id = faulty.LONG.publish(3.0).id
    eventually(lambda: admin.hlen("note:started") == 1, "the job runs")
    return id, process


def test_redis_clock_set_forward_ends_leases_and_delays_and_loses_nothing(long_job, faulty, admin, set_clock):
    long, process = long_job
    faulty.COUNTED.publish(1, delay=HOUR / 2)

    set_clock(1)
    faulty.COUNTED.publish(2)

    eventually(lambda: faulty.COUNTED.counts().totals.get("acked") == 2, "what was due in half an hour is due")
    eventually(lambda: faulty.LONG.counts().alive == 0, "the job ends")
    counts = faulty.LONG.counts()
    assert (counts.missing, counts.dead, counts.totals["acked"]) == (0, 0, 1)
    assert int(admin.hget("note:done", long)) <= 2
    assert not process.said("Traceback")


def test_redis_clock_set_back_stops_no_work(long_job, faulty, set_clock):
    _, process = long_job
    set_clock(-1)
    faulty.COUNTED.publish_many(range(100), chunk=10)

    eventually(lambda: faulty.COUNTED.counts().totals.get("acked") == 100, "work goes on")
    eventually(lambda: faulty.LONG.counts().alive == 0, "the job ends")
    totals = faulty.LONG.counts().totals
    assert (totals["claimed"] - totals.get("released", 0), totals["acked"]) == (1, 1)
    assert not process.said("Traceback")


def test_redis_clock_set_back_does_not_prolong_a_lease(faulty, set_clock):
    queue = faulty.COUNTED
    id = queue.publish(1).id
    run_transition(queue, "claim", CallNumber("dead", 1), limit=1, lease_ms=300)

    set_clock(-1)
    assert not run_transition(queue, "reclaim").overdue
    assert run_transition(queue, "tidy")[2] == 1

    eventually(lambda: run_transition(queue, "reclaim").overdue == (id,), "its lease ends")


def test_workers_whose_own_clocks_are_wrong_change_nothing(worker, faulty, admin, shim, tmp_path):
    for days in (-1, 1):
        folder = tmp_path / f"of{days}"
        folder.mkdir()
        own = Clock(shim, folder)
        own.set(days * 24 * HOUR)
        with own.of_processes():
            worker("--queue", "steady", "--log-level", "error")
    for number in range(100):
        faulty.STEADY.publish(number, delay=0.01 * number)

    eventually(lambda: faulty.STEADY.counts().totals.get("acked") == 100, "all are worked")
    counts = faulty.STEADY.counts()
    assert (counts.missing, counts.totals["claimed"] - counts.totals.get("released", 0)) == (0, 100)
    assert set(admin.hvals("note:done")) == {b"1"}
