"""A Go program and reliq take turns on one queue: each continues from the other's state."""

from contextlib import closing

import pytest
from go_original import GoProgram
from held_clock import NOON

from reliq import Queue
from reliq.keys import Keys, Layout
from reliq.lua import transitions as t

SECOND = NOON // 1_000_000
#: Names and layouts of a Go program.
QUEUES = [
    Keys("orders", Layout.hdt3213()),
    Keys("order:timeout", Layout.hdt3213()),
    Keys("订单/v2 a", Layout.hdt3213(hash_tag=True)),
    Keys("a:b", Layout.hdt3213(hash_tag=True, prefix="shop:eu")),
]

pytestmark = pytest.mark.foreign_hands


@pytest.fixture(params=QUEUES, ids=lambda keys: f"{keys.name} {keys.layout}")
def keys(request):
    return request.param


@pytest.fixture
def go(client, keys):
    return GoProgram(client, keys)


@pytest.fixture
def claim(run, keys):
    """Promote, reclaim and claim as a worker does; return the claimed messages."""
    numbers = iter(range(1, 100))

    def make(second=SECOND, lease_ms=30_000):
        clock = second * 1_000_000
        run(t.promote(keys, clock=clock))
        run(t.reclaim(keys, clock=clock))
        turn = t.CallNumber("w", next(numbers))
        return run(t.claim(keys, turn, limit=9, lease_ms=lease_ms, direct=9, clock=clock)).claimed

    return make


@pytest.fixture
def publish(run, keys):
    numbers = iter(range(1, 100))

    def make(id, **options):
        given = {"ttl_ms": 3_600_000, "retries": 3, "bare": True, "clock": NOON} | options
        run(t.publish(keys, [(id, b"body")], t.CallNumber("p", next(numbers)), **given))
        return id

    return make


def left_behind(client, keys):
    """Return every Redis key except those that only reliq uses."""
    ours = {keys.totals, keys.wake, keys.watch, keys.lane("w"), keys.lane("p"), keys.ends, keys.token}
    return {key.decode() for key in client.scan_iter()} - ours


def test_reliq_works_off_messages_of_go_and_leaves_nothing(go, claim, run, keys, client):
    ids = {go.publish(due=SECOND + late) for late in (0, 0, 5)}

    first = claim(SECOND)
    later = claim(SECOND + 5)

    assert (len(first), len(later), {one.id for one in (*first, *later)}) == (2, 1, ids)
    assert run(t.ack(keys, [(one, None) for one in (*first, *later)], clock=NOON)).lost == ()
    assert left_behind(client, keys) == set()


def test_go_works_off_messages_of_reliq_and_leaves_nothing(go, publish, keys, client):
    now, late = publish("now"), publish("late", delay_ms=5000)

    taken = go.claim(SECOND)
    go.promote(SECOND + 6)
    for id in (taken, go.claim(SECOND)):
        go.ack(id)

    assert {taken, late} == {now, late}
    assert left_behind(client, keys) == set()


def test_nacked_messages_pass_between_go_and_reliq_with_their_retries(go, publish, claim, run, keys):
    of_go = go.publish(due=SECOND, retries=3)
    go.promote(SECOND)
    go.nack(go.claim(SECOND), SECOND, delay=10)
    assert claim(SECOND + 9) == []
    [one] = claim(SECOND + 10)
    assert (one.id, one.left) == (of_go, 2)

    run(t.nack(keys, [(one, 10_000, "failed 1 x", b"")], clock=NOON + 10_000_000))
    go.reclaim(SECOND + 19)
    assert go.claim(SECOND + 19, again=True) is None
    go.reclaim(SECOND + 21)
    assert go.claim(SECOND + 21, again=True) == of_go


def test_messages_of_a_program_in_go_that_stopped_are_redelivered_after_its_leases(go, claim):
    ids = {go.publish(due=SECOND, retries=1) for _ in range(3)}
    go.promote(SECOND)
    for _ in ids:
        go.claim(SECOND, seconds=5)

    assert claim(SECOND + 4) == []
    assert {(one.id, one.left) for one in claim(SECOND + 5)} == {(id, 0) for id in ids}


def test_go_takes_messages_of_a_killed_worker_over(go, publish, claim):
    id = publish("m")
    claim(lease_ms=5000)

    go.reclaim(SECOND + 4)
    assert go.claim(SECOND + 4, again=True) is None
    go.reclaim(SECOND + 6)
    assert go.claim(SECOND + 6, again=True) == id


# ---- Go intercepts a message: its cancel ----------------------------------------


@pytest.mark.parametrize("place", ["pending", "ready", "snoozed", "retry"])
def test_a_waiting_message_that_go_intercepts_is_gone(go, claim, run, keys, client, place):
    id = go.publish(due=SECOND + (5 if place == "pending" else 0))
    if place in ("ready", "retry"):
        go.promote(SECOND)
    if place == "snoozed":
        run(t.snooze(keys, [(claim()[0], 5000)], clock=NOON))
    if place == "retry":
        go.claim(SECOND, seconds=0)
        run(t.reclaim(keys, clock=NOON + 1_000_000))

    assert go.intercept(id) or place == "retry"
    assert claim(SECOND + 60) == []
    if place == "retry":
        assert client.ttl(keys.msg(id)) > 0  # the body stays until then
    else:
        assert left_behind(client, keys) == set()


def test_a_message_that_go_intercepts_while_a_handler_runs_can_be_acked(go, claim, run, keys, client):
    id = go.publish(due=SECOND)
    [one] = claim()

    assert not go.intercept(id)
    assert run(t.ack(keys, [(one, None)], clock=NOON)).lost == ()
    assert left_behind(client, keys) == set()


@pytest.mark.parametrize("when", ["running", "in backoff"])
def test_a_message_that_go_intercepts_is_not_redelivered_after_a_failure(go, claim, run, keys, client, when):
    id = go.publish(due=SECOND)
    [one] = claim()
    if when == "running":
        go.intercept(id)
    run(t.nack(keys, [(one, 1000, "failed 1 x", b"body")], clock=NOON))
    if when == "in backoff":
        go.intercept(id)

    assert claim(SECOND + 60) == []
    assert client.smembers(keys.garbage) == {id.encode()}


# ---- reliq ends messages --------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("place", ["ready", "retry"])
def test_a_message_that_reliq_cancels_leaves_its_list_before_go_meets_it(go, run, keys, client, place, at):
    """In Go, each id without a body takes a fetch slot permanently: ten of them block WithFetchLimit(10)."""
    for _ in range(3):
        go.publish(due=SECOND)
    go.promote(SECOND)
    if place == "retry":
        for _ in range(3):
            go.claim(SECOND, seconds=0)
        go.reclaim(SECOND)

    listed = client.lrange(getattr(keys, place), 0, -1)[::-1]
    gone = listed.pop(at).decode()

    assert run(t.cancel(keys, [gone], clock=NOON)) == ["cancelled"]

    taken = [go.claim(SECOND, again=place == "retry") for _ in range(3)]
    assert taken == [*(id.decode() for id in listed), None]
    assert run(t.counts(keys)).totals == {"cancelled": 1}
    for id in taken[:2]:
        go.ack(id)
    assert {key for key in left_behind(client, keys) if ":dd:" not in key} == set()


def test_a_chosen_id_is_taken_after_an_ack_by_reliq_and_free_after_one_by_go(url, keys, go):
    """In reliq's layout the header stores the window; a Go body has no header, and Go has no windows."""
    with closing(Queue(keys.name, bytes, url=url, layout=keys.layout)) as queue:
        answers = [queue.publish(b"x", id=id, dedup=600).status for id in "ab"]
        go.ack(go.claim(SECOND))
        with queue.receive():
            pass
        answers += [queue.publish(b"x", id=id, dedup=600).status for id in "ab"]

    assert answers == ["published", "published", "published", "duplicate"]
