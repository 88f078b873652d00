"""Serve the application to a browser, with queues that fill every page."""

import threading
from contextlib import contextmanager

import pytest
from site_page import EVERYTHING, serving
from waiting import eventually

from reliq import Consumer, OutgoingMessage, Queue, WorkerSettings
from reliq.admin import Admin
from reliq.web import app, pages
from reliq.worker import upkeep

#: A queue name of the maximum length, which must not widen a page.
LONG_ID = "long-" + "x" * 123
DEAD = [*(f"dead-{number}" for number in range(7)), LONG_ID]


@contextmanager
def served(url, access=EVERYTHING):
    """Return the address of a Redis' pages; all users have the same access, under the name ada."""
    with serving(app(url, access=lambda _: access.by("ada"))) as site, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "GROUPS_SECONDS", 60)  # a busy machine still reads all dead letters
        yield site.url


@contextmanager
def queues(url):
    """Four queues: payments is busy and fails, invoices has keys but no worker, reports is paused, thumbnails idle."""
    payments, admin, done = Queue("payments", dict, url=url), Admin(url), threading.Event()
    consumer = Consumer(url)

    @consumer.handler(payments)
    def pay(body):
        if body["fails"]:
            raise ValueError("card 4111 refused")
        done.wait()

    # No schedule is due during the tests: a run would occupy a handler, and missed runs would be counted.
    consumer.cron("0 6 29 2 *", queue=payments, body={"fails": False}, name="nightly-settlement", tz="Europe/Berlin")
    consumer.every(90 * 86_400, queue=payments, body={"fails": False}, name="quarterly-check")

    for id in DEAD:
        payments.publish({"fails": True, "secret": "CANARY"}, id=id, retries=0, headers={"tenant": "acme"})
    payments.publish_many(OutgoingMessage(body={"fails": False}, delay=7200) for _ in range(30))
    publish_seven(url, "invoices", "reports", "thumbnails")
    Queue("invoices", dict, url=url).publish_many(OutgoingMessage(body={}, key=key) for key in ("tenant-7", LONG_ID))
    with Queue("thumbnails", dict, url=url).receive(limit=7) as jobs:
        for job in jobs:
            job.ack()
    admin.pause("reports", reason="we move")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(upkeep, "BEAT_SECONDS", 0.2)
            consumer.start(WorkerSettings(concurrency=4))
            eventually(lambda: admin.count("payments", "dead") == len(DEAD), "what fails has died")
            payments.publish_many([{"fails": False}, {"fails": False}])
            eventually(lambda: [one for one in admin.workers() if one.busy == 2], "a record says that two handlers run")
            eventually(lambda: len(admin.crons()) == 2, "the periodic jobs are there")
            admin.pause_cron("payments", "quarterly-check", reason="we move", by="ada")
            assert admin.stacks([worker_of(url)], for_seconds=30)
        yield
    finally:
        done.set()
        consumer.stop(5)
        payments.close()
        admin.close()


def worker_of(url):
    """Return the id of the only worker."""
    [worker] = Admin(url).workers()
    return worker.id


def publish_seven(url, *names):
    """Publish seven messages to each queue: NAME-0 to NAME-6."""
    for name in names:
        queue = Queue(name, dict, url=url)
        for number in range(7):
            queue.publish({"number": number}, id=f"{name}-{number}")
        queue.close()
