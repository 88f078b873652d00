"""What a worker writes of its threads on SIGUSR1: an id that a foreign publisher chose adds no line to it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import eventually

from reliq.events import WorkerStopping
from reliq.process import main as child

EVIL = "m\n2026-11-22 ERROR reliq all is lost\x1b[2J\u202e"


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_stacks_during_a_stop_name_messages_in_one_line(kind, make_queue, consumer, start, recorder, gate, client):
    queue = make_queue(body=bytes)
    client.set(queue.keys.msg(EVIL), b"x")
    client.hset(queue.keys.retries_left, EVIL, 3)
    client.lpush(queue.keys.ready, EVIL)

    async def astay():
        await asyncio.to_thread(gate.pass_through)

    async def handle(body):
        await astay()

    consumer.handler(queue)(handle if kind == "async" else lambda body: gate.pass_through())
    start()
    gate.wait_for()
    name = r"q m\n2026-11-22 ERROR reliq all is lost\x1b[2J\u202e"
    place = "in astay" if kind == "async" else "in pass_through"
    with ThreadPoolExecutor() as pool:
        pool.submit(consumer.stop)
        recorder.wait_for(WorkerStopping)
        eventually(lambda: place in child.stacks(consumer).partition(name)[2], "the handler is shown where it waits")
        lines = child.stacks(consumer).split("\n")
        gate.open()

    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("2026-11-22 ERROR") for line in lines)
