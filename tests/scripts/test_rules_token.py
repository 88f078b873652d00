"""The token of a delivery is greater than that of every earlier one of its message, also when the clock goes back."""

import pytest
import redis
from held_clock import NOON, micros

from reliq import transitions as t

#: Each way for a message to be delivered again: it ends a delivery, and has the message wait in a list.
AGAIN = {
    "reclaim": lambda keys, _: [t.reclaim(keys, clock=micros(ms=30_000))],
    "nack": lambda keys, one: [
        t.nack(keys, [(one, 0, "failed 1 x", b"")], clock=NOON),
        t.reclaim(keys, clock=micros(ms=1)),
    ],
    "snooze": lambda keys, one: [t.snooze(keys, [(one, 1)], clock=NOON), t.promote(keys, clock=micros(ms=2))],
    "release": lambda keys, one: [t.release(keys, [one])],
}


def test_the_token_is_the_time_so_that_a_replica_that_lags_behind_goes_on_above_it(publish, claim, client, keys):
    """A failover takes the last writes back, that of the token too."""
    assert claim() == []
    assert client.exists(keys.token) == 0
    publish("a", "b", "c")
    assert [one.token for one in claim(limit=2, clock=NOON)] == [NOON, NOON]
    assert client.get(keys.token) == b"%d" % NOON
    client.delete(keys.token)

    assert [one.token for one in claim(limit=1, clock=micros(us=1))] == [NOON + 1]


def test_a_repeated_claim_has_its_first_token_and_a_forgotten_queue_has_none(publish, run, client, keys):
    publish("m")
    call = lambda clock: t.claim(keys, t.CallNumber("w", 1), limit=1, lease_ms=1000, clock=clock)  # noqa: E731
    [first] = run(call(NOON)).claimed

    [again] = run(call(micros(ms=5))).claimed
    assert again.token == first.token

    run(t.ack(keys, [(again, None)]))
    run(t.forget(keys, letters=False))
    assert client.exists(keys.token) == 0


@pytest.mark.parametrize(
    "spoilt", [b"", b"x", b"nan", b"-1", b"1e300", b"9" * 400, b"0x10"], ids=lambda text: repr(text)[:9]
)
def test_a_number_that_no_claim_writes_counts_for_nothing(publish, claim, client, keys, spoilt):
    client.set(keys.token, spoilt)
    publish("m")

    assert [one.token for one in claim()] == [NOON]


def test_a_claim_that_meets_a_cancelled_message_names_a_spoilt_table_of_failures(publish, claim, client, keys, dump):
    publish("m")
    client.hset(keys.lease, "m", "!")
    client.set(keys.errors, "x")
    before = dump()

    with pytest.raises(redis.ResponseError, match="RELIQ_KEY"):
        claim()

    assert dump() == before
    client.delete(keys.errors)
