"""`Durability.replicas`: a publish waits for replicas and returns how many confirmed it."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
import redis
from proxy import Proxy
from waiting import eventually

from reliq import ConfigurationError, Durability, Queue, events
from reliq.redis.server import PUBLISH_TIMEOUT_SECONDS

pytestmark = pytest.mark.usefixtures("patient")

ONE = Durability.replicas(1, timeout=20)
SHORT = Durability.replicas(1, timeout=0.2)


@pytest.fixture(scope="module")
def servers(server_path, replicated):
    """A primary and a replica of the kind under test."""
    return replicated(server_path)


@pytest.fixture(scope="module")
def newest_servers(newest_server, replicated):
    """The same servers, of a version whose WAIT covers only writes of its own connection."""
    return replicated(newest_server)


def emptied(primary, replica):
    """Return both servers, emptied and in sync."""
    with redis.Redis.from_url(primary.url) as client:
        client.flushall()
        eventually(lambda: client.wait(1, 1000) == 1, "the replica follows")
    return primary, replica


@contextmanager
def cut_off(replica):
    """Stop a replica, as if its machine were unreachable."""
    os.kill(replica.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(replica.pid, signal.SIGCONT)


@pytest.fixture
def pair(servers):
    return emptied(*servers)


@pytest.fixture
def stopped(pair):
    """The primary with a stopped replica."""
    with cut_off(pair[1]):
        yield pair[0]


def waits(server):
    """Return how often a server got the WAIT command."""
    with redis.Redis.from_url(server.url) as client:
        return client.info("commandstats").get("cmdstat_wait", {"calls": 0})["calls"]


def end_wait(server):
    """End the WAIT of a publish as its timeout does, after the only replica has confirmed the publish."""
    with redis.Redis.from_url(server.url) as client:
        waiting = lambda: [one["id"] for one in client.client_list() if one["cmd"] == "wait"]  # noqa: E731
        [publisher] = eventually(waiting, "the publish waits")
        written = client.info("replication")["master_repl_offset"]
        eventually(lambda: client.info("replication")["slave0"]["offset"] >= written, "the replica has it")
        client.client_unblock(publisher)


@pytest.mark.parametrize(
    ("durability", "durable", "replicas", "asked"),
    [(ONE, True, 1, 1), (Durability.replicas(2, timeout=60), False, 1, 1), (None, None, None, 0)],
    ids=["enough", "too few", "not asked"],
)
def test_publish_reports_the_replicas_that_it_waited_for(pair, make_queue, call, durability, durable, replicas, asked):
    queue, follower = make_queue(pair[0]), make_queue(pair[1])
    call(queue, "publish", {}, durability=Durability.NONE)  # loads the script
    before = waits(pair[0])

    with ThreadPoolExecutor() as pool:
        published = pool.submit(call, queue, "publish", {}, durability=durability)
        if durable is False:
            end_wait(pair[0])
        receipt = published.result()

    assert (receipt.status, receipt.on_disk) == ("published", None)
    assert (receipt.durable, receipt.replicas, waits(pair[0]) - before) == (durable, replicas, asked)
    eventually(lambda: follower.counts().ready == 2, "the replica has it")


@pytest.mark.parametrize("timeout", [0.2, 1.2], ids=["short", "longer than that of a reply"])
def test_publish_without_an_answer_of_the_replica_is_not_durable(stopped, make_queue, call, timeout, monkeypatch):
    monkeypatch.setattr("reliq.redis.client.PUBLISH_TIMEOUT_SECONDS", PUBLISH_TIMEOUT_SECONDS)
    seen = []
    queue = make_queue(stopped, observers=[seen.append])

    receipt = call(queue, "publish", {"n": 1}, durability=Durability.replicas(1, timeout=timeout))

    assert (receipt.status, receipt.durable, receipt.replicas) == ("published", False, 0)
    assert call(queue, "counts").ready == 1
    (told,) = [event for event in seen if isinstance(event, events.Unconfirmed)]
    assert (told.ids, told.why) == ((receipt.id,), f"0 of 1 replica within {timeout} s")


def test_durability_of_a_queue_holds_unless_a_publish_overrides_it(pair, make_queue, call):
    queue = make_queue(pair[0], durability=ONE)

    assert call(queue, "publish", {}).durable is True
    assert call(queue, "publish", {}, durability=Durability.NONE).durable is None
    assert call(queue, "publish_many", [{}]).durable is True
    assert call(queue, "publish_many", []).durable is None
    assert call(queue, "publish_many", [{}], durability=Durability.NONE).durable is None


def test_publish_many_waits_once_for_each_chunk(pair, make_queue, call):
    queue = make_queue(pair[0])
    queue.publish({})  # loads the script
    before = waits(pair[0])

    result = call(queue, "publish_many", [{"n": n} for n in range(30)], chunk=10, durability=ONE)

    assert (result.published, result.durable, result.unconfirmed) == (30, True, ())
    assert waits(pair[0]) == before + 3


def test_publish_many_returns_the_unconfirmed_ids(stopped, make_queue, call):
    queue = make_queue(stopped, body=str)

    result = call(queue, "publish_many", ["a", "b"], durability=SHORT)

    assert (result.published, result.durable) == (2, False)
    with queue.receive(limit=5) as jobs:
        assert {job.id for job in jobs} == set(result.unconfirmed)


def test_a_duplicate_is_durable_when_the_first_one_is(pair, make_queue, call):
    queue = make_queue(pair[0])
    with cut_off(pair[1]):
        queue.publish({}, id="a")
        early = call(queue, "publish", {}, id="a", durability=SHORT)
    late = call(queue, "publish", {}, id="a", durability=ONE)

    assert [(one.status, one.durable) for one in (early, late)] == [("duplicate", False), ("duplicate", True)]


def test_publish_in_a_cluster_awaits_a_replica_that_answers_late(cluster, call):
    queue = Queue("q", url=cluster.url)
    primary, replica = cluster.primary_of(queue.keys.ready), cluster.replica_of(queue.keys.ready)

    def waits_long():
        return any(one["cmd"] == "wait" and int(one["idle"]) >= 2 for one in cluster.client(primary).client_list())

    with ThreadPoolExecutor() as pool:
        with cut_off(replica):
            published = pool.submit(call, queue, "publish", {}, durability=ONE)
            eventually(lambda: published.done() or waits_long(), "the publish waits for 2 s")
        receipt = published.result()

    queue.close()
    assert (receipt.status, receipt.durable, receipt.replicas) == ("published", True, 1)


@pytest.mark.parametrize("kind", ["servers", "newest_servers"])
def test_wait_after_an_unknown_script_covers_the_second_try(request, make_queue, call, kind):
    primary, replica = emptied(*request.getfixturevalue(kind))
    with redis.Redis.from_url(primary.url) as client:
        client.script_flush()

    with cut_off(replica):
        receipt = call(make_queue(primary), "publish", {}, durability=SHORT)

    assert (receipt.status, receipt.durable) == ("published", False)


def test_the_wait_is_sent_before_the_publish_is_answered(pair, make_queue, call):
    with closing(Proxy(pair[0].port)) as proxy:
        proxy.hold_reply_to("EVALSHA", until="WAIT")

        receipt = call(make_queue(proxy.url), "publish", {}, durability=ONE)

    assert (receipt.durable, proxy.late) == (True, 0)


@pytest.mark.parametrize("kind", ["servers", "newest_servers"])
def test_repeated_publish_waits_for_its_own_confirmation(request, make_queue, call, kind):
    primary, replica = emptied(*request.getfixturevalue(kind))
    with closing(Proxy(primary.port)) as proxy:
        queue = make_queue(proxy.url)
        queue.publish({"n": 1}, durability=ONE)
        with cut_off(replica):
            proxy.lose_reply_to("EVALSHA")
            receipt = call(queue, "publish", {"n": 2}, durability=SHORT)

    assert proxy.swallowed == 1
    assert make_queue(primary).counts().totals["published"] == 2
    assert (receipt.status, receipt.durable, receipt.replicas) == ("published", False, 0)


def test_a_wait_that_redis_refuses_does_not_hide_the_publish(pair, make_queue, call):
    with redis.Redis.from_url(pair[0].url) as client:
        client.acl_setuser("shop", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-wait"])
    seen = []
    queue = make_queue(pair[0].url.replace("//", "//shop:x@"), observers=[seen.append])

    receipt = call(queue, "publish", {}, durability=SHORT)

    assert (receipt.status, receipt.durable, receipt.replicas) == ("published", False, None)
    (told,) = (event for event in seen if isinstance(event, events.Unconfirmed))
    assert "no permissions" in told.why


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Durability.replicas(True), "replicas must be a whole number, not True"),
        (lambda: Durability.replicas(101), "replicas must be 1 to 100, not 101"),
        (lambda: Durability.replicas(1, timeout=61), "timeout must be 0.001 to 60 seconds, not 61"),
        (lambda: Durability.aof(local=False), "durability by aof needs local=True, or replicas=1 or more"),
        (lambda: Durability.aof(local=1), "local must be True or False, not 1"),
        (lambda: Durability.aof(replicas=-1), "replicas must be 0 to 100, not -1"),
    ],
    ids=["a bool", "too many", "too long", "nothing", "local", "below zero"],
)
def test_durability_outside_its_bounds_is_refused(make, said):
    with pytest.raises(ConfigurationError) as caught:
        make()

    assert str(caught.value).startswith(said)
