"""`Durability.replicas`: a publish that waits for replicas, and says how many have it."""

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import redis
from listener import Listener, received
from waiting import eventually

from reliq import ConfigurationError, Durability, Queue, events

ONE = Durability.replicas(1, timeout=20)
SHORT = Durability.replicas(1, timeout=0.2)


@pytest.fixture(scope="module")
def servers(server_path, replicated):
    """A primary and a replica of the kind under test."""
    return replicated(server_path)


@pytest.fixture(scope="module")
def newest_servers(newest_server, replicated):
    """The same of a kind whose WAIT looks at what its own connection has written."""
    return replicated(newest_server)


def emptied(primary, replica):
    """The two with nothing in them, and the replica up to date."""
    with redis.Redis.from_url(primary.url) as client:
        client.flushall()
        eventually(lambda: client.wait(1, 1000) == 1, "the replica follows")
    return primary, replica


@contextmanager
def cut_off(replica):
    """Have a replica stopped, as a machine that nobody reaches."""
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
    """The primary, its replica cut off."""
    with cut_off(pair[1]):
        yield pair[0]


def waits(server):
    """How often a server was asked to wait for replicas."""
    with redis.Redis.from_url(server.url) as client:
        return client.info("commandstats").get("cmdstat_wait", {"calls": 0})["calls"]


def test_publish_that_a_replica_confirmed_is_durable(pair, make_queue, call):
    queue = make_queue(pair[0])

    receipt = call(queue, "publish", {"n": 1}, durability=ONE)

    assert (receipt.status, receipt.durable, receipt.replicas, receipt.on_disk) == ("published", True, 1, None)
    assert make_queue(pair[1]).counts().ready == 1


def test_publish_without_an_answer_of_the_replica_is_not_durable(stopped, make_queue, call):
    seen = []
    queue = make_queue(stopped, observers=[seen.append])

    receipt = call(queue, "publish", {"n": 1}, durability=SHORT)

    assert (receipt.status, receipt.durable, receipt.replicas) == ("published", False, 0)
    assert call(queue, "counts").ready == 1
    (told,) = [event for event in seen if isinstance(event, events.Unconfirmed)]
    assert (told.ids, told.why) == ((receipt.id,), "0 of 1 replica within 0.2 s")


def test_publish_with_too_few_replicas_reports_their_number(pair, make_queue, call):
    receipt = call(make_queue(pair[0]), "publish", {}, durability=Durability.replicas(2, timeout=2.0))

    assert (receipt.durable, receipt.replicas) == (False, 1)


def test_publish_without_durability_sends_no_wait(pair, make_queue, call):
    queue = make_queue(pair[0])
    before = waits(pair[0])

    receipt = call(queue, "publish", {})

    assert (receipt.durable, receipt.replicas, receipt.on_disk) == (None, None, None)
    assert waits(pair[0]) == before


def test_durability_of_a_queue_holds_unless_a_publish_overrides_it(pair, make_queue, call):
    queue = make_queue(pair[0], durability=ONE)

    assert call(queue, "publish", {}).durable is True
    assert call(queue, "publish", {}, durability=Durability.NONE).durable is None
    assert call(queue, "publish_many", [{}]).durable is True
    assert call(queue, "publish_many", [{}], durability=Durability.NONE).durable is None


def test_publish_many_waits_once_for_each_chunk(pair, make_queue, call):
    queue = make_queue(pair[0])
    queue.publish({})  # Redis knows the script
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


def test_publish_many_of_no_message_has_no_durability(pair, make_queue, call):
    assert call(make_queue(pair[0]), "publish_many", [], durability=ONE).durable is None


def test_a_duplicate_is_durable_when_the_first_one_is(pair, make_queue, call):
    queue = make_queue(pair[0])
    queue.publish({}, id="a")

    receipt = call(queue, "publish", {}, id="a", durability=ONE)

    assert (receipt.status, receipt.durable) == ("duplicate", True)


def test_a_duplicate_is_not_durable_while_the_first_one_is_not(stopped, make_queue, call):
    queue = make_queue(stopped)
    queue.publish({}, id="a")

    receipt = call(queue, "publish", {}, id="a", durability=SHORT)

    assert (receipt.status, receipt.durable) == ("duplicate", False)


def test_wait_may_be_longer_than_the_timeout_of_a_reply(stopped, make_queue, call):
    receipt = call(make_queue(stopped), "publish", {}, durability=Durability.replicas(1, timeout=1.2))

    assert (receipt.status, receipt.durable) == ("published", False)


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


class Relay(Listener):
    """
    Hands everything on to a server, except that it keeps the reply to a publish back until a WAIT was sent, or loses it.

    Attributes:
        late: replies for whose WAIT it waited in vain.
        lost: replies that it lost.
    """

    def __init__(self, port):
        self._port = port
        self._may_answer = threading.Event()
        self._may_answer.set()
        self._to_lose = 0
        self.late = self.lost = 0
        super().__init__()

    def lose_one_reply(self):
        self._to_lose = 1

    def _serve(self, peer, _number):
        with peer, socket.create_connection(("127.0.0.1", self._port)) as server:
            lose = threading.Event()
            back = threading.Thread(target=self._back, args=(server, peer, lose), daemon=True)
            back.start()
            while data := received(peer):
                if b"EVALSHA" in data:
                    self._may_answer.clear()
                    self._to_lose -= 1
                    lose.set() if self._to_lose == 0 else None
                if b"WAIT" in data:
                    self._may_answer.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            back.join()

    def _back(self, server, peer, lose):
        while data := received(server):
            self.late += not self._may_answer.wait(20)
            if lose.is_set():
                self.lost += 1
                peer.shutdown(socket.SHUT_RDWR)
                return
            peer.sendall(data)


@pytest.fixture
def relay():
    """Start relays that end with the test."""
    made = []

    def make(server):
        made.append(Relay(server.port))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_wait_is_sent_before_the_publish_is_answered(pair, make_queue, relay, call):
    between = relay(pair[0])
    queue = make_queue(between.url)

    receipt = call(queue, "publish", {}, durability=ONE)

    assert (receipt.durable, between.late) == (True, 0)


@pytest.mark.parametrize("kind", ["servers", "newest_servers"])
def test_repeated_publish_waits_for_its_own_confirmation(request, make_queue, relay, call, kind):
    primary, replica = emptied(*request.getfixturevalue(kind))
    between = relay(primary)
    queue = make_queue(between.url)
    queue.publish({"n": 1}, durability=ONE)
    with cut_off(replica):
        between.lose_one_reply()

        receipt = call(queue, "publish", {"n": 2}, durability=SHORT)

    assert between.lost == 1
    assert make_queue(primary).counts().totals["published"] == 2
    assert (receipt.status, receipt.durable, receipt.replicas) == ("published", False, 0)


def test_a_wait_that_redis_refuses_does_not_hide_the_publish(pair, make_queue, call):
    with redis.Redis.from_url(pair[0].url) as client:
        client.acl_setuser("shop", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-wait"])
    seen = []
    queue = Queue("q", url=pair[0].url.replace("//", "//shop:x@"), observers=[seen.append])

    receipt = call(queue, "publish", {}, durability=SHORT)

    queue.close()
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
