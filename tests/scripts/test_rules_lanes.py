"""Rule 6: every call may be repeated; and a chosen id is published once while it lives and for a while after."""

import pytest
from held_clock import HOUR_MS, NOON

from reliq import transitions as t

#: So long Redis remembers a claim, by its own clock, which no test holds here.
LEASE_MS = 60_000
ITEMS = [("a", b',"r":3}\na'), ("b", b',"r":3}\nb')]


@pytest.fixture
def lane(keys):
    """A publish of two messages by a number of the lane `p`, or of another."""

    def make(number, items=ITEMS, lane="p", **options):
        return t.publish(keys, items, t.CallNumber(lane, number), ttl_ms=HOUR_MS, retries=3, clock=NOON, **options)

    return make


@pytest.fixture
def worker(keys):
    """A claim by a number of the lane `w`."""

    def make(number, clock=NOON, limit=9, **options):
        return t.claim(keys, t.CallNumber("w", number), limit=limit, lease_ms=LEASE_MS, clock=clock, **options)

    return make


@pytest.mark.foreign_hands
def test_an_id_of_any_bytes_is_given_back_by_a_repeated_claim(worker, run, client, keys):
    ids = [b"two\nlines", b"a\ttab", b"\xff\x00", b""]
    client.lpush(keys.ready, *ids)
    client.hset(keys.retries_left, mapping=dict.fromkeys(ids, 3))
    first = run(worker(1)).claimed

    assert [one.id.encode("utf-8", "surrogateescape") for one in first] == ids
    assert run(worker(1)).claimed == first


# ---- chosen ids -------------------------------------------------------------
