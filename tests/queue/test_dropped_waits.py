"""Waits that stand in Redis while their thread does something else."""

import pytest

from reliq.errors import RedisUnavailableError
from reliq.keys import Keys
from reliq.redis import commands
from reliq.redis.client import Client
from reliq.redis.server import Connection

SECONDS = 20


@pytest.fixture
def waits(url):
    waits = Client.to(Connection.to(url), 5.0).blocking_waits()
    yield waits
    waits.close()


def test_wait_whose_connection_was_dropped_is_begun_again(waits, client):
    one, other = Keys("one"), Keys("other")
    for keys in (one, other):
        waits.begin(keys, keys.wake, commands.wake_token(keys, SECONDS), SECONDS)

    client.client_kill_filter(_type="normal", skipme=True)
    failed = dict([*waits.answers(SECONDS), *waits.answers(1.0)])
    for keys in (one, other):
        waits.begin(keys, keys.wake, commands.wake_token(keys, SECONDS), SECONDS)
    client.lpush(other.wake, "")
    found = waits.answers(SECONDS)

    assert failed.keys() == {one, other}
    assert all(isinstance(error, RedisUnavailableError) for error in failed.values())
    assert [name for name, _ in found] == [other]
    assert waits.stands(one)
