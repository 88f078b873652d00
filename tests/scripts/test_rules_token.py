"""Each delivery's fencing token is greater than all earlier tokens of its message, also if the clock goes back."""

import pytest
import redis
from held_clock import NOON, micros

from reliq.lua import transitions as t


def test_the_token_is_the_time_so_that_a_replica_that_lags_behind_goes_on_above_it(publish, claim, client, keys):
    """A failover can lose the last writes, including the stored token."""
    assert claim() == []
    assert client.exists(keys.token) == 0
    publish("a", "b", "c")
    assert [one.token for one in claim(limit=2, clock=NOON)] == [NOON, NOON]
    assert client.get(keys.token) == b"%d" % NOON
    client.delete(keys.token)

    assert [one.token for one in claim(limit=1, clock=micros(us=1))] == [NOON + 1]


def test_a_forgotten_queue_has_no_token(publish, claim, ack, run, client, keys):
    publish("m")
    ack(*claim())

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
