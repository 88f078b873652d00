"""Failures are visible: the traceback in the log, the place in the dead letter, and the hook's call."""

import asyncio
import logging
import pickle
import re
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass

import pytest
from tenacity import wait_fixed
from waiting import eventually

from reliq import Consumer, Nack, Outcome, Reject, Snooze, UndecodableError
from reliq.events import Acked, DeadLettered, Handled
from reliq.logs import LogObserver
from reliq.wire_format import placed, traceback_of

SECRET = "card 4242"
SOON = wait_fixed(0.01)


def look_up(card):
    raise KeyError(card)


def charge(card):
    try:
        look_up(card)
    except KeyError as error:
        raise ValueError(f"no such {card}") from error


#: An application's formatter.
formatted = logging.Formatter().format


@pytest.fixture
def records(caplog):
    """Return the log records of reliq's loggers about handlers."""
    caplog.set_level(logging.INFO, "reliq")
    return lambda: [one for one in caplog.records if getattr(one, "reliq", {}).get("event") == "handled"]


@pytest.fixture
def told(consumer):
    """Return the calls of an error hook: job, exception, final."""
    heard = []
    consumer.on_error(lambda job, error, final: heard.append((job, error, final)))
    return heard


@pytest.mark.parametrize("error_text", [False, True], ids=["hidden", "with text"])
def test_the_first_failure_and_the_last_have_tracebacks(queue, consumer, start, recorder, records, error_text):
    consumer.handler(queue, backoff=SOON)(charge)
    queue.publish(SECRET, id="m", retries=2)
    start(log_error_text=error_text)
    recorder.wait_for(DeadLettered)

    first, second, last = records()
    assert [one.levelno for one in (first, second, last)] == [logging.INFO, logging.INFO, logging.ERROR]
    assert "in look_up" in formatted(first)
    assert "direct cause" in formatted(first)
    assert "Traceback" not in formatted(second)
    assert isinstance(last.exc_info[1], ValueError)
    assert "in look_up" in formatted(last)
    assert [SECRET in formatted(one) for one in (first, second, last)] == [error_text] * 3
    hint = "(text hidden: see `reliq show QUEUE ID`, or use --log-error-text)"
    hints = [one.getMessage().endswith(hint) for one in (first, second, last)]
    assert hints == [not error_text, False, not error_text]
    assert re.match(
        r"queue \S+: message m: attempt 1 of 3 failed after \d\.\d{3} s, retrying in 10ms: ValueError",
        first.getMessage(),
    )
    assert re.match(
        r"queue \S+: message m: attempt 3 of 3 failed after \d\.\d{3} s, now a dead letter: ValueErr", last.getMessage()
    )
    [letter] = queue.dead_letters()
    places = [f"test_failures_seen.py:{one.__code__.co_firstlineno + at}" for one, at in ((charge, 4), (look_up, 1))]
    assert letter.error == f"ValueError: no such {SECRET} (at {places[0]}, from KeyError at {places[1]})"


def test_tracebacks_of_long_or_looping_chains_and_groups_are_short_without_text():
    first, second = ValueError(SECRET), KeyError(SECRET)
    first.__cause__, second.__context__ = second, first
    group = ExceptionGroup(SECRET, [first, OSError(SECRET)])

    def endless():
        endless()

    with pytest.raises(RecursionError) as deep:
        endless()

    for error in (first, group, deep.value):
        assert SECRET not in traceback_of(error, with_text=False) + placed(error)
        assert len(traceback_of(error, with_text=False).splitlines()) < 200
        assert len(placed(error)) < 400
    assert placed(group) == "ExceptionGroup of ValueError, OSError"
    assert "ValueError from KeyError" in traceback_of(group, with_text=False)


@dataclass
class Card:
    number: int


def test_hooks_hear_of_each_failure_and_whether_it_is_final(make_queue, consumer, work_until, told, as_kind, caplog):
    def broken(job, error, final):
        raise SystemExit(SECRET)

    other = Consumer()
    other.handler(make_queue("single"), backoff=SOON)(as_kind(charge))
    other.on_error(consumer.error_hooks.pop())
    consumer.on_error(broken)
    consumer.include(other)
    consumer.handler(make_queue("batch"), batch=3, linger=1, reject_on=ValueError)(lambda bodies: charge(bodies[0]))
    consumer.handler(make_queue("cards", Card), on_decode_error="reject")(lambda body: None)
    make_queue("single").publish("x", id="m", retries=1)
    make_queue("batch").publish_many(["x"] * 3)
    make_queue("cards").publish(SECRET, id="c")
    work_until(DeadLettered, 5)

    found = defaultdict(list)
    for job, error, final in told:
        found[job.queue].append((job.id, job.body, type(error), final))
    assert found["single"] == [("m", "x", ValueError, False), ("m", "x", ValueError, True)]
    assert len({id for id, _, _, final in found["batch"] if final}) == 3
    assert found["cards"] == [("c", SECRET.encode(), UndecodableError, True)]
    [letter] = make_queue("cards", Card).dead_letters()
    assert (letter.reason, SECRET in letter.error) == ("undecodable", False)
    assert "broken raised an exception, which is ignored: SystemExit at test_failures_seen.py" in caplog.text
    assert SECRET not in caplog.text


@dataclass
class Exiting:
    number: int

    def __post_init__(self):
        raise SystemExit(SECRET)


def test_a_body_whose_class_exits_keeps_no_hook_from_its_warning(make_queue, consumer, work_until, told, caplog):
    consumer.on_error(lambda job, error, final: None)
    consumer.handler(make_queue("cards", Exiting), on_decode_error="reject")(lambda body: None)
    make_queue("cards", dict).publish({"number": 1})
    work_until(DeadLettered)

    assert caplog.text.count("raised an exception, which is ignored: SystemExit at test_failures_seen.py") == 2
    assert (told, SECRET in caplog.text) == ([], False)


def test_hooks_hear_of_an_answer_only_at_the_last_nack(make_queue, consumer, work_until, recorder, told, as_kind):
    answers = {"nack": Nack(0.01), "snooze": Snooze(0.01), "reject": Reject("no")}
    unanswered = list(answers)

    def handle(body, job):
        if body in unanswered:
            unanswered.remove(body)
            raise answers[body]

    queue, last = make_queue(), make_queue("last", retries=0)
    consumer.handler(queue)(as_kind(handle))
    consumer.handler(last)(as_kind(lambda body, job: Nack(5, "gateway busy")))
    queue.publish_many(list(answers))
    last.publish("x", id="m")
    work_until(Acked, 2)
    recorder.wait_for(DeadLettered, 2)

    [(job, error, final)] = told
    assert (job.id, type(error), str(error), final) == ("m", Nack, "gateway busy", True)


@pytest.mark.parametrize("error_text", [False, True], ids=["hidden", "with text"])
def test_a_reason_is_logged_only_with_error_text(make_queue, consumer, start, recorder, records, as_kind, error_text):
    queue = make_queue(retries=0)
    consumer.observers.append(LogObserver(error_text=error_text))
    consumer.handler(queue)(as_kind(lambda body, job: Reject(SECRET) if body == "reject" else Nack(60, SECRET)))
    for body, retries in (("reject", 0), ("nack", 0), ("nack", 1)):
        queue.publish(body, retries=retries)
    start(log_error_text=error_text)
    recorder.wait_for(DeadLettered, 2)
    eventually(lambda: len(records()) == 3, "every answer is logged")

    assert [SECRET in formatted(one) for one in records()] == [error_text] * 3


def test_a_task_that_ends_the_event_loop_is_logged_without_its_text(queue, consumer, work_until, caplog):
    async def leave():
        sys.exit(SECRET)

    @consumer.handler(queue)
    async def handle(body):
        with suppress(SystemExit):
            await asyncio.create_task(leave())

    queue.publish("x")
    work_until(Acked)

    [line] = [formatted(one) for one in caplog.records if "end the event loop" in one.getMessage()]
    assert line.startswith("worker: a task tried to end the event loop; ignored: SystemExit at ")
    assert SECRET not in line


def test_a_hook_hears_of_a_thread_that_overran_and_where_it_stands(queue, consumer, work_until, gate, records, told):
    # Long enough for the handler to come to the gate on a busy machine.
    consumer.handler(queue, timeout=1)(lambda body: gate.pass_through())
    queue.publish("x", id="m")
    work_until(Handled, outcome="timeout")
    eventually(lambda: told, "the hook has heard")
    gate.open()

    job, error, final = told[0]
    assert (job.id, type(error), final) == ("m", TimeoutError, False)
    assert "in pass_through" in traceback_of(error, with_text=False)
    [record] = records()
    assert record.reliq["outcome"] == "timeout"
    assert re.search(
        r"message m: attempt 1 of \d+ exceeded its timeout after \S+ s, retrying when its l", record.getMessage()
    )


def test_an_answer_is_an_exception_that_shows_its_arguments_and_can_be_pickled():
    for answer, shown in (
        (Reject("why"), "Reject(reason='why')"),
        (Nack(), "Nack()"),
        (Nack(delay=5, reason="busy"), "Nack(delay=5, reason='busy')"),
        (Snooze(2, "later"), "Snooze(delay=2, reason='later')"),
    ):
        assert isinstance(answer, Outcome)
        assert repr(answer) == repr(pickle.loads(pickle.dumps(answer))) == shown
        assert str(answer) == answer.reason
