"""dramatiq: threads; a message is acked after its actor returned."""

import os
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers import kit

dramatiq.set_broker(RedisBroker(url=kit.URL, middleware=[]))


@dramatiq.actor
def handle(body):
    pass


@dramatiq.actor
def note(body):
    kit.note(body)


def one(count):
    return kit.one(handle.send, count)


def late(rate, seconds, lead):
    for body in kit.due_bodies(rate, seconds, lead):
        note.send_with_options(args=(body,), delay=max(0, round((body["sent"] - time.time()) * 1000)))


def slow(count):
    kit.slowly(note.send, count)


def work(processes):
    os.environ["dramatiq_worker_timeout"] = "10"  # noqa: SIM112  dramatiq's spelling
    kit.run("-m", "dramatiq", __name__, "--processes", str(processes), "--threads", str(kit.SLOTS), "--skip-logging")
