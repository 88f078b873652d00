"""SAQ: an event loop; a job whose worker died is found by a sweep."""

import time

import saq

from benchmarks.peers import kit

queue = saq.Queue.from_url(kit.URL, name="bench")
#: Room for a queue that is full before the worker comes; a job that waits longer is swept.
OPTIONS = {"ttl": -1, "timeout": 600}


async def handle(ctx, *, body):
    """Do this run's work."""
    await kit.ado()


async def note(ctx, *, body):
    """Write how late this is."""
    kit.note(body["sent"])


settings = {"queue": queue, "functions": [handle, note], "concurrency": kit.SLOTS}


async def one(count):
    await queue.connect()
    await queue.enqueue("handle", body=kit.BODY, **OPTIONS)

    async def loop():
        for _ in range(count):
            await queue.enqueue("handle", body=kit.BODY, **OPTIONS)

    return await kit.atimed(loop())


async def late(rate, seconds, lead):
    await queue.connect()
    for due in kit.dues(rate, seconds, lead):
        await queue.enqueue("note", body={**kit.BODY, "sent": due}, scheduled=due, **OPTIONS)


async def delayed(count):
    await queue.connect()
    for _ in range(count):
        await queue.enqueue("handle", body=kit.BODY, scheduled=time.time() + 3600, **OPTIONS)


async def slow(count):
    await queue.connect()
    await kit.aslowly(lambda body: queue.enqueue("note", body=body, **OPTIONS), count)


def work(processes):
    kit.become("-m", "saq", f"{__name__}.settings", "--workers", str(processes), "--quiet")
