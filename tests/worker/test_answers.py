"""A handler's return value or exception decides the outcome of its message."""

import ctypes
import threading
from collections import Counter
from dataclasses import dataclass

from tenacity import wait_fixed
from waiting import eventually

from reliq import Ack, Consumer, Nack, Reject, Snooze
from reliq.events import Acked, DeadLettered, Expired, Handled, Nacked, Snoozed, Started

SOON = wait_fixed(0.01)


def counted(queue):
    counts = queue.counts()
    assert counts.missing == 0
    return counts


def test_whatever_a_handler_returns_acks(queue, consumer, work_until):
    answers = {"none": None, "ack": Ack(), "false": False, "zero": 0, "text": "anything"}
    consumer.handler(queue)(lambda body: answers[body])
    queue.publish_many(list(answers))

    work_until(Acked, len(answers))

    assert counted(queue).totals["acked"] == len(answers)
    assert counted(queue).alive == 0


def test_a_nack_delivers_again_after_its_delay(queue, consumer, work_until, recorder, give):
    nack = Nack(delay=0.02, reason="busy")
    consumer.handler(queue)(lambda body, job: give(nack) if job.attempt == 1 else None)
    queue.publish("x")
    work_until(Acked)

    assert [(e.attempt, e.outcome, e.error) for e in recorder.of(Handled)] == [(1, "nack", "busy"), (2, "ack", "")]
    assert counted(queue).totals["retried_nack"] == 1


def test_a_reject_is_a_dead_letter_at_once(queue, consumer, work_until, give):
    consumer.handler(queue)(lambda body: give(Reject(reason="no such order")))
    queue.publish("x", id="order-1")
    work_until(DeadLettered)

    (letter,) = queue.dead_letters()
    assert (letter.id, letter.reason, letter.error, letter.attempts) == ("order-1", "rejected", "no such order", 1)
    assert counted(queue).dead == 1


def test_a_snooze_spends_no_retry(queue, consumer, work_until, recorder, give):
    left = []

    @consumer.handler(queue)
    def handle(body, job):
        left.append(job.retries_left)
        return give(Snooze(delay=0.01)) if len(left) < 3 else None

    queue.publish("x", retries=1)
    work_until(Acked)

    assert left == [1, 1, 1]
    assert len(recorder.ids(Snoozed)) == 2


class Wordless:
    def __str__(self):
        raise RuntimeError("no words, but a secret")


#: Reason or exception of a handler -> the last error of the message.
REASONS = [
    (Reject(reason=ValueError("out of stock")), "ValueError: out of stock"),
    (Reject(reason=None), ""),
    (Reject(reason=404), "404"),
    (Reject(reason="half of an emoji: \ud83d"), "half of an emoji: ?"),
    (Reject(reason=Wordless()), "<Wordless without a text>"),
    (Reject(reason="x" * 10_000), "x" * 500),
    (ValueError("\ud83d\nfrom json.loads"), "ValueError: ? from json.loads (at test_answers"),
    (ValueError(Wordless()), "ValueError: <ValueError without a text> (at test_answers"),
]


def test_any_reason_becomes_text_and_neighbours_are_acked_once(make_queue, consumer, work_until, recorder):
    good, bad = make_queue("good"), make_queue("bad", retries=0)
    worked = Counter()
    consumer.handler(good)(lambda body: worked.update([body]))

    @consumer.handler(bad)
    def handle(body):
        raise REASONS[int(body)][0]

    for number in range(len(REASONS)):
        good.publish_many([f"{number}.{one}" for one in range(50)])
        bad.publish(str(number), id=str(number))
    work_until(Acked, 50 * len(REASONS))
    recorder.wait_for(DeadLettered, len(REASONS))
    errors = {int(letter.id): letter.error.partition(".py:")[0] for letter in bad.dead_letters()}
    assert errors == dict(enumerate(text for _, text in REASONS))
    assert set(worked.values()) == {1}
    assert len(worked) == 50 * len(REASONS)
    assert [event.raised for event in recorder.of(Handled, id="0")] == ["ValueError"]  # without the text


def test_a_coroutine_that_is_never_awaited_is_not_acked(queue, consumer, work_until):
    async def work():
        raise AssertionError("never runs")

    consumer.handler(queue, backoff=wait_fixed(60))(lambda body: work())
    queue.publish("x")

    (event,) = work_until(Handled)

    assert event.outcome == "nack"
    assert "async def" in event.error


def test_only_errors_of_retry_on_are_retried_and_reject_on_wins_over_it(queue, consumer, work_until, recorder):
    @consumer.handler(queue, retry_on=(ConnectionError, ValueError), reject_on=(UnicodeError,), backoff=SOON)
    def handle(body, job):
        if body == "both":
            raise UnicodeError("hopeless")  # a subclass of ValueError
        raise ConnectionError("away") if job.attempt == 1 else KeyError("bug")

    queue.publish("retried", id="retried")
    queue.publish("both", id="both")
    work_until(DeadLettered, 2)

    assert [e.outcome for e in recorder.of(Handled, id="retried")] == ["nack", "reject"]
    assert [e.outcome for e in recorder.of(Handled, id="both")] == ["reject"]
    letters = {letter.id: letter for letter in queue.dead_letters()}
    assert letters["retried"].error.startswith("KeyError: 'bug' (at test_answers.py:")
    assert {letter.reason for letter in letters.values()} == {"rejected"}


def test_a_message_without_retries_left_becomes_a_dead_letter_with_its_error(queue, consumer, work_until, recorder):
    asked = []

    def backoff(state):
        asked.append(state.attempt_number)
        return 0.001

    @consumer.handler(queue, backoff=backoff)
    def handle(body):
        raise RuntimeError("the gateway said\nno")

    queue.publish("the body", retries=2, id="m", headers={"trace": "7"})
    work_until(DeadLettered)
    (letter,) = queue.dead_letters()
    assert (letter.id, letter.reason, letter.attempts) == ("m", "failed", 3)
    assert letter.error.startswith("RuntimeError: the gateway said no (at test_answers.py:")
    assert (letter.payload, letter.header.headers) == (b"the body", {"trace": "7"})
    assert [e.attempt for e in recorder.of(Started)] == [1, 2, 3]
    assert asked[:2] == [1, 2]
    assert counted(queue).totals["dead"] == 1


@dataclass
class Order:
    number: int


def test_a_body_that_does_not_decode_waits_for_a_newer_worker(make_queue, consumer, start, recorder, url):
    old, new = consumer, Consumer(url, observers=[recorder])
    # Long enough that retries are left when the old worker has stopped.
    old.handler(make_queue(body=Order), backoff=wait_fixed(1))(lambda order: None)
    new.handler(make_queue(body=dict), backoff=SOON)(lambda order: None)
    make_queue(body=dict).publish({"number": "secret-7"})

    start(old)
    recorder.wait_for(Nacked)
    old.stop()
    start(new)

    recorder.wait_for(Acked)
    failed = recorder.of(Handled)[0]
    assert failed.outcome == "nack"
    assert "$.number" in failed.error
    assert "secret" not in failed.error


def test_a_message_that_expired_in_the_queue_is_counted_and_keeps_its_id(queue, acking, work_until, recorder, client):
    queue.publish("gone", id="gone", dedup=300)
    client.delete(queue.keys.msg("gone"))
    queue.publish("here", id="here")

    work_until(Expired)
    recorder.wait_for(Acked)
    assert recorder.ids(Started) == ["here"]
    assert recorder.ids(Nacked) == []
    eventually(lambda: counted(queue).alive == 0, "both have ended")
    assert counted(queue).totals["expired"] == 1
    assert queue.publish("again", id="gone").status == "duplicate"


def test_an_exception_that_comes_late_into_a_resting_thread_costs_no_thread(queue, consumer, start, recorder):
    threads = []
    consumer.handler(queue)(lambda body: threads.append(threading.get_ident()))
    engine = start(concurrency=1)

    for count in (1, 2, 3):
        queue.publish("x")
        recorder.wait_for(Acked, count)
        eventually(lambda: engine.inflight._idle_threads, "the thread waits for work")
        if count == 1:  # as a handler's own timeout does that fires too late
            thread, error = ctypes.c_ulong(threads[0]), ctypes.py_object(TimeoutError)
            assert ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error) == 1
    assert len(set(threads)) == 1
