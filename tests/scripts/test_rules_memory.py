"""What ended is remembered: abnormal ends always, acked ones when the queue wants it, each stream with its own cap."""

import pytest
from held_clock import micros

from reliq import transitions as t

FOR_EVER_MS = 10**12


@pytest.fixture
def remembered(client, keys):
    """The ends that are remembered, oldest first: id, kind and note."""

    def look(stream=None):
        rows = client.xrange(stream or keys.ends)
        return [tuple(end[name].decode() for name in (b"id", b"kind", b"note")) for _, end in rows]

    return look


@pytest.fixture
def fail(run, keys):
    """Nack what is held, to be delivered again at once; the error is kept with the message."""

    def make(held):
        run(t.nack(keys, [(one, 0, "failed 1 boom", b"") for one in held], clock=micros()))
        run(t.reclaim(keys, clock=micros()))

    return make


def test_an_ack_leaves_no_trace_unless_the_queue_wants_history(publish, claim, run, client, keys):
    publish("m")

    run(t.ack(keys, [(one, None) for one in claim()]))

    assert client.exists(keys.ends, keys.history) == 0


def test_history_has_the_last_acked_ones_and_how_long_they_ran(publish, claim, run, keys, remembered):
    publish("a", "b", "c")
    a, b, c = claim()

    run(t.ack(keys, [(a, None), (b, None)], history=2, took_ms=[10, 20]))
    run(t.ack(keys, [(c, None)], history=2))

    assert remembered(keys.history) == [("b", "acked", "20"), ("c", "acked", "")]
    assert remembered() == []


def test_a_receipt_that_no_longer_holds_takes_nobody_elses_time(publish, claim, run, keys, remembered):
    publish("a", "b")
    a, b = claim()
    run(t.ack(keys, [(a, None)]))

    run(t.ack(keys, [(a, None), (b, None)], history=5, took_ms=[10, 20]))

    assert remembered(keys.history) == [("b", "acked", "20")]


def test_acked_ones_never_push_out_the_others(publish, claim, run, keys, remembered):
    publish("off", delay_ms=1)
    run(t.cancel(keys, ["off"]))
    publish(*(f"m{number}" for number in range(500)))

    run(t.ack(keys, [(one, None) for one in claim(limit=500)], history=1))

    assert remembered() == [("off", "cancelled", "")]
    assert len(remembered(keys.history)) == 1


def test_a_dead_one_is_remembered_with_its_reason_and_error(bury, run, keys, remembered):
    bury("m")

    run(t.collect(keys, ["m"], letters_max=0, letters_ms=FOR_EVER_MS))

    assert remembered() == [("m", "dead", "rejected 1 bad card")]


def test_one_whose_body_was_gone_is_remembered_with_what_last_went_wrong(publish, claim, fail, run, keys, remembered):
    publish("m", "n")
    fail(claim(limit=1))

    run(t.ack(keys, [(one, None) for one in claim()], kind="expired"))

    assert remembered() == [("n", "expired", ""), ("m", "expired", "failed 1 boom")]


@pytest.mark.parametrize("how", ["ack", "nack", "release", "snooze", "reclaim"])
def test_one_cancelled_while_it_ran_is_remembered_by_what_ends_it(how, publish, claim, run, keys, remembered):
    publish("m")
    (one,) = claim(lease_ms=1)
    run(t.cancel(keys, ["m"]))
    end = {
        "ack": t.ack(keys, [(one, None)], kind="expired"),
        "nack": t.nack(keys, [(one, 0, "failed 1 x", b"")]),
        "release": t.release(keys, [one]),
        "snooze": t.snooze(keys, [(one, 5)]),
        "reclaim": t.reclaim(keys, clock=micros(ms=2)),
    }[how]

    run(end)

    assert remembered() == [("m", "cancelled", "")]


def test_one_cancelled_in_a_list_is_remembered_by_the_claim_that_meets_it(publish, claim, fail, run, keys, remembered):
    publish("m")
    fail(claim())
    run(t.cancel(keys, ["m"]))
    assert remembered() == []

    assert claim() == []

    assert remembered() == [("m", "cancelled", "failed 1 boom")]


def test_one_cancelled_between_two_tries_is_remembered_with_its_error(publish, claim, run, keys, remembered):
    publish("m")
    run(t.nack(keys, [(one, 60_000, "failed 1 boom", b"") for one in claim()]))

    run(t.cancel(keys, ["m"]))

    assert remembered() == [("m", "cancelled", "failed 1 boom")]


def test_one_cancelled_and_published_again_in_its_place_is_remembered(publish, run, keys, remembered):
    publish("m", window_ms=1000)
    run(t.cancel(keys, ["m"]))

    publish("m", window_ms=1000, replace=True)

    assert remembered() == [("m", "cancelled", "")]


def test_purged_ones_are_remembered(publish, run, keys, remembered):
    publish("a", "b")

    run(t.purge(keys, ["a"], state="ready"))

    assert remembered() == [("a", "purged", "")]


def test_the_last_thousand_are_remembered_and_no_more(publish, run, keys, remembered):
    for start in (0, 500, 1000):
        ids = [f"m{number}" for number in range(start, start + 500)]
        publish(*ids, delay_ms=1)
        run(t.cancel(keys, ids))

    assert [id for id, _, _ in remembered()] == [f"m{number}" for number in range(500, 1500)]
