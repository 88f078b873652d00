"""Several independent servers behind one wire: each has some shards of a queue, the first has all else."""

import asyncio

import pytest
import redis
from ports import free_port
from waiting import eventually

from reliq import ConfigurationError
from reliq.embedded import EmbeddedRedis
from reliq.keys import Keys
from reliq.transport.connection import Connection
from reliq.transport.failures import NotSentError, is_failure


@pytest.fixture(scope="module")
def servers(server_path):
    with (
        EmbeddedRedis(server=server_path, port=free_port()) as a,
        EmbeddedRedis(server=server_path, port=free_port()) as b,
        EmbeddedRedis(server=server_path) as c,
    ):
        yield a, b, c


@pytest.fixture
def connection(servers):
    for one in servers:
        with redis.Redis(unix_socket_path=str(one.socket)) as client:
            client.flushall()
    connection = Connection.to(tuple(one.url for one in servers))
    yield connection
    connection.close()


def keys_at(server):
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        return {key.decode() for key in client.scan_iter()}


@pytest.fixture(params=["blocking", "asyncio"])
def exchange(request, connection):
    if request.param == "blocking":
        return connection.wire().exchange

    def make(commands):
        async def once():
            try:
                return await connection.async_wire().exchange(commands)
            finally:
                await connection.aclose()

        return asyncio.run(once())

    return make


def test_a_shard_lies_on_its_server_and_all_else_on_the_first(servers, exchange):
    shards = [Keys("q", shard=number).ready for number in range(6)]

    replies = exchange([*(("RPUSH", key, 1) for key in shards), ("SET", "reliq:x", 1), ("PING",), ("LLEN", shards[4])])

    assert replies == [1, 1, 1, 1, 1, 1, b"OK", b"PONG", 1]
    assert [keys_at(one) for one in servers] == [
        {shards[0], shards[3], "reliq:x"},
        {shards[1], shards[4]},
        {shards[2], shards[5]},
    ]


def test_a_server_that_is_away_fails_its_own_shards_and_comes_back(call_on_three):
    exchange, stop, start = call_on_three
    lengths = [("LLEN", Keys("other", shard=number).ready) for number in range(3)]
    assert exchange(lengths) == [0, 0, 0]

    stop()
    first, then = exchange(lengths), exchange(lengths)

    assert first[0:3:2] == then[0:3:2] == [0, 0]
    assert is_failure(first[1])
    assert isinstance(then[1], NotSentError)
    start()
    eventually(lambda: exchange(lengths) == [0, 0, 0], "every server answers")


@pytest.fixture
def call_on_three(servers, server_path):
    with EmbeddedRedis(server=server_path, port=free_port()) as mine:
        connection = Connection.to((servers[0].url, mine.url, servers[2].url))
        yield connection.wire().exchange, mine.kill, mine.start
        connection.close()


def test_all_time_outs_share_one_wire_and_its_connections(connection):
    assert connection.wire(1.0) is connection.wire(30.0)
    assert connection.wire().place(Keys("q", shard=1).ready) == connection.wire().place(Keys("q", shard=4).ready)
    assert connection.wire().place(Keys("q").ready) != connection.wire().place(Keys("q", shard=1).ready)


@pytest.mark.parametrize(
    ("urls", "why"),
    [
        ((), "must be different ones, at least one"),
        (("redis://a", "redis://:secret@a"), "must be different ones, at least one"),
        (("redis://a", "redis+cluster://b"), r"redis\+cluster://b is a Cluster, which spreads shards by itself"),
        (("redis://a", "b"), "must begin with"),
    ],
)
def test_servers_that_cannot_be_are_refused(urls, why):
    with pytest.raises(ConfigurationError, match=why) as caught:
        Connection.to(urls)

    assert "secret" not in str(caught.value)
