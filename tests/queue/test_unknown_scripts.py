"""What goes in one round trip runs in its order where Redis lacks scripts, and costs nothing more where it has them."""

import asyncio

import pytest
from lost_scripts import with_scripts_lost

from reliq import Outgoing, Queue
from reliq.lua import script, transitions
from reliq.lua.transitions import CallNumber
from reliq.redis.client import AsyncClient, Client
from reliq.redis.server import Connection

SECONDS = 5.0


@pytest.fixture
def knows(client):
    """Have Redis know these scripts and no others, as after a start at which others were quicker."""

    def only(*scripts):
        client.script_flush()
        for one in scripts:
            client.script_load(one.text)

    return only


@pytest.fixture(params=["blocking", "asyncio"])
def trips(request, url):
    """Make round trips of a process that has not been at this Redis yet; between them do what is no request."""

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
                client = AsyncClient.to(connection, SECONDS)
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


def test_missing_or_lost_script_runs_before_the_scripts_behind_it(queue, client, knows, trips):
    due(queue, client, "m1")
    knows(script("claim"))

    def restart():
        due(queue, client, "m2")
        knows(script("claim"))
        client.client_kill_filter(_type="normal", skipme=True)

    first, _, second = trips(look(queue.keys, 1), restart, look(queue.keys, 2))

    assert (ids(first), ids(second)) == (["m1"], ["m2"])


def test_round_trip_to_a_server_with_the_scripts_sends_digests_only(queue, client, knows, trips):
    ran = {}

    def count():
        ran.update({name: row["calls"] for name, row in client.info("commandstats").items()})
        client.config_resetstat()

    knows(script("promote"), script("claim"))
    trips(look(queue.keys, 1), count, look(queue.keys, 2), look(queue.keys, 3), count)

    assert (ran["cmdstat_evalsha"], ran["cmdstat_eval"]) == (4, 2)  # in full in the first trip


def test_user_without_eval_runs_loaded_scripts_in_order(queue, client, knows, trips, url, monkeypatch):
    knows(script("promote"), script("claim"))
    client.acl_setuser("strict", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-eval"])
    due(queue, client, "m1")
    strict = url.replace("redis://", "redis://strict:x@")
    monkeypatch.setattr(Connection, "to", lambda _url, to=Connection.to: to(strict))
    denied = []

    def refill():
        denied.append(len(client.acl_log()))
        due(queue, client, "m2")

    try:
        first, _, second = trips(look(queue.keys, 1), refill, look(queue.keys, 2))
        denied.append(len(client.acl_log()))
    finally:
        client.acl_deluser("strict")

    assert (ids(first), ids(second)) == (["m1"], ["m2"])
    assert denied[0] == denied[1]  # it was refused once


@pytest.mark.parametrize("lost", ["all", "limit", "promote", "reclaim"])
def test_ordered_queue_is_received_whenever_redis_loses_scripts(url, client, monkeypatch, lost):
    def receive(at):
        queue, rounds = Queue(f"q{at}", str, url=url, ordered=True), []
        queue.publish_many([Outgoing(body=body, id=body, key=body[0]) for body in ("a0", "a1", "b0")])
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
