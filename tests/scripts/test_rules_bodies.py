"""Claimed bodies are read in bounded pieces: small bodies at once, sizes of large bodies, a prefix of giant bodies."""

import pytest

from reliq.lua import transitions as t
from reliq.settings import INLINE_BYTES
from reliq.wire_format import HEADER_LIMIT


@pytest.fixture
def bodies(run, keys):
    return lambda *ids, max_body=INLINE_BYTES: run(t.bodies(keys, ids, max_body=max_body))


def test_small_bodies_are_answered_at_once(bodies, client, keys):
    client.set(keys.msg("a"), b"\xff\x00")
    client.set(keys.msg("empty"), b"")
    client.sadd(keys.msg("set"), "x")

    assert bodies("a", "gone", "empty", "set") == [b"\xff\x00", None, b"", None]


def test_bodies_that_are_large_together_are_answered_by_their_sizes(bodies, client, keys):
    half = INLINE_BYTES // 2
    client.set(keys.msg("a"), b"x" * half)
    client.set(keys.msg("b"), b"x" * half)
    client.set(keys.msg("c"), b"x")
    client.sadd(keys.msg("set"), "x")

    assert bodies("a", "b") == [b"x" * half] * 2
    assert bodies("a", "b", "c", "gone", "set") == [half, half, 1, 0, 0]


def test_a_body_beyond_the_limit_is_answered_by_its_size_and_start(bodies, client, keys):
    limit = INLINE_BYTES + HEADER_LIMIT  # the largest envelope with a body of `max_body` bytes
    client.set(keys.msg("a"), b"a" * (limit + 1))
    client.set(keys.msg("b"), b"b" * limit)

    assert bodies("a", "b") == [t.Oversized(limit + 1, b"a" * HEADER_LIMIT), limit]


@pytest.mark.parametrize("left", [0, 3], ids=["none left", "some left"])
def test_a_nack_that_ends_an_unread_message_keeps_its_body_as_it_is(left, publish, claim, run, client, keys, where):
    publish("m", "expired", retries=left)
    value = client.get(keys.msg("m"))
    held = claim()
    client.delete(keys.msg("expired"))

    run(t.nack(keys, [(one, -2, "undecodable 1 x", b"") for one in held]))

    assert (client.get(keys.msg("m")), client.ttl(keys.msg("m"))) == (value, -1)
    assert where() == {"garbage": ["expired", "m"]}
    assert run(t.collect(keys, ["m", "expired"], dead_letter_limit=9, letters_ms=10**12)) == (("m",), ("expired",))
