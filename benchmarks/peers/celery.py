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
    """Do this run's work."""
    kit.do()


@app.task(name="note")
def note(body):
    """Write how late this is."""
    kit.note(body["sent"])


def one(count):
    handle.delay(kit.BODY)
    return kit.timed(lambda: [handle.delay(kit.BODY) for _ in range(count)])


def late(rate, seconds, lead):
    for due in kit.dues(rate, seconds, lead):
        note.apply_async(({**kit.BODY, "sent": due},), eta=datetime.fromtimestamp(due, UTC))


def delayed(count):
    for _ in range(count):
        handle.apply_async((kit.BODY,), countdown=3600)


def slow(count):
    kit.slowly(note.delay, count)


def work(processes):
    options = (
        "--pool",
        "threads" if "thread" in kit.SETTING else kit.SETTING,
        "--concurrency",
        str(kit.SLOTS),
        "--without-gossip",
        "--without-mingle",
        "--loglevel",
        "ERROR",
    )
    kit.processes(processes, "-m", "celery", "-A", f"{__name__}:app", "worker", *options, "-n", "w%i")
