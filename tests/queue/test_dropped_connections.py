"""Broken connections: to a demoted server, dropped silently, or left over from a closed event loop."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref

import psutil
import pytest
import redis
from redis._parsers.base import BaseParser
from waiting import eventually

from reliq import Consumer, Queue
from reliq.redis.connection import error_code, is_elsewhere, run_blocking

KEPT = 24


@pytest.fixture(params=["blocking", "asyncio"])
def publishes(request):
    """Publish with many idle connections, before and after `what` happens to them: `publishes(queue, what)`."""

    def blocking(queue, happens):
        wire, others = queue.connection().wire(), KEPT - 1  # and the connection of this call

        def exchange(*command):
            sent = run_blocking(wire.send([command]))
            return run_blocking(wire.receive(sent, 1, within_seconds=60.0))[0]

        threads = [threading.Thread(target=exchange, args=("BLPOP", "together", 60)) for _ in range(others)]
        for thread in threads:
            thread.start()
        eventually(lambda: b"blocked_clients:%d" % others in exchange("INFO", "clients"), "all wait at once")
        exchange("RPUSH", "together", *range(others))
        for thread in threads:
            thread.join()
        worked = [queue.publish({"n": n}).status for n in range(KEPT // 2)]
        happens()
        return worked + [queue.publish({"n": n}).status for n in range(KEPT // 2)]

    def asynchronous(queue, happens):
        async def publish():
            wire = queue.connection().async_wire()
            await asyncio.gather(*(wire.exchange([("PING",)]) for _ in range(KEPT)))
            worked = [(await queue.apublish({"n": n})).status for n in range(KEPT // 2)]
            happens()
            worked += [(await queue.apublish({"n": n})).status for n in range(KEPT // 2)]
            await queue.aclose()
            return worked

        return asyncio.run(publish())

    return blocking if request.param == "blocking" else asynchronous


@pytest.mark.slow
def test_publish_reaches_the_new_primary_behind_the_same_address(proxy, own_server, publishes, make_queue):
    old, new = own_server(), own_server(repl_diskless_sync_delay=0)
    proxy.port = old.port
    queue = make_queue(url=proxy.url)

    def fail_over():
        with redis.Redis.from_url(old.url) as admin:
            admin.replicaof("127.0.0.1", new.port)
            eventually(lambda: admin.info("replication")["master_link_status"] == "up", "the replica follows")
        proxy.port = new.port

    assert publishes(queue, fail_over) == ["published"] * KEPT

    there = make_queue(url=new.url)
    assert there.counts().ready == KEPT // 2


@pytest.mark.parametrize("resets", [True, False], ids=["reset", "silent"])
def test_dropped_connections_fail_no_publish(proxy, through, publishes, queue, resets):
    before = []

    def drop():
        before.append(proxy.connections)
        proxy.forget_connections(resets=resets)

    assert publishes(through, drop) == ["published"] * KEPT

    assert before == [KEPT]
    assert queue.counts().ready == KEPT


def test_reply_of_a_demoted_or_loading_server_is_recognised():
    for text in (
        "READONLY You can't write against a read only replica.",
        "ERR READONLY You can't write against a read only replica.",
        "READONLY You can't write against a read only replica. script: 0123, on @user_script:60.",
        "ERR Error running script (call to f_01ab): @user_script:60: @user_script: 60: -READONLY You can't write",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "ERR LOADING Redis is loading the dataset in memory",
        "NOREPLICAS Not enough good replicas to write.",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    ):
        assert is_elsewhere([b"1", BaseParser.parse_error(text)]), text


def test_other_refusals_keep_their_connection():
    for text, said in (
        ("TRYAGAIN Multiple keys request during rehashing of slot", "TRYAGAIN"),
        ("CLUSTERDOWN The cluster is down", "CLUSTERDOWN"),
        ("BUSY Redis is busy running a script.", "BUSY"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "command"),
        ("ERR unknown command 'READONLY'", "unknown"),
    ):
        assert not is_elsewhere([BaseParser.parse_error(text)])
        assert error_code(BaseParser.parse_error(text)) == said


@pytest.mark.slow
def test_ended_event_loop_closes_its_connections(queue, client):
    loops, process = weakref.WeakSet(), psutil.Process()

    async def publish():
        loops.add(asyncio.get_running_loop())
        await queue.apublish({})

    queue.publish({})
    before = len(client.client_list()), process.num_fds()
    for _ in range(100):
        asyncio.run(publish())
    gc.collect()

    assert queue.counts().ready == 101
    eventually(lambda: len(client.client_list()) <= before[0], "Redis sees them go")
    assert process.num_fds() <= before[1]
    assert len(loops) <= 1
    assert len(queue.connection()._loops) <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_abandoned_event_loop_is_swept_by_the_next(queue):
    loops, process = weakref.WeakSet(), psutil.Process()
    before = process.num_fds()

    for _ in range(3):
        loop = asyncio.new_event_loop()
        loops.add(loop)
        loop.run_until_complete(queue.apublish({}))
        loop.close()
        del loop
        gc.collect()

    assert len(loops) <= 1
    assert process.num_fds() <= before + 2
    asyncio.run(queue.apublish({}))  # it closes the last old connection
    gc.collect()
    assert len(loops) == 0


@pytest.mark.slow
def test_worker_that_publishes_in_async_handlers_leaves_nothing_open(url):
    queue, other, consumer = Queue("q", url=url), Queue("other", url=url), Consumer()

    @consumer.handler(queue)
    async def handle(_body):
        await other.apublish({})

    def drain():
        queue.publish({})
        consumer.drain()
        queue.close()  # the number of connections of the worker's threads varies
        gc.collect()
        return psutil.Process().num_fds()

    drain()
    before = drain()
    for _ in range(2):
        drain()

    eventually(lambda: psutil.Process().num_fds() <= before, "what the worker opened is closed")
    assert other.counts().ready == 4
    queue.close()


PUBLISHES = """
import select, sys
del select.poll  # as eventlet does it
from reliq import Queue
queue = Queue("q", url=sys.argv[1])
print([queue.publish({}).status for _ in range(3)])
"""


@pytest.mark.slow
def test_connections_are_kept_where_poll_is_missing(proxy):
    ran = subprocess.run([sys.executable, "-c", PUBLISHES, proxy.url], capture_output=True, text=True, check=False)

    assert (ran.stdout.strip(), ran.stderr) == ("['published', 'published', 'published']", "")
    assert proxy.connections == 1
