"""The test kit: published messages, direct calls of handlers, and drains in the test's own thread."""

import asyncio
import gc
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

import psutil
import pytest
import redis
from tenacity import wait_fixed

from reliq import (
    Admin,
    BodyError,
    ConfigurationError,
    Consumer,
    Job,
    Layout,
    Limit,
    OutgoingMessage,
    Queue,
    Reject,
    Tasks,
    UndecodableError,
)
from reliq.admin.calls import STEP_IDS
from reliq.events import Handled, Started
from reliq.lua import transitions
from reliq.redis import commands
from reliq.redis.shards import ShardMap
from reliq.testing import Published, isolated
from reliq.testing.kit import Reliq, TestClock


def test_published_messages_are_found_by_every_criterion(reliq, shop):
    now = reliq.now
    shop.orders.publish(shop.Order(1), delay=60, id="order-1", headers={"tenant": "a", "by": "me"})
    second = shop.orders.publish(shop.Order(2))

    [ready, pending] = reliq.published(shop.orders)

    assert ready == Published(second.id, shop.Order(2), {}, pytest.approx(now, abs=30), "ready")
    assert (pending.id, pending.body, pending.state) == ("order-1", shop.Order(1), "pending")
    assert pending.due == pytest.approx(now + 60, abs=30)
    assert reliq.assert_published(shop.orders, shop.Order(1), headers={"tenant": "a"}, state="pending") == pending
    assert reliq.assert_published(shop.orders, id="order-1", due=datetime.fromtimestamp(pending.due, UTC)) == pending
    assert reliq.published(shop.orders, due=pending.due + 2) == []
    assert reliq.published(shop.orders, headers={"tenant": "b"}) == []
    reliq.refute_published(shop.orders, shop.Order(3))


def test_failed_assertion_shows_the_messages_that_exist(reliq, shop):
    with pytest.raises(AssertionError, match="no message in 'mails' with body='hello', state='ready': there is none"):
        reliq.assert_published(shop.mails, "hello", state="ready")

    shop.mails.publish_many(f"mail {number}" for number in range(25))

    with pytest.raises(AssertionError, match=r"there are 25:\n(.*mail 0.*\n)(.*\n){19}  … and 5 more"):
        reliq.assert_published(shop.mails, "hello")
    with pytest.raises(AssertionError, match=r"expected no matching message in 'mails', but there are 1:\n.*'mail 3'"):
        reliq.refute_published(shop.mails, "mail 3")
    with pytest.raises(ConfigurationError, match="state must be one of ready, waiting, .*, not 'done'"):
        reliq.published(shop.mails, state="done")


def test_published_finds_every_message_of_a_large_queue(reliq, shop):
    several_reads = 2 * STEP_IDS + 1
    shop.mails.publish_many(map(str, range(several_reads)))
    shop.mails.publish_many(OutgoingMessage(body=f"{number}", key="k") for number in range(several_reads))
    shop.mails.publish_many(OutgoingMessage(body=f"{number}", key=f"k{number:02}") for number in range(25))

    found = [(one.state, one.key, int(one.body)) for one in reliq.published(shop.mails)]

    ready = [("ready", None, number) for number in range(several_reads)]
    waiting = [("waiting", "k", number) for number in range(several_reads)]
    waiting += [("waiting", f"k{number:02}", number) for number in range(25)]
    assert found == ready + waiting


def test_kit_supports_queues_in_the_go_layout(reliq):
    queue = Queue("q", str, layout=Layout.hdt3213())
    queue.publish("x")

    assert [(one.body, one.due) for one in reliq.published(queue)] == [("x", None)]
    assert reliq.perform(consumer_of(queue, lambda body, job: (body, job.attempt)), queue, "y") == ("y", None)


def test_no_url_leads_out_of_the_test(monkeypatch):
    with isolated() as reliq, monkeypatch.context() as patch:  # an embedded server on a Unix socket
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a host was looked up"))
        connect = socket.socket.connect
        patch.setattr(
            socket.socket,
            "connect",
            lambda it, to: connect(it, to) if it.family == socket.AF_UNIX else pytest.fail(f"connects to {to}"),
        )
        patch.setenv("RELIQ_URL", "redis://production.example:6379/0")
        queues = [Queue("a", str, url="redis://production.example:6379/0"), Queue("b", str)]
        for queue in queues:
            queue.publish("x")
            asyncio.run(queue.apublish("y"))
            assert len(reliq.published(queue)) == 2
            consumer = consumer_of(queue, lambda body: None, url="rediss://production.example/3")
            assert len(reliq.drain(consumer).acked) == 2
        assert len(Admin("redis://production.example").queues().queues) == 2


def test_reliq_url_is_set_for_children_and_withheld_from_late_threads(url, client, monkeypatch):
    monkeypatch.setenv("RELIQ_URL", url)  # the production URL
    program = "from reliq import Queue; Queue('q', str).publish('from a child')"
    queue, over, failed = Queue("q", str), threading.Event(), []

    def outlive():
        over.wait(60)
        with pytest.raises(ConfigurationError, match="an isolated test has removed RELIQ_URL: use the") as caught:
            queue.publish("from a thread")
        failed.append(caught)

    with isolated() as reliq:
        thread = threading.Thread(target=outlive)
        thread.start()
        subprocess.run([sys.executable, "-c", program], check=True)
        reliq.assert_published(queue, "from a child")
    over.set()
    thread.join(60)

    assert failed
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 1
    assert client.dbsize() == 0


def test_isolated_block_has_an_empty_redis_and_fails_for_its_own_running_worker(kit_url, shop):
    still_runs = pytest.raises(ConfigurationError, match=r"still runs.*: end the test with consumer.stop\(\)")
    with still_runs, isolated(kit_url):
        shop.consumer.start()
    shop.consumer.stop()

    for _ in range(2):
        with isolated(kit_url) as reliq:
            assert (reliq.published(shop.mails), shop.mails.counts().totals) == ([], {})
            shop.mails.publish("x", id="same")
            assert [one.queue for one in Admin().queues().queues] == ["mails"]
            shop.consumer.start()
            shop.consumer.stop()
    with redis.Redis.from_url(kit_url) as client:
        assert client.dbsize() == 0


def test_isolated_block_closes_its_connections(kit_url):
    """The error of a handler refers to the block, so without a close its connections would stay open."""
    numbers, consumer, opened, errors = Queue("numbers", int), Consumer(), set(), []
    consumer.handler(numbers)(lambda body: 1 / body)
    gc.collect()
    gc.disable()  # it would close what a block leaves open, at some time
    try:
        for _ in range(2):
            with isolated(kit_url) as reliq:
                numbers.publish(0)
                with pytest.raises(ZeroDivisionError) as error:
                    reliq.drain(consumer)
            errors.append(error)
            opened.add(psutil.Process().num_fds())
    finally:
        gc.enable()

    assert len(opened) == 1


def test_nested_block_and_filled_database_are_refused(kit_url, client, shop):
    with isolated(kit_url), pytest.raises(ConfigurationError, match="cannot be nested"), isolated(kit_url):
        pass
    client.execute_command("SELECT", 8)
    client.set("precious", 1)
    refused = pytest.raises(ConfigurationError, match=r"/8 has 1 key, and tests delete all keys: .*/8 flushdb")
    with refused, isolated(kit_url.replace("/7", "/8")):
        pass
    assert client.get("precious") == b"1"
    client.flushdb()
    unknown = pytest.raises(ConfigurationError, match="the Redis of tests is 'embedded' or the URL .*, not 'localhost'")
    with unknown, isolated("localhost"):
        pass


def test_perform_calls_a_handler_with_a_real_job_without_redis(monkeypatch):
    queue, jobs = Queue("q", dict[str, int], retries=5), []

    def handle(body, job):
        jobs.append((body, job.id, job.attempt, job.retries_left, dict(job.headers), job.lease_lost, job.state))
        return "answer"

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connects"))
    reliq = Reliq("redis://127.0.0.1:1/0", TestClock(None))
    answer = reliq.perform(
        consumer_of(queue, handle), queue, {"a": 1}, id="mine", attempt=3, headers={"b": "c"}, state="state"
    )

    assert (answer, jobs) == ("answer", [({"a": 1}, "mine", 3, 3, {"b": "c"}, False, "state")])


def test_perform_raises_the_error_of_the_handler_or_of_its_publish(reliq, shop):
    with pytest.raises(Reject, match="no such order"):
        reliq.perform(shop.consumer, shop.orders, shop.Order(-1))
    with pytest.raises(BodyError):
        reliq.perform(shop.consumer, shop.orders, {"number": object()})
    with pytest.raises(ConfigurationError, match="attempt must be 1 to 4, not 5"):
        reliq.perform(shop.consumer, shop.orders, shop.Order(1), attempt=5)
    with pytest.raises(ConfigurationError, match="no handler for queue 'others'"):
        reliq.perform(shop.consumer, Queue("others"), {})


def test_async_handlers_run_in_blocking_and_async_code(reliq, shop):
    async def drain():
        await shop.mails.apublish("three")
        return await reliq.adrain(shop.consumer)

    reliq.perform(shop.consumer, shop.mails, "one")
    asyncio.run(reliq.aperform(shop.consumer, shop.mails, "two"))

    async def wrong():
        reliq.perform(shop.consumer, shop.mails, "four")

    with pytest.raises(ConfigurationError, match=r"already runs an event loop: use `await reliq.adrain"):
        asyncio.run(wrong())
    assert len(asyncio.run(drain()).acked) == 1
    assert shop.seen == ["one", "two", "three"]


def test_drain_delivers_due_messages_and_follow_ups_in_its_thread(reliq, shop):
    threads = []
    shop.consumer.middleware(contextmanager(lambda _job: (yield threads.append(threading.current_thread()))))
    shop.orders.publish_many([shop.Order(1), shop.Order(-2)])
    shop.orders.publish(shop.Order(3), delay=60)

    done = reliq.drain(shop.consumer)

    assert shop.seen == [(1, 1), "closed 1"]
    assert [len(ids) for ids in (done.acked, done.nacked, done.snoozed, done.dead, done.expired)] == [2, 0, 0, 1, 0]
    assert set(threads) == {threading.current_thread()}
    assert [letter.reason for letter in shop.orders.dead_letters()] == ["rejected"]
    assert reliq.published(shop.orders, state="pending") == reliq.published(shop.orders)


def test_error_of_a_handler_ends_in_it_and_a_drain_keeps_its_message(reliq, shop):
    shop.orders.publish_many([shop.Order(13), shop.Order(1)])
    drain, perform = reliq.drain, partial(reliq.perform, queue=shop.orders, body=shop.Order(13))

    for fail in (drain, perform):
        with pytest.raises(ValueError, match="thirteen") as raised:
            fail(shop.consumer)
        names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert (names[-1], "run" in names) == ("close", False)

    assert shop.seen == []
    assert [one.state for one in reliq.published(shop.orders)] == ["ready", "unack"]
    assert len(reliq.drain(shop.consumer, fail_fast=False).acked) == 2


def test_undecodable_body_fails_the_drain(reliq, shop):
    Queue("orders", str).publish("no order", id="odd")

    for look in (lambda: reliq.published(shop.orders), lambda: reliq.drain(shop.consumer)):
        with pytest.raises(UndecodableError, match="message 'odd' of queue 'orders': body is not Order: ") as raised:
            look()
        assert (raised.value.queue, raised.value.id) == ("orders", "odd")


def test_drain_without_fail_fast_lets_a_message_die(reliq, shop):
    errors = []
    shop.consumer.on_error(lambda job, error, final: errors.append((job.attempt, str(error), final)))
    shop.orders.publish(shop.Order(13), retries=1)

    done = reliq.drain(shop.consumer, scheduled=True, fail_fast=False)

    assert errors == [(1, "thirteen", False), (2, "thirteen", True)]
    assert (len(done.nacked), len(done.dead)) == (1, 1)
    assert [letter.reason for letter in shop.orders.dead_letters()] == ["failed"]


def test_drain_without_an_end_is_given_up(reliq):
    queue = Queue("q", int)
    consumer = consumer_of(queue, lambda number: queue.publish(number + 1))
    queue.publish(0)

    with pytest.raises(AssertionError, match=r"not drained after 30 deliveries \(31 of 'q'\): perhaps a handler"):
        reliq.drain(consumer, most=30)


def test_drain_and_perform_run_middleware_observers_and_lifespan(reliq):
    told, queue = [], Queue("q", str)

    @asynccontextmanager
    async def lifespan():
        told.append("entered")
        yield "state"
        told.append("left")

    @contextmanager
    def around(job):
        told.append(f"around {job.body}")
        yield

    async def handle(body, job):
        told.append((body, job.state))

    def observe(event):
        told.extend([type(event)] * isinstance(event, Started | Handled))

    consumer = consumer_of(queue, handle, lifespan=lifespan, observers=[observe])
    consumer.middleware(around)
    queue.publish("x")

    reliq.drain(consumer)
    asyncio.run(reliq.aperform(consumer, queue, "x"))
    reliq.perform(consumer, queue, "x", state="given")

    way = ["entered", Started, "around x", ("x", "state"), Handled, "left"]
    assert told == [*way, *way, Started, "around x", ("x", "given"), Handled]


def test_batch_handler_receives_batches(reliq):
    queue, batches = Queue("q", int), []
    consumer = Consumer()

    @consumer.handler(queue, batch=3)
    def handle(bodies, jobs):
        batches.append((bodies, [job.attempt for job in jobs]))
        return [Reject() if body == 2 else None for body in bodies]

    queue.publish_many(range(5))
    done = reliq.drain(consumer)

    assert batches == [([0, 1, 2], [1, 1, 1]), ([3, 4], [1, 1])]
    assert (len(done.acked), len(done.dead)) == (4, 1)
    assert reliq.perform(consumer, queue, 2)[0].reason == ""


def test_cancelled_async_drain_ends(reliq):
    queue = Queue("q", str)

    async def waits(_body):
        running.set()
        await asyncio.Event().wait()

    async def test():
        drain = asyncio.create_task(reliq.adrain(consumer_of(queue, waits), fail_fast=False))
        await running.wait()
        drain.cancel()
        await drain

    running = asyncio.Event()
    queue.publish("x")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(test())


def consumer_of(queue, function, **options):
    consumer = Consumer(**options)
    consumer.handler(queue)(function)
    return consumer


def test_drain_accepts_a_blocking_lifespan_and_raises_the_error_of_one(reliq, shop):
    left = []

    @contextmanager
    def lifespan():
        yield "state"
        left.append("left")

    @asynccontextmanager
    async def broken():
        raise OSError("no database")
        yield

    shop.consumer.lifespan = lifespan
    shop.orders.publish(shop.Order(1), delay=timedelta(days=2))
    reliq.drain(shop.consumer, scheduled=True)
    assert (left, shop.seen) == (["left"], [(1, 1), "closed 1"])

    shop.consumer.lifespan = broken
    with pytest.raises(OSError, match="no database"):
        reliq.drain(shop.consumer)


def test_every_shard_is_drained_and_forgotten_by_the_next_test(kit_url):
    queue = Queue("q", int)
    for shards in (4, 1, 2):
        with isolated(kit_url) as reliq:
            seen = []
            if shards > 1:
                reliq._client.run(transitions.remap(queue.keys, b"", ShardMap(1, shards, shards).text))
            for number in range(8):
                queue.publish(number)

            assert sorted(one.body for one in reliq.published(queue)) == list(range(8))
            assert [keys.shard for keys in queue.shards()] == list(range(shards))
            assert {queue.known_shards.keys(at).ready for at in range(shards)} == {
                keys.ready for keys in queue.shards() if reliq._client.run(commands.end_of(keys, "ready"))
            }
            assert len(reliq.drain(consumer_of(queue, seen.append)).acked) == 8
            assert sorted(seen) == list(range(8))


def test_perform_calls_a_task_with_its_arguments(reliq):
    app = Tasks("tasks", handler={"backoff": wait_fixed(0)})
    seen = []

    @app.middleware
    @contextmanager
    def around(job):
        seen.append((job.headers["reliq-task"], job.body.number))
        yield

    @app.task
    def double(number: int, state: str = "none") -> str:
        return f"{2 * number} {state}"

    @app.task(retries=0)
    async def walk(job: Job, number: int) -> tuple[int | None, int, str | None]:
        return job.attempt, job.retries_left, job.key

    assert reliq.perform(app, double, 2) == "4 none"
    assert reliq.perform(app, double, number=3, state="given") == "6 given"
    assert asyncio.run(reliq.aperform(app, walk.options(key="k"), 4)) == (1, 0, "k")
    assert seen == [("double", 2), ("double", 3), ("walk", 4)]
    with pytest.raises(BodyError, match="task 'double': "):
        reliq.perform(app, double, "two")


def test_drain_runs_plain_async_and_unknown_tasks(reliq):
    app, new, ran = Tasks("tasks"), Tasks("tasks"), []
    app.task(name="plain")(lambda: ran.append("plain"))
    app.task(name="later")(asyncio.sleep)
    new.task(name="unknown")(lambda: None)
    app.tasks["plain"].options(id="plain").publish()
    app.tasks["later"].options(id="later").publish(0)
    new.tasks["unknown"].options(id="unknown").publish()

    done = reliq.drain(app)

    assert (done.acked, done.snoozed, ran) == (["plain", "later"], ["unknown"], ["plain"])


def test_a_drain_ignores_shared_limits(reliq):
    queue, ran = Queue("limited", int, limits=[Limit("api", rate="1/h")]), []
    consumer = Consumer()
    consumer.handler(queue)(ran.append)
    queue.publish_many(range(3))

    reliq.drain(consumer)

    assert sorted(ran) == [0, 1, 2]
