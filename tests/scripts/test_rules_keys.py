"""Rules 1 and 4: a script touches its KEYS alone, checks them before it writes, and drains at maxmemory."""

import pytest
import redis
from every_call import LATER, stage
from every_script import NAMES, OF_LIMITS, SCRIPTS

from reliq import transitions as t
from reliq.keys import Keys

#: In the words of 6.2, and of 7.0.
OOM = r"OOM|maxmemory"
READERS = {"bodies", "counts", "held_up", "lines"}
#: They drain nothing, and may be refused at maxmemory.
ADDING = {"publish", "publish (keyed)", "ask", "remap", "register", "tick", "limit", "sleep", "depart", "arrive"}
WRITERS = [name for name in NAMES if name not in READERS]
#: Written late and never in the way.
LATE = ("totals", "ends", "history", "minutes", "windows")
#: Of any type they are written anew.
ANY_TYPE = ("watch", "paused")
#: What the names of lines, of which there is one for each key of a message, and of bodies begin with.
STARTS = tuple(start for keys in (Keys("q"), Keys("q-keyed")) for start in (keys.line_start, keys.msg_start))
CHECKED = {(name, key) for name in NAMES for key in SCRIPTS[name].keys if key not in (*LATE, *ANY_TYPE, "line", "msg")}
#: The first are read for an id that is taken or was cancelled, and not else; the others go with the queue, whatever they
#: are.
CHECKED -= {
    ("publish", "unack"),
    ("publish (keyed)", "unack"),
    ("publish (keyed)", "pending"),
    ("ask", "unack"),
    ("claim", "errors"),
    ("forget", "cron"),
    ("forget", "token"),
    ("forget", "map"),
    ("forget", "epoch"),
    *(("forget", key) for key in OF_LIMITS),
}


@pytest.fixture
def calls(run, client, keys):
    return stage(run, client, keys)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_changes_no_key_that_it_was_not_given(name, calls, run, client, dump):
    stage(run, client, Keys("other"))
    before = dump()

    run(calls[name])

    after = dump()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    given = set(calls[name].keys)
    starts = tuple(given.intersection(STARTS)) or " "
    assert {key for key in changed if not key.startswith(starts)} <= given
    assert changed or name in (*READERS, "forget")  # it removes nothing of a queue that has messages


@pytest.mark.parametrize("name", NAMES)
def test_a_user_who_may_touch_only_the_declared_keys_can_run_a_script(name, calls, client, url):
    call = calls[name]
    given = [f"{key}*" if key in STARTS else key for key in call.keys]
    client.acl_setuser("keys-only", enabled=True, nopass=True, reset=True, categories=["+@all"], keys=given)

    with redis.Redis.from_url(url, username="keys-only", password="any") as limited:
        answer = limited.execute_command(*call.command_in_full)

    client.acl_deluser("keys-only")
    assert repr(call.read(answer))


@pytest.mark.foreign_hands
@pytest.mark.parametrize(("name", "key"), sorted(CHECKED))
def test_a_key_of_the_wrong_type_is_named_and_nothing_is_changed(name, key, calls, reply, client, keys, dump):
    call = calls[name]
    if (name, key) == ("publish", "ready"):  # the staged one is due later
        call = t.publish(keys, [("new", b"body")], t.CallNumber("p", 99), ttl_ms=1000, retries=1, clock=LATER)
    broken = call.keys[SCRIPTS[name].keys.index(key)]
    client.delete(broken)
    if key in ("lane", "epoch", "map", "token"):  # strings
        client.sadd(broken, "x")
    else:
        client.set(broken, "x")
    before = dump()

    with pytest.raises(redis.ResponseError, match="WRONGTYPE") as failure:
        reply(call)

    assert broken in str(failure.value)
    assert dump() == before


@pytest.fixture
def expected(run, client):
    """What a script answers where nothing is wrong: in a twin of the queue."""
    twin = stage(run, client, Keys("twin"))
    return lambda name: run(twin[name])


@pytest.mark.foreign_hands
@pytest.mark.parametrize("name", [name for name in WRITERS if "totals" in SCRIPTS[name].keys])
def test_totals_of_the_wrong_type_never_stop_a_transition(name, calls, expected, run, client, keys):
    client.set(keys.totals, "not a hash")

    assert run(calls[name]) == expected(name)

    assert client.get(keys.totals) == b"not a hash"


@pytest.mark.parametrize("name", [name for name in WRITERS if "ends" in SCRIPTS[name].keys])
def test_ends_that_cannot_be_noted_never_stop_a_transition(name, calls, expected, run, client, keys):
    for key in (keys.ends, keys.history):
        client.set(key, "not a stream")

    assert run(calls[name]) == expected(name)

    assert client.get(keys.ends) == client.get(keys.history) == b"not a stream"


@pytest.mark.foreign_hands
@pytest.mark.parametrize("name", ["publish", "claim", "reclaim", "ack", "nack", "collect"])
def test_a_total_that_is_no_number_never_stops_a_transition(name, calls, run, client, keys):
    for kind in client.hkeys(keys.totals):
        client.hset(keys.totals, kind, "many")

    run(calls[name])

    assert set(client.hvals(keys.totals)) >= {b"many"}


@pytest.mark.foreign_hands
def test_a_marker_of_the_wrong_type_does_not_stop_a_cancel_half_way(run, publish, client, keys, where):
    publish("first", delay_ms=1)
    client.sadd(keys.dedup("second"), "x")

    assert run(t.cancel(keys, ["first", "second"])) == ["cancelled", "not_found"]

    assert where() == {}


@pytest.fixture
def full(client):
    """No memory left, and nothing may be evicted."""
    client.config_set("maxmemory-policy", "noeviction")
    yield lambda: client.config_set("maxmemory", 1)
    client.config_set("maxmemory", 0)


def test_at_maxmemory_a_publish_is_refused_and_writes_nothing(full, calls, reply, dump):
    before = dump()
    full()

    with pytest.raises(redis.ResponseError, match=OOM):
        reply(calls["publish"])

    assert dump() == before


def test_at_maxmemory_a_publish_of_nothing_new_is_refused_too(full, publish, dump):
    publish("m", window_ms=1000)
    before = dump()
    full()

    with pytest.raises(redis.ResponseError, match=OOM):
        publish("m", window_ms=1000)

    assert dump() == before


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ADDING])
def test_at_maxmemory_everything_that_drains_goes_on(name, full, calls, expected, run):
    answer = expected(name)
    full()

    assert run(calls[name]) == answer


@pytest.mark.parametrize("limit", [0, 10])
@pytest.mark.parametrize("watcher", ["", "me"])
def test_at_maxmemory_a_claim_that_finds_nothing_is_not_refused(limit, watcher, full, run, keys):
    full()

    answer = run(t.claim(keys, t.CallNumber("w", 1), limit=limit, lease_ms=1000, watcher=watcher, clock=LATER))

    assert answer.claimed == []


def test_at_maxmemory_a_queue_drains_to_nothing(full, publish, claim, run, where):
    publish("a", "b", "c")
    keys = Keys("q")
    full()

    first, second, third = claim()
    run(t.nack(keys, [(first, 0, "failed 1 x", b"")], clock=LATER))
    run(t.release(keys, [second]))
    run(t.extend(keys, [third], lease_ms=1000))
    run(t.reclaim(keys, clock=LATER))
    again = claim()
    run(t.ack(keys, [(third, 1000)], clock=LATER))
    run(t.ack(keys, [(one, None) for one in again], clock=LATER))

    assert where() == {}
