"""Celery: threads, late acks; what is delayed waits in the memory of a worker that holds it unacked."""

from datetime import UTC, datetime

from celery import Celery

from benchmarks.peers import kit

app = Celery("bench", broker=kit.URL)
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    worker_disable_rate_limits=True,
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
    worker_hijack_root_logger=False,
)


@app.task(name="handle")
def handle(body):
    pass


@app.task(name="note")
def note(body):
    kit.note(body)


def one(count):
    return kit.one(handle.delay, count)


def late(rate, seconds, lead):
    for body in kit.due_bodies(rate, seconds, lead):
        note.apply_async((body,), eta=datetime.fromtimestamp(body["sent"], UTC))


def slow(count):
    kit.slowly(note.delay, count)


def work(processes):
    options = ("--pool", "threads", "--concurrency", str(kit.SLOTS), "--loglevel", "ERROR", "-n", "w%i")
    quiet = ("--without-gossip", "--without-mingle")
    kit.run("-m", "celery", "-A", f"{__name__}:app", "worker", *options, *quiet, processes=processes)
