"""reliq: threads for plain handlers, an event loop for async ones; acked after the handler returned."""

from datetime import UTC, datetime, timedelta

import reliq
from benchmarks.peers import kit
from reliq.bench.bench import BATCHES, KINDS

WORK = reliq.Queue("work", url=kit.URL)
NOTE = reliq.Queue("note", url=kit.URL)

plain = reliq.Consumer()
asynchronous = reliq.Consumer()
batches = reliq.Consumer()


@plain.handler(WORK)
def handle(body: dict) -> None:
    """Do this run's work."""
    kit.do()


@plain.handler(NOTE)
def note(body: dict) -> None:
    """Write how late this is."""
    kit.note(body["sent"])


@asynchronous.handler(WORK)
async def handle_async(body: dict) -> None:
    """Do this run's work on the event loop."""
    await kit.ado()


if "batch" in KINDS:

    @batches.handler(WORK, **BATCHES)
    def handle_batch(bodies):
        """Return at once, for all of them."""


def one(count):
    WORK.publish(kit.BODY)
    return kit.timed(lambda: [WORK.publish(kit.BODY) for _ in range(count)])


def bulk(count):
    WORK.publish(kit.BODY)
    return kit.timed(lambda: WORK.publish_many(kit.BODY for _ in range(count)))


def late(rate, seconds, lead):
    for due in kit.dues(rate, seconds, lead):
        NOTE.publish({**kit.BODY, "sent": due}, at=datetime.fromtimestamp(due, UTC))


def delayed(count):
    WORK.publish_many(reliq.Outgoing(body=kit.BODY, delay=timedelta(hours=1)) for _ in range(count))


def slow(count):
    kit.slowly(NOTE.publish, count)


def work(processes):
    _work("plain", processes)


def work_async(processes):
    _work("asynchronous", processes)


def work_batch(processes):
    _work("batches", processes)


def _work(consumer, processes):
    place = f"{__name__}:{consumer}"
    options = ("--processes", str(processes), "--concurrency", str(kit.SLOTS), "--log-level", "error")
    kit.become("-m", "reliq", "worker", place, *options)
