"""In each round, two hundred good messages are handled once, beside all kinds of hostile input to the worker."""

import faulthandler
import gc
import logging
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

import psutil
import pytest
from tenacity import Retrying, stop_after_attempt
from waiting import eventually
from worker_vandal import ANSWERS, ERRORS, Evil, Vandal, throw

from reliq import Consumer, Job, Layout, OutgoingMessage, Queue, WorkerSettings
from reliq.events import Acked
from reliq.logs import JsonFormatter, LogObserver, TextFormatter
from reliq.metrics.process import ProcessMetrics
from reliq.worker.health import Pulse, live

pytestmark = pytest.mark.slow

ROUNDS, LONG_ROUNDS = 20, 2000
GOOD, EVIL = 200, 40
PATIENCE_SECONDS = 60
#: Rounds between two measurements of the process.
WEIGHED = 5
#: Allowed growth of memory between the first fifth of the rounds and the last.
GROWTH_BYTES = 64 * 2**20


@dataclass
class Order:
    number: int


class Worked:
    """Records which good messages were handled and acked, and how often."""

    def __init__(self):
        self.handled, self.acked = Counter(), Counter()

    def __call__(self, event, /):
        if isinstance(event, Acked):
            self.acked.update(id for id in event.ids if id.startswith("good-"))


class Formatted(logging.Handler):
    """Format every log line in both formats, and drop it."""

    def emit(self, record):
        for one in (JsonFormatter(), TextFormatter(colours=True)):
            one.format(record)


@pytest.fixture
def quiet_log(caplog, monkeypatch):
    """
    Send the log lines of reliq and asyncio to one handler that keeps none: kept lines would look like a leak.

    Call it in the test: when a test begins, pytest adds its own handler to loggers that do not propagate.
    """

    def quiet():
        for name in ("reliq", "asyncio"):
            caplog.set_level(logging.DEBUG, name)
            monkeypatch.setattr(logging.getLogger(name), "handlers", [Formatted()])
            monkeypatch.setattr(logging.getLogger(name), "propagate", False)

    return quiet


@pytest.fixture
def seed(request):
    chosen = int(os.environ.get("RELIQ_FUZZ_SEED", "0"))
    return chosen or (time.time_ns() % 10**9 if request.config.getoption("--long") else 20261122)


def build(url, worked, chance):
    """Build a worker with every kind of handler and layout; it gives random hostile answers to all other messages."""
    metrics, pulse = ProcessMetrics(), Pulse()
    observers = [worked, metrics, pulse, LogObserver(error_text=True), lambda event: evil_observer(chance)]
    consumer = Consumer(url, observers=observers)
    consumer.on_error(lambda job, error, final: evil_observer(chance))

    def answer(job):
        if job.id.startswith("good-"):
            worked.handled[job.id] += 1
            return None
        return chance.choice(ANSWERS)()

    async def aanswer(body, job):
        return answer(job)

    def batch(bodies: list[bytes], jobs: list[Job[bytes]]):
        return [Evil() if not job.id.startswith("good-") else answer(job) for job in jobs]

    options = {"backoff": exponential, "timeout": 60}
    handlers = {"async": aanswer, "batch": batch}
    queues = [Queue(name, bytes, url=url) for name in ("plain", "async", "batch")]
    queues += [Queue("typed", Order, url=url), Queue("go", bytes, layout=Layout.hdt3213(), url=url)]
    for queue in queues:
        batches = {"batch": 20, "linger": 0.01} if queue.name == "batch" else {}
        consumer.handler(queue, **options, **batches)(handlers.get(queue.name, lambda body, job: answer(job)))
    return consumer, queues, metrics, pulse


def exponential(state):
    """A backoff that computes 2**attempt, as older tenacity versions do."""
    return min(0.02, 0.001 * 2**state.attempt_number)


def evil_observer(chance):
    if chance.random() < 0.1:
        throw(chance.choice([one for one in ERRORS if not isinstance(one, KeyboardInterrupt)]))


def publish_good(queues, number):
    """Publish the good messages of this round, some with a short delay; return their ids."""
    published = set()
    for queue in queues:
        body = Order(number) if queue.name == "typed" else b"good"
        ids = [f"good-{number}-{queue.name}-{at}" for at in range(GOOD // len(queues))]
        messages = [OutgoingMessage(body=body, id=id, delay=0.0 if at % 5 else 0.02) for at, id in enumerate(ids)]
        # For busy machines: repeating with the same ids is safe.
        Retrying(stop=stop_after_attempt(3), reraise=True)(queue.publish_many, messages)
        published.update(ids)
    return published


def forget_evil(client, queues):
    """Remove leftovers of hostile messages when no good message is alive, as an operator empties a queue by hand."""
    names = ("pending", "ready", "unack", "retry", "garbage", "retries_left", "lease", "errors", "wake", "dead", "ends")
    names += ("plans", "plans_due", "windows", "minutes", "watch")
    for queue in queues:
        client.unlink(*(getattr(queue.keys, name) for name in names))


@pytest.mark.timeout(900)
def test_whatever_others_hand_to_a_worker_good_messages_are_acked_once(url, client, seed, request, quiet_log):
    print(f"\nRELIQ_FUZZ_SEED={seed}", file=sys.stderr)
    quiet_log()
    chance, worked = random.Random(seed), Worked()
    rounds = LONG_ROUNDS if request.config.getoption("--long") else ROUNDS
    consumer, queues, metrics, pulse = build(url, worked, random.Random(seed + 1))
    vandal, process, sizes = Vandal(client, chance), psutil.Process(), []
    for queue in queues:  # a worker that finds no stored schedules looks for them again after ten seconds
        vandal.surroundings(queue.keys)
    consumer.start(WorkerSettings(concurrency=8))
    engine = consumer._engine
    try:
        for number in range(rounds):
            # Also in a process whose GIL is held.
            faulthandler.dump_traceback_later(3 * PATIENCE_SECONDS, exit=True)
            for _ in range(EVIL):
                vandal.message(chance.choice(queues).keys)
            vandal.surroundings(chance.choice(queues).keys)
            good = publish_good(queues, number)
            eventually(lambda good=good: good <= worked.acked.keys(), f"round {number} is acked", PATIENCE_SECONDS)
            # Kept counts would look like a leak.
            assert {count.pop(id) for count in (worked.handled, worked.acked) for id in good} == {1}
            metrics.sample(engine.stats())
            pulse.note(engine.stats())
            assert (engine.dead_parts(), engine.hung_slots, live([pulse])) == ([], 0, ""), f"round {number}"
            if number % 3 == 2:
                forget_evil(client, queues)
            if number % WEIGHED == WEIGHED - 1:
                gc.collect()
                sizes.append(process.memory_info().rss)
        forget_evil(client, queues)
        eventually(lambda: not engine.inflight.deliveries(), "nothing is held for ever", 60)
    finally:
        consumer.stop(grace=5)
        faulthandler.cancel_dump_traceback_later()

    assert (worked.handled, worked.acked) == ({}, {})
    assert sizes[-1] - sizes[len(sizes) // 5] < GROWTH_BYTES, [size // 2**20 for size in sizes]
