"""A check beside workers and publishers: what only moves is never told as wrong, and what is wrong is found."""

import random
import threading
import time
from contextlib import contextmanager

import pytest

from reliq import Admin, Consumer, Nack, Outgoing, Queue, Reject, Snooze, WorkerSettings
from reliq.admin.fsck import check, reading

PATIENCE_SECONDS = 100.0
ENOUGH_CHECKS = 12
ENOUGH_ACKED = 1000


@pytest.fixture(params=["as it is", "in tiny pieces", "lists count as long"])
def pieces(request, monkeypatch):
    """Read in pieces so small, or doubt so much, that nearly everything moves while it is read."""
    if request.param != "as it is":
        monkeypatch.setattr(check, "SHORT_LISTS", 0)
    if request.param == "in tiny pieces":
        for module in (check, reading):
            monkeypatch.setattr(module, "BATCH", 7)
        monkeypatch.setattr(check, "MARGIN", 2)


@contextmanager
def busy(url, keys=(None,), **limits):
    """A queue that is worked in every way there is, as long as the block runs; its messages have `keys` by turns."""
    queue, consumer = Queue("busy", int, url=url, retries=2, letters_max=20, **limits), Consumer(url)
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

    def publish() -> None:
        chance, number = random.Random(7), 0
        while not over.is_set():
            # Enough to do, and never so much that the test is about reading a long list.
            if queue.counts().alive < 400:
                queue.publish_many(
                    Outgoing(
                        body=number + n,
                        id=f"m-{number + n}",
                        dedup=0.05,
                        delay=chance.choice((0, 0, 0.02)),
                        key=keys[n % len(keys)],
                    )
                    for n in range(50)
                )
                for n in range(0, 50, 9):
                    queue.cancel(f"m-{number + n}")
                number += 50

    queue.publish(9)  # what nobody has published to is no queue
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


def test_a_busy_queue_is_never_said_to_be_wrong(url, pieces):
    admin = Admin(url)

    with busy(url) as queue:
        until, reports = time.monotonic() + PATIENCE_SECONDS, []
        while len(reports) < ENOUGH_CHECKS or queue.counts().totals.get("acked", 0) < ENOUGH_ACKED:
            assert time.monotonic() < until, "the workers hardly work"
            reports.append(admin.check("busy"))

    assert [fault for report in reports for fault in wrong(report)] == []
    assert all(report.is_sound for report in reports)


@pytest.mark.parametrize("limits", [{"ordered": True}, {"per_key": 2, "key_rate": "400/s"}], ids=str)
def test_a_busy_queue_with_keys_is_never_said_to_be_wrong(url, limits):
    admin, keys = Admin(url), [*(f"key-{number}" for number in range(9)), None]

    with busy(url, keys, **limits) as queue:
        until, reports = time.monotonic() + PATIENCE_SECONDS, []
        while len(reports) < ENOUGH_CHECKS or queue.counts().totals.get("acked", 0) < ENOUGH_ACKED / 4:
            assert time.monotonic() < until, "the workers hardly work"
            reports.append(admin.check("busy"))

    assert [fault for report in reports for fault in wrong(report)] == []


def test_what_is_wrong_in_a_busy_queue_is_found_and_mended_and_nothing_else_is_touched(url, pieces, client):
    admin = Admin(url)
    strays = {f"ghost-{n}": "3" for n in range(20)}

    with busy(url) as queue:
        client.hset(queue.keys.retries_left, mapping=strays)
        [*others] = [fault for _ in range(3) for fault in wrong(admin.check("busy"))]
        mended = wrong(admin.check("busy", repair=True))
        after = [fault for _ in range(3) for fault in wrong(admin.check("busy"))]

    assert {(fault.name, fault.count) for fault in others} == {("stray-count", 20)}
    assert [(fault.name, fault.count, fault.mended) for fault in mended if fault.name != "account"] == [
        ("stray-count", 20, 20)
    ]
    # The strays were never published: ended, they are too many, and nothing else is.
    assert {(fault.name, fault.count) for fault in after} == {("account", 20)}
