"""reliq: threads for plain handlers, an event loop for async ones; acked after the handler returned."""

import time
from datetime import UTC, datetime

import reliq
from benchmarks.peers import kit

WORK = reliq.Queue("work", url=kit.URL)
NOTE = reliq.Queue("note", url=kit.URL)

plain = reliq.Consumer()
asynchronous = reliq.Consumer()


@plain.handler(WORK)
def handle(body: dict) -> None:
    pass


@plain.handler(NOTE)
def note(body: dict) -> None:
    kit.note(body)


@asynchronous.handler(WORK)
async def handle_async(body: dict) -> None:
    pass


def one(count):
    return kit.one(WORK.publish, count)


def bulk(count):
    began = time.perf_counter()
    WORK.publish_many(kit.BODY for _ in range(count))
    return time.perf_counter() - began


def late(rate, seconds, lead):
    for body in kit.due_bodies(rate, seconds, lead):
        NOTE.publish(body, at=datetime.fromtimestamp(body["sent"], UTC))


def slow(count):
    kit.slowly(NOTE.publish, count)


def work(processes):
    _work("plain", processes)


def work_async(processes):
    _work("asynchronous", processes)


def _work(consumer, processes):
    options = ("--processes", str(processes), "--concurrency", str(kit.SLOTS), "--log-level", "error")
    kit.run("-m", "reliq", "worker", f"{__name__}:{consumer}", *options)
