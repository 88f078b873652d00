"""After a lost reply, a call is repeated with the same number and gets its first reply."""

import asyncio
import os
import signal
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from transition import run_transition
from waiting import eventually

from reliq import OutgoingMessage, PublishFailed, Queue, RedisUnavailableError
from reliq.redis import server

FAILED_TRIES = 20  # more than any call makes


def test_publishes_whose_replies_are_lost_run_once(through, call, queue, proxy, commands):
    call(through, "publish", {"n": 0})
    before = commands()["evalsha"]
    proxy.lose_reply_to("EVALSHA")

    assert call(through, "publish", {"n": 1}).status == "published"

    assert (proxy.swallowed, commands()["evalsha"] - before) == (1, 2)  # the connection does not repeat it by itself
    proxy.lose_reply_to("EVALSHA", times=2)
    assert call(through, "publish_many", ({"n": n} for n in range(30)), chunk=10).published == 30
    assert queue.counts().ready == queue.counts().totals["published"] == 32


def test_publish_of_unknown_outcome_is_not_repeated_after_its_message_ran(through, call, queue, proxy, monkeypatch):
    call(through, "publish", {})
    with queue.receive():
        pass
    proxy.lose_reply_to("EVALSHA", times=FAILED_TRIES)
    monkeypatch.setattr("reliq.publish.PUBLISH_SECONDS", 0.2)
    with pytest.raises(PublishFailed) as caught:
        call(through, "publish", {"n": 1})
    proxy.lose_reply_to("", times=0)
    with queue.receive() as [job]:
        assert job.id == caught.value.id

    receipt = call(through, "publish", {"n": 1}, id=caught.value.id)

    assert caught.value.outcome == "unknown"
    assert (receipt.status, queue.counts().alive) == ("published", 0)
    assert queue.counts().totals["published"] == 2


@pytest.fixture
def unknown(through, queue, proxy, monkeypatch):
    """Publish body 1 as `a` with a lost reply, and let a worker finish it; the id is then free."""

    def publish(**terms):
        through.publish({})
        with queue.receive():
            pass
        proxy.lose_reply_to("EVALSHA", times=FAILED_TRIES)
        with monkeypatch.context() as during:
            during.setattr("reliq.publish.PUBLISH_SECONDS", 0.0)  # one attempt only
            with pytest.raises(PublishFailed):
                through.publish({"n": 1}, id="a", **({"dedup": 0} | terms))
        proxy.lose_reply_to("", times=0)
        with queue.receive() as [job]:
            assert job.body == {"n": 1}

    return publish


@pytest.mark.parametrize(
    ("first", "terms", "alive"),
    [
        ({"headers": {"a": "b"}}, {"headers": {"a": "b"}}, 0),
        ({"ignore_dedup": True}, {"ignore_dedup": True}, 1),
        ({}, {"body": {"n": 2}}, 1),
        ({}, {"delay": 60}, 1),
        ({}, {"key": "b"}, 1),
        ({}, {"at": datetime.now(UTC) + timedelta(minutes=1)}, 1),
        ({}, {"ttl": 60}, 1),
        ({}, {"retries": 1}, 1),
        ({}, {"headers": {"a": "b"}}, 1),
        ({}, {"dedup": 1}, 1),
        ({}, {"ignore_dedup": True}, 1),
    ],
    ids=["same", "replacing", "body", "delay", "key", "at", "ttl", "retries", "headers", "dedup", "replace"],
)
def test_unknown_publish_made_again_is_published_if_it_differs_or_replaces(
    unknown, through, queue, first, terms, alive
):
    unknown(**first)

    receipt = through.publish(terms.pop("body", {"n": 1}), id="a", **({"dedup": 0} | terms))

    assert (receipt.status, queue.counts().alive) == ("published", alive)


@pytest.mark.parametrize("option", ["follow", "replace"])
def test_unknown_publish_with_on_conflict_runs_when_it_is_made_again(unknown, through, queue, option):
    through.publish({}, id="a", on_conflict=option)  # Redis caches the script
    with queue.receive():
        pass
    unknown(dedup=None, on_conflict=option)

    through.publish({"n": 1}, id="a", on_conflict=option)

    with queue.receive() as [job]:
        assert job.body == {"n": 1}


def test_cancel_forgets_a_publish_of_unknown_outcome(unknown, through, call):
    unknown()

    call(through, "cancel", "a")

    assert not through._lanes.parked


def test_claim_and_settle_whose_replies_are_lost_are_made_again(through, queue, proxy, receive):
    queue.publish_many([{"n": n} for n in range(5)])
    through.counts()
    proxy.lose_reply_to("EVALSHA")

    def work(jobs):
        assert [job.body["n"] for job in jobs] == list(range(5))
        assert proxy.swallowed == 1
        proxy.lose_reply_to("EVALSHA")

    receive(through, work, limit=5)

    counts = queue.counts()
    assert proxy.swallowed == 2
    assert (counts.alive, counts.totals["acked"], counts.totals["claimed"]) == (0, 5, 5)


@pytest.mark.parametrize("name", ["cancel", "redrive", "resume"])
def test_call_made_again_after_a_lost_reply_happens_once(name, through, call, queue, proxy):
    queue.publish({}, id="m", delay=60 * (name == "cancel"))
    if name == "redrive":
        with queue.receive() as [job]:
            job.reject()
        run_transition(queue, "collect", ["m"], dead_letter_limit=10, letters_ms=10**9)
    queue.pause()
    args = {"cancel": ["m"], "redrive": [queue.dead_letters()], "resume": []}[name]
    call(through, "counts")
    proxy.lose_reply_to("DEL" if name == "resume" else "EVALSHA")

    call(through, name, *args)

    counts = queue.counts()
    assert proxy.swallowed == 1
    assert (counts.alive, counts.missing, counts.paused) == (name != "cancel", 0, name != "resume")
    assert [counts.totals.get(kind, 0) for kind in ("cancelled", "redriven")] == [name == "cancel", name == "redrive"]


@pytest.mark.usefixtures("impatient")
def test_calls_to_an_unreachable_server_are_refused(call):
    nobody = Queue("q", url="redis://127.0.0.1:1/0")

    with pytest.raises(PublishFailed) as caught:
        call(nobody, "publish", {}, id="m")

    assert (caught.value.outcome, caught.value.ids, caught.value.queue) == ("refused", ("m",), "q")
    assert "nothing was written" in str(caught.value)
    assert type(caught.value.__cause__) is RedisUnavailableError
    for name, args in [("counts", ()), ("cancel", ("m",)), ("dead_letters", ()), ("pause", ())]:
        with pytest.raises(RedisUnavailableError) as refused:
            call(nobody, name, *args)
        assert not refused.value.maybe_ran


@pytest.mark.usefixtures("persistent")
def test_publish_waits_for_a_redis_that_returns_within_its_time(away, make_queue, call):
    place, comes_back = away
    timer = threading.Timer(1.0, comes_back)
    timer.start()

    assert call(make_queue(url=place), "publish", {}).status == "published"
    timer.join()


def test_publish_to_a_frozen_server_is_unknown_and_safe_to_repeat(own_server, make_queue, call):
    server = own_server()
    queue = make_queue(url=server.url)
    call(queue, "publish", {"n": 0})
    queue.counts()  # its connection stays open

    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(PublishFailed) as caught:
            queue.publish({"n": 1}, id="m")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    again = call(queue, "publish", {"n": 1}, id="m")

    assert caught.value.outcome == "unknown"
    assert again.status in {"published", "duplicate"}
    counts = queue.counts()
    assert (counts.ready, counts.totals["published"]) == (2, 2)


def test_failed_publish_many_reports_confirmed_and_remaining_ids(through, call, queue, proxy, monkeypatch):
    monkeypatch.setattr("reliq.publish.PUBLISH_SECONDS", 0.2)
    call(through, "publish", {})

    def items():
        for n in range(30):
            if n == 20:
                eventually(lambda: queue.counts().ready == 21, "the second call is made")
                proxy.lose_reply_to("EVALSHA", times=FAILED_TRIES)
            yield OutgoingMessage(body={"n": n}, id=f"m{n}")

    with pytest.raises(PublishFailed) as caught:
        call(through, "publish_many", items(), chunk=10)
    proxy.lose_reply_to("", times=0)

    assert (caught.value.confirmed, caught.value.outcome) == (20, "unknown")
    assert caught.value.ids == tuple(f"m{n}" for n in range(20, 30))
    assert call(through, "publish_many", caught.value.rest, chunk=10).published == 10
    assert queue.counts().ready == 31


def test_cancelled_tasks_leave_every_connection_clean(queue, client):
    replies = []

    async def ask(n):
        receipt = await queue.apublish({"n": n}, id=f"m{n}")
        replies.append((receipt.id, f"m{n}"))

    async def storm():
        for round_ in range(10):
            tasks = [asyncio.create_task(ask(100 * round_ + n)) for n in range(30)]
            for turn, task in enumerate(tasks):
                if turn % 3 == 0:
                    await asyncio.sleep(0)
                if turn % 2:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        counts = await asyncio.gather(*(queue.acounts() for _ in range(20)))
        again = [await queue.apublish({}, id=f"m{n}") for n in range(30)]
        await queue.aclose()
        return counts, again

    counts, again = asyncio.run(storm())

    assert len(replies) >= 150
    assert [pair for pair in replies if pair[0] != pair[1]] == []
    assert {one.missing for one in counts} == {0}
    assert [receipt.id for receipt in again] == [f"m{n}" for n in range(30)]
    final = queue.counts()
    assert final.totals["published"] == final.ready == len(client.keys(queue.keys.msg("*")))


async def cancelled_after(turns, coroutine):
    """Cancel a task after a number of event loop turns."""
    task = asyncio.create_task(coroutine)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_cancelled_task_does_not_close_its_connection(through, proxy):
    async def storm():
        await through.acounts()
        for turns in range(1, 31):
            await cancelled_after(turns, through.apublish({}))
            await through.acounts()
        if under_way := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(under_way)
        await through.aclose()

    asyncio.run(storm())

    assert proxy.connections <= 4
    assert through.counts().totals["published"] == 30


def test_cancelled_receive_returns_its_messages(queue):
    queue.publish_many([{"n": n} for n in range(200)])

    async def take():
        async with queue.areceive(limit=20, wait=1) as jobs:
            for job in jobs:
                job.snooze(delay=0)
            await asyncio.Event().wait()

    async def storm():
        for turns in range(30):
            await cancelled_after(turns, take())
        await queue.aclose()

    asyncio.run(storm())

    counts = queue.counts()
    assert (counts.unack, counts.alive) == (0, 200)
    with queue.receive(limit=200, wait=30) as jobs:
        assert {job.retries_left for job in jobs} == {12}


def test_child_forked_while_locks_are_held_has_connections_of_its_own(queue):
    queue.publish({"from": "parent"})
    shared = server._shared

    with shared._lock, shared._by_url[queue.target]._lock, queue._lanes._lock:
        child = os.fork()
        if not child:
            signal.alarm(100)  # end a hanging test
            for _ in range(20):
                queue.publish({"from": "child"})
            os._exit(0)
    for _ in range(20):
        assert queue.publish({"from": "parent"}).status == "published"
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    with queue.receive(limit=50) as jobs:
        assert Counter(job.body["from"] for job in jobs) == {"parent": 21, "child": 20}
