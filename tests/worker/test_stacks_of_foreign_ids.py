"""What a worker writes of its threads on SIGUSR1: an id that a foreign publisher chose adds no line to it."""

import pytest

from reliq.process import main as child

EVIL = "m\n2026-11-22 ERROR reliq all is lost\x1b[2J\u202e"


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_id_in_the_stacks_is_one_word_of_one_line(kind, make_queue, consumer, start, gate, client):
    queue = make_queue(body=bytes)
    client.set(queue.keys.msg(EVIL), b"x")
    client.hset(queue.keys.retries_left, EVIL, 3)
    client.lpush(queue.keys.ready, EVIL)

    async def astay(body):
        gate.pass_through()

    consumer.handler(queue)(astay if kind == "async" else lambda body: gate.pass_through())
    start()
    gate.wait_for()

    told = child.stacks(consumer)

    assert all(line.isprintable() for line in told.split("\n"))
    assert not any(line.startswith("2026-11-22 ERROR") for line in told.split("\n"))
    assert r"q m\n2026-11-22 ERROR reliq all is lost\x1b[2J\u202e" in told
