"""The layout of the Go original: reliq takes over its Redis keys, and the original can read reliq's."""

import json
from pathlib import Path

import pytest
from held_clock import HOUR_MS

from reliq.keys import Keys, Layout
from reliq.lua import transitions as t
from reliq.message import BARE, Delivery

RECORDED = json.loads(Path(__file__).with_name("hdt3213-keyspaces.json").read_text("utf-8"))["cases"]
TAGGED = Layout.hdt3213(hash_tag=True)
LAYOUTS = dict.fromkeys(RECORDED, TAGGED) | {
    "published_default": Layout.hdt3213(),
    "published_custom_prefix": Layout.hdt3213(prefix="acme"),
}
#: Seconds after which all recorded messages are due.
DUE_AFTER = dict.fromkeys(RECORDED, 0) | {"in_flight": 29, "nacked_with_delay": 59}
#: Retries left of the messages of a recording.
LEFT = {"published_default": {3, 5}, "in_flight": {2}, "nacked_with_delay": {2}, "nacked_waiting_retry": {8}}
DAY = 86_400

pytestmark = pytest.mark.foreign_hands


@pytest.fixture
def restore(client):
    """Write the recorded Redis content; return the time of the recording in whole unix seconds."""

    def load(name):
        for key, held in RECORDED[name]["keys"].items():
            value = held["value"]
            match held["type"]:
                case "string":
                    client.set(key, value)
                case "zset":
                    client.zadd(key, value)
                case "hash":
                    client.hset(key, mapping=value)
                case "list":
                    client.rpush(key, *value)
            if held["pttl_ms"]:
                client.pexpire(key, held["pttl_ms"])
        return RECORDED[name]["redis_time_ms"] // 1000

    return load


@pytest.fixture
def drain(run, client):
    """Promote, reclaim, claim and ack all due messages at a unix second; return bodies with their retries left."""

    def make(keys, second, number):
        clock = second * 1_000_000
        run(t.promote(keys, clock=clock))
        run(t.reclaim(keys, clock=clock))
        claimed = run(t.claim(keys, t.CallNumber("w", number), limit=9, lease_ms=1000, clock=clock)).claimed
        bodies = client.mget([keys.msg(one.id) for one in claimed]) if claimed else []
        assert run(t.ack(keys, [(one, None) for one in claimed], clock=clock)).lost == ()
        return {body.decode(): one.left for body, one in zip(bodies, claimed, strict=True)}

    return make


def recorded_bodies(name):
    return {held["value"] for key, held in RECORDED[name]["keys"].items() if ":msg:" in key}


@pytest.mark.parametrize("name", RECORDED)
def test_each_message_of_the_original_is_taken_when_it_is_due_and_not_before(name, restore, drain, client):
    keys = Keys("orders", LAYOUTS[name])
    now, bodies = restore(name), recorded_bodies(name)
    later = {body for body in bodies if body.startswith("later")}

    early = drain(keys, now + DUE_AFTER[name] - 1, number=1)
    in_time = drain(keys, now + DUE_AFTER[name], number=2)
    at_last = drain(keys, now + HOUR_MS // 1000 + 1, number=3)

    assert early == {} or name == "nacked_waiting_retry"
    assert (early.keys() | in_time.keys(), at_last.keys()) == (bodies - later, later)
    assert {*(early | in_time | at_last).values()} == LEFT.get(name, {*(early | in_time | at_last).values()})
    ours = {keys.totals, keys.wake, keys.watch, keys.token, keys.lane("w")}
    assert {key.decode() for key in client.keys("*")} <= ours


def test_messages_of_the_original_keep_the_order_of_its_lists(restore, run):
    keys = Keys("orders", TAGGED)
    now = restore("nacked_waiting_retry")
    recorded = RECORDED["nacked_waiting_retry"]["keys"][keys.retry]["value"]

    claimed = run(t.claim(keys, t.CallNumber("w", 1), limit=9, lease_ms=1, clock=now * 1_000_000)).claimed

    assert [one.id for one in claimed] == recorded[::-1]


def test_a_message_of_the_original_can_be_cancelled_nacked_and_rescheduled(restore, run, client):
    keys = Keys("orders", LAYOUTS["published_default"])
    now = restore("published_default") * 1_000_000
    by_body = {client.get(keys.msg(id.decode())): id.decode() for id in client.zrange(keys.pending, 0, -1)}

    assert run(t.cancel(keys, [by_body[b"now-1"]], clock=now)) == ["cancelled"]
    assert run(t.reschedule(keys, [by_body[b"later-0"]], delay_ms=0, clock=now)) == ["rescheduled"]
    run(t.promote(keys, clock=now))
    claimed = run(t.claim(keys, t.CallNumber("w", 1), limit=9, lease_ms=1, clock=now)).claimed
    assert {one.id for one in claimed} == {by_body[b"now-0"], by_body[b"later-0"]}
    assert run(t.nack(keys, [(one, 0, "failed - x", b"") for one in claimed], clock=now)).lost == ()
    assert set(run(t.reclaim(keys, clock=now)).again) == {one.id for one in claimed}


@pytest.mark.parametrize("spare_leases", [False, True], ids=["all", "sparing leases"])
@pytest.mark.parametrize("name", ["in_flight", "nacked_with_delay"])
def test_a_message_that_the_original_leased_or_nacked_is_no_suspect_and_not_spared(name, spare_leases, restore, run):
    """As suspects, 600 messages nacked by Go took 44.7 s instead of 2.0: each ran alone."""
    keys = Keys("orders", TAGGED)
    clock = (restore(name) + DAY) * 1_000_000

    taken = run(t.reclaim(keys, spare_leases=spare_leases, clock=clock)).overdue
    options = {"limit": 9, "lease_ms": 1, "suspects": t.Suspects(9, 9, 9), "clock": clock}
    claimed = run(t.claim(keys, t.CallNumber("w", 1), **options)).claimed

    assert [(one.id, one.deaths) for one in claimed] == [(id, 0) for id in taken]
    assert len(taken) == 2


def test_a_cancel_looks_through_a_bounded_piece_of_a_long_list(run, client):
    keys = Keys("orders", TAGGED)
    client.rpush(keys.ready, *(f"m{number}" for number in range(1000)))
    client.hset(keys.retries_left, mapping={f"m{number}": 3 for number in range(1000)})
    some = [f"m{number}" for number in range(300, 800)]  # each may be searched among 200 from either end

    assert set(run(t.cancel(keys, some))) == {"cancelled"}

    assert client.llen(keys.ready) == 1000
    assert run(t.claim(keys, t.CallNumber("w", 1), limit=500, lease_ms=1)).behind == 500


def test_an_empty_body_that_is_rejected_becomes_a_dead_letter(restore, run, client):
    keys = Keys("orders", TAGGED)
    clock = restore("nacked_waiting_retry") * 1_000_000
    (one,) = run(t.claim(keys, t.CallNumber("w", 1), limit=1, lease_ms=1, clock=clock)).claimed
    client.set(keys.msg(one.id), "")
    failure = t.failure(Delivery(one, b"", BARE, b""), "rejected", "no", 0, final=True)

    assert run(t.nack(keys, [failure], clock=clock)).lost == ()

    assert run(t.collect(keys, [one.id], dead_letter_limit=9, letters_ms=10**12)) == ((one.id,), ())


# ---- reliq's keys read by Go ---------------------------------------------------


@pytest.fixture(params=["published_default", "published_hash_tag", "published_custom_prefix"])
def published(request, run, client):
    """Publish the recorded case with reliq; return the case, its keys, and the recorded Redis content."""
    keys = Keys("orders", LAYOUTS[request.param])
    case = RECORDED[request.param]["keys"]
    clock = RECORDED[request.param]["redis_time_ms"] * 1000
    bodies = sorted(recorded_bodies(request.param))
    options = {"ttl_ms": HOUR_MS, "bare": True, "clock": clock}
    for number, body in enumerate(bodies, 1):
        delay = {"delay_ms": HOUR_MS, "retries": 5} if body.startswith("later") else {"delay_ms": 1, "retries": 3}
        run(t.publish(keys, [(f"id-{body}", body.encode())], t.CallNumber("p", number), **delay, **options))
    return case, keys


def test_reliq_leaves_keys_types_bodies_counts_and_due_times_as_the_original_does(published, client):
    case, keys = published
    names = {key: held["type"].encode() for key, held in case.items() if ":msg:" not in key}
    ids = {key.rsplit(":", 1)[1]: held["value"] for key, held in case.items() if ":msg:" in key}
    names |= {keys.msg(f"id-{body}"): b"string" for body in ids.values()}

    left = {key.decode(): client.type(key) for key in client.keys("*")}
    assert {key: left.get(key) for key in names} == names
    assert left.keys() - names.keys() <= {keys.totals, keys.wake, keys.token, keys.lane("p")}

    for id, body in ids.items():
        key = keys.msg(f"id-{body}")
        assert client.get(key) == body.encode()
        assert abs(client.pttl(key) - case[keys.msg(id)]["pttl_ms"]) < 30_000
        assert client.hget(keys.retries_left, f"id-{body}") == case[keys.retries_left]["value"][id].encode()
        assert abs(client.zscore(keys.pending, f"id-{body}") - case[keys.pending]["value"][id]) < 1.1
