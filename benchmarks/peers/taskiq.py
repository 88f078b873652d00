"""taskiq on Redis streams: an event loop; acked after the task returned."""

import taskiq_redis

from benchmarks.peers import kit

broker = taskiq_redis.RedisStreamBroker(kit.URL, consumer_id="0")


@broker.task
async def handle(body: dict) -> None:
    pass


@broker.task
async def note(body: dict) -> None:
    kit.note(body)


async def one(count):
    await broker.startup()
    seconds = await kit.aone(handle.kiq, count)
    await broker.shutdown()
    return seconds


async def slow(count):
    await broker.startup()
    await kit.aslowly(note.kiq, count)
    await broker.shutdown()


def work(processes):
    options = ("--workers", str(processes), "--max-async-tasks", str(kit.SLOTS), "--log-level", "ERROR")
    kit.run("-m", "taskiq", "worker", f"{__name__}:broker", *options)
