"""huey: threads; a task is popped before it runs, so one that dies with its worker is gone."""

from datetime import datetime

import huey

from benchmarks.peers import kit

app = huey.RedisHuey("bench", url=kit.URL, results=False, utc=False)


@app.task()
def handle(body):
    """Do this run's work."""
    kit.do()


@app.task()
def note(body):
    """Write how late this is."""
    kit.note(body["sent"])


def one(count):
    handle(kit.BODY)
    return kit.timed(lambda: [handle(kit.BODY) for _ in range(count)])


def late(rate, seconds, lead):
    for due in kit.dues(rate, seconds, lead):
        note.schedule(({**kit.BODY, "sent": due},), eta=datetime.fromtimestamp(due))  # noqa: DTZ006  huey's form


def delayed(count):
    for _ in range(count):
        handle.schedule((kit.BODY,), delay=3600)


def slow(count):
    kit.slowly(note, count)


def work(processes):
    options = ("--workers", str(kit.SLOTS), "--quiet", "--scheduler-interval", "1", "--no-periodic")
    kit.processes(processes, "-m", "huey.bin.huey_consumer", f"{__name__}.app", *options)
