"""Bodies over `max_body` from another program: they stay in Redis, and no worker reads them."""

import pytest
from tenacity import wait_none

from reliq import Layout
from reliq.events import Acked, DeadLettered, Handled
from reliq.redis.commands import letters_between
from reliq.settings import MIB

GIANT = 4 * MIB
ENVELOPE = b'RELIQ/1 {"d":1700000000000,"r":%d,"h":{"from":"elsewhere"}}\n'


@pytest.fixture
def put_giant(client):
    """Write a message with a giant body, as a foreign program without a size limit does."""

    def put(queue, id, retries=0):
        value = (b"" if queue.keys.bare else ENVELOPE % retries) + b"x" * GIANT
        client.set(queue.keys.msg(id), value, px=60_000)
        client.hset(queue.keys.retries_left, id, retries)
        client.lpush(queue.keys.ready, id)

    return put


@pytest.fixture
def sent(client):
    """Return the number of bytes that Redis has sent since its start."""
    return lambda: client.info("stats")["total_net_output_bytes"]


@pytest.mark.parametrize("layout", [Layout.RELIQ, Layout.hdt3213()], ids=["reliq", "go"])
def test_oversized_bodies_are_dead_letters(make_queue, consumer, work_until, recorder, caller, put_giant, sent, layout):
    queue, handled = make_queue(body=bytes, layout=layout), []
    consumer.handler(queue)(handled.append)
    put_giant(queue, "giant")
    put_giant(queue, "giant-too")
    queue.publish(b"neighbour")
    before = sent()

    work_until(Acked)
    recorder.wait_for(DeadLettered, count=2)

    assert sent() < before + MIB
    assert handled == [b"neighbour"]
    why = f"body must be at most {MIB} bytes (max_body), not {GIANT}"
    letters = caller.run(letters_between(queue.keys, "-", "+", count=9))
    assert {letter.id for letter in letters} == {"giant", "giant-too"}
    assert {(one.reason, one.error, len(one.payload)) for one in letters} == {("undecodable", why, GIANT)}


def test_oversized_bodies_are_retried_unread_with_headers(make_queue, consumer, work_until, recorder, put_giant, sent):
    queue, failed = make_queue(body=bytes), []
    consumer.handler(queue, backoff=wait_none())(lambda body: None)
    consumer.on_error(lambda job, error, final: failed.append((job.attempt, job.headers, job.body, str(error), final)))
    put_giant(queue, "giant", retries=2)
    before = sent()

    work_until(DeadLettered)

    assert sent() < before + MIB
    why = f"message 'giant' of queue 'q': body must be at most {MIB} bytes (max_body), not {GIANT}"
    assert failed == [(attempt, {"from": "elsewhere"}, b"", why, attempt == 3) for attempt in (1, 2, 3)]
    assert [event.failed for event in recorder.of(Handled)] == [True, True, True]


def test_max_body_is_the_limit_of_a_body_without_its_headers(make_queue, consumer, work_until, recorder):
    queue, sizes = make_queue(body=bytes, max_body=1000), (1000, 1001, 200_000)
    consumer.handler(queue, on_decode_error="reject")(lambda body: None)
    for size in sizes:
        make_queue(body=bytes).publish(b"x" * size, headers={"long": "h" * 8000})

    work_until(Acked)
    recorder.wait_for(DeadLettered, 2)

    why = "body must be at most 1000 bytes (max_body), not "
    assert {len(one.payload): one.error for one in queue.dead_letters()} == {size: f"{why}{size}" for size in sizes[1:]}
