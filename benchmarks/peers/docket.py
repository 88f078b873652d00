"""docket: Redis streams and an event loop; acked after the task returned."""

from datetime import UTC, datetime, timedelta
from functools import partial

from docket import Docket

from benchmarks.peers import kit


async def handle(body: dict) -> None:
    pass


async def note(body: dict) -> None:
    kit.note(body)


tasks = [handle, note]


def _docket():
    return Docket(name="bench", url=kit.URL, execution_ttl=timedelta(0))


async def _publish(docket, task, body):
    await docket.add(task)(body)  # each call of `add` makes a new id


async def one(count):
    async with _docket() as docket:
        return await kit.aone(partial(_publish, docket, handle), count)


async def late(rate, seconds, lead):
    async with _docket() as docket:
        for body in kit.due_bodies(rate, seconds, lead):
            await docket.add(note, when=datetime.fromtimestamp(body["sent"], UTC))(body)


async def slow(count):
    async with _docket() as docket:
        await kit.aslowly(partial(_publish, docket, note), count)


def work(processes):
    place = ("--tasks", f"{__name__}:tasks", "--docket", "bench", "--url", kit.URL)
    options = ("--concurrency", str(kit.SLOTS), "--logging-level", "ERROR")
    kit.run("-m", "docket", "worker", *place, *options, processes=processes)
