"""RQ: a job whose key is taken waits in a set of its own, and the end of the one before puts it into the queue."""

import redis
import rq

from benchmarks.peers import kit
from benchmarks.peers.limits import kit as work

queue = rq.Queue("bench", connection=redis.Redis.from_url(kit.URL))


def one_of_a_key(body):
    """Work for a moment."""
    work.worked(body)


def fill_keys(count):
    def publish(body):
        limit = rq.RateLimit(key=f"key-{body['key']}", concurrency=1)
        queue.enqueue(one_of_a_key, body, rate_limit=limit, result_ttl=0)

    return kit.timed(lambda: [publish(body) for body in work.bodies(count)])


def work_keys(processes):
    options = ("--worker-class", "rq.worker.SimpleWorker", "--quiet", "--url", kit.URL)
    kit.processes(processes, "-m", "rq.cli", "worker", "bench", *options)
