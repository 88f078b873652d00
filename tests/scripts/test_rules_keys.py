"""Rules 1 and 4: a script touches its KEYS only, checks them before it writes, and can drain a queue at maxmemory."""

import pytest
import redis
from cutting import Snapshot
from every_call import LATER, stage
from every_script import NAMES, OF_LIMITS, SCRIPTS, TRANSITIONS

from reliq.keys import Keys
from reliq.lua import transitions as t

#: Error texts of Redis 6.2 and 7.0.
OOM = r"OOM|maxmemory"
#: Scripts that add data, and may be refused at maxmemory.
ADDING = {
    "publish",
    "publish (keyed)",
    "replace",
    "replace (keyed)",
    "ask",
    "remap",
    "register",
    "tick",
    "limit",
    "sleep",
    "depart",
    "arrive",
}
ADDING |= {"plan", "plan_tick", "plan_tick (keyed)"}
#: Keys that are written last and whose type does not matter.
LATE = ("totals", "ends", "history", "minutes", "windows")
#: Keys that are overwritten, whatever their type.
ANY_TYPE = ("watch", "paused")
#: Prefixes of the names of key queues, bodies and results.
STARTS = tuple(
    start for keys in (Keys("q"), Keys("q-keyed")) for start in (keys.line_start, keys.msg_start, keys.result_start)
)
CHECKED = {
    (name, key)
    for name in NAMES
    for key in SCRIPTS[name].keys
    if key not in (*LATE, *ANY_TYPE, "line", "msg", "result")
}
#: Without limits, a script does not read the additional keys of queues with keys.
CHECKED -= {(name, key) for name, one in TRANSITIONS.items() for key in one.keyed_keys}
#: Some keys are read only for an id that is taken or was cancelled; `forget` deletes keys of any type.
CHECKED -= {
    *(("publish", "unack"), ("publish (keyed)", "unack"), ("publish (keyed)", "pending"), ("publish (keyed)", "map")),
    *(("ask", "unack"), ("plan", "map"), ("claim", "errors"), ("replace (keyed)", "map")),
    *(("forget", key) for key in ("cron", "plans", "plans_due", "token", "map", "epoch", *OF_LIMITS)),
}


@pytest.fixture
def calls(run, client, keys):
    return stage(run, client, keys)


@pytest.fixture
def answers(client, reply):
    """Run each call from the same state; return Redis' replies, including errors."""

    def make(calls, make=reply):
        state, found = Snapshot(client), {}
        for name, call in calls.items():
            state.put_back()
            try:
                found[name] = repr(call.read(make(call)))
            except redis.ResponseError as error:
                found[name] = str(error)
        state.put_back()
        return found

    return make


def test_a_user_who_may_touch_only_the_declared_keys_can_run_each_script(calls, answers, limited):
    def as_limited(call):
        given = [f"{key}*" if key in STARTS else key for key in call.keys]
        return limited(call, keys=given)

    assert answers(calls, as_limited) == answers(calls)


@pytest.mark.parametrize("command", ["GET", "SISMEMBER", "HEXISTS", "HLEN", "LLEN"])
def test_a_read_that_is_refused_is_named_and_nothing_is_changed(command, keys, limited, dump):
    chosen = t.publish(
        keys, [("mine", b"body")], t.CallNumber("lane", 1), ttl_ms=1000, retries=3, window_ms=1000, bare=True
    )
    before = dump()

    with pytest.raises(redis.ResponseError, match=command):
        limited(chosen, without=command)

    assert dump() == before


@pytest.mark.foreign_hands
def test_a_key_of_the_wrong_type_is_named_and_nothing_is_changed(calls, reply, client, keys, dump):
    wrong = {}
    for name, key in sorted(CHECKED):
        call = calls[name]
        if (name, key) == ("publish", "ready"):  # the staged message is due later
            call = t.publish(keys, [("new", b"body")], t.CallNumber("p", 99), ttl_ms=1000, retries=1, clock=LATER)
        broken = call.keys[SCRIPTS[name].keys.index(key)]
        value = client.dump(broken)
        client.delete(broken)
        is_string = key in ("lane", "epoch", "map", "token")
        client.sadd(broken, "x") if is_string else client.set(broken, "x")
        before = dump()
        try:
            answer = repr(reply(call))
        except redis.ResponseError as error:
            answer = str(error)
        if "WRONGTYPE" not in answer or broken not in answer or dump() != before:
            wrong[name, key] = answer
        client.delete(broken)
        if value:
            client.restore(broken, 0, value)

    assert wrong == {}


@pytest.mark.foreign_hands
@pytest.mark.parametrize("key", ["totals", "ends", "history"])
def test_totals_and_ends_of_the_wrong_type_never_stop_a_transition(key, calls, answers, client, keys):
    calls = {name: call for name, call in calls.items() if key in SCRIPTS[name].keys and "keyed" not in name}
    calls.pop("counts", None)
    expected = answers(calls)
    client.set(getattr(keys, key), "of another type")

    assert answers(calls) == expected
    assert client.get(getattr(keys, key)) == b"of another type"


@pytest.mark.foreign_hands
def test_a_marker_of_the_wrong_type_does_not_stop_a_cancel_half_way(run, publish, client, keys, where):
    publish("first", delay_ms=1)
    client.sadd(keys.dedup("second"), "x")

    assert run(t.cancel(keys, ["first", "second"])) == ["cancelled", "not_found"]

    assert where() == {}


# ---- no memory left -------------------------------------------------------------


@pytest.fixture
def full(client):
    """Let Redis have no memory left and evict nothing."""
    client.config_set("maxmemory-policy", "noeviction")
    yield lambda most=1: client.config_set("maxmemory", most)
    client.config_set("maxmemory", 0)


def test_at_maxmemory_a_publish_is_refused_also_of_nothing_new_and_writes_nothing(full, publish, dump):
    publish("m", window_ms=1000)
    before = dump()
    full()

    for id in ("m", "new"):
        with pytest.raises(redis.ResponseError, match=OOM):
            publish(id, window_ms=1000)

    assert dump() == before


def test_at_maxmemory_each_script_that_drains_goes_on(full, calls, answers, reply):
    def when_full(call):
        full()
        try:
            return reply(call)
        finally:
            full(0)

    draining = {name: call for name, call in calls.items() if name not in ADDING}

    assert answers(draining, when_full) == answers(draining)


@pytest.mark.parametrize("watcher", ["", "me"], ids=["no watcher", "a watcher"])
def test_at_maxmemory_a_claim_that_finds_nothing_is_not_refused(watcher, full, run, keys):
    full()
    for number, limit in enumerate((0, 10), 1):
        turn = t.CallNumber("w", number)
        assert run(t.claim(keys, turn, limit=limit, lease_ms=1000, watcher=watcher, clock=LATER)).claimed == []
