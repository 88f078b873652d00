"""`receive` without a decorator: messages are claimed, renewed, and settled at the end of the block."""

import asyncio
import contextlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from transition import run_transition
from waiting import eventually

from reliq import RedisUnavailableError, WrongKeyTypeError
from reliq.events import Acked, Handled
from reliq.lua.transitions import CallNumber, collect
from reliq.redis.client import Client
from reliq.redis.commands import letters_between
from reliq.settings import MIB

#: A repeated call would count twice.
pytestmark = pytest.mark.usefixtures("patient")


def bodies(jobs):
    return [job.body for job in jobs]


def test_messages_without_an_answer_are_acked_at_the_end(queue, receive):
    queue.publish_many([{"n": 1}, {"n": 2}, {"n": 3}])

    assert receive(queue, bodies, limit=2) == [{"n": 1}, {"n": 2}]

    counts = queue.counts()
    assert (counts.ready, counts.unack, counts.totals["acked"]) == (1, 0, 2)
    assert receive(queue, bodies) == [{"n": 3}]
    assert receive(queue, bodies) == receive(queue, bodies, wait=0.05) == []


def test_every_kind_of_answer_is_settled(queue, receive):
    queue.publish_many([{"n": n} for n in range(4)])

    def answer(jobs):
        jobs[0].ack()
        jobs[1].nack(delay=60, reason="busy")
        jobs[2].reject(reason="bad card")
        jobs[3].snooze(delay=60)

    receive(queue, answer, limit=4)

    counts = queue.counts()
    assert (counts.unack, counts.garbage, counts.pending, counts.missing) == (1, 1, 1, 0)
    assert [counts.totals[kind] for kind in ("acked", "nacked", "snoozed")] == [1, 2, 1]  # a reject counts as a nack


def test_messages_are_settled_if_no_thread_can_start_to_renew_their_leases(queue, monkeypatch):
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "reliq-receive":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    receipt = queue.publish({"n": 1})
    with pytest.raises(RuntimeError, match="can't start new thread"), queue.receive():
        pass

    assert receipt.state().state == "backoff"


def test_nack_spends_a_retry_and_snooze_does_not(queue, receive):
    queue.publish_many([{"n": 1}, {"n": 2}])
    again = {}

    receive(queue, lambda jobs: (jobs[0].nack(delay=0), jobs[1].snooze(delay=0)), limit=2)
    while len(again) < 2:
        receive(queue, lambda jobs: again.update({job.body["n"]: job.attempt for job in jobs}), limit=2, wait=30)

    assert again == {1: 2, 2: 1}


def test_block_that_raises_nacks_messages_without_an_answer(queue, receive):
    queue.publish_many([{"n": 1}, {"n": 2}])

    def fail(jobs):
        jobs[0].ack()
        raise LookupError("no such order")

    with pytest.raises(LookupError):
        receive(queue, fail, limit=2)

    counts = queue.counts()
    assert (counts.totals["acked"], counts.totals["nacked"], counts.unack) == (1, 1, 1)


def test_message_without_retries_left_becomes_a_dead_letter(queue, receive):
    queue.publish({}, id="m", retries=0)

    with pytest.raises(LookupError), contextlib.ExitStack():
        receive(queue, lambda _jobs: {}["secret"])
    run_transition(queue, "collect", ["m"], dead_letter_limit=10, letters_ms=10**9)

    [letter] = queue.dead_letters()
    assert (letter.reason, letter.error, letter.attempts) == ("failed", "KeyError", 1)


def test_undecodable_body_is_nacked_logged_and_observed_beside_others(make_queue, receive, caplog):
    told = []
    make_queue(str).publish("no json", id="m")
    queue = make_queue(observers=[told.append])
    queue.publish({"n": 1})

    assert receive(queue, bodies, limit=5) == [{"n": 1}]
    assert queue.counts().totals["nacked"] == 1

    [handled] = [event for event in told if isinstance(event, Handled) and event.outcome == "nack"]
    assert (handled.id, handled.outcome, handled.failed, handled.attempt) == ("m", "nack", True, 1)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.fullmatch(
        r"receive: queue q: message m: cannot decode the body, so the message is retried with backoff: body is not .*",
        line,
    )
    assert "no json" not in line


def test_messages_claimed_beside_a_refused_command_are_returned(queue, client, receive):
    queue.publish({}, id="m")
    client.set(queue.keys.garbage, "no set")

    with pytest.raises(WrongKeyTypeError):
        receive(queue, bodies)

    client.delete(queue.keys.garbage)
    counts = queue.counts()
    assert (counts.ready, counts.unack, counts.totals["claimed"]) == (1, 0, 1)
    with queue.receive() as [job]:
        assert (job.attempt, job.retries_left) == (1, 12)


def test_receives_leave_a_single_lane_and_no_other_redis_key(queue, client, receive):
    queue.publish({})
    assert receive(queue, len) == 1
    before = sorted(client.keys())

    assert [receive(queue, len) for _ in range(50)] == [0] * 50
    assert sorted(client.keys()) == before


def test_message_whose_body_is_gone_expires_at_once(queue, client, receive):
    receipt = queue.publish({})
    client.delete(queue.keys.msg(receipt.id))

    assert receive(queue, lambda jobs: (bodies(jobs), queue.counts().totals["expired"])) == ([], 1)


def test_wait_ends_when_a_message_is_published(queue, receive):
    publishes = threading.Timer(0.05, queue.publish, args=({"n": 1},))
    publishes.start()

    assert receive(queue, bodies, wait=30) == [{"n": 1}]
    publishes.join()


def test_wait_ends_when_a_message_is_due_and_never_before(queue, client, receive):
    receipt = queue.publish({"n": 1}, delay=0.3)

    seconds, micros = receive(queue, lambda jobs: client.time() if jobs else None, wait=30)

    assert seconds + micros / 1_000_000 >= receipt.due


def test_lease_is_renewed_while_a_block_runs_or_waits(queue, client):
    queue.publish_many([{}, {}])
    deadlines = set()

    def renewed(at_least):
        deadlines.update(score for _, score in client.zrange(queue.keys.unack, 0, -1, withscores=True))
        return len(deadlines) >= at_least

    async def work():
        async with queue.areceive(lease=0.3) as [job]:
            await asyncio.to_thread(eventually, lambda: renewed(8), "the lease is renewed")
        await queue.aclose()
        return job

    with queue.receive(lease=0.3) as [job]:
        eventually(lambda: renewed(4), "the lease is renewed")
    assert not job.lease_lost
    assert not asyncio.run(work()).lease_lost
    assert queue.counts().totals["acked"] == 2


def test_receive_without_wait_passes_over_cancelled_messages(queue):
    for id in "abc":
        queue.publish({}, id=id)
    assert [queue.cancel(id) for id in "ab"] == ["cancelled"] * 2

    with queue.receive() as jobs:
        assert [job.id for job in jobs] == ["c"]

    assert queue.counts().alive == 0


def test_running_job_sees_that_it_was_cancelled_and_is_not_retried(queue):
    queue.publish({}, id="m")

    with queue.receive(lease=0.3) as [job]:
        assert queue.cancel("m") == "running"
        eventually(lambda: job.cancelled, "the renewal says so")
        job.nack(delay=0)

    assert (queue.counts().alive, queue.counts().totals["cancelled"]) == (0, 1)


def test_job_whose_lease_was_taken_is_lost_and_its_ack_ignored(queue, client):
    queue.publish({}, id="m")

    with queue.receive(lease=30) as [job]:
        client.zadd(queue.keys.unack, {"m": 1})
        with queue.receive(limit=1, wait=30) as [other]:
            pass

    assert (other.id, other.attempt) == ("m", 2)
    assert job.lease_lost
    counts = queue.counts()
    assert (counts.alive, counts.totals["acked"], counts.missing) == (0, 1, 0)


def test_cancelled_async_block_settles_every_answer(make_queue):
    """The cancel arrives after the first outcome was sent."""
    tasks = []
    queue = make_queue(observers=[lambda event: tasks[0].cancel() if isinstance(event, Acked) else None])
    queue.publish_many([{"n": n} for n in range(3)])

    async def work():
        tasks.append(asyncio.current_task())
        async with queue.areceive(limit=3) as jobs:
            jobs[1].nack(delay=60)
            jobs[2].snooze(delay=60)

    async def main():
        await asyncio.gather(asyncio.create_task(work()), return_exceptions=True)
        await queue.aclose()

    asyncio.run(main())

    totals = queue.counts().totals
    assert [totals.get(kind, 0) for kind in ("acked", "nacked", "snoozed")] == [1, 1, 1]


def test_receive_that_is_cancelled_again_and_again_returns_its_message(make_queue):
    """anyio cancels a task in every round of its event loop until the task ends."""
    queue = make_queue()
    queue.publish({}, id="m")

    async def receive():
        async with queue.areceive(wait=60, lease=3600) as [job]:
            job.ack()
            await asyncio.sleep(3600)

    async def main():
        for rounds in range(40):  # before, during and after the claim
            task = asyncio.create_task(receive())
            for _ in range(rounds):
                await asyncio.sleep(0)
            while not task.done():
                task.cancel()
                await asyncio.sleep(0)
            await asyncio.to_thread(eventually, lambda: queue.counts().unack == 0, "the message is no longer leased")
            if not queue.counts().alive:
                await queue.apublish({}, id="m")
        await queue.aclose()

    asyncio.run(main())


def test_settle_refused_for_a_moment_is_made_again(own_server, make_queue, receive):
    """The server reports too few replicas until it has refused a command."""
    server = own_server()
    queue = make_queue(url=server.url)
    queue.publish_many([{"n": 1}, {"n": 2}])
    with redis.Redis.from_url(server.url) as admin:

        def mend():
            wanted = {"errorstat_NOREPLICAS", "errorstat_ERR"}  # of a command; in a script of Redis 6.2
            eventually(lambda: wanted & set(admin.info("errorstats")), "Redis refuses")
            admin.config_set("min-replicas-to-write", 0)

        mending = threading.Thread(target=mend)

        def answer(jobs):
            jobs[1].nack(delay=60)
            admin.config_resetstat()
            admin.config_set("min-replicas-to-write", 1)
            mending.start()

        receive(queue, answer, limit=2)
        mending.join()

    assert (queue.counts().totals["acked"], queue.counts().totals["nacked"]) == (1, 1)


def test_leases_are_spared_after_an_outage_until_they_end(queue, client, away, make_queue, receive, monkeypatch):
    """A lease has expired, and its holder, also cut off from Redis, is about to renew it."""
    queue.publish({}, id="m")
    [held] = run_transition(queue, "claim", CallNumber("holder", 1), limit=1, lease_ms=30_000).claimed
    client.zadd(queue.keys.unack, {"m": 1})
    url, come_back = away
    cut_off = {lease: make_queue(url=url) for lease in (300, 0.05)}
    with monkeypatch.context() as patch:
        patch.setattr("reliq.receive.receiver.TAKE_SECONDS", 0.01)
        for lease, one in cut_off.items():
            with pytest.raises(RedisUnavailableError):
                receive(one, bodies, lease=lease)
    come_back()

    assert receive(cut_off[300], bodies) == []
    assert run_transition(queue, "extend", [held], lease_ms=30_000).lost == ()
    assert queue.counts().unack == 1

    client.zadd(queue.keys.unack, {"m": 1})  # the lease is not renewed again
    assert receive(cut_off[0.05], bodies, wait=60, lease=0.05) == [{}]


@pytest.mark.parametrize(("met_by", "lease"), [("a renewal", 0.3), ("the settling", 0.05)], ids=["renew", "settle"])
def test_outage_that_begins_in_a_block_is_noted(own_server, make_queue, met_by, lease):
    server = own_server()
    queue = make_queue(url=server.url)
    queue.publish({})

    def outage():
        with queue.receive(lease=lease):
            server.kill()
            if met_by == "a renewal":
                eventually(lambda: queue._receiver.spares_leases(queue.keys), "the renewal fails")

    with pytest.raises(RedisUnavailableError):
        outage()

    assert queue._receiver.spares_leases(queue.keys)


def test_waiting_threads_and_tasks_do_not_starve_publishes(url, make_queue):
    queue, received = make_queue(url=f"{url}?max_connections=4"), []

    def take():
        while len(received) < 20:
            with queue.receive(wait=1) as jobs:
                received.extend(job.body["n"] for job in jobs)

    async def atake():
        while len(received) < 40:
            async with queue.areceive(wait=1) as jobs:
                received.extend(job.body["n"] for job in jobs)

    async def work():
        tasks = [asyncio.create_task(atake()) for _ in range(20)]
        for n in range(20, 40):
            assert (await queue.apublish({"n": n})).status == "published"
        await asyncio.gather(*tasks)
        await queue.aclose()

    with ThreadPoolExecutor(20) as pool:
        taken = [pool.submit(take) for _ in range(20)]
        for n in range(20):
            assert queue.publish({"n": n}).status == "published"
    assert [one.result() for one in taken] == [None] * 20
    asyncio.run(work())

    assert sorted(received) == list(range(40))


def test_large_bodies_are_read_in_pieces(make_queue, commands, receive, monkeypatch):
    monkeypatch.setattr("reliq.receive.bodies.READ_BYTES", 2 * MIB)
    large = make_queue(bytes)
    large.publish_many(b"x" * 2**18 for _ in range(20))

    received = receive(large, lambda jobs: [len(job.body) for job in jobs], limit=20)

    assert received == [2**18] * 20
    assert commands()["mget"] == 3


@pytest.mark.parametrize("retries", [0, 3], ids="{} retries".format)
def test_oversized_body_is_returned_or_dies_unread_and_others_are_received(make_queue, client, receive, retries):
    queue, giant = make_queue(bytes), 4 * MIB
    queue.publish(b"giant", id="giant", retries=retries)
    client.append(queue.keys.msg("giant"), b"x" * (giant - len(b"giant")))
    queue.publish_many([b"neighbour", b"x" * MIB])
    before = client.info("stats")["total_net_output_bytes"]

    received = receive(queue, bodies, limit=9)

    assert client.info("stats")["total_net_output_bytes"] - before < 2 * MIB
    assert received == [b"neighbour", b"x" * MIB]
    counts = queue.counts()
    assert (counts.unack, counts.garbage) == ((0, 1) if retries == 0 else (1, 0))
    assert counts.totals["nacked"] == 1
    patient = Client.to(queue.connection(), 60.0)
    patient.run(collect(queue.keys, ["giant"], dead_letter_limit=10, letters_ms=10**9))
    letters = patient.run(letters_between(queue.keys, "-", "+", count=9))
    assert [(letter.reason, letter.error, letter.attempts, len(letter.payload)) for letter in letters] == [
        ("undecodable", f"body must be at most {MIB} bytes (max_body), not {giant}", 1, giant)
    ] * (retries == 0)


def test_close_ends_the_wait_of_another_thread_which_begins_it_anew(queue, receive):
    def listeners():
        return [thread for thread in threading.enumerate() if thread.name == "reliq-listener"]

    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(receive, queue, bodies, wait=20)
        [listener] = eventually(listeners, "it waits")
        queue.close()

        eventually(lambda: not listener.is_alive(), "its wait ends")
        queue.publish({"n": 1})
        assert received.result() == [{"n": 1}]
