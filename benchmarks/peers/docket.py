"""docket: Redis streams and an event loop; acked after the task returned."""

from datetime import UTC, datetime, timedelta

from docket import Docket

from benchmarks.peers import kit


async def handle(body: dict) -> None:
    pass


async def note(body: dict) -> None:
    kit.note(body)


tasks = [handle, note]


def _docket():
    return Docket(name="bench", url=kit.URL, execution_ttl=timedelta(0))


async def one(count):
    async with _docket() as docket:
        return await kit.aone(docket.add(handle), count)


async def late(rate, seconds, lead):
    async with _docket() as docket:
        for body in kit.due_bodies(rate, seconds, lead):
            await docket.add(note, when=datetime.fromtimestamp(body["sent"], UTC))(body)


async def slow(count):
    async with _docket() as docket:
        await kit.aslowly(docket.add(note), count)


def work(processes):
    place = ("--tasks", f"{__name__}:tasks", "--docket", "bench", "--url", kit.URL)
    looks = ("--minimum-check-interval", "10ms", "--scheduling-resolution", "10ms", "--logging-level", "ERROR")
    kit.run("-m", "docket", "worker", *place, "--concurrency", str(kit.SLOTS), *looks, processes=processes)
