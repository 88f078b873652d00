"""A worker of a queue with keys: how it detects the keys, how much it claims, and how limits apply."""

import logging
import threading
import time
from collections import defaultdict

import pytest
from waiting import eventually

from reliq import ConfigurationError, Nack, OutgoingMessage
from reliq.events import Acked, Claimed, LeaseLost, Released
from reliq.lua.transitions import ClaimAnswer, Suspects
from reliq.worker.claims import Capacity, QueueClaims
from reliq.worker.fetcher import POLL_SECONDS

#: The longest wait of a handler for another.
PATIENCE_SECONDS = 20.0
ROOM = Capacity(2, 10, suspects=Suspects(16, 0, 16))


def test_the_first_message_with_a_key_is_claimed_like_any_other(queue, acking, fetcher_of, clock):
    """When a queue gets its first key, a worker that has not seen it makes no extra call and adds no delay."""
    fetcher = fetcher_of(acking)
    fetcher.step()  # a claim: no wake-up announced a message

    queue.publish("x", key="a")
    clock.now += POLL_SECONDS / 2
    fetcher.step(4)  # a wait, a claim, the body, the start

    assert [one.delivery.claimed.key for one in fetcher.held] == ["a"]


def test_a_queue_with_keys_is_claimed_into_free_slots_alone_and_its_poll_takes_nothing(acking):
    def limits_of(call):
        args = dict(zip(call.script.args, call.args, strict=True))
        return args["limit"], args["keyed_limit"]

    claims = QueueClaims(acking.handlers[0])
    poll = claims.claim(ROOM, "")
    claims.answered(ClaimAnswer(-1, -1, 5, [], keyed=True))
    number = claims.claim(ROOM, "").args[1]
    claims.answered(ClaimAnswer(-1, -1, 5, [], keyed=True))
    again = claims.claim(ROOM, "")

    assert limits_of(poll) == (12, 0)  # a poll leaves the permits of a rate to the worker that is woken for them
    assert (poll.args[1], number, again.args[1]) == (1, 1, 2)  # the poll used no call number
    assert limits_of(again) == (2, 2)  # also if no message was skipped
    claims.answered(ClaimAnswer(-1, -1, 0, [], keyed=True))
    assert not claims.has_room(ROOM._replace(slots=0))


def test_a_claim_whose_answer_was_lost_is_made_again_as_it_was(acking):
    claims = QueueClaims(acking.handlers[0])
    claims.must_only_poll = False
    first = claims.claim(ROOM, "")

    again = claims.claim(ROOM._replace(slots=1, ahead=3), "")

    assert first.args[:5] == again.args[:5]
    assert first.args[-2] == again.args[-2] == 2


def test_any_claim_may_begin_with_retry_and_a_quarter_does(acking):
    """If a limit allows only the first message of every second claim, no rhythm keeps the messages of a list waiting."""
    claims = QueueClaims(acking.handlers[0])
    at = claims.claim(ROOM, "").script.args.index("first")

    firsts = [claims.claim(ROOM, "").args[at] for _ in range(1000)]

    assert all("retry" in firsts[phase::4] for phase in range(4))
    assert 150 < firsts.count("retry") < 350


def test_keys_of_an_ordered_queue_are_worked_in_order_and_beside_each_other(make_queue, workers, recorder):
    """Two workers run one message of each key at a time, also after a failure, and different keys concurrently."""
    queue, lock = make_queue(ordered=True), threading.Lock()
    running, seen, beside = set(), defaultdict(list), threading.Barrier(2)

    def handle(body, job):
        if (body, job.key, job.attempt) == ("0", "a", 1):
            raise Nack(delay=0.5)
        with lock:
            assert job.key not in running
            running.add(job.key)
        if body == "0" and job.key in "bc":
            beside.wait(PATIENCE_SECONDS)  # both keys run at this moment
        with lock:
            running.remove(job.key)
            seen[job.key].append(int(body))

    queue.publish_many([OutgoingMessage(body=str(number), key=key) for number in range(40) for key in "abcd"])
    workers(2, queue, handle=handle)
    recorder.wait_for(Acked, 160)

    assert seen == {key: list(range(40)) for key in "abcd"}


def test_a_handler_that_outlives_its_lease_has_a_lower_token_than_the_next(make_queue, consumer, start, recorder, gate):
    """With an ordered queue, a store that keeps the greatest fencing token refuses the late write."""
    queue, tokens = make_queue(ordered=True), []

    @consumer.handler(queue, lease=0.6, timeout=0.2)
    def handle(body, job):
        tokens.append((body, job.attempt, job.token))
        if job.attempt == 1 and body == "first":
            gate.pass_through()

    for body in ("first", "second"):
        queue.publish(body, key="a")
    start()
    recorder.wait_for(Acked, 2)
    gate.open()
    recorder.wait_for(LeaseLost, verb="ack")

    assert [(body, attempt) for body, attempt, _ in tokens] == [("first", 1), ("first", 2), ("second", 1)]
    late, again, successor = (token for _, _, token in tokens)
    assert late < again < successor
    assert queue.counts().alive == 0


def test_a_stop_gives_messages_back_to_the_heads_of_their_key_queues(queue, consumer, work_until, recorder):
    consumer.handler(queue, batch=100, linger=60)(lambda bodies: None)
    queue.publish_many([OutgoingMessage(body=f"{key}{number}", key=key) for number in range(3) for key in "ab"])
    work_until(Claimed, 6, concurrency=1)

    consumer.stop()

    assert len(recorder.ids(Released)) == 6
    with queue.receive(limit=6) as jobs:
        for key in "ab":
            assert [job.body for job in jobs if job.key == key] == [f"{key}{number}" for number in range(3)]


# ---- limits that the code declares


def test_declared_limits_are_written_and_an_operators_stay_until_the_code_changes(make_queue, workers, client, caplog):
    caplog.set_level(logging.INFO, "reliq")
    queue, declared = make_queue(), {"per_key": 2, "rate": "100/s", "burst": 20, "key_weights": {"vip": 4}}

    def stored(name):
        return client.hget(queue.keys.limits, name)

    workers(1, make_queue(**declared))
    names = ("per_key", "rate_us", "burst", "weight:vip")
    assert [stored(name) for name in names] == [b"2", b"10000", b"20", b"4"]
    assert "queue q: limits written to Redis: " in caplog.text
    client.hset(queue.keys.limits, "per_key", "7")
    caplog.clear()

    workers(1, make_queue(**declared))
    assert stored("per_key") == b"7"
    assert "limits" not in caplog.text

    workers(1, make_queue(concurrency=3))
    assert (stored("per_key"), stored("concurrency")) == (None, b"3")


def test_limits_that_redis_has_lost_are_written_again(quick_beats, make_queue, workers, client):
    queue = make_queue(per_key=2)
    workers(1, queue)

    client.flushall()

    eventually(lambda: client.hget(queue.keys.limits, "per_key") == b"2", "they are there again")


def test_a_queue_of_several_shards_that_declares_limits_is_not_worked(serve, spread, start):
    spread(serve(ordered=True), 4)

    with pytest.raises(ConfigurationError, match="'q' has 4 shards, but limits need a single shard"):
        start()


# ---- a drain


def test_a_drain_waits_for_a_key_that_wakes_soon_and_leaves_one_that_sleeps_long(make_queue, consumer, client):
    queue, seen = make_queue(key_rate="5/s", key_burst=1), []
    consumer.handler(queue)(seen.append)
    queue.publish("asleep", key="sleeper")
    queue.publish_many([OutgoingMessage(body=str(number), key="a") for number in range(4)])
    client.zadd(queue.keys.asleep, {"sleeper": int(time.time()) + 3600})
    client.zrem(queue.keys.ring, "sleeper")

    consumer.drain()

    assert (seen, queue.counts().waiting) == (["0", "1", "2", "3"], 1)
