"""streaq: Redis streams and an event loop (uvloop); a task that died with its worker is taken over by another."""

from datetime import UTC, datetime, timedelta

import streaq

from benchmarks.peers import kit

worker = streaq.Worker(redis_url=kit.URL, concurrency=kit.SLOTS, queue_name="bench")


@worker.task(ttl=0)
async def handle(body: dict) -> None:
    """Do this run's work."""
    await kit.ado()


@worker.task(ttl=0)
async def note(body: dict) -> None:
    """Write how late this is."""
    kit.note(body["sent"])


async def one(count):
    async with worker:
        await handle.enqueue(kit.BODY)

        async def loop():
            for _ in range(count):
                await handle.enqueue(kit.BODY)

        return await kit.atimed(loop())


async def bulk(count):
    async with worker:
        await handle.enqueue(kit.BODY)

        async def loop():
            for size in map(len, kit.pieces(range(count))):
                await worker.enqueue_many([handle.enqueue(kit.BODY) for _ in range(size)])

        return await kit.atimed(loop())


async def late(rate, seconds, lead):
    async with worker:
        for due in kit.dues(rate, seconds, lead):
            when = datetime.fromtimestamp(due, UTC)
            await note.enqueue({**kit.BODY, "sent": due}).start(schedule=when)


async def delayed(count):
    async with worker:
        for _ in range(count):
            await handle.enqueue(kit.BODY).start(delay=timedelta(hours=1))


async def slow(count):
    async with worker:
        await kit.aslowly(note.enqueue, count)


def work(processes):
    kit.become("-m", "streaq", "run", f"{__name__}:worker", "--workers", str(processes))
