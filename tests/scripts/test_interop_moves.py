"""A program in Go and reliq at the same queue, move by move: each goes on with what the other one left."""

import pytest
from go_original import GoProgram
from held_clock import NOON

from reliq import Queue, transitions as t
from reliq.keys import Keys, Layout

SECOND = NOON // 1_000_000
#: Names and layouts as a Go program has them.
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
    """Promote, reclaim and claim as a worker does; return what was claimed."""
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
    """Every key but those that only reliq knows of."""
    ours = {keys.totals, keys.wake, keys.watch, keys.lane("w"), keys.lane("p"), keys.ends, keys.token}
    return {key.decode() for key in client.scan_iter()} - ours


def test_what_go_publishes_reliq_works_and_nothing_is_left(go, claim, run, keys, client):
    ids = {go.publish(due=SECOND + late) for late in (0, 0, 5)}

    first = claim(SECOND)
    later = claim(SECOND + 5)

    assert (len(first), len(later), {one.id for one in (*first, *later)}) == (2, 1, ids)
    assert run(t.ack(keys, [(one, None) for one in (*first, *later)], clock=NOON)).lost == ()
    assert left_behind(client, keys) == set()


def test_what_reliq_publishes_go_works_and_nothing_is_left(go, publish, keys, client):
    now, late = publish("now"), publish("late", delay_ms=5000)

    taken = go.claim(SECOND)
    go.promote(SECOND + 6)
    for id in (taken, go.claim(SECOND)):
        go.ack(id)

    assert {taken, late} == {now, late}
    assert left_behind(client, keys) == set()


def test_what_go_nacked_comes_again_with_the_retries_that_go_counts(go, claim):
    id = go.publish(due=SECOND, retries=3)
    go.promote(SECOND)
    go.claim(SECOND)
    go.nack(id, SECOND, delay=10)

    assert claim(SECOND + 9) == []
    assert [(one.id, one.left) for one in claim(SECOND + 10)] == [(id, 2)]


def test_what_reliq_nacked_go_takes_again(go, publish, claim, run, keys):
    id = publish("m")
    [one] = claim()
    run(t.nack(keys, [(one, 10_000, "failed 1 x", b"")], clock=NOON))

    go.reclaim(SECOND + 9)
    assert go.claim(SECOND + 9, again=True) is None
    go.reclaim(SECOND + 11)
    assert go.claim(SECOND + 11, again=True) == id


def test_what_go_had_fetched_when_it_stopped_is_taken_over_when_its_lease_is_over(go, claim):
    ids = {go.publish(due=SECOND, retries=1) for _ in range(3)}
    go.promote(SECOND)
    for _ in ids:
        go.claim(SECOND, seconds=5)

    assert claim(SECOND + 4) == []
    assert {(one.id, one.left) for one in claim(SECOND + 5)} == {(id, 0) for id in ids}


def test_what_reliq_held_when_it_was_killed_go_takes_over(go, publish, claim):
    id = publish("m")
    claim(lease_ms=5000)

    go.reclaim(SECOND + 4)
    assert go.claim(SECOND + 4, again=True) is None
    go.reclaim(SECOND + 6)
    assert go.claim(SECOND + 6, again=True) == id


@pytest.mark.parametrize("place", ["pending", "ready", "snoozed"])
def test_what_go_intercepts_while_it_waits_is_gone(go, claim, run, keys, client, place):
    id = go.publish(due=SECOND + (5 if place == "pending" else 0))
    if place == "ready":
        go.promote(SECOND)
    if place == "snoozed":
        run(t.snooze(keys, [(claim()[0], 5000)], clock=NOON))

    assert go.intercept(id)
    assert claim(SECOND + 60) == []
    assert left_behind(client, keys) == set()


def test_what_go_intercepts_while_a_handler_runs_it_can_be_acked(go, claim, run, keys, client):
    id = go.publish(due=SECOND)
    [one] = claim()

    assert not go.intercept(id)
    assert run(t.ack(keys, [(one, None)], clock=NOON)).lost == ()
    assert left_behind(client, keys) == set()


@pytest.mark.parametrize("when", ["running", "in backoff"])
def test_what_go_intercepts_while_reliq_has_it_is_not_delivered_again_after_a_failure(
    go, claim, run, keys, client, when
):
    id = go.publish(due=SECOND)
    [one] = claim()
    if when == "running":
        go.intercept(id)
    run(t.nack(keys, [(one, 1000, "failed 1 x", b"body")], clock=NOON))
    if when == "in backoff":
        go.intercept(id)

    assert claim(SECOND + 60) == []
    assert client.smembers(keys.garbage) == {id.encode()}


def test_what_go_intercepts_in_the_retry_list_is_gone_but_for_its_body_which_has_a_ttl(go, claim, run, keys, client):
    id = go.publish(due=SECOND)
    go.promote(SECOND)
    go.claim(SECOND, seconds=0)
    run(t.reclaim(keys, clock=NOON + 1_000_000))

    go.intercept(id)

    assert claim(SECOND + 60) == []
    assert client.ttl(keys.msg(id)) > 0


@pytest.mark.parametrize("place", ["ready", "retry"])
def test_what_reliq_cancels_in_a_list_is_out_of_it_so_that_no_consumer_in_go_meets_an_id_without_a_body(
    go, run, keys, client, place
):
    """Go keeps one of its fetch slots for ever for each such id: with ten of them WithFetchLimit(10) delivers nothing."""
    ids = [go.publish(due=SECOND) for _ in range(3)]
    go.promote(SECOND)
    if place == "retry":
        for _ in ids:
            go.claim(SECOND, seconds=0)
        go.reclaim(SECOND)

    assert run(t.cancel(keys, ids[1:2], clock=NOON)) == ["cancelled"]

    taken = [go.claim(SECOND, again=place == "retry") for _ in range(3)]
    assert sorted(filter(None, taken)) == sorted([ids[0], ids[2]])
    for id in filter(None, taken):
        go.ack(id)
    assert {key for key in left_behind(client, keys) if ":dd:" not in key} == set()


def test_what_go_leased_or_nacked_is_no_suspect(go, run, keys):
    """600 messages that Go had merely nacked took 44.7 s instead of 2.0: each was run as what may kill its worker."""
    leased, nacked = go.publish(due=SECOND), go.publish(due=SECOND)
    go.promote(SECOND)
    for _ in range(2):
        go.claim(SECOND, seconds=5)
    go.nack(nacked, SECOND)
    clock = (SECOND + 6) * 1_000_000

    run(t.reclaim(keys, clock=clock))
    claimed = run(
        t.claim(keys, t.CallNumber("w", 1), limit=9, lease_ms=1000, suspects=0, direct=9, clock=clock)
    ).claimed

    assert {one.id for one in claimed} == {leased, nacked}


@pytest.fixture
def queue(url, keys):
    queue = Queue(keys.name, bytes, url=url, layout=keys.layout)
    yield queue
    queue.close()


@pytest.mark.parametrize("end", ["acked", "rejected", "purged", "cancelled"])
def test_a_chosen_id_is_taken_after_each_end_that_reliq_makes(queue, run, end):
    """In reliq's own layout the window is in the header; a body of Go has none."""
    assert queue.publish(b"x", id="a", dedup=600).status == "published"

    if end == "purged":
        run(t.purge(queue.keys, ["a"], state="ready"))
    elif end == "cancelled":
        queue.cancel("a")
    else:
        with queue.receive() as [job]:
            if end == "rejected":
                job.reject(reason="no")
        queue.moves.collect(["a"], letters_max=9, letters_ms=10**6)

    again = queue.publish(b"x", id="a", dedup=600)
    assert again.status == ("published" if end == "cancelled" else "duplicate")


def test_an_end_that_go_makes_frees_the_id(queue, go, client):
    """Go knows of no windows: docs/go.md says so."""
    queue.publish(b"x", id="a", dedup=600)
    go.ack(go.claim(SECOND))

    assert queue.publish(b"x", id="a", dedup=600).status == "published"
