"""Celery: a worker keeps a bucket for each task in its memory, which holds for the processes of its own pool."""

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


@app.task(name="start", rate_limit=f"{work.RATE}/s")
def start(body):
    """Return at once."""
    work.started(body)


def fill_rate(count):
    return kit.timed(lambda: [start.delay(body) for body in work.bodies(count)])


def work_rate(processes):
    options = ("--pool", "prefork", "--concurrency", str(processes), "--without-gossip", "--without-mingle")
    kit.become("-m", "celery", "-A", f"{__name__}:app", "worker", *options, "--loglevel", "ERROR")
