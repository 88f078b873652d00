"""BullMQ's Python port: an event loop; jobs are locked while they run."""

import asyncio
import contextlib
import time

import bullmq

from benchmarks.peers import kit

OPTIONS = {"removeOnComplete": True}


def queue():
    return bullmq.Queue("bench", {"connection": kit.URL})


async def handle(job, _token):
    """Do this run's work, or write how late this is."""
    if job.name == "note":
        kit.note(job.data["sent"])
    else:
        await kit.ado()


async def one(count):
    target = queue()
    await target.add("handle", kit.BODY, OPTIONS)

    async def loop():
        for _ in range(count):
            await target.add("handle", kit.BODY, OPTIONS)

    seconds = await kit.atimed(loop())
    await target.close()
    return seconds


async def bulk(count):
    target = queue()
    await target.add("handle", kit.BODY, OPTIONS)

    async def loop():
        for size in map(len, kit.pieces(range(count))):
            await target.addBulk([{"name": "handle", "data": kit.BODY, "opts": OPTIONS} for _ in range(size)])

    seconds = await kit.atimed(loop())
    await target.close()
    return seconds


async def late(rate, seconds, lead):
    target = queue()
    for due in kit.dues(rate, seconds, lead):
        delay = max(0, round((due - time.time()) * 1000))
        await target.add("note", {**kit.BODY, "sent": due}, {**OPTIONS, "delay": delay})
    await target.close()


async def delayed(count):
    target = queue()
    for _ in range(count):
        await target.add("handle", kit.BODY, {**OPTIONS, "delay": 3_600_000})
    await target.close()


async def slow(count):
    target = queue()
    await kit.aslowly(lambda body: target.add("note", body, OPTIONS), count)
    await target.close()


def work(processes):
    kit.processes(processes, "-m", "benchmarks.peers", "bullmq_python", "serve")


async def serve():
    """Be one worker."""
    bullmq.Worker("bench", handle, {"connection": kit.URL, "concurrency": kit.SLOTS})
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
