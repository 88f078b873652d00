"""Limits by cost that queues share: a worker claims first, books the cost, and holds the message without a slot."""

import signal
import time
from contextlib import closing

import pytest
from overheard import Overheard
from waiting import eventually
from worker_process import AT_ONCE, Worker, environment_for

from reliq import Consumer, Limit, OutgoingMessage, Queue
from reliq.errors import RedisRefusedError
from reliq.events import Acked, Released
from reliq.keys import limit_key
from reliq.lua import script
from reliq.worker.fetcher import Fetcher

RATE, BURST = 2000, 3000
JOBS = """
import os, time, redis
from reliq import Consumer, Limit, Queue

API = Limit("api", rate=["50/s", "2000/s by cost"], burst=[5, 3000])
record, consumer = redis.Redis.from_url(os.environ["RELIQ_URL"]), Consumer()

def serve(queue):
    @consumer.handler(queue, lease=60)
    def handle(body, job):
        record.rpush("starts", f"{time.time():.6f} {body['cost']} {job.id}")

for name in ("chats", "docs"):
    serve(Queue(name, limits=[API]))
"""


def outgoing(*costs):
    return [OutgoingMessage(body="x", cost=cost) for cost in costs]


def full_at(client, name):
    return int(client.hget(limit_key(name), "cost_full") or 0)


def test_four_processes_with_two_queues_keep_every_window_through_a_kill(url, client, tmp_path):
    """One process is killed and replaced; starts are calls of the handler."""
    tmp_path.joinpath("jobs.py").write_text(JOBS)
    limit = Limit("api", rate=["50/s", f"{RATE}/s by cost"], burst=[5, BURST])
    queues, ids = [Queue(name, url=url, limits=[limit]) for name in ("chats", "docs")], set()
    for queue in queues:
        ids |= {queue.publish({"cost": cost}, cost=cost).id for cost in (20, 100, 2000, 300) * 8}

    with closing(
        Worker("jobs:consumer", tmp_path, environment_for(tmp_path, url), "--processes", "4", change=AT_ONCE)
    ) as worker:
        eventually(lambda: client.llen("starts") > 20, "work goes on")
        worker.children()[0].kill()
        eventually(lambda: sum(queue.counts().alive for queue in queues) == 0, "all messages are handled")
        assert worker.stop(signal.SIGTERM) == 0

    rows = [row.decode().split() for row in client.lrange("starts", 0, -1)]
    assert {id for *_, id in rows} == ids
    level = most = before = 0.0
    for at, cost in sorted((float(at), int(cost)) for at, cost, _ in rows):
        level = max(0.0, level - (at - before) * RATE) + cost
        before, most = at, max(most, level)
    assert most <= BURST + RATE  # on a stalled machine; usually a held message starts at most 0.1 s late


def test_a_held_message_needs_no_slot(make_queue, recorder, url, start):
    slow, quick = make_queue("slow", limits=[Limit("slow", rate="1/s by cost", burst=100)]), make_queue("quick")
    slow.publish_many(outgoing(100, 4))
    quick.publish_many(["x"] * 200)
    consumer = Consumer(url, observers=[recorder])
    for queue in (slow, quick):
        consumer.handler(queue)(lambda body: None)

    start(consumer, concurrency=1)

    recorder.wait_for(Acked, 200, queue="quick")
    recorder.wait_for(Acked, 2, queue="slow")


def test_while_a_message_is_held_other_queues_wait_for_nothing(make_queue, recorder, workers):
    slow, quick = make_queue("slow", limits=[Limit("slow", rate="1/h by cost", burst=100)]), make_queue("quick")
    slow.publish_many(outgoing(100, 1, 1))
    workers(2, slow, quick)
    recorder.wait_for(Acked, 1, queue="slow")

    quick.publish_many(["x"] * 500)

    recorder.wait_for(Acked, 500, queue="quick")
    # One is held, for an hour. The other worker may try the third at this moment; it cannot book it and releases it.
    eventually(lambda: (slow.counts().unack, slow.counts().ready) == (1, 1), "one is held and the other released")


def test_a_stop_releases_the_held_message_and_gives_its_cost_back(make_queue, consumer, start, recorder, client):
    queue = make_queue(limits=[Limit("api", rate="100/m by cost", burst=100)])
    consumer.handler(queue)(lambda body: None)
    queue.publish_many(outgoing(100))
    start()
    recorder.wait_for(Acked)
    first = full_at(client, "api")
    queue.publish_many(outgoing(60))
    eventually(lambda: full_at(client, "api") > first, "the next start is booked")
    assert queue.counts().unack == 1

    consumer.stop(grace=0)

    assert full_at(client, "api") == first
    assert queue.counts().ready == 1


@pytest.mark.parametrize("spent", [900, 0], ids=["more", "less"])
@pytest.mark.parametrize("kind", ["plain", "key", "own rate", "batch"])
def test_a_job_tells_the_limit_what_it_really_cost(kind, spent, make_queue, consumer, start, recorder, client):
    options = {"rate": "100/s by cost", "burst": 500} if kind == "own rate" else {}
    queue = make_queue(limits=[Limit("api", rate="1/s by cost", burst=500)], **options)
    if kind == "batch":
        consumer.handler(queue, batch=2, linger=0.01)(lambda bodies, jobs: jobs[0].spent(spent))
    else:
        consumer.handler(queue)(lambda body, job: job.spent(spent))
    message = OutgoingMessage(body="x", cost=1 if kind == "plain" else 400, key="k" if kind == "key" else None)
    queue.publish_many([message])

    start()

    recorder.wait_for(Acked)
    # The limit refills by 1/s meanwhile.
    eventually(lambda: abs(full_at(client, "api") / 1e6 - time.time() - spent) <= 60, "the limit is corrected")


def test_only_messages_that_fit_into_the_burst_together_make_a_batch(make_queue, consumer, start, recorder):
    queue, sizes = make_queue(limits=[Limit("api", rate="3600/h by cost", burst=100)]), []
    consumer.handler(queue, batch=5, linger=0.01)(lambda bodies: sizes.append(len(bodies)))
    queue.publish_many(outgoing(30, 30, 30, 30, 90))

    start()

    recorder.wait_for(Acked, 3)
    assert sizes == [3]


@pytest.mark.parametrize(("rate", "burst"), [("40/s by cost", 100), ("5/s", 1)])
def test_a_batch_does_not_linger_for_messages_with_later_starts(rate, burst, make_queue, consumer, start, recorder):
    queue, sizes = make_queue(limits=[Limit("api", rate=rate, burst=burst)]), []
    consumer.handler(queue, batch=5, linger=20)(lambda bodies: sizes.append(len(bodies)))
    queue.publish_many(outgoing(*[40 if burst == 100 else 1] * 5))

    start()

    recorder.wait_for(Acked, 5)
    assert max(sizes) == max(1, burst // 40)


@pytest.mark.parametrize("seconds", [0.002, 0.2])
def test_a_busy_queue_does_not_keep_held_messages_from_slots(seconds, make_queue, recorder, url, start):
    slow, quick = make_queue("slow", limits=[Limit("slow", rate="9999/s by cost")]), make_queue("quick")
    quick.publish_many(["x"] * int(20 / seconds))
    consumer = Consumer(url, observers=[recorder])
    consumer.handler(slow)(lambda body: None)
    consumer.handler(quick)(lambda body: time.sleep(seconds))
    start(consumer, concurrency=1)
    recorder.wait_for(Acked, 3, queue="quick")

    slow.publish_many(outgoing(10, 10, 10))

    recorder.wait_for(Acked, 3, queue="slow")
    assert len(recorder.of(Released, queue="slow")) < 3  # on a stalled machine, a booking may be late


@pytest.mark.parametrize("kind", ["plain", "own rate", "keys", "two limits"])
def test_a_limit_by_cost_works_with_other_limits(kind, make_queue, workers, recorder, client):
    limits = [Limit("api", rate=["100/s", "4000/s by cost"], burst=[5, 400])]
    if kind == "two limits":
        limits += [Limit("wide", rate="200/s", burst=9), Limit("narrow", rate="2000/s by cost", burst=300)]
    queue = make_queue(limits=limits, **({"rate": "500/s"} if kind == "own rate" else {}))
    costs = [1, 20, 300, 100] * 5
    keys = [f"k{number % 3}" if kind == "keys" else None for number in range(20)]
    queue.publish_many(OutgoingMessage(body="x", cost=cost, key=key) for cost, key in zip(costs, keys, strict=True))

    workers(2, queue)

    recorder.wait_for(Acked, 20)
    assert {client.hget(limit_key(one.name), "rate").decode() for one in limits} == {one.declared[0] for one in limits}


def test_a_start_takes_at_most_one_and_a_half_bookings(make_queue, workers, recorder, url):
    limit = Limit("api", rate="20000/s by cost", burst=2000)
    queues = [make_queue(name, limits=[limit]) for name in ("chats", "docs")]
    for queue in queues:
        queue.publish_many(outgoing(*[20, 100, 900, 60] * 15))

    with closing(Overheard(url)) as overheard:
        workers(3, *queues)
        recorder.wait_for(Acked, 120)
        calls = [one for one in overheard.all() if one["client_type"] != "lua" and script("book").sha in one["command"]]
        assert len(calls) <= 180


def test_a_message_that_finds_no_slot_at_its_time_is_released_and_gives_its_cost_back(
    make_queue, recorder, url, start, gate, client
):
    limit = Limit("api", rate="25/s by cost", burst=100)
    queue, other = make_queue("q", limits=[limit]), make_queue("other")
    consumer = Consumer(url, observers=[recorder])
    consumer.handler(other)(lambda body: gate.pass_through())
    consumer.handler(queue)(lambda body: None)
    start(consumer, concurrency=1)
    queue.publish_many(outgoing(100))
    recorder.wait_for(Acked, 1)
    first = full_at(client, "api")
    queue.publish_many(outgoing(100))
    eventually(lambda: queue.counts().unack == 1, "the next message is held")

    other.publish("x")
    gate.wait_for()

    recorder.wait_for(Released, 1, queue="q")
    eventually(lambda: full_at(client, "api") < first + 3_000_000, "its cost is back")
    gate.open()
    recorder.wait_for(Acked, 2, queue="q")


def test_a_message_held_in_a_shard_that_disappears_is_released(make_queue, consumer, start, client, monkeypatch):
    queue = make_queue(limits=[Limit("api", rate="100/s by cost")])
    for each in (queue, make_queue("other")):
        consumer.handler(each)(lambda body: None)
    fetcher = start()._fetcher
    client.set(limit_key("api"), "of another program")  # so the message stays held, without a booking
    queue.publish("x")
    eventually(lambda: any(held.parked for held in fetcher._inflight.deliveries()), "the message is held")

    others = {keys: one for keys, one in fetcher._served.shards().items() if keys != queue.keys}
    monkeypatch.setattr(fetcher._served, "shards", lambda: others)

    eventually(lambda: not fetcher._inflight.deliveries(), "this process has no delivery of it", seconds=20)
    assert queue.counts().ready == 1


def test_a_limit_that_redis_refuses_starts_nothing_until_it_answers(make_queue, workers, recorder, client, caplog):
    queue = make_queue(limits=[Limit("api", rate="100/s by cost")])
    workers(1, queue)
    client.set(limit_key("api"), "of another program")
    queue.publish_many(outgoing(5))

    eventually(lambda: "queue q: the fetcher failed (attempt 2)" in caplog.text, "the log reports it")
    assert recorder.ids(Acked) == []
    client.delete(limit_key("api"))
    recorder.wait_for(Acked)


def test_a_message_that_is_held_after_an_error_keeps_no_thread_busy(make_queue, consumer, start, recorder, monkeypatch):
    queue, steps, step = make_queue(limits=[Limit("api", rate="1000/s by cost")]), [], Fetcher.step
    consumer.handler(queue)(lambda body: None)
    monkeypatch.setattr(Fetcher, "step", lambda fetcher: (steps.append(1), step(fetcher))[1])
    fetcher = start()._fetcher
    eventually(lambda: fetcher._queues, "the fetcher serves the queue")
    fetcher._queues[0].bookings._next_at = time.monotonic() + 2  # as if other processes were first
    fetcher._backoff.note(queue.keys, RedisRefusedError("OOM"))

    queue.publish_many(outgoing(5))

    recorder.wait_for(Acked)
    assert len(steps) < 200
