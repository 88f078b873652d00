"""`receive` waits for all shards of a queue as a worker does: one wait for each shard in a process, and few polls."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from waiting import eventually

from reliq import Admin, Queue
from reliq.lua import transitions
from reliq.lua.transitions import CallNumber
from reliq.receive.receiver import LeaseBatch, Listener, Receiver
from reliq.redis.connection import BLOCKING, run_blocking
from reliq.redis.shards import ShardMap
from reliq.redis.wakeups import WakeTokens

#: A repeated call would count twice.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]

SHARDS = 8


@pytest.fixture
def queue(cluster):
    queue = Queue("orders", int, url=cluster.url)
    cluster.client(cluster.primary_of(queue.keys.map)).set(queue.keys.map, ShardMap(1, SHARDS, SHARDS).text)
    Admin(cluster.url).load_scripts()  # a script that a server has not loaded would count twice
    yield queue
    queue.close()


@pytest.fixture
def other(cluster):
    """A separate producer: the queue under test learns of its messages only through Redis."""
    other = Queue("orders", int, url=cluster.url)
    other.publish(0, delay=3600)
    yield other
    other.close()


@pytest.fixture
def no_looks(monkeypatch):
    """Let a process poll once and never again: it finds later messages only through wake tokens and due times."""
    for name in ("EACH_SHARD_SECONDS", "WATCHED_SHARD_SECONDS"):
        monkeypatch.setattr(f"reliq.receive.receiver.{name}", 3600.0)


@pytest.fixture
def kept(monkeypatch):
    """Keep unused waits until the queue is closed, instead of for a second."""
    monkeypatch.setattr("reliq.receive.receiver.KEPT_SECONDS", 3600.0)


@pytest.fixture
def scripts(cluster):
    """Return how many script calls the primaries have run; the first call of a script sends its text."""

    def count():
        stats = [cluster.client(one).info("commandstats") for one in cluster.primaries()]
        return sum(one.get(f"cmdstat_{name}", {"calls": 0})["calls"] for one in stats for name in ("eval", "evalsha"))

    return count


@pytest.fixture
def blocked(cluster):
    """Return the number of blocked clients in the Cluster; expect none from an earlier test."""

    def count():
        return sum(cluster.client(one).info("clients")["blocked_clients"] for one in cluster.primaries())

    eventually(lambda: count() == 0, "the waits of earlier tests end")
    return count


@pytest.fixture(params=["blocking", "asyncio"])
def taken(request, queue):
    """Let threads or tasks receive a message each; return the future of their bodies."""
    pool = ThreadPoolExecutor(20)

    def receive():
        with queue.receive(wait=30) as jobs:
            return [job.body for job in jobs]

    async def areceive():
        async with queue.areceive(wait=30) as jobs:
            return [job.body for job in jobs]

    async def all_of(number):
        found = await asyncio.gather(*(areceive() for _ in range(number)))
        await queue.aclose()
        return found

    def begin(number=1):
        if request.param == "asyncio":
            return pool.submit(lambda: asyncio.run(all_of(number)))
        futures = [pool.submit(receive) for _ in range(number)]
        return pool.submit(lambda: [one.result() for one in futures])

    yield begin
    pool.shutdown()


def wait_until_all_stand(blocked, received):
    """Wait until each shard has a blocked wait; fail with the error of the receive, if there is one."""
    eventually(lambda: received.done() or blocked() == SHARDS, "a wait for each shard stands")
    assert not received.done(), received.exception() or received.result()


@pytest.mark.usefixtures("no_looks")
def test_one_wait_for_each_shard_serves_all_receives_of_a_process(taken, other, blocked, scripts):
    before = scripts()
    received = taken(12)
    wait_until_all_stand(blocked, received)
    eventually(lambda: scripts() - before >= 12 * 3 * (1 + SHARDS), "each has looked, first at one shard, then at all")
    looked = settled(scripts)

    other.publish(1)
    eventually(lambda: scripts() >= looked + 6, "it is published, found and acked")

    assert settled(scripts) == looked + 6  # publish; promote, reclaim, claim and bodies by one; ack
    for number in range(2, 13):
        other.publish(number)
    assert sorted(body for [body] in received.result(60)) == list(range(1, 13))
    eventually(lambda: not blocked(), "nobody waits any more")


def test_threads_that_receive_first_at_once_share_one_listener(queue, request):
    """Two listeners would open two waits for each shard, and one of these would never be closed."""
    run_blocking(queue.known_shards.refresh(BLOCKING))
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # threads switch after a few instructions
    with ThreadPoolExecutor(8) as pool:
        for _ in range(50):
            together = threading.Barrier(8)
            receiver = Receiver(queue.known_shards, queue.codec, queue.settings)
            queue._clients._blocking.clear()

            def ask(receiver=receiver, together=together):
                together.wait()
                return receiver.listener()

            listeners = {one.result() for one in [pool.submit(ask) for _ in range(8)]}
            assert len(listeners) == 1
            assert None not in listeners


def test_idle_shards_are_checked_by_one_process_for_all(taken, queue, other, blocked, scripts, monkeypatch):
    """Without sharing, each receive made four polls a second at each shard: 96 calls a second."""
    monkeypatch.setattr("reliq.receive.receiver.EACH_SHARD_SECONDS", 0.05)
    monkeypatch.setattr("reliq.receive.receiver.WATCHED_SHARD_SECONDS", 3600.0)
    received, looks = taken(5), []
    wait_until_all_stand(blocked, received)
    eventually(lambda: len(queue._receiver.listener()._waiting) == 5, "each has made its own polls and waits")
    look = Listener._look
    monkeypatch.setattr(Listener, "_look", lambda self, shards: looks.append(self) or look(self, shards))
    settle = scripts()
    eventually(lambda: len(looks) >= 10, "ten rounds of looks are made")

    assert scripts() - settle <= len(looks) * (SHARDS + 1)
    other.publish_many(range(1, 6), chunk=1)
    received.result(60)


@pytest.mark.usefixtures("no_looks", "kept")
def test_unused_wake_token_goes_to_another_process(queue, other, blocked):
    wait_until_they_stand(queue, blocked)

    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(receive_one, other)
        eventually(lambda: blocked() == 2 * SHARDS, "the other one waits")
        producer = Queue("orders", int, url=other.connection().name)
        receipt = producer.publish(1)
        assert heard.result(60) == [receipt.id]


@pytest.mark.usefixtures("no_looks")
def test_cancelled_receive_leaves_its_wake_up_to_the_next_receive(queue, other, blocked):
    async def cancelled():
        waiting = await waits(queue, lambda: blocked() == SHARDS)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        other.publish(1)
        return await areceive_one(queue)

    assert len(asyncio.run(cancelled())) == 1


@pytest.mark.usefixtures("no_looks")
def test_wake_up_of_a_receive_cancelled_meanwhile_goes_to_another_process(queue, other, blocked, monkeypatch):
    leave = Listener.leave

    def leave_cancelled(self, place):
        found = leave(self, place)
        if found and receipts and self is queue._receiver.listener() and not waiting.cancelling():
            waiting.cancel()
        return found

    async def cancelled():
        nonlocal waiting
        waiting = await waits(queue, lambda: blocked() == SHARDS)
        next_one = await waits(other, lambda: blocked() == 2 * SHARDS)
        producer = Queue("orders", int, url=other.connection().name)
        receipts.append(None)
        receipts.append(producer.publish(1))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await next_one == [receipts[-1].id]

    waiting, receipts = None, []
    monkeypatch.setattr(Listener, "leave", leave_cancelled)
    asyncio.run(cancelled())


@pytest.mark.usefixtures("no_looks")
def test_a_listener_whose_thread_or_waits_were_refused_begins_anew(queue, other, monkeypatch):
    """A temporary shortage of threads or file descriptors does not stop a process from receiving."""
    refusals = {"thread": threading.Thread.start, "waits": WakeTokens.__init__}

    def refused_once(what, call):
        def made(self, *given):
            if refusals.pop(what, None) and (what == "waits" or self.name == "reliq-listener"):
                raise {"thread": RuntimeError, "waits": OSError}[what](what)
            call(self, *given)

        return made

    monkeypatch.setattr(threading.Thread, "start", refused_once("thread", threading.Thread.start))
    monkeypatch.setattr(WakeTokens, "__init__", refused_once("waits", WakeTokens.__init__))
    with pytest.raises(RuntimeError):
        receive_one(queue)

    with ThreadPoolExecutor(1) as pool:
        refusals["thread"] = None
        heard = pool.submit(receive_one, queue)
        eventually(lambda: not refusals.get("waits"), "its waits were refused")
        receipt = other.publish(1)
        assert heard.result(60) == [receipt.id]


@pytest.mark.usefixtures("no_looks")
def test_receive_cancelled_while_it_claims_does_not_wait(queue, monkeypatch):
    poll, tasks = LeaseBatch._poll, []

    async def cancelled_under_way(batch, client):
        if batch._is_wide:
            tasks[0].cancel()
        return await poll(batch, client)

    async def cancelled():
        tasks.append(asyncio.create_task(areceive_one(queue)))
        async with asyncio.timeout(100):
            await asyncio.wait(tasks)
        await queue.aclose()

    monkeypatch.setattr(LeaseBatch, "_poll", cancelled_under_way)
    asyncio.run(cancelled())

    assert tasks[0].cancelled()


@pytest.mark.usefixtures("no_looks")
def test_waiting_receive_gets_due_messages_and_expired_leases(taken, queue, other, blocked):
    receipt, client = other.publish(3), queue._clients.blocking()
    for keys in queue.known_shards.all:  # claim as a process that is killed
        client.run(transitions.claim(keys, CallNumber("killed", 1), limit=1, lease_ms=500))
    received = taken(3)
    eventually(lambda: blocked() == SHARDS, "a wait for each shard stands")

    other.publish(1, delay=0.2)
    other.publish(2, delay=0.3)

    assert receipt
    assert sorted(body for [body] in received.result(60)) == [1, 2, 3]


@pytest.mark.usefixtures("no_looks", "kept")
def test_wait_that_times_out_checks_no_shard_again_and_a_closed_queue_waits_no_more(queue, blocked, scripts):
    wait_until_they_stand(queue, blocked)
    before = settled(scripts)

    with queue.receive(wait=0.01) as jobs:
        assert jobs == []
    assert scripts() - before == 3 * (1 + SHARDS)  # one shard, then all shards

    queue.close()

    eventually(lambda: "reliq-listener" not in {one.name for one in threading.enumerate()}, "its thread ends")
    eventually(lambda: not blocked(), "Redis sees its waits go")


def wait_until_they_stand(queue, blocked):
    """Receive nothing until there is a wait for each shard; the waits stay for the next receive."""

    def stand():
        with queue.receive(wait=0.05) as jobs:
            assert jobs == []
        return blocked() == SHARDS

    eventually(stand, "a wait for each shard stands")


def receive_one(queue):
    with queue.receive(wait=30) as jobs:
        return [job.id for job in jobs]


async def waits(queue, stands):
    """Return the task of a receive when all its waits are blocked."""
    task = asyncio.create_task(areceive_one(queue))
    await asyncio.to_thread(eventually, stands, "a wait for each shard stands")
    return task


async def areceive_one(queue):
    async with queue.areceive(wait=60) as jobs:
        return [job.id for job in jobs]


def settled(count):
    """Return a count when it no longer changes."""
    seen = [-1]

    def rests():
        seen.append(count())
        return len(seen) > 20 and len(set(seen[-20:])) == 1

    eventually(rests, "the count comes to rest")
    return seen[-1]
