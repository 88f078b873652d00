"""reliq: threads for plain handlers, an event loop for async ones; acked after the handler returned."""

from datetime import UTC, datetime, timedelta

import reliq
from benchmarks.peers import kit
from reliq.bench.jobs import BATCHES, KINDS

NOTHING = reliq.Queue("nothing", url=kit.URL)
NOTE = reliq.Queue("note", url=kit.URL)

plain = reliq.Consumer()
asynchronous = reliq.Consumer()
batches = reliq.Consumer()


@plain.handler(NOTHING)
def nothing(body: dict) -> None:
    """Return at once."""


@plain.handler(NOTE)
def note(body: dict) -> None:
    """Write how late this is."""
    kit.note(body["sent"])


@asynchronous.handler(NOTHING)
async def nothing_async(body: dict) -> None:
    """Return at once, on the event loop."""


if "batch" in KINDS:

    @batches.handler(NOTHING, **BATCHES)
    def nothing_batch(bodies):
        """Return at once, for all of them."""


def one(count):
    NOTHING.publish(kit.BODY)
    return kit.timed(lambda: [NOTHING.publish(kit.BODY) for _ in range(count)])


def bulk(count):
    NOTHING.publish(kit.BODY)
    return kit.timed(lambda: NOTHING.publish_many(kit.BODY for _ in range(count)))


def late(rate, seconds, lead):
    for due in kit.dues(rate, seconds, lead):
        NOTE.publish({**kit.BODY, "sent": due}, at=datetime.fromtimestamp(due, UTC))


def delayed(count):
    NOTHING.publish_many(reliq.Outgoing(body=kit.BODY, delay=timedelta(hours=1)) for _ in range(count))


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
    kit.become("-m", "reliq", "worker", place, "--processes", str(processes), "--log-level", "error")
