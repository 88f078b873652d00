"""Rule 2: nothing is ever early, not by a microsecond; and scores stay unix seconds with three decimals."""

from held_clock import HOUR_MS, NOON, micros, millis

from reliq import transitions as t


def test_a_message_for_a_moment_that_has_come_is_ready_at_once(publish, where):
    for id, at_ms in (("past", millis(-1)), ("now", millis()), ("later", millis(1))):
        publish(id, at_ms=at_ms, clock=micros(us=1))

    assert publish("at once", clock=micros(us=999)).due_ms == millis()
    assert where() == {"ready": ["past", "now", "at once"], "pending": ["later"]}


# ---- how long bodies last -------------------------------------------------------


def near(client, key, ms):
    """Whether `key` lives about `ms` longer, by the server's own clock."""
    return ms - 30_000 < client.pttl(key) <= ms


def test_a_bare_body_is_never_written_into(run, claim, client, keys):
    run(t.publish(keys, [("m", b"bare")], t.CallNumber("p", 1), ttl_ms=HOUR_MS, retries=3, bare=True, clock=NOON))
    (held,) = claim()

    run(t.snooze(keys, [(held, HOUR_MS)], clock=NOON))

    assert client.get(keys.msg("m")) == b"bare"
    assert near(client, keys.msg("m"), 2 * HOUR_MS)
