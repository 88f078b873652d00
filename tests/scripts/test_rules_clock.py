"""Rule 2: nothing is ever early, not by a microsecond; and scores stay unix seconds with three decimals."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq import transitions as t
from reliq.wireformat import open_envelope


@pytest.mark.parametrize(("us", "due_ms"), [(0, 100), (1, 101), (999, 101), (1000, 101)])
def test_a_delayed_message_is_due_no_earlier_than_its_delay(us, due_ms, publish, client, keys, due):
    answer = publish("m", delay_ms=100, clock=micros(us=us))

    assert answer.due_ms == millis(due_ms)
    assert due(keys.pending, "m") == millis(due_ms)
    assert open_envelope(client.get(keys.msg("m")))[0].due == millis(due_ms)


def test_a_message_without_delay_is_due_in_the_past(publish, where):
    answer = publish("m", clock=micros(us=999))

    assert answer.due_ms == millis()
    assert where() == {"ready": ["m"]}


@pytest.mark.parametrize(("at", "place"), [(millis(-1), "ready"), (millis(), "ready"), (millis(1), "pending")])
def test_a_message_for_a_moment_that_has_come_is_ready_at_once(at, place, publish, where):
    publish("m", at_ms=at, clock=micros(us=1))

    assert where() == {place: ["m"]}


def test_scores_are_unix_seconds_with_milliseconds_as_decimals(publish, client, keys):
    publish("m", delay_ms=1)

    assert client.execute_command("ZRANGE", keys.pending, 0, -1, "WITHSCORES")[0][1] == 1_800_000_000.001


@pytest.mark.parametrize(("us", "moved"), [(-1, 0), (0, 1), (1, 1)])
def test_promote_moves_a_message_at_its_due_time_and_not_before(us, moved, publish, run, keys, where):
    publish("m", delay_ms=100)

    count, wait = run(t.promote(keys, clock=micros(100, us)))

    assert (count, wait) == ((1, -1) if moved else (0, 1))
    assert where() == {"ready" if moved else "pending": ["m"]}


def test_promote_moves_the_longest_due_first(publish, run, keys, where):
    for id, delay in ("third", 3), ("first", 1), ("second", 2), ("later", 5):
        publish(id, delay_ms=delay)

    assert run(t.promote(keys, clock=micros(4))) == (3, 1)

    assert where() == {"ready": ["first", "second", "third"], "pending": ["later"]}


@pytest.mark.parametrize(("us", "deadline"), [(0, 100), (1, 101), (999, 101)])
def test_a_lease_is_no_shorter_than_asked(us, deadline, publish, claim, keys, due):
    publish("m")

    claim(lease_ms=100, clock=micros(us=us))

    assert due(keys.unack, "m") == millis(deadline)


@pytest.mark.parametrize(("us", "taken"), [(-1, False), (0, True), (1, True)])
def test_reclaim_takes_a_lease_that_has_ended_and_no_other(us, taken, publish, claim, run, keys, where):
    publish("m")
    claim(lease_ms=100)

    answer = run(t.reclaim(keys, clock=micros(100, us)))

    assert (answer.overdue, answer.next_in_ms) == ((("m",), -1) if taken else ((), 1))
    assert where() == {"retry" if taken else "unack": ["m"]}


@pytest.mark.parametrize(("us", "deadline"), [(0, 100), (1, 101)])
def test_an_extension_is_no_shorter_than_asked(us, deadline, publish, claim, run, keys, due):
    publish("m")

    run(t.extend(keys, claim(lease_ms=5), lease_ms=100, clock=micros(us=us)))

    assert due(keys.unack, "m") == millis(deadline)


@pytest.mark.parametrize(("us", "due_ms"), [(0, 100), (1, 101)])
def test_a_nacked_message_comes_back_no_earlier_than_its_delay(us, due_ms, publish, claim, run, keys, due):
    publish("m")
    (held,) = claim()

    run(t.nack(keys, [(held, 100, "failed 1 x", b"")], clock=micros(us=us)))

    assert due(keys.unack, "m") == millis(due_ms)
    assert run(t.reclaim(keys, clock=micros(due_ms, us=-1))).count == 0
    assert run(t.reclaim(keys, clock=micros(due_ms))).again == ("m",)


@pytest.mark.parametrize(("us", "due_ms"), [(0, 100), (1, 101)])
def test_a_snoozed_message_comes_back_no_earlier_than_its_delay(us, due_ms, publish, claim, run, keys, due):
    publish("m")
    (held,) = claim()

    run(t.snooze(keys, [(held, 100)], clock=micros(us=us)))

    assert due(keys.pending, "m") == millis(due_ms)


@pytest.mark.parametrize(("us", "due_ms"), [(0, 100), (1, 101)])
def test_a_redriven_message_comes_no_earlier_than_its_delay(us, due_ms, die, run, keys, due):
    letter = die("m")

    run(t.redrive(keys, [(letter, "m", 3)], ttl_ms=1000, delay_ms=100, clock=micros(us=us)))

    assert due(keys.pending, "m") == millis(due_ms)


@pytest.mark.parametrize(("us", "due_ms"), [(0, 100), (1, 101)])
def test_a_rescheduled_message_comes_no_earlier_than_its_delay(us, due_ms, publish, run, keys, due):
    publish("m", delay_ms=5)

    run(t.reschedule(keys, ["m"], delay_ms=100, clock=micros(us=us)))

    assert due(keys.pending, "m") == millis(due_ms)


def test_without_a_given_clock_a_script_asks_redis(run, keys, client, due):
    seconds, us = client.time()
    before = seconds * 1_000_000 + us

    run(t.publish(keys, [("m", b"x")], t.CallNumber("p", 1), ttl_ms=1000, retries=1, delay_ms=50))

    seconds, us = client.time()
    assert before <= due(keys.pending, "m") * 1000 - 50_000 <= seconds * 1_000_000 + us + 1000


def near(client, key, ms):
    """Whether `key` lives about `ms` longer, by the server's own clock."""
    return ms - 30_000 < client.pttl(key) <= ms


def test_a_body_lives_for_its_ttl_after_its_due_time(publish, client, keys):
    publish("soon", ttl_ms=HOUR_MS)
    publish("later", ttl_ms=HOUR_MS, delay_ms=2 * HOUR_MS)
    publish("dated", ttl_ms=HOUR_MS, at_ms=millis(4 * HOUR_MS))

    assert near(client, keys.msg("soon"), HOUR_MS)
    assert near(client, keys.msg("later"), 3 * HOUR_MS)
    assert near(client, keys.msg("dated"), 5 * HOUR_MS)


@pytest.mark.parametrize("verb", ["nack", "snooze", "reschedule"])
def test_putting_a_message_off_moves_its_ttl_and_its_header_on(verb, publish, claim, run, client, keys):
    publish("m", delay_ms=0)
    (held,) = claim()
    calls = {
        "nack": t.nack(keys, [(held, HOUR_MS, "failed 1 x", b"")], clock=NOON),
        "snooze": t.snooze(keys, [(held, HOUR_MS)], clock=NOON),
        "reschedule": t.reschedule(keys, ["m"], delay_ms=HOUR_MS, clock=NOON),
    }
    if verb == "reschedule":
        run(t.nack(keys, [(held, 0, "failed 1 x", b"")], clock=NOON))

    run(calls[verb])

    header, payload = open_envelope(client.get(keys.msg("m")))
    assert (header.due, header.retries, payload) == (millis(HOUR_MS), 3, b"m")
    assert near(client, keys.msg("m"), 2 * HOUR_MS)


def test_a_redriven_message_gets_a_ttl_and_a_header_of_its_own(die, run, client, keys):
    letter = die("m")

    run(t.redrive(keys, [(letter, "m", 7)], ttl_ms=HOUR_MS, delay_ms=HOUR_MS, clock=NOON))

    assert open_envelope(client.get(keys.msg("m")))[0].due == millis(HOUR_MS)
    assert near(client, keys.msg("m"), 2 * HOUR_MS)


def test_a_bare_body_is_never_written_into(run, claim, client, keys):
    run(t.publish(keys, [("m", b"bare")], t.CallNumber("p", 1), ttl_ms=HOUR_MS, retries=3, bare=True, clock=NOON))
    (held,) = claim()

    run(t.snooze(keys, [(held, HOUR_MS)], clock=NOON))

    assert client.get(keys.msg("m")) == b"bare"
    assert near(client, keys.msg("m"), 2 * HOUR_MS)
