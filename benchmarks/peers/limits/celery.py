"""Celery: a worker keeps a bucket for each task in its memory, so that each of several has a part of the rate."""

import os

from celery import Celery

from benchmarks.peers import kit
from benchmarks.peers.limits import kit as work

app = Celery("bench", broker=kit.URL)
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=16,
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
    worker_hijack_root_logger=False,
)


@app.task(name="start", rate_limit=f"{work.RATE / int(os.environ.get('BENCH_PARTS', '1')):g}/s")
def start(body):
    """Return at once."""
    work.started(body)


def fill_rate(count):
    return kit.timed(lambda: [start.delay(body) for body in work.bodies(count)])


def work_rate(processes):
    os.environ["BENCH_PARTS"] = str(processes)
    options = (
        "--pool",
        "threads",
        "--concurrency",
        "16",
        "--without-gossip",
        "--without-mingle",
        "--loglevel",
        "ERROR",
    )
    kit.processes(processes, "-m", "celery", "-A", f"{__name__}:app", "worker", *options, "-n", "w%i")
