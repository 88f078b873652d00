"""Rules 3 and 7: the work of a call is bounded, one message is a list of one, and an empty list is no work."""

import pytest
from held_clock import micros

from reliq.admin.check import check_ids
from reliq.errors import ConfigurationError
from reliq.lua import transitions as t
from reliq.message import Claimed

MANY = [f"m{number:03}" for number in range(500)]


@pytest.fixture
def held(publish, claim):
    publish(*MANY)
    return claim(limit=500)


def test_five_hundred_are_settled_at_once_in_order(held, run, keys, where, claim, client):
    assert [one.id for one in held] == MANY
    assert run(t.extend(keys, held, lease_ms=1000)).lost == ()
    assert run(t.release(keys, held)).lost == ()
    assert where() == {"ready": MANY}

    assert run(t.snooze(keys, [(one, 5) for one in claim(limit=500)], clock=micros())).lost == ()
    assert run(t.promote(keys, clock=micros(5))) == (500, -1)
    assert where() == {"ready": MANY}

    assert run(t.nack(keys, [(one, 0, "failed 1 x", b"") for one in claim(limit=500)], clock=micros())).lost == ()
    assert run(t.reclaim(keys, clock=micros())).again == tuple(MANY)
    assert where() == {"retry": MANY}

    assert run(t.nack(keys, [(one, 0, "rejected 1 x", b"v") for one in claim(limit=500)])).lost == ()
    assert run(t.collect(keys, MANY, dead_letter_limit=1000, letters_ms=10**12)) == (tuple(MANY), ())
    letters = [(name.decode(), fields[b"id"].decode(), 3) for name, fields in client.xrange(keys.dead)]
    assert run(t.redrive(keys, letters, ttl_ms=10_000)) == ["redriven"] * 500
    assert where() == {"ready": MANY}

    assert run(t.ack(keys, [(one, 1000) for one in claim(limit=500)])).lost == ()
    assert client.keys(keys.msg("*")) == client.hkeys(keys.lease) == client.hkeys(keys.retries_left) == []


def test_five_hundred_delayed_messages_are_rescheduled_and_cancelled_at_once(publish, run, keys, where):
    publish(*MANY, delay_ms=1000)

    assert run(t.reschedule(keys, MANY, delay_ms=2000, clock=micros())) == ["rescheduled"] * 500
    assert run(t.cancel(keys, MANY)) == ["cancelled"] * 500

    assert where() == {}


@pytest.mark.usefixtures("held")
def test_five_hundred_suspects_and_five_hundred_cancelled_are_met_in_one_claim(claim, run, keys, where):
    run(t.reclaim(keys, clock=micros(30_000)))
    assert claim(limit=500, suspects=t.Suspects(16, 8, 8)) == []
    assert where() == {"retry": MANY}

    run(t.cancel(keys, MANY))
    assert claim(limit=500) == []
    assert where() == {}


@pytest.mark.parametrize("state", ["pending", "ready", "retry", "garbage"])
def test_five_hundred_are_purged_at_once(state, publish, claim, run, keys, where, client):
    publish(*MANY, delay_ms=1 if state == "pending" else 0)
    if state == "retry":
        claim(limit=500)
        run(t.reclaim(keys, clock=micros(30_000)))
    if state == "garbage":
        run(t.nack(keys, [(one, 0, "rejected 1 x", b"v") for one in claim(limit=500)]))
    assert where() == {state: MANY}

    assert run(t.purge(keys, MANY, state=state)) == 500

    assert where() == {}
    assert client.keys(keys.msg("*")) == client.hkeys(keys.retries_left) == []


def test_a_call_about_nothing_and_a_chore_with_nothing_due_change_nothing(publish, claim, run, keys, dump):
    publish("m", "held")
    claim(limit=1)
    publish("later", delay_ms=100)
    before = dump()
    options = {"extend": {"lease_ms": 1}, "collect": {"dead_letter_limit": 9, "letters_ms": 10**12}}

    for verb in ("ack", "nack", "extend", "release", "snooze", "cancel", "reschedule", "collect"):
        run(getattr(t, verb)(keys, [], **options.get(verb, {})))
        assert dump() == before, verb
    for verb in ("promote", "reclaim", "tidy"):
        run(getattr(t, verb)(keys, clock=micros(1)))
        assert dump() == before, verb


TOO_MANY = [f"m{number}" for number in range(501)]
HELD = [Claimed(id, "w.1:5", 1) for id in TOO_MANY]
TURN = t.CallNumber("w", 1)
OF_TOO_MANY = {
    "publish": lambda keys: t.publish(keys, [(id, b"x") for id in TOO_MANY], TURN, ttl_ms=1, retries=1),
    "promote": lambda keys: t.promote(keys, limit=501),
    "claim": lambda keys: t.claim(keys, TURN, limit=501, lease_ms=1),
    "reclaim": lambda keys: t.reclaim(keys, limit=501),
    "ack": lambda keys: t.ack(keys, [(one, None) for one in HELD]),
    "nack": lambda keys: t.nack(keys, [(one, 0, "failed 1 x", b"") for one in HELD]),
    "extend": lambda keys: t.extend(keys, HELD, lease_ms=1),
    "release": lambda keys: t.release(keys, HELD),
    "snooze": lambda keys: t.snooze(keys, [(one, 0) for one in HELD]),
    "cancel": lambda keys: t.cancel(keys, TOO_MANY),
    "reschedule": lambda keys: t.reschedule(keys, TOO_MANY),
    "collect": lambda keys: t.collect(keys, TOO_MANY, dead_letter_limit=1, letters_ms=1),
    "redrive": lambda keys: t.redrive(keys, [("0-1", id, 1) for id in TOO_MANY], ttl_ms=1),
    "purge": lambda keys: t.purge(keys, TOO_MANY, state="ready"),
    "check": lambda keys: check_ids(keys, TOO_MANY),
}
OF_A_TIME = {
    "claim": lambda keys, ms: t.claim(keys, TURN, limit=1, lease_ms=ms),
    "extend": lambda keys, ms: t.extend(keys, HELD[:1], lease_ms=ms or -1),
    "cancel": lambda keys, ms: t.cancel(keys, ["m"], tombstone_ms=ms),
}


@pytest.mark.parametrize("name", OF_TOO_MANY)
def test_a_call_takes_five_hundred_and_no_more(name, keys):
    with pytest.raises(ConfigurationError, match="must be [01] to 500, not 501"):
        OF_TOO_MANY[name](keys)


@pytest.mark.parametrize("name", OF_A_TIME)
def test_a_time_that_redis_would_refuse_is_refused_before_it_is_sent(name, keys):
    for ms in (0, -1, 10**13):
        with pytest.raises(ConfigurationError, match="_ms must be [01] to"):
            OF_A_TIME[name](keys, ms)
