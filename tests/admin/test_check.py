"""`Admin.check` reports each kind of broken queue in the model, and repairs it without guessing."""

import json
import random
from pathlib import Path

import pytest
from handling import handle_all
from transition import run_transition

from reliq import Admin, Layout, OutgoingMessage, Queue
from reliq.admin.check import check_ids

HOUR = 3600


@pytest.fixture
def queue(url, layout, client, claim):
    """A queue with messages in every state: waiting, due, in flight, nacked, in retry, garbage, dead letter."""
    queue = Queue("q", bytes, url=url, layout=layout)
    for place in ("over", "dead", "retried", "held", "nacked"):
        queue.publish(b"body", id=place, retries=0 if place in ("over", "dead") else 3)
        [one] = claim(queue, lease_ms=1 if place == "retried" else HOUR * 1000)
        if place in ("over", "dead"):
            run_transition(queue, "nack", [(one, 0, "rejected 1 x", b"body")])
        elif place == "nacked":
            run_transition(queue, "nack", [(one, HOUR * 1000, "failed 1 x", b"")])
        elif place == "retried":
            later = (client.time()[0] + 2) * 1_000_000
            assert run_transition(queue, "reclaim", clock=later).overdue == ("retried",)
    run_transition(queue, "collect", ["dead"], dead_letter_limit=9, letters_ms=10**12)
    queue.publish_many([OutgoingMessage(body=b"body", id=f"ready-{n}") for n in range(3)])
    queue.publish_many([OutgoingMessage(body=b"body", id=f"late-{n}", delay=HOUR) for n in range(3)])
    yield queue
    queue.close()


@pytest.fixture
def check(url, layout):
    """Check the queue; return the faults by name."""
    admin = Admin(url, layout=layout)

    def make(**options):
        report = admin.check("q", patience=0, **options)
        assert report.unproved == 0
        return {fault.name: fault for fault in report.faults}

    return make


def names(faults):
    """Return the faults without `account`: breaking a queue by hand changes its account, and Go keeps no account."""
    return set(faults) - {"account"}


def looked_at(queue, client, id, **options):
    """Return the script's reply about an id."""
    call = check_ids(queue.keys, [id], part="both", **options)
    return call.read(client.execute_command(*call.command_in_full))[1][0]


def state(queue, client, id):
    """Return the states of an id, and its retry count."""
    found = looked_at(queue, client, id)
    at = {0: "pending", 1: "unack", 2: "garbage", 8: "ready", 9: "retry"}
    return [name for part, name in at.items() if found[part] not in (b"", 0)], found[3].decode()


def test_sound_queue_has_no_faults(queue, url, layout):
    report = Admin(url, layout=layout).check("q")

    assert (report.faults, report.is_sound, report.looked_at) == ((), True, 10)


#: Name -> how the test breaks the queue, the fault and the id that are reported, and the states after the repair.
BREAKS = {
    "ready and unack": (lambda c, k: c.lpush(k.ready, "held"), "twice", "held", ["unack"]),
    "ready twice": (lambda c, k: c.lpush(k.ready, "ready-1"), "twice", "ready-1", ["ready"]),
    "ready and retry": (lambda c, k: c.lpush(k.ready, "retried"), "twice", "retried", ["retry"]),
    "pending and unack": (lambda c, k: c.zadd(k.pending, {"nacked": 2e9}), "twice", "nacked", ["unack"]),
    "pending and ready": (lambda c, k: c.zadd(k.pending, {"ready-0": 2e9}), "twice", "ready-0", ["ready"]),
    "garbage and ready": (lambda c, k: c.sadd(k.garbage, "ready-0"), "twice", "ready-0", ["ready"]),
    "garbage and pending": (lambda c, k: c.zadd(k.pending, {"over": 2e9}), "twice", "over", ["garbage"]),
    "no count in a list": (lambda c, k: c.hdel(k.retries_left, "ready-2"), "no-count", "ready-2", ["ready"]),
    "a count that is text": (lambda c, k: c.hset(k.retries_left, "late-0", "many"), "bad-count", "late-0", ["pending"]),
    "a count below 0": (lambda c, k: c.hset(k.retries_left, "ready-0", "-1"), "bad-count", "ready-0", ["ready"]),
    "a count at the end": (lambda c, k: c.hset(k.retries_left, "over", "3"), "ended-count", "over", ["garbage"]),
    "a count of nobody": (lambda c, k: c.hset(k.retries_left, "ghost", "3"), "stray-count", "ghost", []),
    "a word of nobody": (lambda c, k: c.hset(k.lease, "ghost", "suspect"), "stray-word", "ghost", []),
    "an error of nobody": (lambda c, k: c.hset(k.errors, "ghost", "failed 1 x"), "stray-error", "ghost", []),
    "a body of nobody": (lambda c, k: c.set(k.msg("ghost"), "body"), "stray-body", "ghost", []),
    "a nonce in a list": (lambda c, k: c.hset(k.lease, "ready-0", "l.1:9"), "wrong-word", "ready-0", ["ready"]),
    "a nonce of a pending": (lambda c, k: c.hset(k.lease, "late-0", "l.1:9"), "wrong-word", "late-0", ["pending"]),
    "a list's word in unack": (lambda c, k: c.hset(k.lease, "held", "@170"), "wrong-word", "held", ["unack"]),
    "a word at the end": (lambda c, k: c.hset(k.lease, "over", "suspect"), "wrong-word", "over", ["garbage"]),
    "due never": (lambda c, k: c.zadd(k.unack, {"nacked": "inf"}), "wrong-time", "nacked", ["unack"]),
    "a lease for ever": (lambda c, k: c.zadd(k.unack, {"held": 1.9e9}), "wrong-time", "held", ["unack"]),
    "no body of a pending": (lambda c, k: c.delete(k.msg("late-1")), "no-body", "late-1", []),
    "no body of a nacked": (lambda c, k: c.delete(k.msg("nacked")), "no-body", "nacked", []),
    "no body in a list": (lambda c, k: c.delete(k.msg("ready-1")), "no-body", "ready-1", ["ready"]),
    "a strange body": (lambda c, k: c.delete(key := k.msg("late-1")) + c.sadd(key, "x"), "strange-body", "late-1", []),
    "taken out of ready": (lambda c, k: c.lrem(k.ready, 0, "ready-1"), "lost", "ready-1", ["ready"]),
    "taken out of pending": (lambda c, k: c.zrem(k.pending, "late-2"), "lost", "late-2", ["pending"]),
    "taken out of unack": (lambda c, k: c.zrem(k.unack, "held"), "lost", "held", ["ready"]),
}
#: Without an envelope, a check cannot restore the state of these messages.
DEAD_WHEN_BARE = {"lost"}


@pytest.mark.parametrize("how", BREAKS)
def test_each_fault_is_reported_and_repaired(how, queue, check, client, layout):
    hand, fault, id, places = BREAKS[how]
    hand(client, queue.keys)

    told = check()
    mended = check(repair=True)

    assert names(told) == {fault}
    assert (told[fault].count, told[fault].examples, told[fault].mended) == (1, (id,), 0)
    left_alone = how == "no body in a list"
    assert mended[fault].mended == (0 if left_alone else 1)
    gone_to_the_dead = layout.bare and fault in DEAD_WHEN_BARE
    now_at, left = state(queue, client, id)
    assert now_at == ([] if gone_to_the_dead else places)
    assert left == "0" or fault not in ("no-count", "bad-count"), "one more delivery"
    assert {name for name, fault in check().items() if not fault.passes and name != "account"} == set()
    if fault == "stray-body":
        letter = queue.dead_letters()[-1]
        assert (letter.id, letter.payload, letter.reason) == ("ghost", b"body", "lost")
    elif not layout.bare and fault != "stray-count":
        assert "account" not in check(), "what was mended is counted"


@pytest.mark.parametrize(
    "name", ["pending", "ready", "unack", "retry", "garbage", "retries_left", "lease", "errors", "dead"]
)
def test_redis_key_of_another_type_is_put_aside_and_its_messages_are_restored(name, queue, check, client):
    key = getattr(queue.keys, name)
    client.delete(key)
    client.set(key, "not ours")

    told = check()
    mended = check(repair=True)

    assert told["wrong-type"].examples[0].startswith(f"{key} is a string, not a")
    assert mended["wrong-type"].mended == 1
    assert [client.get(one) for one in client.keys(f"*:aside:*:{name}")] == [b"not ours"]
    assert names(check()) <= {"no-word"}


def test_wrong_due_time_is_repaired_from_the_envelope_or_makes_a_dead_letter(url, client):
    ours, bare = (Queue("q", bytes, url=url, layout=one) for one in (Layout.RELIQ, Layout.hdt3213()))
    due = ours.publish(b"body", id="m", delay=HOUR).due
    bare.publish(b"body", id="m", delay=HOUR)
    for queue in (ours, bare):
        client.zadd(queue.keys.pending, {"m": "inf"})

        [fault] = Admin(url, layout=queue.keys.layout).check("q", repair=True, patience=0).faults
        assert (fault.name, fault.mended) == ("wrong-time", 1)

    assert client.zscore(ours.keys.pending, "m") == due
    assert [(one.id, one.reason) for one in bare.dead_letters()] == [("m", "lost")]


def test_messages_of_a_deleted_list_are_handled_or_cancelled_after_a_repair(url, client):
    queue = Queue("q", int, url=url)
    queue.publish_many(range(600))
    queue.publish(600, id="cancelled")
    queue.cancel("cancelled")
    client.delete(queue.keys.ready)

    report = Admin(url).check("q", repair=True)

    mended = {(fault.name, fault.count, fault.mended) for fault in report.faults}
    assert mended == {("lost", 600, 600), ("stray-count", 1, 1)}  # the count belongs to the cancelled message
    assert report.is_sound
    assert sorted(handle_all(queue)) == list(range(600))
    assert (queue.counts().totals["cancelled"], queue.counts().missing) == (1, 0)


def test_account_that_does_not_add_up_and_total_that_is_no_count_are_kept(url, client):
    queue = Queue("q", bytes, url=url)
    queue.publish(b"body")
    client.hincrby(queue.keys.totals, "published", 2)

    report = Admin(url).check("q", repair=True)

    [fault] = report.faults
    assert (fault.name, fault.count, fault.mended, fault.examples) == ("account", 2, 0, ("2 too few",))
    assert not report.is_sound
    for total in ("many", "-5"):
        client.hset(queue.keys.totals, "acked", total)

        [fault] = Admin(url).check("q", repair=True).faults

        assert (fault.name, fault.examples, fault.mended) == ("bad-total", ("acked",), 0)
        assert client.hget(queue.keys.totals, "acked") == total.encode()


def test_missing_body_and_foreign_lease_are_reported_as_passing(url, client):
    queue = Queue("q", bytes, url=url)
    queue.publish(b"body", id="expired")
    queue.publish(b"body", id="held")
    client.delete(queue.keys.msg("expired"))
    client.rpop(queue.keys.ready)
    run_transition(queue, "promote")
    client.lpush(queue.keys.ready, "expired")
    client.lrem(queue.keys.ready, 0, "held")
    client.zadd(queue.keys.unack, {"held": client.time()[0] + 60})

    report = Admin(url).check("q")

    assert [(fault.name, fault.passes) for fault in report.faults] == [("no-body", True), ("no-word", True)]
    assert report.is_sound


def test_check_without_repair_writes_nothing(queue, check, client):
    for hand, *_ in BREAKS.values():
        hand(client, queue.keys)
    before = {key: client.dump(key) for key in client.scan_iter()}

    check()
    assert {key: client.dump(key) for key in client.scan_iter()} == before

    check(repair=True)
    check(repair=True)
    assert names(check()) <= {"no-body", "no-word"}, "everything that was broken at once is repaired"


def test_message_that_changed_since_the_look_is_not_repaired(queue, client):
    seen = looked_at(queue, client, "ready-0")[-1]
    client.hset(queue.keys.retries_left, "ready-0", "7")
    wish = {"ready-0": (seen, "", 0, "", "", "dead", "lost - x")}

    answer = looked_at(queue, client, "ready-0", wishes=wish)

    assert answer == b"changed"
    assert state(queue, client, "ready-0") == (["ready"], "7")


def break_at_random(client, keys, chance, id):
    """Write random data of one id into the queue's Redis keys."""
    for key in (keys.pending, keys.unack):
        if chance.random() < 0.3:
            client.zadd(key, {id: chance.choice(("inf", "-inf", 0, 5, 1.8e9, 1.9e9, 1.8e12))})
    for key in (keys.ready, keys.retry):
        if chance.random() < 0.3:
            client.lpush(key, *[id] * chance.choice((1, 1, 3)))
    if chance.random() < 0.2:
        client.sadd(keys.garbage, id)
    if chance.random() < 0.5:
        client.hset(keys.retries_left, id, chance.choice(("0", "3", "-1", "x", "1e3")))
    if chance.random() < 0.5:
        words = ("a.1:500", "a.1:500!", "nacked", "suspect", "!", "@1800000000000?", "?")
        client.hset(keys.lease, id, chance.choice(words))
    if chance.random() < 0.3:
        client.hset(keys.errors, id, "failed 1 x")
    if chance.random() < 0.6:
        head = chance.choice((b"", b'RELIQ/1 {"d":1800000000000,"r":3}\n', b'RELIQ/1 {"d":5}\n', b'RELIQ/1 {"d":'))
        client.set(keys.msg(id), head + b"body")


@pytest.mark.parametrize("seed", range(2), ids="seed {}".format)
def test_random_corruption_is_repaired(seed, queue, check, client):
    chance = random.Random(seed)
    for number in range(300):
        break_at_random(client, queue.keys, chance, f"x-{number}")

    told, mended = check(), check(repair=True)

    assert len(names(told)) > 8
    assert {name: told[name].count for name in names(told)} == {name: mended[name].count for name in names(mended)}
    assert all(fault.mended == fault.count for fault in mended.values() if not fault.passes and fault.name != "account")
    assert {name for name, fault in check().items() if not fault.passes and name != "account"} == set()


def test_recorded_queues_of_the_go_original_are_sound(client, url):
    recorded = json.loads((Path(__file__).parents[1] / "scripts/hdt3213-keyspaces.json").read_text("utf-8"))["cases"]
    writes = {"string": client.set, "zset": client.zadd, "list": lambda key, ids: client.rpush(key, *ids)}
    writes["hash"] = lambda key, fields: client.hset(key, mapping=fields)
    for name, case in recorded.items():
        if keys := case["keys"]:
            client.flushall()
            for key, held in keys.items():
                writes[held["type"]](key, held["value"])
            tagged = any(key.startswith("{") for key in keys)
            layout = Layout.hdt3213(hash_tag=tagged, prefix="acme" if "custom" in name else "dp")

            report = Admin(url, layout=layout).check("orders")

            assert (report.faults, report.looked_at) == ((), sum(":msg:" in key for key in keys)), name


def test_check_prints_faults_and_exits_1_until_the_queue_is_repaired(command, url, client):
    Queue("orders", bytes, url=url).publish(b"body", id="m")
    client.delete("{reliq:orders}:ready")
    client.hset("{reliq:orders}:lease", "ghost", "suspect")

    told = command("check", "orders")
    assert (told.code, "stray-word" in told.out) == (1, True)
    assert told.out.endswith("orders: 2 ids looked at; the queue is NOT sound.\n")
    mended = command("check", "orders", "--repair", "--json")
    assert mended.code == 0
    assert {(fault["name"], fault["mended"]) for fault in mended.json["faults"]} == {("lost", 1), ("stray-word", 1)}
    assert command("check", "orders") == (0, "orders: 1 id looked at; the queue is sound.\n", "")


def test_check_looks_twice_at_a_faulty_queue_that_go_may_share(command, url, client, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    for layout, waited in (("reliq", []), ("hdt3213", [5.0])):
        queue = Queue("orders", bytes, url=url, layout=Layout.parse(layout))
        queue.publish(b"body", id="m")
        client.hset(queue.keys.retries_left, "m", "x")

        done = command("check", "orders", "--layout", layout)

        assert (done.code, waits, "bad-count" in done.out) == (1, waited, True)
