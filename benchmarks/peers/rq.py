"""RQ: its SimpleWorker, which runs jobs in the worker's own process, for a fork of each job is slower still."""

from datetime import UTC, datetime, timedelta

import redis
import rq

from benchmarks.peers import kit

queue = rq.Queue("bench", connection=redis.Redis.from_url(kit.URL))
OPTIONS = {"result_ttl": 0}


def handle(body):
    """Do this run's work."""
    kit.do()


def note(body):
    """Write how late this is."""
    kit.note(body["sent"])


def one(count):
    queue.enqueue(handle, kit.BODY, **OPTIONS)
    return kit.timed(lambda: [queue.enqueue(handle, kit.BODY, **OPTIONS) for _ in range(count)])


def bulk(count):
    def publish():
        for size in map(len, kit.pieces(range(count))):
            queue.enqueue_many([rq.Queue.prepare_data(handle, (kit.BODY,), **OPTIONS) for _ in range(size)])

    return kit.timed(publish)


def late(rate, seconds, lead):
    for due in kit.dues(rate, seconds, lead):
        queue.enqueue_at(datetime.fromtimestamp(due, UTC), note, {**kit.BODY, "sent": due}, **OPTIONS)


def delayed(count):
    for _ in range(count):
        queue.enqueue_in(timedelta(hours=1), handle, kit.BODY, **OPTIONS)


def slow(count):
    kit.slowly(lambda body: queue.enqueue(note, body, **OPTIONS), count)


def work(processes):
    options = ("--worker-class", "rq.worker.SimpleWorker", "--with-scheduler", "--quiet", "--url", kit.URL)
    kit.processes(processes * kit.SLOTS, "-m", "rq.cli", "worker", "bench", *options)
