"""`Admin.check` of a queue with keys: messages in the wrong list, stuck keys, places without a message."""

from secrets import token_hex

import pytest
from transition import run_transition

from reliq import Admin, Queue
from reliq.lua import transitions as t
from reliq.wire_format import envelope_rest

HOUR_MS = 3_600_000
FOR_EVER = float("inf")


@pytest.fixture
def queue(url):
    """Three keys: A has one message in flight and three waiting, B two waiting, C one in flight."""
    queue = Queue("q", bytes, url=url)
    publish(queue, "A", "a-held")
    publish(queue, "C", "c-held")
    assert {one.id for one in claim(queue)} == {"a-held", "c-held"}
    publish(queue, "A", "a-1", "a-2", "a-3")
    publish(queue, "B", "b-1", "b-2")
    yield queue
    queue.close()


def call_number():
    return t.CallNumber(f"lane-{token_hex(4)}", 1)


def publish(queue, key, *ids):
    items = [(id, envelope_rest(3, 1, None) + b"body") for id in ids]
    run_transition(queue, "publish", items, call_number(), ttl_ms=HOUR_MS, retries=3, message_keys=[key] * len(ids))


def claim(queue, limit=500):
    number = call_number()
    return run_transition(queue, "claim", number, limit=limit, lease_ms=HOUR_MS).claimed


@pytest.fixture
def check(url):
    admin = Admin(url)
    return lambda **options: {fault.name: fault for fault in admin.check("q", **options).faults}


def line(client, queue, key):
    return [id.decode() for id in client.lrange(queue.keys.line(key), 0, -1)][::-1]


def test_sound_queue_with_keys_has_no_faults(queue, check, url, client):
    client.zadd(queue.keys.asleep, {"B": FOR_EVER})  # paused without an end
    client.zrem(queue.keys.ring, "B")

    assert check(repair=True) == {}
    assert Admin(url).check("q").looked_at == 7
    assert client.zscore(queue.keys.asleep, "B") == FOR_EVER


#: Name -> how the test breaks the queue, the fault and its subject, and the key queue after the repair.
BREAKS = {
    "no turn for a line": (lambda c, k: c.zrem(k.ring, "B"), "stuck-key", "B", ("B", ["b-1", "b-2"])),
    "a turn without a line": (lambda c, k: c.zadd(k.ring, {"D": 1}), "stray-turn", "D", ("D", [])),
    "a place of nobody": (lambda c, k: c.zadd(k.held, {"B\0ghost": 0}), "stray-place", "ghost", ("B", ["b-1", "b-2"])),
    "a place under another key": (
        lambda c, k: c.zadd(k.held, {"B\0a-held": 0}), "stray-place", "a-held", ("B", ["b-1", "b-2"]),
    ),
    "a place of what waits": (lambda c, k: c.zadd(k.held, {"B\0b-1": 0}), "stray-place", "b-1", ("B", ["b-1", "b-2"])),
    "a place that nobody keeps": (lambda c, k: c.zadd(k.held, {"\2\0a-held": 0}), "stray-place", "a-held", ("C", [])),
    "a lease without a place": (lambda c, k: c.zrem(k.held, "C\0c-held"), "no-place", "c-held", ("C", [])),
    "asleep until a time that is none": (
        lambda c, k: c.zadd(k.asleep, {"B": 1e15}) + c.zrem(k.ring, "B"), "long-sleep", "B", ("B", ["b-1", "b-2"]),
    ),
    "held and in the line": (lambda c, k: c.lpush(k.line("C"), "c-held"), "twice", "c-held", ("C", [])),
    "in the line and in ready": (lambda c, k: c.lpush(k.ready, "b-2"), "twice", "b-2", ("B", ["b-1", "b-2"])),
    "in two lines": (lambda c, k: c.lpush(k.line("A"), "b-2"), "twice", "b-2", ("B", ["b-1", "b-2"])),
    "in no line": (lambda c, k: c.lrem(k.line("B"), 1, "b-1"), "lost", "b-1", ("B", ["b-2", "b-1"])),
    "in ready": (
        lambda c, k: c.lrem(k.line("B"), 1, "b-1") + c.lpush(k.ready, "b-1"), "misplaced", "b-1", ("B", ["b-2", "b-1"]),
    ),
    "in the line of another key": (
        lambda c, k: c.lrem(k.line("B"), 1, "b-1") + c.lpush(k.line("A"), "b-1"),
        "misplaced", "b-1", ("B", ["b-2", "b-1"]),
    ),
    "a count that is none": (lambda c, k: c.hset(k.retries_left, "b-1", "x B"), "bad-count", "b-1", ("B", ["b-1", "b-2"])),
}  # fmt: skip


@pytest.mark.parametrize("how", BREAKS)
def test_each_fault_of_a_queue_with_keys_is_reported_and_repaired(how, queue, check, client):
    hand, fault, named, (key, waits) = BREAKS[how]
    hand(client, queue.keys)

    told, mended, after = check(), check(repair=True), check()

    assert told.keys() <= {fault, "stuck-key", "misplaced", "account"}
    assert named in told[fault].examples
    assert mended[fault].mended == mended[fault].count
    assert after == {}
    assert line(client, queue, key) == waits
    assert {one.id for one in claim(queue)} == {"a-1", "a-2", "a-3", "b-1", "b-2"}


def test_check_reads_a_long_key_queue_and_many_key_queues_in_pieces(queue, check, url, client):
    for part in range(3):
        publish(queue, "long", *(f"long-{part}-{number}" for number in range(400)))
    for number in range(300):
        publish(queue, f"key-{number}", f"of-{number}")

    assert check() == {}
    assert Admin(url).check("q").looked_at == 1507
