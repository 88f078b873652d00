"""How fast messages are published: one by one, many at once, and by 100 coroutines that share a process."""

import asyncio
import time

from reliq.bench import bare
from reliq.bench.report import Figure
from reliq.bench.stage import BODY, Stage

PUBLISHERS = 100


def one_by_one(stage: Stage) -> list[Figure]:
    """Publish in a loop, each waiting for its receipt; beside it a SET by the same client library."""
    count = stage.scale.singles
    began = time.perf_counter()
    for _ in range(count):
        stage.queue.publish(BODY)
    return [_figure("one by one", count / (time.perf_counter() - began), bare.sets(stage))]


def many(stage: Stage) -> list[Figure]:
    """Publish an iterator."""
    count = stage.scale.many
    began = time.perf_counter()
    stage.queue.publish_many(BODY for _ in range(count))
    seconds = time.perf_counter() - began
    stage.empty()
    return [_figure("publish_many", count / seconds, bare.publishes(stage))]


def concurrently(stage: Stage) -> list[Figure]:
    """Publish one by one in each of many coroutines."""
    seconds = asyncio.run(_race(stage, stage.scale.singles // PUBLISHERS))
    count = stage.scale.singles // PUBLISHERS * PUBLISHERS
    return [_figure(f"{PUBLISHERS} coroutines", count / seconds, bare.publishes(stage))]


async def _race(stage: Stage, each: int) -> float:
    async def publisher() -> None:
        for _ in range(each):
            await stage.queue.apublish(BODY)

    await stage.queue.apublish(BODY)  # connects
    began = time.perf_counter()
    await asyncio.gather(*(publisher() for _ in range(PUBLISHERS)))
    seconds = time.perf_counter() - began
    await stage.queue.aclose()
    return seconds


def _figure(name: str, rate: float, limit: float) -> Figure:
    return Figure(part="publish", name=name, value=rate, unit="messages/s", bare=limit)
