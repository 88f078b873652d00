"""Receiving without a decorator: claimed, renewed, settled at the end of the block."""

import asyncio
import contextlib
import re
import threading

import pydantic
import pytest
import redis
from waiting import eventually

from reliq import Queue, RedisUnavailableError, WrongKeyTypeError
from reliq.events import Acked, Handled
from reliq.transitions import CallNumber


def bodies(jobs):
    return [job.body for job in jobs]


def test_what_is_not_answered_is_acked_at_the_end(queue, receive):
    queue.publish_many([{"n": 1}, {"n": 2}, {"n": 3}])

    assert receive(queue, bodies, limit=2) == [{"n": 1}, {"n": 2}]

    counts = queue.counts()
    assert (counts.ready, counts.unack, counts.totals["acked"]) == (1, 0, 2)


def test_nothing_is_received_from_an_empty_queue(queue, receive):
    assert receive(queue, bodies) == []
    assert receive(queue, bodies, wait=0.05) == []


def test_every_answer_is_given_to_redis(queue, receive):
    queue.publish_many([{"n": n} for n in range(4)])

    def answer(jobs):
        jobs[0].ack()
        jobs[1].nack(delay=60, reason="busy")
        jobs[2].reject(reason="bad card")
        jobs[3].snooze(delay=60)

    receive(queue, answer, limit=4)

    counts = queue.counts()
    assert (counts.unack, counts.garbage, counts.pending, counts.missing) == (1, 1, 1, 0)
    assert {kind: counts.totals[kind] for kind in ("acked", "nacked", "snoozed")} == {
        "acked": 1,
        "nacked": 2,  # a reject is one
        "snoozed": 1,
    }


def test_a_nack_spends_a_retry_and_a_snooze_does_not(queue, receive):
    queue.publish_many([{"n": 1}, {"n": 2}], chunk=2)

    def answer(jobs):
        jobs[0].nack(delay=0)
        jobs[1].snooze(delay=0)

    receive(queue, answer, limit=2)
    again = {}
    while len(again) < 2:
        receive(queue, lambda jobs: again.update({job.body["n"]: job.attempt for job in jobs}), limit=2, wait=30)

    assert again == {1: 2, 2: 1}


def test_a_block_that_raises_nacks_what_was_not_answered(queue, receive):
    queue.publish_many([{"n": 1}, {"n": 2}])

    def fail(jobs):
        jobs[0].ack()
        raise LookupError("no such order")

    with pytest.raises(LookupError):
        receive(queue, fail, limit=2)

    counts = queue.counts()
    assert (counts.totals["acked"], counts.totals["nacked"], counts.unack) == (1, 1, 1)


def test_a_message_without_retries_left_dies_by_its_error(queue, receive):
    queue.publish({}, id="m", retries=0)

    with pytest.raises(LookupError), contextlib.ExitStack():
        receive(queue, lambda _jobs: {}["secret"])
    queue.moves.collect(["m"], letters_max=10, letters_ms=10**9)

    [letter] = queue.letters()
    assert (letter.reason, letter.error, letter.attempts) == ("failed", "KeyError", 1)


def test_a_body_that_does_not_decode_is_nacked_at_once_and_the_others_are_received(url, queue, receive):
    Queue("q", str, url=url).publish("no json")
    queue.publish({"n": 1})

    def look(jobs):
        return bodies(jobs), queue.counts().unack

    assert receive(queue, look, limit=5) == ([{"n": 1}], 2)
    assert queue.counts().totals["nacked"] == 1


def test_a_body_that_does_not_decode_is_told_as_a_worker_tells_it(url, receive, caplog):
    told = []
    Queue("q", str, url=url).publish("no json", id="m")
    queue = Queue("q", url=url, observers=[told.append])

    assert receive(queue, bodies) == []

    [handled] = [event for event in told if isinstance(event, Handled)]
    assert (handled.id, handled.outcome, handled.failed, handled.attempt) == ("m", "nack", True, 1)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.fullmatch(r"q: m does not decode and goes back: body is not .*", line)
    assert "no json" not in line


def test_a_body_whose_decoding_raises_anything_holds_up_no_other(url, receive):
    class Odd(pydantic.BaseModel):
        n: int

        @pydantic.model_validator(mode="after")
        def raises(self):
            if self.n == 1:
                raise LookupError("s3cret")
            return self

    Queue("q", url=url).publish_many([{"n": 1}, {"n": 2}])

    assert receive(Queue("q", Odd, url=url), lambda jobs: [job.body.n for job in jobs], limit=2) == [2]


def test_what_was_claimed_beside_a_refusal_is_given_back_unspent(queue, client, receive):
    queue.publish({}, id="m")
    client.set(queue.keys.garbage, "no set")

    with pytest.raises(WrongKeyTypeError):
        receive(queue, bodies)

    client.delete(queue.keys.garbage)
    counts = queue.counts()
    assert (counts.ready, counts.unack, counts.totals["claimed"]) == (1, 0, 1)
    with queue.receive() as [job]:
        assert (job.attempt, job.retries_left) == (1, 12)


def test_five_hundred_receives_of_nothing_leave_no_key_and_any_number_of_something_one_lane(queue, client):
    def take():
        with queue.receive() as jobs:
            return len(jobs)

    queue.publish({})
    assert take() == 1
    before = sorted(client.keys())

    assert [take() for _ in range(500)] == [0] * 500
    assert sorted(client.keys()) == before

    for _ in range(20):
        queue.publish({})
        assert take() == 1
    assert sorted(client.keys()) == before


def test_a_message_whose_body_is_gone_ends_at_once(queue, client, receive):
    receipt = queue.publish({})
    client.delete(queue.keys.msg(receipt.id))

    assert receive(queue, lambda jobs: (bodies(jobs), queue.counts().totals["expired"])) == ([], 1)


def test_a_wait_ends_with_a_message_that_comes(queue, receive):
    threading.Timer(0.05, queue.publish, args=({"n": 1},)).start()

    assert receive(queue, bodies, wait=30) == [{"n": 1}]


def test_a_wait_ends_with_a_message_that_comes_due_and_never_before(queue, client, receive):
    receipt = queue.publish({"n": 1}, delay=0.3)

    seconds, micros = receive(queue, lambda jobs: client.time() if jobs else None, wait=30)

    assert seconds + micros / 1_000_000 >= receipt.due


def test_a_lease_is_renewed_while_the_block_runs(queue):
    queue.publish({})
    deadlines = []

    with queue.receive(lease=0.3) as [job]:
        first = queue.moves.counts()
        while len(set(deadlines)) < 4:
            deadlines += [score for _, score in _unack(queue)]

    assert first.unack == 1
    assert not job.lost
    assert queue.counts().totals["acked"] == 1


def test_a_lease_is_renewed_while_an_async_block_waits(queue):
    queue.publish({})

    async def work():
        deadlines = set()
        async with queue.areceive(lease=0.3) as [job]:
            while len(deadlines) < 4:
                deadlines.update(score for _, score in _unack(queue))
                await asyncio.sleep(0)
        await queue.aclose()
        return job.lost

    assert asyncio.run(work()) is False
    assert queue.counts().totals["acked"] == 1


def test_a_job_is_told_that_it_was_cancelled(queue):
    queue.publish({}, id="m")

    with queue.receive(lease=0.3) as [job]:
        queue.cancel("m")
        while not job.cancelled:
            pass

    assert queue.counts().alive == 0


def test_a_job_whose_lease_was_taken_is_lost_and_its_answer_changes_nothing(queue, client):
    queue.publish({}, id="m")

    with queue.receive(lease=30) as [job]:
        client.zadd(queue.keys.unack, {"m": 1})
        with queue.receive(limit=1, wait=30) as [other]:
            pass

    assert (other.id, other.attempt) == ("m", 2)
    assert job.lost
    counts = queue.counts()
    assert (counts.alive, counts.totals["acked"], counts.missing) == (0, 1, 0)


def test_a_cancelled_block_still_tells_redis_every_answer(url):
    """The cancel comes when the first of the answers has been told."""
    settled, tasks = Queue("q", url=url), []
    settled.publish_many([{"n": n} for n in range(3)])

    def cancel(event):
        if isinstance(event, Acked):
            tasks[0].cancel()

    async def work(queue):
        async with queue.areceive(limit=3) as jobs:
            jobs[1].nack(delay=60)
            jobs[2].snooze(delay=60)

    async def main():
        queue = Queue("q", url=url, observers=[cancel])
        tasks.append(asyncio.create_task(work(queue)))
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]
        await queue.aclose()

    asyncio.run(main())

    totals = settled.counts().totals
    assert {kind: totals.get(kind, 0) for kind in ("acked", "nacked", "snoozed")} == dict.fromkeys(
        ("acked", "nacked", "snoozed"), 1
    )


def test_a_settling_that_redis_cannot_take_now_is_made_again(own_server, receive):
    """The server has too few replicas, until it has refused something for that."""
    server = own_server()
    with redis.Redis.from_url(server.url) as admin:
        queue = Queue("q", url=server.url)
        queue.publish_many([{"n": 1}, {"n": 2}], chunk=2)

        def mend():
            wanted = {"errorstat_NOREPLICAS", "errorstat_ERR"}  # of a command, of one in a script of Redis 6.2
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

        counts = queue.counts()
        assert (counts.totals["acked"], counts.totals["nacked"]) == (1, 1)


@pytest.fixture
def held(queue, client):
    """A message whose lease is over, held by somebody who was cut off from Redis and is about to renew it."""
    queue.publish({}, id="m")
    [held] = queue.moves.claim(CallNumber("holder", 1), limit=1, lease_ms=30_000).claimed
    client.zadd(queue.keys.unack, {"m": 1})
    return held


@pytest.fixture
def cut_off(away, monkeypatch):
    """Return a queue on a Redis that was away when a receive with `lease` asked it for messages, and is back."""

    def make(lease):
        url, come_back = away
        queue = Queue("q", url=url)
        with monkeypatch.context() as patch:
            patch.setattr("reliq.receive.receive.TAKE_SECONDS", 0.01)
            with pytest.raises(RedisUnavailableError), queue.receive(lease=lease):
                pass
        come_back()
        return queue

    return make


def test_after_an_outage_leases_are_spared_that_their_holders_may_renew(queue, held, cut_off, receive):
    assert receive(cut_off(lease=300), bodies) == []

    assert queue.moves.extend([held], lease_ms=30_000).lost == ()
    assert queue.counts().unack == 1


@pytest.mark.parametrize(("met_by", "lease"), [("a renewal", 0.3), ("the settling", 0.05)])
def test_an_outage_that_begins_in_a_block_is_noted_too(own_server, met_by, lease):
    server = own_server()
    queue = Queue("q", url=server.url)
    queue.publish({})

    def outage():
        with queue.receive(lease=lease):
            server.kill()
            if met_by == "a renewal":
                eventually(lambda: queue._receiver.spares_leases, "the renewal fails")

    with pytest.raises(RedisUnavailableError):
        outage()

    assert queue._receiver.spares_leases


@pytest.mark.usefixtures("held")
def test_a_lease_that_nobody_renews_after_an_outage_is_taken_back(cut_off, receive):
    assert receive(cut_off(lease=0.05), bodies, wait=60, lease=0.05) == [{}]


def test_threads_that_wait_starve_no_publish(url):
    queue = Queue("q", url=f"{url}?max_connections=4")
    over, received, errors = threading.Event(), [], []

    def take():
        try:
            while not over.is_set():
                with queue.receive(wait=1) as jobs:
                    received.extend(job.body["n"] for job in jobs)
        except Exception as error:
            errors.append(error)
            over.set()

    threads = [threading.Thread(target=take) for _ in range(20)]
    for thread in threads:
        thread.start()
    for n in range(20):
        assert queue.publish({"n": n}).status == "published"
    eventually(lambda: len(received) == 20 or errors, "everything is received")
    over.set()
    for thread in threads:
        thread.join()

    assert errors == []
    assert sorted(received) == list(range(20))
    queue.close()


def test_tasks_that_wait_starve_no_publish(url):
    queue, received = Queue("q", url=f"{url}?max_connections=4"), []

    async def take():
        while len(received) < 20:
            async with queue.areceive(wait=1) as jobs:
                received.extend(job.body["n"] for job in jobs)

    async def work():
        tasks = [asyncio.create_task(take()) for _ in range(20)]
        for n in range(20):
            assert (await queue.apublish({"n": n})).status == "published"
        await asyncio.gather(*tasks)

    asyncio.run(work())

    assert sorted(received) == list(range(20))


def test_large_bodies_are_read_in_pieces(url, commands, receive):
    large = Queue("q", bytes, url=url)
    large.publish_many(b"x" * 2**20 for _ in range(20))

    received = receive(large, lambda jobs: [len(job.body) for job in jobs], limit=20)

    assert received == [2**20] * 20
    assert commands()["mget"] == 3
    large.close()


def _unack(queue):
    wire = queue.connection().wire()
    [rows] = wire.exchange([("ZRANGE", queue.keys.unack, 0, -1, "WITHSCORES")])
    return list(zip(rows[::2], rows[1::2], strict=True))
