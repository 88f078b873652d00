"""dramatiq: threads; a message is acked after its actor returned."""

import os
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers import kit

#: A consumer that finds nothing, or has no room, looks again after so long at most; its default is a second.
LOOK_MS = 10

broker = RedisBroker(url=kit.URL, middleware=[])
dramatiq.set_broker(broker)


@dramatiq.actor
def handle(body):
    """Do this run's work."""
    kit.do()


@dramatiq.actor
def note(body):
    """Write how late this is."""
    kit.note(body["sent"])


def one(count):
    handle.send(kit.BODY)
    return kit.timed(lambda: [handle.send(kit.BODY) for _ in range(count)])


def late(rate, seconds, lead):
    for due in kit.dues(rate, seconds, lead):
        note.send_with_options(args=(with_due(due),), delay=max(0, round((due - time.time()) * 1000)))


def delayed(count):
    for _ in range(count):
        handle.send_with_options(args=(kit.BODY,), delay=3_600_000)


def with_due(due):
    return {**kit.BODY, "sent": due}


def slow(count):
    kit.slowly(note.send, count)


def work(processes):
    os.environ["dramatiq_worker_timeout"] = str(LOOK_MS)  # noqa: SIM112  dramatiq's spelling
    options = ("--processes", str(processes), "--threads", str(kit.SLOTS), "--skip-logging")
    kit.become("-m", "dramatiq", __name__, *options)
