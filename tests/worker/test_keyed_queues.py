"""A worker of a queue whose messages have keys: how it learns of them, what it claims, and what its limits become."""

import logging
import threading
import time
from collections import defaultdict

import pytest
from waiting import eventually

from reliq import ConfigurationError, Consumer, Nack
from reliq.events import Acked, Claimed, Lost, Released
from reliq.lua import script
from reliq.transitions import ClaimAnswer, Suspects
from reliq.worker.claims import Capacity, QueueClaims
from reliq.worker.fetcher import POLL_SECONDS, Fetcher
from reliq.worker.inflight import Inflight
from reliq.worker.scheduler import Scheduler
from reliq.worker.served import Served

ROOM = Capacity(2, 10, suspects=Suspects(16, 0, 16))


@pytest.fixture
def parts(caller, no_heartbeat):
    """A fetcher whose rounds the test makes, and what it has claimed."""

    def make(consumer, served=None):
        inflight, held = Inflight(consumer.handlers, 4), []
        served = served or Served(consumer.handlers)
        scheduler = Scheduler(caller, consumer.handlers, lambda: None, is_keyed=served.is_keyed)
        settle = lambda deliveries, outcome: None  # noqa: E731
        return Fetcher(caller, served, inflight, scheduler, held.extend, settle, no_heartbeat), held

    return make


@pytest.fixture
def handler(queue, consumer):
    consumer.handler(queue)(lambda body: None)
    return consumer.handlers[0]


def ran(client, name):
    return client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"]


def test_a_worker_that_rests_learns_that_a_queue_has_keys(queue, consumer, start, recorder):
    consumer.handler(queue)(lambda body: None)
    start()
    queue.publish("x")
    recorder.wait_for(Acked)

    queue.publish_many(["x"] * 3)
    for key in "abc":
        queue.publish("y", key=key)

    recorder.wait_for(Acked, 7)


def test_a_worker_that_was_woken_for_nothing_asks_for_keys_along_with_its_next_wait_once(
    queue, consumer, parts, client, clock
):
    consumer.handler(queue)(lambda body: None)
    fetcher, _ = parts(consumer)
    fetcher.step()  # a claim: nobody said that there is work
    clock.now += POLL_SECONDS * 0.8
    assert ran(client, "hmget") == 0

    for asked in (1, 1):  # the second time within the same second
        client.lpush(queue.keys.wake, "1")
        fetcher.step()  # the wait ends with the token
        fetcher.step()  # the claim brings nothing
        before = client.info("stats")["total_reads_processed"]
        clock.now += POLL_SECONDS / 20
        fetcher.step()  # a wait takes the question along
        reads = client.info("stats")["total_reads_processed"] - before
        assert (ran(client, "hmget"), reads) == (asked, 2)  # the wait, and this question


def test_a_message_with_a_key_is_found_by_the_question(queue, consumer, parts, clock):
    consumer.handler(queue)(lambda body: None)
    fetcher, held = parts(consumer)
    fetcher.step()
    clock.now += POLL_SECONDS * 0.9
    queue.publish("x", key="a")

    for _ in range(6):  # a wait, a claim in vain, a wait with the question, a claim, the body, the start
        fetcher.step()

    assert [one.delivery.claimed.key for one in held] == ["a"]


def test_a_queue_that_declares_limits_has_keys_from_the_start(make_queue, consumer):
    consumer.handler(make_queue(rate="5/s"))(lambda body: None)
    consumer.handler(make_queue("plain"))(lambda body: None)

    served = Served(consumer.handlers)

    assert (served.is_keyed("q"), served.is_keyed("plain")) == (True, False)


def test_messages_with_keys_are_claimed_into_free_slots_alone(handler):
    claims = QueueClaims(handler)
    claims.looked(ClaimAnswer(-1, -1, 5, []))
    plain = claims.limit(ROOM)

    claims.serve_keys(keyed=True)

    assert (plain, claims.limit(ROOM), claims.has_room(ROOM._replace(slots=0))) == (12, 2, False)
    claims.claim(ROOM, "")
    claims.answered(ClaimAnswer(-1, -1, 0, []))
    assert claims.limit(ROOM) == 2  # also when nothing was passed over


def test_the_poll_of_a_queue_with_keys_is_a_look_that_takes_nothing_from_whoever_is_woken(handler):
    claims = QueueClaims(handler)
    claims.serve_keys(keyed=True)

    claims.unsure = True
    poll = claims.claim(ROOM, "")
    claims.answered(ClaimAnswer(-1, -1, 5, []))
    claim = claims.claim(ROOM, "")

    limits = [dict(zip(one.script.args, one.args, strict=True))["limit"] for one in (poll, claim)]
    assert limits == [0, 2]


def test_a_claim_whose_answer_was_lost_is_made_again_as_it_was(handler):
    claims = QueueClaims(handler)
    claims.unsure = False
    first = claims.claim(ROOM, "")

    claims.serve_keys(keyed=True)
    again = claims.claim(ROOM, "")
    claims.answered(ClaimAnswer(-1, -1, 0, []))
    new = claims.claim(ROOM, "")

    assert [one.script for one in (first, again, new)] == [script("claim")] * 2 + [script("claim", keyed=True)]
    assert first.args == again.args


def test_the_keys_of_an_ordered_queue_are_worked_in_their_orders_beside_each_other(url, make_queue, recorder):
    """Two workers; of each key one message at a time, and the keys beside each other."""
    queue, lock = make_queue(ordered=True), threading.Lock()
    running, seen, together = set(), defaultdict(list), []

    def handle(body, job):
        with lock:
            assert job.key not in running
            running.add(job.key)
            together.append(len(running))
        time.sleep(0)
        with lock:
            running.remove(job.key)
            seen[job.key].append(int(body))

    for number in range(40):
        for key in "abcd":
            queue.publish(str(number), key=key)
    workers = [Consumer(url, observers=[recorder]) for _ in range(2)]
    for one in workers:
        one.handler(queue)(handle)
        one.start()
    recorder.wait_for(Acked, 160)
    for one in workers:
        one.stop()

    assert seen == {key: list(range(40)) for key in "abcd"}
    assert max(together) > 1


def test_a_message_that_fails_holds_up_its_own_key_alone(make_queue, consumer, start, recorder):
    queue, done = make_queue(ordered=True), []

    @consumer.handler(queue)
    def handle(body, job):
        if body == "a0" and job.attempt == 1:
            raise Nack(delay=0.5)
        done.append(body)

    for body in ("a0", "a1", "b0", "b1"):
        queue.publish(body, key=body[0])
    start()

    recorder.wait_for(Acked, 4)
    assert done == ["b0", "b1", "a0", "a1"]


def test_the_token_of_a_handler_that_outlived_its_lease_is_less_than_its_successors_and_its_ack_is_refused(
    make_queue, consumer, start, recorder, gate
):
    """The fence of an ordered queue: a store that keeps the greatest token refuses the late one."""
    queue, tokens = make_queue(ordered=True), []

    @consumer.handler(queue, lease=0.6, timeout=0.2)
    def handle(body, job):
        tokens.append((body, job.attempt, job.token))
        if job.attempt == 1 and body == "first":
            gate.pass_through()

    queue.publish("first", key="a")
    queue.publish("second", key="a")
    start(concurrency=4)
    gate.wait_for()

    recorder.wait_for(Acked, 2)
    gate.open()
    recorder.wait_for(Lost, verb="ack")

    assert [(body, attempt) for body, attempt, _ in tokens] == [("first", 1), ("first", 2), ("second", 1)]
    late, again, successor = (token for _, _, token in tokens)
    assert late < again < successor
    assert queue.counts().alive == 0


def test_a_stop_gives_messages_back_to_the_heads_of_their_lines(make_queue, consumer, start, recorder):
    queue = make_queue()
    consumer.handler(queue, batch=100, linger=60)(lambda bodies: None)
    for number in range(3):
        for key in "ab":
            queue.publish(f"{key}{number}", key=key)
    start(concurrency=1)
    recorder.wait_for(Claimed, 6)

    consumer.stop()

    assert len(recorder.ids(Released)) == 6
    with queue.receive(limit=6) as jobs:
        assert [job.body for job in jobs if job.key == "a"] == ["a0", "a1", "a2"]
        assert [job.body for job in jobs if job.key == "b"] == ["b0", "b1", "b2"]


# ---- limits that the code declares


def limits_of(client, queue):
    return {name.decode(): value.decode() for name, value in client.hgetall(queue.keys.limits).items()}


def test_a_worker_writes_the_limits_that_its_queue_declares_and_says_so(make_queue, consumer, start, client, caplog):
    caplog.set_level(logging.INFO, "reliq")
    queue = make_queue(ordered=True, rate="100/s", burst=20, key_weights={"vip": 4})
    consumer.handler(queue)(lambda body: None)

    start()

    stored = limits_of(client, queue)
    assert stored.items() >= {"per_key": "1", "rate_us": "10000", "burst": "20", "weight:vip": "4"}.items()
    assert "q: limits written: ordered=True, rate=100/s, burst=20, key_weights={'vip': 4}" in caplog.messages


def test_what_was_changed_since_stays_until_the_code_declares_something_else(
    url, make_queue, consumer, start, client, caplog
):
    caplog.set_level(logging.INFO, "reliq")
    consumer.handler(make_queue(per_key=2))(lambda body: None)
    start()
    client.hset(make_queue().keys.limits, "per_key", "7")
    caplog.clear()

    other = Consumer(url)
    other.handler(make_queue(per_key=2))(lambda body: None)
    start(other)
    assert limits_of(client, make_queue())["per_key"] == "7"
    assert "limits" not in caplog.text

    newer = Consumer(url)
    newer.handler(make_queue(concurrency=3))(lambda body: None)
    start(newer)
    stored = limits_of(client, make_queue())
    assert (stored.get("per_key"), stored["concurrency"]) == (None, "3")


def test_limits_that_redis_has_lost_are_written_again(make_queue, consumer, start, client, monkeypatch):
    monkeypatch.setattr("reliq.worker.heartbeat.BEAT_SECONDS", 0.05)
    queue = make_queue(per_key=2)
    consumer.handler(queue)(lambda body: None)
    start()

    client.flushall()

    eventually(lambda: limits_of(client, queue).get("per_key") == "2", "they are there again")


def test_a_queue_of_several_shards_that_declares_limits_is_not_worked(make_queue, consumer, spread, start):
    queue = make_queue(ordered=True)
    spread(queue, 4)
    consumer.handler(queue)(lambda body: None)

    with pytest.raises(ConfigurationError, match="'q' has 4 shards, and limits hold for a queue of one"):
        start()


# ---- a drain


def test_a_drain_leaves_the_messages_of_a_key_that_sleeps_for_long(make_queue, consumer, client):
    queue, seen = make_queue(), []
    consumer.handler(queue)(seen.append)
    queue.publish("asleep", key="a")
    queue.publish("awake", key="b")
    client.zadd(queue.keys.asleep, {"a": time.time() + 3600})
    client.zrem(queue.keys.ring, "a")

    consumer.drain()

    assert (seen, queue.counts().waiting) == (["awake"], 1)


def test_a_drain_waits_for_a_key_that_wakes_soon_and_for_a_rate(make_queue, consumer):
    queue, seen = make_queue(key_rate="5/s", key_burst=1), []
    consumer.handler(queue)(seen.append)
    for number in range(4):
        queue.publish(str(number), key="a")

    consumer.drain()

    assert seen == ["0", "1", "2", "3"]
