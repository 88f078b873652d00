"""A check beside running workers and publishers reports real faults only, and never a message that just moved."""

import random
import threading
import time
from contextlib import contextmanager

import pytest

from reliq import Admin, Consumer, Nack, OutgoingMessage, Queue, Reject, Snooze, WorkerSettings
from reliq.admin import check

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 100.0
ENOUGH_CHECKS = 12
ENOUGH_ACKED = 1000


@pytest.fixture(params=["as it is", "in tiny pieces", "lists count as long"])
def pieces(request, monkeypatch):
    """Read in tiny pieces, or with tiny margins, so that almost every message moves during the read."""
    if request.param != "as it is":
        monkeypatch.setattr(check, "SHORT_LISTS", 0)
    if request.param == "in tiny pieces":
        monkeypatch.setattr(check, "BATCH", 7)
        monkeypatch.setattr(check, "MARGIN", 2)


@contextmanager
def busy(url, keys=(None,), **limits):
    """Run publishers, workers and failures on a queue while the block runs; its messages use `keys` in turn."""
    queue, consumer = Queue("busy", int, url=url, retries=2, dead_letter_limit=20, **limits), Consumer(url)
    over = threading.Event()

    @consumer.handler(queue, lease=0.4, timeout=5)
    def work(number: int) -> None:
        match number % 10:
            case 0:
                raise Nack(delay=0.01)
            case 1:
                raise Snooze(delay=0.01) if random.Random(number).random() < 0.5 else Nack(delay=0.0)
            case 2:
                raise Reject
            case 3:
                raise ValueError("now and then")

    def outgoing(number, delay):
        key = keys[number % len(keys)]
        return OutgoingMessage(body=number, id=f"m-{number}", dedup=0.05, delay=delay, key=key)

    def publish() -> None:
        chance, number = random.Random(7), 0
        while not over.is_set():
            if queue.counts().alive < 400:  # keep lists short: this is no test of long lists
                queue.publish_many(outgoing(number + n, chance.choice((0, 0, 0.02))) for n in range(50))
                for n in range(0, 50, 9):
                    queue.cancel(f"m-{number + n}")
                number += 50

    queue.publish(9)  # the registry does not list an empty queue
    publisher = threading.Thread(target=publish)
    consumer.start(WorkerSettings(concurrency=4))
    publisher.start()
    try:
        yield queue
    finally:
        over.set()
        publisher.join()
        consumer.stop(grace=5)
        queue.close()


def wrong(report):
    return [fault for fault in report.faults if not fault.passes]


def checks(url, queue, acked):
    """Check until there were enough checks and enough parallel work; return the faults."""
    faults, number, until = [], 0, time.monotonic() + PATIENCE_SECONDS
    while number < ENOUGH_CHECKS or queue.counts().totals.get("acked", 0) < acked:
        assert time.monotonic() < until, "the workers hardly work"
        faults += wrong(Admin(url).check("busy"))
        number += 1
    return faults


def test_check_of_a_busy_queue_finds_no_fault(url, pieces):
    with busy(url) as queue:
        assert checks(url, queue, ENOUGH_ACKED) == []


@pytest.mark.parametrize("limits", [{"ordered": True}, {"per_key": 2, "key_rate": "400/s"}], ids=["ordered", "per_key"])
def test_check_of_a_busy_queue_with_keys_finds_no_fault(url, limits):
    with busy(url, [*(f"key-{number}" for number in range(9)), None], **limits) as queue:
        assert checks(url, queue, ENOUGH_ACKED / 4) == []


def test_fault_of_a_busy_queue_is_repaired_and_nothing_else(url, pieces, client):
    admin = Admin(url)
    strays = {f"ghost-{n}": "3" for n in range(20)}

    with busy(url) as queue:
        client.hset(queue.keys.retries_left, mapping=strays)
        others = [fault for _ in range(3) for fault in wrong(admin.check("busy"))]
        mended = wrong(admin.check("busy", repair=True))
        after = [fault for _ in range(3) for fault in wrong(admin.check("busy"))]

    assert {(fault.name, fault.count) for fault in others} == {("stray-count", 20)}
    assert {(fault.name, fault.mended) for fault in mended} - {("account", 0)} == {("stray-count", 20)}
    # The stray messages were never published, so their ends make the account wrong; nothing else is.
    assert {(fault.name, fault.count) for fault in after} == {("account", 20)}
