"""How fast messages are published: one by one, many at once, and by 100 coroutines that share a process."""

import asyncio
import time

from reliq.bench import bare
from reliq.bench.report import Figure
from reliq.bench.stage import BODY, Stage

PUBLISHERS = 100


def one_by_one(stage: Stage) -> list[Figure]:
    """Publish in a loop, each waiting for its receipt; beside it a SET by redis-py."""
    return [_figure("one by one", bare.in_turns(stage, lambda: _one_by_one(stage), bare.sets))]


def many(stage: Stage) -> list[Figure]:
    """Publish many at once, from an iterator."""
    return [_figure("publish_many", bare.in_turns(stage, lambda: _many(stage), bare.publishes))]


def concurrently(stage: Stage) -> list[Figure]:
    """Publish one by one in each of PUBLISHERS coroutines."""
    rates = bare.in_turns(stage, lambda: asyncio.run(_concurrently(stage)), bare.publishes)
    return [_figure(f"{PUBLISHERS} coroutines", rates)]


def _one_by_one(stage: Stage) -> float:
    began = time.perf_counter()
    for _ in range(stage.scale.singles):
        stage.queue.publish(BODY)
    return stage.scale.singles / (time.perf_counter() - began)


def _many(stage: Stage) -> float:
    began = time.perf_counter()
    stage.queue.publish_many(BODY for _ in range(stage.scale.many))
    return stage.scale.many / (time.perf_counter() - began)


async def _concurrently(stage: Stage) -> float:
    each = stage.scale.singles // PUBLISHERS

    async def publisher() -> None:
        for _ in range(each):
            await stage.queue.apublish(BODY)

    await stage.queue.apublish(BODY)  # connects
    began = time.perf_counter()
    await asyncio.gather(*(publisher() for _ in range(PUBLISHERS)))
    seconds = time.perf_counter() - began
    await stage.queue.aclose()
    return each * PUBLISHERS / seconds


def _figure(name: str, rates: tuple[float, float]) -> Figure:
    return Figure(part="publish", name=name, value=rates[0], unit="messages/s", bare=rates[1])
