"""Redis keeps the last ended messages: failures always, acked messages if set; each stream has its own cap."""

import pytest
from held_clock import NOON

from reliq.lua import transitions as t


@pytest.fixture
def remembered(client, keys):
    """Return the remembered ends, the oldest first: id, kind and note."""

    def look(stream=None):
        rows = client.xrange(stream or keys.ends)
        return [tuple(end[name].decode() for name in (b"id", b"kind", b"note")) for _, end in rows]

    return look


def test_history_has_the_last_acked_messages_and_how_long_they_ran(publish, claim, run, client, keys, remembered):
    publish("a", "b", "c", "d", "off")
    run(t.cancel(keys, ["off"]))
    a, b, c, d = claim()

    run(t.ack(keys, [(a, None)]))
    assert client.exists(keys.history) == 0
    run(t.ack(keys, [(a, None), (b, None), (c, None)], history=2, took_ms=[10, 20, 30]))
    assert remembered(keys.history) == [("b", "acked", "20"), ("c", "acked", "30")]
    run(t.ack(keys, [(d, None)], history=2))

    assert remembered(keys.history) == [("c", "acked", "30"), ("d", "acked", "")]
    assert remembered() == [("off", "cancelled", "")]


def test_abnormal_ends_are_kept_with_the_last_error(publish, claim, die, nack, run, keys, remembered):
    die("dead")
    publish("expired", "backoff")
    nack(*claim(), note="failed 1 boom")
    run(t.reclaim(keys, clock=NOON))
    backoff, expired = sorted(claim(), key=lambda one: one.id)
    run(t.ack(keys, [(expired, None)], kind="expired"))
    nack(backoff, delay_ms=60_000, note="failed 2 boom")
    run(t.cancel(keys, ["backoff"]))
    publish("purged", "revived", window_ms=1000)
    run(t.purge(keys, ["purged"], state="ready"))
    run(t.cancel(keys, ["revived"]))
    publish("revived", window_ms=1000, replace=True)
    publish("delayed", delay_ms=5)
    run(t.cancel(keys, ["delayed"]))

    assert remembered() == [
        ("dead", "dead", "rejected 1 bad card"),
        ("expired", "expired", "failed 1 boom"),
        ("backoff", "cancelled", "failed 2 boom"),
        ("purged", "purged", ""),
        ("revived", "cancelled", ""),
        ("delayed", "cancelled", ""),
    ]


def test_the_last_thousand_ends_are_remembered_and_no_more(publish, run, keys, remembered):
    for start in (0, 500, 1000):
        ids = [f"m{number}" for number in range(start, start + 500)]
        publish(*ids, delay_ms=1)
        run(t.cancel(keys, ids))

    assert [id for id, _, _ in remembered()] == [f"m{number}" for number in range(500, 1500)]
