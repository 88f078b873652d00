"""taskiq on Redis streams: an event loop; acked after the task returned."""

import taskiq_redis

from benchmarks.peers import kit

broker = taskiq_redis.RedisStreamBroker(kit.URL, consumer_id="0")


@broker.task
async def handle(body: dict) -> None:
    """Do this run's work."""
    await kit.ado()


@broker.task
async def note(body: dict) -> None:
    """Write how late this is."""
    kit.note(body["sent"])


async def one(count):
    await broker.startup()
    await handle.kiq(kit.BODY)

    async def loop():
        for _ in range(count):
            await handle.kiq(kit.BODY)

    seconds = await kit.atimed(loop())
    await broker.shutdown()
    return seconds


async def slow(count):
    await broker.startup()
    await kit.aslowly(note.kiq, count)
    await broker.shutdown()


def work(processes):
    place = f"{__name__}:broker"
    options = ("--workers", str(processes), "--max-async-tasks", str(kit.SLOTS), "--log-level", "ERROR")
    kit.become("-m", "taskiq", "worker", place, *options)
