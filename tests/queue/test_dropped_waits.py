"""Waits for tokens stay open in Redis while their thread does other work."""

import pytest
from waiting import eventually

from reliq.keys import Keys
from reliq.redis.client import Client
from reliq.redis.server import Connection

SECONDS = 20


@pytest.fixture
def tokens(url):
    tokens = Client.to(Connection.to(url), 5.0).wake_tokens()
    yield tokens
    tokens.close()


@pytest.fixture
def expect(tokens, client):
    """Start a wait for the tokens of shards; return when it is blocked in Redis."""

    def begin(*shards):
        [place] = tokens.serve(shards) if not tokens.standing else tokens.standing
        tokens.expect(place, list(shards))
        eventually(lambda: client.info("clients")["blocked_clients"] == 1, "it waits")

    return begin


def test_wait_whose_connection_was_dropped_is_begun_again_at_once(tokens, expect, client):
    shards = Keys("one"), Keys("other")
    expect(*shards)

    client.client_kill_filter(_type="normal", skipme=True)
    came, failed = tokens.came(SECONDS)
    expect(*shards)
    client.lpush(shards[1].wake, "")

    assert (came, failed) == ([], [*shards])
    assert tokens.came(SECONDS) == ([shards[1]], [])
    assert not tokens.standing


def test_wait_that_lacks_a_shard_ends_and_loses_no_token(tokens, expect, client):
    one, other = Keys("one"), Keys("other")
    tokens.serve([one, other])
    expect(one)
    tokens.expect(*tokens.standing, [one, other])  # a wait is open, but not for both

    assert tokens.came(SECONDS) == ([], [])
    assert not tokens.standing
    expect(one, other)
    tokens.expect(*tokens.standing, [one])  # the wait is for more shards
    client.lpush(other.wake, "")
    assert tokens.came(SECONDS) == ([other], [])


def test_poke_ends_a_wait_and_leaves_it_standing(tokens, expect):
    expect(Keys("one"))

    tokens.poke()

    assert tokens.came(SECONDS) == ([], [])
    assert tokens.standing
