"""A message whose worker died is a suspect: it may have killed the worker, so only few suspects run at a time."""

import threading

import pytest
from transition import run_transition

from reliq.events import Acked, Handled, Started
from reliq.lua.transitions import CallNumber


@pytest.fixture
def suspects(make_queue):
    """Make messages whose worker died and whose leases have expired."""

    def make(*names, amount=20):
        for name in names:
            queue = make_queue(name)
            queue.publish_many(["x"] * amount)
            assert (
                len(run_transition(queue, "claim", CallNumber("dead", 1), limit=amount, lease_ms=1).claimed) == amount
            )
            while queue.counts().retry < amount:
                run_transition(queue, "reclaim")

    return make


def test_suspects_run_in_half_of_the_slots_and_others_wait(no_looks, queue, consumer, start, recorder, suspects, gate):
    left = []

    @consumer.handler(queue)
    def handle(body, job):
        left.append(job.retries_left)
        gate.pass_through()

    suspects("q")
    start(concurrency=8)

    gate.wait_for(4)
    queue.publish("innocent")
    gate.wait_for()
    assert left == [11] * 4 + [12]  # twelve, minus the retry that the dead worker spent
    assert (queue.counts().retry, queue.counts().unack) == (16, 5)
    gate.open()
    recorder.wait_for(Acked, 21)
    assert left.count(11) == 20


def test_no_queue_waits_for_the_suspects_of_another(no_looks, make_queue, consumer, start, suspects, gate):
    @consumer.handler(make_queue("slow"))
    @consumer.handler(make_queue("quick"))
    def handle(body):
        gate.pass_through()

    suspects("slow", "quick", amount=5)
    start(concurrency=4)

    gate.wait_for(4)
    gate.open()


@pytest.mark.parametrize(("deaths", "beside"), [(2, 2), (3, 1)], ids=["two", "three"])
def test_each_death_in_a_row_halves_how_many_run_beside_each_other(
    no_looks, queue, client, consumer, start, recorder, suspects, meter, gate, deaths, beside
):
    @consumer.handler(queue)
    def handle(body, job):
        with meter:
            gate.pass_through()
            threading.Event().wait(0.02)  # another concurrent suspect would be counted

    suspects("q", amount=12)
    client.hset(queue.keys.lease, mapping=dict.fromkeys(client.lrange(queue.keys.retry, 0, -1), f"suspect{deaths}"))

    start(concurrency=8)

    gate.wait_for(beside)
    gate.open()
    recorder.wait_for(Acked, 12)
    assert meter.most == beside


def test_the_innocent_are_found_behind_many_suspects(no_looks, queue, consumer, start, recorder, suspects, gate):
    @consumer.handler(queue)
    def handle(body):
        if body == "x":
            gate.pass_through()

    suspects("q", amount=100)
    queue.publish_many(["innocent"] * 20)
    claimed = run_transition(queue, "claim", CallNumber("other", 1), limit=20, lease_ms=30_000).claimed
    run_transition(queue, "nack", [(one, 0, "failed 1 x", b"") for one in claimed])
    while queue.counts().retry < 120:
        run_transition(queue, "reclaim")

    start(concurrency=4)

    gate.wait_for(2)  # as many suspects as four slots may run
    recorder.wait_for(Acked, 20)
    assert len(recorder.of(Started)) == 22


def test_a_suspect_that_hangs_does_not_keep_the_next_from_its_turn(queue, consumer, start, recorder, suspects, gate):
    seen = []

    @consumer.handler(queue, timeout=1.5, lease=60)  # long enough for the others on a busy machine
    def handle(body, job):
        seen.append(job.id)
        if len(seen) == 1:
            gate.pass_through()

    suspects("q", amount=3)
    start(concurrency=2)  # one suspect at a time

    recorder.wait_for(Acked, 2)
    assert recorder.wait_for(Handled, outcome="timeout")[0].id == seen[0]
    assert recorder.ids(Acked) == seen[1:]
