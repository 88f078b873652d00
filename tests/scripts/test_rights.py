"""Least rights of each role: they allow its scripts, and the headers list exactly the commands that scripts run."""

import contextlib
from dataclasses import replace

import pytest
import redis
from cutting import ONLY_READ, Snapshot, run_by
from every_call import LATER, daily_tick, keyed_queue, stage
from every_script import KEYED, ONCE as BY_NAME
from held_clock import HOUR_MS, NOON
from sending import send

from reliq.admin.acl import SCRIPTS, acl_rule, rights
from reliq.admin.check import check_ids, check_keys
from reliq.lua import transitions as t
from reliq.settings import INLINE_BYTES

pytestmark = pytest.mark.foreign_hands


#: Ids of dead letters contain the server's time: a time in microseconds that the server has not reached.
FAR = 4_000_000_000_000_000


@pytest.fixture
def calls(run, client, keys):
    """Return calls by script: the staged calls, and more where one call does not cover all paths of its script."""
    calls = {name: [call] for name, call in stage(run, client, keys).items()}
    client.lpush(keys.ready, "of-go")
    client.hset(keys.retries_left, "of-go", 3)
    cancel = t.cancel(keys, ["of-go"], tombstone_ms=5)
    calls["cancel"].append(replace(cancel, args=(cancel.args[0], "1", *cancel.args[2:])))  # for a bare body
    calls["publish"] += [*calls["publish"], *_publishes(client, keys)]  # the first call is repeated
    calls["claim"].append(t.claim(keys, t.CallNumber("w", 99), limit=10, lease_ms=1000, watcher="me", clock=LATER))
    client.set(keys.msg("large"), "x" * 2 * INLINE_BYTES)
    calls["bodies"].append(t.bodies(keys, ["large", "ready"], max_body=1000))
    calls["collect"].append(t.collect(keys, ["gone"], dead_letter_limit=2, letters_ms=1, clock=FAR))
    calls["purge"] += [
        t.purge(keys, [id], state=state) for id, state in (("no", "pending"), ("no", "ready"), ("in-retry", "retry"))
    ]
    calls["check"] += _mendings(run, client, keys)
    calls["check_keys"] += _mendings_of_keys(client, keys)
    letter = client.xadd(keys.dead, {"id": "x", "value": b'RELIQ/1 {"d":1,"r":1}\n', "note": "failed 1 x"}).decode()
    calls["redrive"].append(t.redrive(keys, [(letter, "x", 1)], ttl_ms=HOUR_MS))
    calls["redrive"].append(t.redrive(keys, [("1-1", "no", 1)], ttl_ms=1, fence="8 8 4"))
    value = b'RELIQ/1 {"d":1800000000000,"r":1,"k":"e"}\nbody'
    letter = client.xadd(keys.dead, {"id": "k-died", "value": value, "note": "failed 1 x"}).decode()
    calls["redrive"].append(t.redrive(keys, [(letter, "k-died", 1)], ttl_ms=HOUR_MS, fence="99 8 4"))
    calls["purge"].append(t.purge(keyed_queue(keys), ["k-waiting"], state="line", line="c"))
    calls["promote (keyed)"].append(t.promote(keys, clock=LATER))
    calls["claim (keyed)"].append(
        replace(calls["claim (keyed)"][0], args=(LATER, 100, *calls["claim (keyed)"][0].args[2:]))
    )
    client.hset(keys.lease, "in-garbage", "suspect")
    calls["ask"].append(t.ask(keys, ["again"], fence="9 8 4"))
    third = keys.of_shard(2)
    run(t.publish(third, [("empty", b"body")], t.CallNumber("p", 1), ttl_ms=9, retries=1))
    client.delete(third.msg("empty"))
    calls["depart"].append(t.depart(third, ["empty"], state="ready"))
    calls["key_queues"], calls["sleep"] = _of_keys(client, keys)
    client.zadd(keys.held, {"tenant\0of-another": 0})
    calls["status"].append(t.status(keys, "unknown"))
    calls["held_up"] = [t.held_up(keys, most=9, of=["a"])]
    client.hset(keys.cron, "daily asked", 7)
    sooner = daily_tick(2, due_ms=NOON // 1000 + 1)
    calls["tick"] += [t.tick(keys, one, ttl_ms=1, retries=1, clock=NOON) for one in (sooner, daily_tick(3, asked=7))]
    calls["plan"].append(
        t.plan(keyed_queue(keys), "write", "late", revision="c", next=10**10, line="p", value=b"x", clock=NOON)
    )
    calls["plan"].append(calls["plan"][0])
    calls["plan"] += [t.plan(keys, verb, "new", revision="b2", next=10**10) for verb in ("pause", "resume", "delete")]
    calls["plan_tick"].append(t.plan_tick(keys, [t.PlanTick("plan.no.1", "no", "a", "1", "")]))
    for name in KEYED:
        calls[name.partition(" ")[0]] += calls.pop(name)
    return calls


def _of_keys(client, keys):
    """Return calls that read the queues of one key and of the largest keys, and that put a key to sleep and wake it."""
    client.hset(keys.limits, mapping={"on": 1, "per_key": 2, "rate_us": 5, "burst": 9, "weighted": 1})
    client.hset(keys.limits, mapping={"concurrency": 9, "weight:tenant": 2, "walk": "0 0"})
    client.lpush(keys.line("tenant"), "of-tenant")
    client.zadd(keys.ring, {"tenant": 1, "other": 2})
    spans = (60_000, 0, None, 0)
    return [t.key_queues(keys), t.key_queues(keys, of=["a"])], [t.sleep(keys, "tenant", for_ms=one) for one in spans]


def _publishes(client, keys):
    """Publish: immediately, with the earliest due time, and again an id that is cancelled in its list."""
    client.lpush(keys.ready, "again")
    client.hset(keys.retries_left, "again", 3)
    client.hset(keys.lease, "again", "!")
    kinds = [("now", {}), ("sooner", {"delay_ms": 1}), ("again", {"delay_ms": 1, "window_ms": 9, "fence": "7 8 4"})]
    return [
        t.publish(keys, [(id, b',"r":3}\nbody')], t.CallNumber("p", 100 + at), ttl_ms=HOUR_MS, retries=3, **options)
        for at, (id, options) in enumerate(kinds)
    ]


def _mendings(run, client, keys):
    """Repair: an id twice in a list, an id in garbage and ready, and a body without a message."""
    client.lpush(keys.ready, "twice", "twice", "both")
    client.sadd(keys.garbage, "both")
    client.set(keys.msg("stray"), "body")
    client.lpush(keys.line("mended"), "in-line", "in-line")
    client.hset(keys.retries_left, mapping={"in-line": "3 mended", "in-no-line": "3 mended"})
    wishes = {"twice": ("ready", 0, "0", "=", "", ""), "both": ("unack", 2**40, "=", "", "", "")}
    wishes |= {"stray": ("", 0, "", "", "dead", "lost - x"), "nowhere": ("retry", 0, "=", "=", "", "")}
    wishes |= dict.fromkeys(("in-line", "in-no-line"), ("line", 0, "=", "=", "", ""))
    ids = list(wishes)
    _, rows = run(check_ids(keys, ids, part="both"))
    digests = {id: row[-1] for id, row in zip(ids, rows, strict=True)}
    wishes = {id: (digests[id], *wish) for id, wish in wishes.items()}
    pieces = [
        check_ids(keys, ids, part=part, piece=(0, 9), lines={"in-line": "mended"})
        for part in ("ready", "retry", "line")
    ]
    return [check_ids(keys, ids, part="both", wishes=wishes), *pieces]


def _mendings_of_keys(client, keys):
    """Repair: places without a message; keys without a turn, turns without a key, and keys that sleep too long."""
    client.hset(keys.retries_left, "extended", "3 a")
    client.hset(keys.limits, "per_key", 2)
    client.zadd(keys.held, {"a\0stray": 0})
    client.lpush(keys.line("stuck"), "waits")
    client.zadd(keys.ring, {"gone": 1})
    client.zadd(keys.asleep, {"late": 1e15})
    items = [("a", "stray"), ("a", "extended"), ("stuck", ""), ("gone", ""), ("late", "")]
    return [check_keys(keys, items, repair=True)]


@pytest.fixture
def play(client, keys, url):
    """Run the calls of a role as a user with its rights; return the refused commands."""

    def make(role, calls):
        is_new = int(client.info("server")["redis_version"].split(".")[0]) >= 7
        rule = acl_rule([role], [keys, keyed_queue(keys), keys.of_shard(1)], user="actor", selectors=is_new)
        client.execute_command("ACL", "SETUSER", "actor", "reset", *rule.rules, "on", ">secret")
        client.acl_log_reset()
        with redis.Redis.from_url(url, username="actor", password="secret") as actor:
            for call in calls:
                with contextlib.suppress(redis.ResponseError):
                    send(actor, call)
        client.execute_command("ACL", "DELUSER", "actor")
        return {one["object"] for one in client.acl_log() if not one["object"].startswith("client")}

    return make


#: Commands that the calls above do not reach; both commands of redrive on `msg` are in a shared helper that it skips.
UNREACHED = {
    "ack": (
        "asleep:ZREM ends:XADD errors:HMGET limits:HGET rates:ZADD rates:ZREM ready:EXISTS retries_left:HGET "
        "retry:EXISTS ring:ZADD"
    ),
    "arrive": (
        "dead:XADD errors:HSET lease:HSET pending:ZADD pending:ZRANGE retry:LPUSH unack:ZADD unack:ZRANGE watch:DEL "
        "windows:HSET"
    ),
    "cancel": (
        "asleep:ZMSCORE limits:HGET line:EXISTS ready:EXISTS retry:EXISTS retry:LPOS retry:LREM ring:ZADD ring:ZRANGE"
    ),
    "check": "dedup:SET errors:HMGET pending:ZADD pending:ZRANGE ready:LPUSH retry:LREM",
    "checkpoint": "lease:HSET msg:SETRANGE",
    "claim": (
        "asleep:ZADD asleep:ZMSCORE held:ZREM line:EXISTS line:LPUSH pending:ZADD rates:ZRANGEBYSCORE rates:ZREM "
        "ready:LPUSH retry:EXISTS retry:LPUSH ring:EXISTS wake:LTRIM"
    ),
    "depart": (
        "dead:XDEL dead:XRANGE ends:XADD errors:HDEL errors:HMGET retry:LRANGE retry:LTRIM totals:HINCRBY unack:ZSCORE"
    ),
    "extend": "lease:HSET",
    "forget": " ".join(sorted(f"{key}:UNLINK" for command, key in BY_NAME["forget"].uses if command == "UNLINK")),
    "leave": (
        "ends:XADD errors:HMGET lease:HSET pending:ZADD pending:ZRANGE ready:LPUSH retry:LPUSH unack:ZADD "
        "unack:ZRANGE wake:LPUSH watch:DEL"
    ),
    "limit": (
        "asleep:ZADD asleep:ZREM asleep:ZSCORE held:ZLEXCOUNT limits:HGET rates:ZADD rates:ZSCORE ring:ZADD wake:LPUSH"
    ),
    "nack": (
        "held:ZADD limits:HGET msg:SET rates:ZADD rates:ZREM ready:EXISTS retries_left:HGET retry:EXISTS "
        "ring:ZADD watch:DEL"
    ),
    "promote": "asleep:ZADD asleep:ZREM held:ZREM limits:HSET line:RPUSH rates:ZADD retry:EXISTS ring:EXISTS",
    "publish": "lease:HSET",
    "purge": "ready:EXISTS retry:EXISTS ring:ZREM",
    "reclaim": (
        "ends:XADD errors:HDEL garbage:SADD held:ZADD lease:HDEL msg:GETRANGE msg:PERSIST ready:EXISTS "
        "retries_left:HDEL retry:EXISTS unack:ZADD"
    ),
    "redrive": "msg:PEXPIRE msg:PTTL watch:DEL",
    "release": (
        "lease:HSET limits:HGET line:EXISTS rates:ZADD rates:ZREM ready:EXISTS retries_left:HGET retry:EXISTS ring:ZADD"
    ),
    "remap": "map:GET map:SET",
    "replace": "dedup:DEL dedup:PTTL epoch:SET lane:PEXPIRE ready:EXISTS retry:EXISTS watch:DEL",
    "reschedule": "wake:LPUSH watch:DEL",
    "snooze": (
        "held:ZADD limits:HGET rates:ZADD rates:ZREM ready:EXISTS retries_left:HGET retry:EXISTS ring:ZADD watch:DEL"
    ),
    "succeed": (
        "history:XADD pending:ZADD pending:ZRANGE rates:ZADD rates:ZREM ready:EXISTS retries_left:HGET "
        "retry:EXISTS watch:DEL"
    ),
    "tidy": "errors:HDEL held:ZSCORE lease:HDEL rates:ZREM retries_left:HDEL",
}


def named(uses):
    return " ".join(sorted(f"{key}:{command}" for command, key in uses))


def test_scripts_run_the_commands_of_their_headers_and_no_others(calls, client):
    state, undeclared, unreached = Snapshot(client), {}, {}
    for name in BY_NAME:
        state.put_back()
        uses = BY_NAME[name].uses
        ran = {use for call in calls[name] for use in run_by(client, call)} | {("TIME", "")}
        undeclared |= {name: named(ran - uses)} if ran - uses else {}
        unreached |= {name: named(uses - ran)} if uses - ran else {}

    assert undeclared == {}
    assert unreached == UNREACHED


@pytest.mark.parametrize("role", SCRIPTS)
def test_a_role_may_run_its_scripts(role, calls, play):
    assert play(role, [call for name in SCRIPTS[role].split() for call in calls[name]]) == set()


def test_a_viewer_has_no_right_to_change_anything():
    assert rights("viewer").keys() - ONLY_READ == {"INFO", "SCAN", "TIME"}


def test_a_viewer_may_run_each_script_that_reads_and_may_repair_nothing(calls, play, client):
    looks = [
        call
        for name in ("counts", "check", "key_queues")
        for call in calls[name]
        if call.script.name != "check" or not any(call.args[6::9])
    ]
    before = {key: client.dump(key) for key in client.scan_iter()}

    assert play("viewer", looks) == set()
    assert play("viewer", calls["check"] + calls["check_keys"]) & {"zrem", "lrem", "srem", "zadd", "del"}
    assert {key: client.dump(key) for key in client.scan_iter()} == before
