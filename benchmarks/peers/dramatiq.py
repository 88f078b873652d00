"""dramatiq: threads; a message is acked after its actor returned."""

import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers import kit

broker = RedisBroker(url=kit.URL, middleware=[])
dramatiq.set_broker(broker)


@dramatiq.actor
def nothing(body):
    """Return at once."""


@dramatiq.actor
def note(body):
    """Write how late this is."""
    kit.note(body["sent"])


def one(count):
    nothing.send(kit.BODY)
    return kit.timed(lambda: [nothing.send(kit.BODY) for _ in range(count)])


def late(rate, seconds, lead):
    for due in kit.dues(rate, seconds, lead):
        note.send_with_options(args=(with_due(due),), delay=max(0, round((due - time.time()) * 1000)))


def delayed(count):
    for _ in range(count):
        nothing.send_with_options(args=(kit.BODY,), delay=3_600_000)


def with_due(due):
    return {**kit.BODY, "sent": due}


def slow(count):
    kit.slowly(note.send, count)


def work(processes):
    kit.become("-m", "dramatiq", __name__, "--processes", str(processes), "--threads", "8", "--skip-logging")
