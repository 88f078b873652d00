"""Invalid data in the keys of a queue or a worker does not hide other queues and workers."""

import pytest
from prometheus_client import CollectorRegistry

from reliq.keys import QUEUES_KEY, WORKERS_KEY, Keys, worker_key
from reliq.metrics.serving import queue_collector
from reliq.redis.server import Connection

SPOILT = Keys("spoilt")

#: Name -> invalid data, and the error shown for that queue; an empty error: the queue is shown as usual.
SPOILINGS = {
    "a total whose name is no UTF-8": (("HINCRBY", SPOILT.totals, b"\xff", 7), ""),
    "a total that is no number": (("HSET", SPOILT.totals, "acked", "many"), "the total acked is not a number"),
    "a total of 4301 digits": (("HSET", SPOILT.totals, "claimed", "9" * 4301), "the total claimed is not a number"),
    "a total below zero": (("HINCRBY", SPOILT.totals, "claimed", -5), "the total claimed is negative: -5"),
    "a total that nobody knows": (("HSET", SPOILT.totals, "\x1b[2J", "9" * 4301), ""),
    "a score of -inf": (("ZADD", SPOILT.pending, "-inf", "m"), ""),
    "a score of +inf": (("ZADD", SPOILT.unack, "+inf", "m"), ""),
    "an id that is no UTF-8": (("LPUSH", SPOILT.ready, b"\xff\x1b"), ""),
} | {
    f"a string instead of {name}": (("SET", getattr(SPOILT, name), "x"), f"the Redis key '{getattr(SPOILT, name)}'")
    for name in ("pending", "ready", "unack", "retry", "garbage", "dead", "totals")
}


@pytest.mark.parametrize(("spoiling", "reason"), SPOILINGS.values(), ids=SPOILINGS)
def test_corrupt_queue_is_shown_with_its_reason_and_hides_no_other(spoiling, reason, command, queue, client, url):
    queue.publish({"n": 1}, id="m")
    client.hset(QUEUES_KEY, mapping={"spoilt": "1", "no name!": "1"})
    client.execute_command(*spoiling)

    seen = command("queues", "--json").json
    said = command("queues")

    shown = {view["queue"]: view["ready"] for view in seen["queues"]}
    assert shown["q"] == 1
    assert shown.keys() | seen["unreadable"].keys() == {"q", "spoilt"}
    assert reason in seen["unreadable"].get("spoilt", "")
    assert ("spoilt" in seen["unreadable"]) == bool(reason)
    assert (said.code, f"spoilt cannot be read: {reason}" in said.out) == (0, bool(reason))
    assert command("queues", "q", "--check").code == 0
    assert command("check", "spoilt").err == ""

    registry = CollectorRegistry()
    collector = queue_collector(Connection.to(url))
    registry.register(collector)

    assert registry.get_sample_value("reliq_messages", {"queue": "q", "state": "ready"}) == 1
    assert registry.get_sample_value("reliq_queue_unreadable", {"queue": "spoilt"}) == bool(reason)
    assert collector.redis_answers()


def test_commands_skip_worker_records_that_something_else_wrote(queue, command, client):
    queue.publish({})
    client.zadd(WORKERS_KEY, {b"evil\xff": 1, "listed": 2, "evil": 3})
    client.rpush(worker_key("listed"), "a list")
    for record in (b"\xff", b"[" * 5000, b'{"id":1}', b'{"pid":1e999}'):
        client.set(worker_key("evil"), record)

        for words in ("queues", "workers", "workers q --running"):
            assert command(*words.split()).code == 0
