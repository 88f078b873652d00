"""The token of a delivery is greater than that of every earlier one of its message, whatever became of the clock."""

import pytest
import redis
from held_clock import NOON, micros

from reliq import transitions as t


@pytest.fixture
def again(run, keys):
    """Each way for a message to be delivered again: it ends a delivery, and has the message wait in a list."""

    def reclaim(one):
        run(t.reclaim(keys, clock=micros(ms=30_000)))

    def nack(one):
        run(t.nack(keys, [(one, 0, "failed 1 x", b"")], clock=NOON))
        run(t.reclaim(keys, clock=micros(ms=1)))

    def snooze(one):
        run(t.snooze(keys, [(one, 1)], clock=NOON))
        run(t.promote(keys, clock=micros(ms=2)))

    return {"reclaim": reclaim, "nack": nack, "snooze": snooze, "release": lambda one: run(t.release(keys, [one]))}


@pytest.mark.parametrize("way", ["reclaim", "nack", "snooze", "release"])
@pytest.mark.parametrize("clock", [NOON - 60_000_000, NOON, NOON + 60_000_000], ids=["back", "same", "on"])
def test_the_token_rises_with_each_delivery_of_a_message(publish, claim, again, way, clock):
    publish("m")
    [first] = claim(clock=NOON)
    again[way](first)
    [second] = claim(clock=clock)

    assert second.token > first.token


def test_the_token_is_the_time_so_that_a_replica_that_lags_behind_goes_on_above_it(publish, claim, client, keys):
    """A failover takes the last writes back, that of the token too."""
    publish("a", "b")
    [first] = claim(limit=1, clock=NOON)
    client.delete(keys.token)

    [second] = claim(limit=1, clock=micros(us=1))

    assert (first.token, second.token) == (NOON, NOON + 1)


def test_all_messages_of_a_claim_have_its_token_and_a_claim_of_nothing_has_none(publish, claim, client, keys):
    assert claim() == []
    assert client.exists(keys.token) == 0
    publish("a", "b")

    assert [one.token for one in claim()] == [NOON, NOON]
    assert client.get(keys.token) == b"%d" % NOON


def test_a_claim_that_is_repeated_has_its_first_token(publish, run, keys):
    publish("m")
    call = lambda clock: t.claim(keys, t.CallNumber("w", 1), limit=1, lease_ms=1000, clock=clock)  # noqa: E731
    [first] = run(call(NOON)).claimed

    [again] = run(call(micros(ms=5))).claimed

    assert again.token == first.token


@pytest.mark.parametrize("spoilt", [b"", b"x", b"nan", b"-1", b"1e300", b"9" * 400, b"0x10"], ids=repr)
def test_a_number_that_no_claim_writes_counts_for_nothing(publish, claim, client, keys, spoilt):
    client.set(keys.token, spoilt)
    publish("m")

    assert [one.token for one in claim()] == [NOON]


def test_a_key_of_another_type_is_named_and_nothing_is_changed(publish, claim, client, keys, dump):
    client.sadd(keys.token, "x")
    publish("m")
    before = dump()

    with pytest.raises(redis.ResponseError, match="RELIQ_KEY"):
        claim()

    assert dump() == before


def test_a_queue_that_is_forgotten_forgets_its_token(publish, claim, run, client, keys):
    publish("m")
    [one] = claim()
    run(t.ack(keys, [(one, None)]))

    run(t.forget(keys, letters=False))

    assert client.exists(keys.token) == 0


def test_a_claim_that_meets_a_cancelled_message_names_a_spoilt_table_of_failures(
    publish, claim, run, client, keys, dump
):
    publish("m")
    client.hset(keys.lease, "m", "!")
    client.set(keys.errors, "x")
    before = dump()

    with pytest.raises(redis.ResponseError, match="RELIQ_KEY"):
        claim()

    assert dump() == before
    client.delete(keys.errors)
