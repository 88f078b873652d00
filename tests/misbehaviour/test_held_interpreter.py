"""A handler that holds the GIL blocks its process: leases, neighbours and shutdown still behave as documented."""

import signal

import psutil
import pytest
from waiting import eventually

pytestmark = pytest.mark.slow


def started(client, id):
    return int(client.hget("started", id) or 0)


class Neighbour:
    """A message whose handler runs beside a misbehaving handler; another process reruns it without a retry spent."""

    def __init__(self, queue, client):
        self._queue, self._client = queue, client
        self._id = queue.publish("bell").id
        self._runs(1)

    def check_it_runs_again(self):
        self._runs(2)
        self._client.rpush("bell", "1")
        eventually(lambda: self._queue.counts().totals.get("acked"), "and comes to its end")
        counts = self._queue.counts()
        assert (counts.missing, counts.dead, counts.totals.get("retried_lease", 0)) == (0, 0, 0)
        assert started(self._client, self._id) == 2

    def _runs(self, times):
        eventually(lambda: started(self._client, self._id) == times, f"the neighbour runs {times} times")


def test_only_the_message_that_holds_the_interpreter_pays(worker, deeds, client):
    process = worker("--concurrency", "4", "--gil-timeout", "5")
    neighbour = Neighbour(deeds.WAITING, client)

    bad = deeds.HELD.publish("re").id
    eventually(lambda: started(client, bad), "the handler holds the interpreter")
    deeds.GOOD.publish_many(range(50))
    deeds.AGOOD.publish_many(range(50))

    eventually(lambda: deeds.GOOD.counts().totals.get("acked") == 50, "the good ones are worked")
    eventually(lambda: deeds.AGOOD.counts().totals.get("acked") == 50, "the good coroutines are worked")
    neighbour.check_it_runs_again()
    eventually(lambda: deeds.HELD.counts().dead == 1, "the bad one ends")
    eventually(lambda: process.said("a handler has held the GIL for"), "the log says why")
    eventually(lambda: process.said(f"Running messages: held {bad}\n"), "and of which message")
    assert deeds.HELD.dead_letters()[0].reason == "lease"
    for queue in (deeds.GOOD, deeds.AGOOD):
        assert (queue.counts().missing, queue.counts().dead) == (0, 0)
        assert queue.counts().totals.get("retried_lease", 0) == 0
    assert started(client, bad) == 1


@pytest.mark.parametrize("how", ["re", "cancelled re"])
def test_coroutine_that_holds_the_interpreter_is_named_and_pays_alone(worker, deeds, client, how):
    process = worker("--concurrency", "4", "--gil-timeout", "5", "--queue", "aheld")
    sleeping = [deeds.AHELD.publish("sleeps").id for _ in range(2)]
    eventually(lambda: all(started(client, id) for id in sleeping), "the neighbours run")

    bad = deeds.AHELD.publish(how).id

    eventually(lambda: deeds.AHELD.counts().dead == 1, "the bad one ends")
    eventually(lambda: process.said(f"Running messages: aheld {bad}\n"), "the log names it alone")
    eventually(lambda: all(started(client, id) == 2 for id in sleeping), "the neighbours run again, without a retry")
    assert [one.id for one in deeds.AHELD.dead_letters()] == [bad]
    assert deeds.AHELD.counts().totals.get("retried_lease", 0) == 0


def test_handler_that_holds_the_interpreter_ends_at_its_timeout(worker, deeds, client):
    process = worker("--concurrency", "4")  # the default --gil-timeout is half a minute
    neighbour = Neighbour(deeds.WAITING, client)

    deeds.LIMITED.publish("re")

    eventually(lambda: process.said("a handler that holds the GIL exceeded its timeout"), "it is ended")
    eventually(lambda: deeds.LIMITED.counts().dead == 1, "the bad one ends")
    neighbour.check_it_runs_again()


@pytest.mark.parametrize("queue", ["HANGING", "SWALLOWING"])
def test_handler_that_ignores_its_timeout_ends_with_its_process(worker, deeds, client, queue):
    hangs = getattr(deeds, queue)
    process = worker("--concurrency", "8")
    neighbour = Neighbour(deeds.WAITING, client)
    (first,) = process.children()

    bad = hangs.publish("").id
    eventually(lambda: process.said(f"a handler exceeded its timeout: {hangs.name} {bad}; replacing"), "it is seen")
    deeds.GOOD.publish_many(range(50))

    eventually(lambda: deeds.GOOD.counts().totals.get("acked") == 50, "a successor works")
    neighbour.check_it_runs_again()
    eventually(lambda: hangs.counts().dead == 1, "the one that hung ends")
    eventually(lambda: not first.is_running(), "its process is gone")
    assert started(client, bad) == 1
    assert hangs.dead_letters()[0].reason == "lease"


def test_single_handler_that_holds_the_interpreter_keeps_its_lease(worker, deeds, client):
    worker("--concurrency", "1", "--queue", "held", "--queue", "good")
    bad = deeds.HELD.publish("14").id
    eventually(lambda: started(client, bad), "the handler holds the interpreter")
    deeds.GOOD.publish_many(range(20))
    worker("--concurrency", "1", "--queue", "held", "--queue", "good")

    eventually(lambda: deeds.GOOD.counts().totals.get("acked") == 20, "the good ones are worked")
    eventually(lambda: deeds.HELD.counts().totals.get("acked") == 1, "it ends well after more than two leases")

    assert started(client, bad) == 1
    assert deeds.GOOD.counts().totals.get("retried_lease", 0) == 0


def test_no_process_outlives_a_killed_supervisor(worker, deeds, client):
    process = worker("--concurrency", "4", "--gil-timeout", "1000")
    bad = deeds.HELD.publish("with a child re").id
    eventually(lambda: started(client, bad), "the handler holds the interpreter")
    (pid,) = client.lrange("children", 0, -1)
    left = [psutil.Process(int(pid)), *process.children()]

    process.process.send_signal(signal.SIGKILL)

    eventually(lambda: not any(map(runs, left)), "the child and what it has started end")


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
