"""Rule 2: nothing is ever early, not by a microsecond; and scores stay unix seconds with three decimals."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq import transitions as t
from reliq.wireformat import open_envelope


@pytest.mark.parametrize(
    ("us", "due_ms"),
    [(0, 100), (1, 101), (999, 101), (1000, 101)],
    ids=lambda n: f"{n} us" if n < 100 or n > 101 else f"{n} ms",
)
def test_nothing_is_due_earlier_than_its_delay(us, due_ms, publish, claim, die, run, client, keys, due):
    clock = micros(us=us)
    letter = die("redriven")
    publish("nacked", "snoozed", "extended", "leased")
    publish("rescheduled", delay_ms=5)
    nacked, snoozed, extended = claim(limit=3, lease_ms=5)

    answer = publish("published", delay_ms=100, clock=clock)
    claim(lease_ms=100, clock=clock)
    run(t.extend(keys, [extended], lease_ms=100, clock=clock))
    run(t.nack(keys, [(nacked, 100, "failed 1 x", b"")], clock=clock))
    run(t.snooze(keys, [(snoozed, 100)], clock=clock))
    run(t.redrive(keys, [(letter, "redriven", 3)], ttl_ms=1000, delay_ms=100, clock=clock))
    run(t.reschedule(keys, ["rescheduled"], delay_ms=100, clock=clock))

    dues = {id: due(keys.unack, id) for id in ("leased", "extended", "nacked")}
    dues |= {id: due(keys.pending, id) for id in ("published", "snoozed", "redriven", "rescheduled")}
    assert dues == dict.fromkeys(dues, millis(due_ms))
    assert answer.due_ms == open_envelope(client.get(keys.msg("published")))[0].due == millis(due_ms)
    assert client.zscore(keys.pending, "published") == millis(due_ms) / 1000


def test_a_message_for_a_moment_that_has_come_is_ready_at_once(publish, where):
    for id, at_ms in (("past", millis(-1)), ("now", millis()), ("later", millis(1))):
        publish(id, at_ms=at_ms, clock=micros(us=1))

    assert publish("at once", clock=micros(us=999)).due_ms == millis()
    assert where() == {"ready": ["past", "now", "at once"], "pending": ["later"]}


@pytest.mark.parametrize("us", [-1, 0, 1], ids=lambda us: f"{us} us")
def test_messages_move_at_their_due_time_and_leases_end_then_and_not_before(us, publish, claim, run, keys, where):
    publish("leased", "nacked")
    _, nacked = claim(lease_ms=100)
    run(t.nack(keys, [(nacked, 100, "failed 1 x", b"")], clock=NOON))
    publish("delayed", delay_ms=100)

    moved, wait = run(t.promote(keys, clock=micros(100, us)))
    answer = run(t.reclaim(keys, clock=micros(100, us)))

    taken = us >= 0
    assert (moved, wait) == ((1, -1) if taken else (0, 1))
    assert (answer.overdue, answer.again) == ((("leased",), ("nacked",)) if taken else ((), ()))
    assert answer.next_in_ms == (-1 if taken else 1)
    assert [*where()] == (["ready", "retry"] if taken else ["pending", "unack"])


def test_without_a_given_clock_a_script_asks_redis(run, keys, client, due):
    seconds, us = client.time()
    before = seconds * 1_000_000 + us

    run(t.publish(keys, [("m", b"x")], t.CallNumber("p", 1), ttl_ms=1000, retries=1, delay_ms=50))

    seconds, us = client.time()
    assert before <= due(keys.pending, "m") * 1000 - 50_000 <= seconds * 1_000_000 + us + 1000


# ---- how long bodies last -------------------------------------------------------


def near(client, key, ms):
    """Whether `key` lives about `ms` longer, by the server's own clock."""
    return ms - 30_000 < client.pttl(key) <= ms


@pytest.mark.parametrize("verb", ["nack", "snooze", "reschedule", "redrive"])
def test_putting_a_message_off_moves_its_ttl_and_its_header_on(verb, publish, claim, die, run, client, keys):
    if verb == "redrive":
        call = t.redrive(keys, [(die("m"), "m", 3)], ttl_ms=HOUR_MS, delay_ms=HOUR_MS, clock=NOON)
    else:
        publish("m", delay_ms=0)
        (held,) = claim()
        call = {
            "nack": t.nack(keys, [(held, HOUR_MS, "failed 1 x", b"")], clock=NOON),
            "snooze": t.snooze(keys, [(held, HOUR_MS)], clock=NOON),
            "reschedule": t.reschedule(keys, ["m"], delay_ms=HOUR_MS, clock=NOON),
        }[verb]
        if verb == "reschedule":
            run(t.nack(keys, [(held, 0, "failed 1 x", b"")], clock=NOON))

    run(call)

    header, payload = open_envelope(client.get(keys.msg("m")))
    assert (header.due, header.retries, payload) == (millis(HOUR_MS), 3, b"m")
    assert near(client, keys.msg("m"), 2 * HOUR_MS)


def test_a_bare_body_is_never_written_into(run, claim, client, keys):
    run(t.publish(keys, [("m", b"bare")], t.CallNumber("p", 1), ttl_ms=HOUR_MS, retries=3, bare=True, clock=NOON))
    (held,) = claim()

    run(t.snooze(keys, [(held, HOUR_MS)], clock=NOON))

    assert client.get(keys.msg("m")) == b"bare"
    assert near(client, keys.msg("m"), 2 * HOUR_MS)
