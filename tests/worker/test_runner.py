"""The checks of a delivery right before its handler begins."""

import asyncio
import logging
import threading
import time

import pytest
from tenacity import wait_fixed

from reliq import Nack, Reject
from reliq.events import Acked, Handled, Nacked
from reliq.handlers.settlement import RELEASED
from reliq.logs import LogObserver
from reliq.worker.runner import Runner
from reliq.worker.slots import HandlerCall

LEASE = 5.0


def test_a_message_begins_only_under_its_lease_and_goes_back_otherwise(consumer, queue, new_deliveries):
    settled = []
    consumer.handler(queue, lease=LEASE)(lambda body: None)
    runner = Runner(lambda deliveries, outcome: settled.append((deliveries, outcome)), (), (), threading.Event())

    def a_run(*ages):
        """Return a run of messages that were claimed the given seconds ago and not renewed."""
        deliveries = [one for age in ages for one in new_deliveries(age=age)]
        return HandlerCall(deliveries, consumer.handlers[0], time.monotonic(), None)

    assert runner.begin(a_run(0.0))
    assert settled == []
    late, lost, batch = a_run(LEASE + 0.1), a_run(0.0), a_run(0.0, LEASE + 0.1, 0.0)
    lost.deliveries[0].lost = True
    assert not runner.begin(late)
    assert not runner.begin(lost)
    late_one = batch.deliveries[1]
    assert runner.begin(batch)
    assert settled == [(late.deliveries, RELEASED), (lost.deliveries, RELEASED), ([late_one], RELEASED)]


class Unbound:
    """An unbound proxy, such as the proxies of web frameworks outside a request."""

    @property
    def __class__(self):
        raise RuntimeError("working outside of the request, with secret-7")


class WordlessError(Exception):
    def __str__(self):
        raise ValueError("secret-7")


class Nameless(type):
    @property
    def __name__(cls):
        raise ValueError("secret-7")


class MisnamedError(Exception, metaclass=Nameless):
    """An error with a class that raises when its name is read."""


def raising(error):
    raise error


class ExitWithoutNameError(SystemExit, metaclass=Nameless):
    """The same, but `except Exception` does not catch it."""


def endless():
    endless()


#: Exceptions of handlers that would end an unprotected thread or event loop.
FATAL = {
    "no words": lambda: raising(WordlessError()),
    "no name": lambda: raising(MisnamedError()),
    "an exit": lambda: raising(SystemExit(3)),
    "an interrupt": lambda: raising(KeyboardInterrupt()),
    "the end of a generator": lambda: raising(GeneratorExit()),
    "a cancellation": lambda: raising(asyncio.CancelledError()),
    "too deep a recursion": endless,
}
#: Invalid answers of handlers: the attempt fails, the message is redelivered, and no thread or slot is lost.
NONSENSE = {
    "a class": lambda: Reject,
    "an unbound proxy": Unbound,
    "no delay": lambda: Nack(delay="soon"),
    "an endless delay": lambda: Nack(delay=10**400),
    "a negative delay": lambda: Nack(delay=-1),
    "an error that is no reason": lambda: Nack(reason=Unbound()),
}


@pytest.mark.parametrize("batch", [None, 5], ids=["one", "batch"])
def test_a_senseless_answer_fails_and_costs_no_slot(make_queue, consumer, start, recorder, caplog, as_kind, batch):
    caplog.set_level(logging.DEBUG)
    queue = make_queue(retries=0)
    consumer.observers.append(LogObserver())
    consumer.observers.append(lambda event: raising(SystemExit(3)))

    def handle(body):
        return answers[body]() if body in answers else None

    # An exception in a batch fails all messages of the batch; other tests cover this.
    answers = NONSENSE if batch else NONSENSE | FATAL
    chosen = (lambda bodies: list(map(handle, bodies))) if batch else handle
    consumer.handler(queue, batch=batch, backoff=wait_fixed(60))(as_kind(chosen))
    queue.publish_many(list(answers))
    engine = start(concurrency=2)
    recorder.wait_for(Nacked, len(answers))
    queue.publish_many(["good"] * 50)

    recorder.wait_for(Acked, 50)
    assert len(set(recorder.ids(Handled, outcome="nack"))) == len(answers)  # some may run again after a second
    assert engine.dead_parts() == []
    assert "secret-7" not in caplog.text


def test_a_batch_with_another_number_of_answers_or_none_is_not_acked(queue, consumer, work_until, recorder, caplog):
    answers = {
        "generator": lambda: (Nack() for _ in range(1)),
        "map": lambda: map(str, [1]),
        "class": lambda: Reject,
        "two": lambda: [None, None],
    }
    consumer.handler(queue, batch=1)(lambda bodies: answers[bodies[0]]())
    queue.publish_many(list(answers))

    work_until(Nacked, 4)

    assert "a batch handler must return an answer for each message, 1, not 2" in caplog.text
    assert all(event.error.startswith("ConfigurationError: a") for event in recorder.of(Handled))
    assert recorder.of(Acked) == []


class Fragile:
    """A body with a decoder of foreign code, which raises any exception."""

    @classmethod
    def model_json_schema(cls):
        return {}

    @classmethod
    def model_validate_json(cls, payload):
        errors = {b"exit": SystemExit(3), b"name": ExitWithoutNameError()}
        return raising(errors[payload]) if payload in errors else payload


def test_a_body_whose_decoding_raises_anything_harms_no_other_of_its_batch(make_queue, consumer, work_until, recorder):
    queue, worked = make_queue(body=Fragile, retries=0), []
    consumer.handler(queue, batch=4)(worked.extend)
    make_queue(body=bytes, retries=0).publish_many([b"good", b"exit", b"name", b"good"])

    work_until(Acked, 2, concurrency=1)
    recorder.wait_for(Nacked, 2)
    assert worked == [b"good", b"good"]
