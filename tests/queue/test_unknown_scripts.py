"""Missing scripts are sent again in a second round trip, in order; if Redis has all scripts there is none."""

import asyncio
from contextlib import closing

import pytest
from lost_scripts import with_scripts_lost

from reliq import OutgoingMessage, Queue, RedisUnavailableError
from reliq.lua import script, transitions
from reliq.lua.transitions import CallNumber
from reliq.redis.client import AnyClient, Client
from reliq.redis.connection import NotSentError, ServerConnections
from reliq.redis.server import Connection

SECONDS = 5.0


@pytest.fixture
def knows(client):
    """Let Redis have exactly these scripts loaded, as after a restart at which other clients were faster."""

    def only(*scripts):
        client.script_flush()
        for one in scripts:
            client.script_load(one.text)

    return only


@pytest.fixture(params=["blocking", "asyncio"])
def trips(request, url):
    """Run the first round trips of a process at this Redis; actions that are no request run between them."""

    def blocking(*rounds):
        connection, answers = Connection.to(url).anew(), []
        client = Client.to(connection, SECONDS)
        for one in rounds:
            answers += [one()] if callable(one) else [client.run_all(one, for_seconds=SECONDS)]
        connection.close()
        return answers

    def asynchronous(*rounds):
        async def make():
            connection, answers = Connection.to(url).anew(), []
            for one in rounds:
                client = AnyClient(connection.async_wire(SECONDS))
                answers += [one()] if callable(one) else [await client.run_all(one, for_seconds=SECONDS)]
            await connection.aclose()
            return answers

        return asyncio.run(make())

    return blocking if request.param == "blocking" else asynchronous


def look(keys, number):
    """Promote, then claim."""
    return [transitions.promote(keys), transitions.claim(keys, CallNumber("lane", number), limit=1, lease_ms=60_000)]


def due(queue, client, id):
    queue.publish({}, id=id, delay=3600)
    client.zadd(queue.keys.pending, {id: 1})


def ids(answers):
    return [one.id for one in answers[-1].claimed]


def test_missing_scripts_run_in_their_order(queue, client, knows, trips):
    due(queue, client, "m1")
    knows()

    def restart():
        due(queue, client, "m2")
        knows()
        client.client_kill_filter(_type="normal", skipme=True)

    first, _, second = trips(look(queue.keys, 1), restart, look(queue.keys, 2))

    assert (ids(first), ids(second)) == (["m1"], ["m2"])


def test_missing_script_runs_after_the_scripts_that_redis_has(queue, client, knows, trips):
    due(queue, client, "m1")
    knows(script("claim"))

    first, second = trips(look(queue.keys, 1), look(queue.keys, 2))

    assert (ids(first), first[0][0], ids(second)) == ([], 1, ["m1"])


def test_request_may_have_run_when_redis_is_lost_before_the_missing_scripts_run(queue, client, knows, url, monkeypatch):
    knows(script("promote"))
    trips = []

    async def send(connections, commands, send=ServerConnections.send):
        trips.append(commands)
        if len(trips) > 1:
            raise NotSentError("gone")
        return await send(connections, commands)

    monkeypatch.setattr(ServerConnections, "send", send)
    with closing(Connection.to(url).anew()) as connection, pytest.raises(RedisUnavailableError) as raised:
        Client.to(connection, SECONDS).run_all(look(queue.keys, 1))

    assert raised.value.maybe_ran


def test_round_trip_to_a_server_with_the_scripts_sends_digests_only(queue, client, knows, trips):
    ran = {}

    def count():
        ran.update({name: row["calls"] for name, row in client.info("commandstats").items()})
        client.config_resetstat()

    client.config_resetstat()
    knows(script("promote"), script("claim"))
    trips(look(queue.keys, 1), look(queue.keys, 2), count)

    assert (ran["cmdstat_evalsha"], ran.get("cmdstat_eval", 0)) == (4, 0)


def test_user_without_eval_runs_loaded_scripts(queue, client, knows, trips, url, monkeypatch):
    knows(script("promote"), script("claim"))
    client.acl_setuser("strict", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-eval"])
    due(queue, client, "m1")
    strict = url.replace("redis://", "redis://strict:x@")
    monkeypatch.setattr(Connection, "to", lambda _url, to=Connection.to: to(strict))
    denied = len(client.acl_log())

    try:
        [found] = trips(look(queue.keys, 1))
    finally:
        client.acl_deluser("strict")

    assert (ids(found), len(client.acl_log())) == (["m1"], denied)


@pytest.mark.parametrize("lost", ["all", "limit", "promote", "reclaim"])
def test_ordered_queue_is_received_whenever_redis_loses_scripts(url, client, monkeypatch, lost):
    def receive(at):
        queue, rounds = Queue(f"q{at}", str, url=url, ordered=True), []
        queue.publish_many([OutgoingMessage(body=body, id=body, key=body[0]) for body in ("a0", "a1", "b0")])
        for number in range(5):
            if number == 4:
                queue.publish("late", key="a", id="late", delay=3600)
                client.zadd(queue.keys.pending, {"late": 1})
            with queue.receive(limit=5) as jobs:
                rounds.append(sorted(job.body for job in jobs))
                for job in jobs:
                    if number == 0 and job.body == "a0":
                        job.nack(delay=3600)
            client.zadd(queue.keys.unack, {"a0": 1}, xx=True)
        counts = queue.counts()
        totals = [counts.totals[kind] for kind in ("published", "acked", "nacked")]
        assert (rounds, totals, counts.alive) == ([["a0", "b0"], ["a0"], ["a1"], [], ["late"]], [4, 4, 1], 0)

    assert with_scripts_lost(client, lost, monkeypatch, receive) >= 15
