"""`RateLimited`: when a service refuses more calls, the key or the queue sleeps, and no retry is spent."""

import logging
import time
from datetime import timedelta

import pytest

from reliq import Admin, ConfigurationError, OutgoingMessage, RateLimited
from reliq.events import Acked, Handled, Released, Snoozed, Throttled
from reliq.handlers.settlement import raised
from reliq.logs import LogObserver
from reliq.settings import HandlerSettings

LONG = 60.0
#: How long a key sleeps; tests check only this lower bound.
SLEEP_SECONDS = 0.3


def test_a_rate_limited_key_sleeps_alone(make_queue, consumer, work_until, recorder, client, as_kind, give, caplog):
    caplog.set_level(logging.INFO, "reliq")
    consumer.observers.insert(0, LogObserver())  # before the observer that the test waits for
    queue, seen = make_queue(ordered=True), []

    def handle(body, job):
        seen.append((body, job.attempt, job.retries_left, time.monotonic()))
        is_first = body == "a0" and len([one for one in seen if one[0] == "a0"]) == 1
        return give(RateLimited(delay=SLEEP_SECONDS, reason="429")) if is_first else None

    for body in ("a0", "a1", "b0", "b1"):
        queue.publish(body, key=body[0], retries=5)
    consumer.handler(queue)(as_kind(handle))
    work_until(Acked, 4)
    (told,) = recorder.of(Throttled)
    assert (told.keys, told.seconds) == (("a",), SLEEP_SECONDS)
    assert "queue q: a handler reported a rate limit; throttled for 0.3 s: key a" in caplog.messages
    assert [body for body, *_ in seen if body[0] == "a"] == ["a0", "a0", "a1"]  # it is the next message again
    first, again = [row for row in seen if row[0] == "a0"]
    assert first[1:3] == again[1:3] == (1, 5)
    assert again[3] - first[3] >= SLEEP_SECONDS
    assert [(event.failed, event.error) for event in recorder.of(Handled, outcome="rate_limited")] == [(False, "429")]
    assert recorder.of(Released) == []
    assert client.zcard(queue.keys.asleep) == 0


@pytest.mark.parametrize("end", ["by itself", "by a resume"])
def test_a_message_without_a_key_puts_its_queue_to_sleep(make_queue, consumer, work_until, recorder, url, end):
    queue, starts = make_queue(concurrency=1), []

    @consumer.handler(queue)
    def handle(body, job):
        starts.append((body, time.monotonic()))
        if len(starts) == 1:
            raise RateLimited(delay=timedelta(seconds=SLEEP_SECONDS) if end == "by itself" else 3600)

    queue.publish("any")
    queue.publish("keyed", key="a")
    (told,) = work_until(Throttled)

    assert told.keys == ("",)
    if end == "by a resume":
        assert Admin(url).resume("q")

    recorder.wait_for(Acked, 2)
    assert sorted(body for body, _ in starts) == ["any", "any", "keyed"]
    assert end != "by itself" or starts[1][1] - starts[0][1] >= SLEEP_SECONDS


def test_each_message_of_a_batch_may_answer_that_it_was_rate_limited(make_queue, consumer, work_until, recorder):
    queue, calls = make_queue(per_key=5), []

    @consumer.handler(queue, batch=4, linger=LONG)
    def handle(bodies):
        calls.append(sorted(bodies))
        return [RateLimited(LONG) if body == "a" else RateLimited(LONG * 2) if body == "b" else None for body in bodies]

    queue.publish_many([OutgoingMessage(body=key, key=key) for key in "abcd"])
    work_until(Acked, 2, concurrency=1)
    recorder.wait_for(Throttled, 2)
    assert {(one.keys, one.seconds) for one in recorder.of(Throttled)} == {(("a",), LONG), (("b",), 2 * LONG)}
    assert calls == [["a", "b", "c", "d"]]
    counts = queue.counts()
    assert (counts.waiting, counts.unack) == (2, 0)


def test_in_a_queue_without_keys_the_message_alone_waits(queue, consumer, work_until, recorder):
    @consumer.handler(queue)
    def handle(body):
        if body == "limited":
            raise RateLimited(delay=LONG)

    queue.publish_many(["limited", "others", "others"], chunk=3)
    work_until(Acked, 2)
    recorder.wait_for(Snoozed)
    assert recorder.of(Throttled) == []
    assert queue.counts().pending == 1


def test_a_bad_delay_is_refused_and_one_of_zero_is_the_shortest():
    for answer, complaint in (
        (RateLimited(delay="soon"), "delay must be seconds"),
        (RateLimited(delay=30_000), "must be at most 3600 seconds, not 30000: .* give max_delay=30000"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            raised(answer, 1, HandlerSettings())
    assert raised(RateLimited(delay=30_000, max_delay=30_000), 1, HandlerSettings()).delay_ms == 30_000_000
    assert raised(RateLimited(delay=0), 1, HandlerSettings()).delay_ms == 1  # 0 would claim it at once
