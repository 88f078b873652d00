"""RQ: its SimpleWorker, which runs jobs in the worker's own process; a fork for each job is slower still."""

import time
from datetime import UTC, datetime

import redis
import rq

from benchmarks.peers import kit

queue = rq.Queue("bench", connection=redis.Redis.from_url(kit.URL))


def handle(body):
    pass


def note(body):
    kit.note(body)


def one(count):
    return kit.one(lambda body: queue.enqueue(handle, body, result_ttl=0), count)


def bulk(count):
    began = time.perf_counter()
    for _ in range(count // kit.BULK):
        queue.enqueue_many([rq.Queue.prepare_data(handle, (kit.BODY,), result_ttl=0) for _ in range(kit.BULK)])
    return time.perf_counter() - began


def late(rate, seconds, lead):
    for body in kit.due_bodies(rate, seconds, lead):
        queue.enqueue_at(datetime.fromtimestamp(body["sent"], UTC), note, body, result_ttl=0)


def slow(count):
    kit.slowly(lambda body: queue.enqueue(note, body, result_ttl=0), count)


def work(processes):
    options = ("--worker-class", "rq.worker.SimpleWorker", "--with-scheduler", "--quiet", "--url", kit.URL)
    kit.run("-m", "rq.cli", "worker", "bench", *options, processes=processes)
