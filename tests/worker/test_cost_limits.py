"""A rate by cost in real workers: messages pay before they start, and `Job.spent` corrects what they paid."""

import signal
from contextlib import closing

import pytest
from waiting import eventually
from worker_process import AT_ONCE, Worker, environment_for

from reliq import ConfigurationError, Layout, OutgoingMessage, Queue
from reliq.events import Acked, Expired

RATE, BURST = 2000, 4000
JOBS = """
import os, redis
from reliq import Consumer, Queue

CHATS = Queue("chats", rate="2000/s by cost", burst=4000)
record, consumer = redis.Redis.from_url(os.environ["RELIQ_URL"]), Consumer()

@consumer.handler(CHATS, lease=60)
def handle(body, job):
    claimed = record.zscore(CHATS.keys.unack, job.id) - 60
    spent = body["cost"] * (3 if int(claimed) % 2 else 10) // 10
    record.rpush("starts", f"{claimed:.3f} {spent} {job.id}")
    job.spent(spent)
"""


def worst(starts):
    """Return the most that starts, pairs of unix seconds and cost, took from the rate at once."""
    level = most = before = 0.0
    for at, cost in sorted(starts):
        level = max(0.0, level - (at - before) * RATE) + cost
        before, most = at, max(most, level)
    return most


def test_four_processes_exceed_no_window_through_a_kill(url, client, tmp_path):
    """One process is killed and replaced; starts are claims, by the clock of Redis, with what they really cost."""
    tmp_path.joinpath("jobs.py").write_text(JOBS)
    queue, costs = Queue("chats", url=url, rate=f"{RATE}/s by cost", burst=BURST), [20, 100, 1500, 300] * 15
    ids = {queue.publish({"cost": cost}, cost=cost, key=f"k{cost}").id for cost in costs}

    with closing(
        Worker("jobs:consumer", tmp_path, environment_for(tmp_path, url), "--processes", "4", change=AT_ONCE)
    ) as worker:
        eventually(lambda: client.llen("starts") > 20, "work goes on")
        worker.children()[0].kill()
        eventually(lambda: queue.counts().alive == 0, "all messages are handled")
        assert worker.stop(signal.SIGTERM) == 0

    rows = [row.decode().split() for row in client.lrange("starts", 0, -1)]
    assert {id for *_, id in rows} == ids
    assert worst((float(at), int(cost)) for at, cost, _ in rows) <= BURST * 1.001  # scores are in ms


def told(job):
    job.spent(1)


async def told_async(body, job):
    told(job)


def told_in_a_batch(bodies: list[str], jobs):
    for job in jobs:
        told(job)


@pytest.mark.parametrize(
    ("handler", "options"),
    [(lambda body, job: told(job), {}), (told_async, {}), (told_in_a_batch, {"batch": 2, "linger": 0.01})],
    ids=["plain", "async", "batch"],
)
def test_a_job_that_spent_less_lets_the_next_start(handler, options, make_queue, consumer, start, recorder):
    queue = make_queue(rate="1/h by cost", burst=100)
    consumer.handler(queue, **options)(handler)
    queue.publish_many(OutgoingMessage(body="x", cost=95) for _ in range(3))

    start()

    recorder.wait_for(Acked, 3)


def test_a_job_that_said_nothing_lets_no_other_start(make_queue, workers, recorder):
    queue, quick = make_queue(rate="1/h by cost", burst=100), make_queue("quick")
    queue.publish_many(OutgoingMessage(body="x", cost=95) for _ in range(3))
    quick.publish_many(["x"] * 100)

    workers(2, queue, quick)

    recorder.wait_for(Acked, 100, queue="quick")
    recorder.wait_for(Acked, 1, queue=queue.name)
    assert queue.counts().ready == 2


def test_an_expired_message_pays_nothing(make_queue, workers, recorder, client):
    queue = make_queue(rate="1/h by cost", burst=100)
    queue.publish_many(OutgoingMessage(body="x", cost=95, id=id) for id in ("a", "b", "c"))
    client.delete(queue.keys.msg("a"), queue.keys.msg("b"))

    workers(1, queue)

    recorder.wait_for(Expired, 2)
    recorder.wait_for(Acked, 1)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"cost": 101}, "cost must be at most the burst of the queue's rate by cost, which is 100, not 101"),
        ({"cost": 0}, "cost must be 1 to 1000000000, not 0"),
        ({"cost": True}, "cost must be a whole number, not True"),
        ({"cost": 1.5}, "cost must be a whole number, not 1.5"),
    ],
)
def test_a_bad_cost_is_refused_and_nothing_is_sent(options, wanted, make_queue):
    queue = make_queue(rate="1/h by cost", burst=100)

    with pytest.raises(ConfigurationError, match=wanted):
        queue.publish("x", **options)

    assert queue.counts().alive == 0


def test_a_queue_in_the_go_layout_refuses_a_cost(url):
    with pytest.raises(ConfigurationError, match="cost cannot be sent on a queue in the hdt3213 layout"):
        Queue("go", bytes, url=url, layout=Layout.hdt3213()).publish(b"x", cost=2)
