"""A foreign publisher writes arbitrary data: each message ends, perhaps as a dead letter, and no worker crashes."""

import random
import threading
from dataclasses import dataclass

import pytest
from tenacity import wait_none
from waiting import eventually
from worker_vandal import IDS, NOTES, Vandal, put

from reliq import Consumer, Queue, WorkerSettings
from reliq.codec import Codec
from reliq.errors import UndecodableError

SEED = 20_240_817
MESSAGES = 200
#: A huge retry count: an undecodable message with it ends when its body expires.
ENDLESS = b"9" * 30


@dataclass
class Order:
    number: int
    note: str = ""


def publish_anything(client, keys, chance, number):
    """
    Put a malformed message into a list that a consumer reads; its id contains its number and is unique.

    Return the Redis key of its body, and whether it has too many retries to wait for its end.
    """
    vandal = Vandal(client, chance)
    id = vandal.blob(IDS) + b"~%d" % number
    place = chance.choice(["ready", "retry", "pending", "unack", "garbage"])
    left = chance.choice([b"0", b"1", b"-3", b"", b"many", b"1e5", ENDLESS, None])
    with client.pipeline() as pipe:
        if chance.random() < 0.9:
            pipe.set(keys.msg("").encode() + id, vandal.value(), px=60_000)
        if left is not None and place != "garbage":
            pipe.hset(keys.retries_left, id, left)
        if chance.random() < 0.2:
            pipe.hset(keys.lease, id, chance.choice([b"!", b"nacked", b"suspect", b"@5", b"@x", b"a.1:5", b"\xff"]))
        if chance.random() < 0.2:
            pipe.hset(keys.errors, id, vandal.blob(NOTES))
        put(pipe, keys, place, id, chance.choice([0, -5, 1.5, 1_700_000_000]))
        pipe.execute()
    return keys.msg("").encode() + id, left == ENDLESS


@pytest.mark.parametrize("undecodable", ["retry", "reject"])
def test_every_foreign_message_ends_and_the_worker_continues(url, client, undecodable):
    chance = random.Random(SEED)
    queue = Queue("q", Order, url=url)
    worked = threading.Event()
    consumer = Consumer()

    @consumer.handler(queue, lease=5, backoff=wait_none(), on_decode_error=undecodable)
    def work(order: Order) -> None:
        if order.note == "the last one":
            worked.set()

    published = [publish_anything(client, queue.keys, chance, number) for number in range(MESSAGES)]
    endless = [place for place, is_endless in published if is_endless]
    consumer.start(WorkerSettings(concurrency=4))
    try:
        eventually(lambda: queue.counts().alive <= len(endless), "every message has ended that has an end")
        client.delete(*endless)  # as when they expire
        eventually(lambda: queue.counts().alive == 0, "every message has ended")
        queue.publish(Order(1, "the last one"))
        assert worked.wait(100)
        eventually(lambda: queue.counts().alive == 0, "and the last one too")
    finally:
        consumer.stop(grace=5)

    totals = queue.counts().totals
    ended = sum(totals.get(kind, 0) for kind in ("acked", "dead", "expired", "cancelled"))
    assert ended == MESSAGES + 1
    letters = len(queue.dead_letters(limit=500))  # ids that are no text would end the report of a failure
    assert letters == totals["dead"] > MESSAGES / 4
    assert client.hlen(queue.keys.retries_left) == 0
    queue.close()


DEEP, LONG = 200_000, 1_000_000
BOMBS = {
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "a long number": b"1" * LONG,
    "a number with a long power": b"1e" + b"9" * LONG,
    "a long text": b'"' + b"a" * LONG + b'"',
    "a long text without an end": b'"' + b"a" * LONG,
    "escapes": b'"' + b"\\u0041" * (LONG // 6) + b'"',
    "a long key": b'{"' + b"a" * LONG + b'":1}',
    "no utf-8": b'"' + b"\xff" * LONG + b'"',
    "nothing": b"",
}


def test_body_made_to_harm_decodes_or_is_refused_in_a_line():
    for bomb, body in BOMBS.items():
        for kind in (dict, list, Order, int, float, str, dict[str, int], list[Order], object):
            try:
                Codec(kind).decode(body)
            except UndecodableError as error:
                shown = str(error)
                assert (len(shown) < 300, "aaaa" in shown, "1111" in shown) == (True, False, False), (bomb, kind)
