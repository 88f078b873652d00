"""`Admin.check`: a queue broken in every way that the model names is told, and mended without guessing."""

import json
import random
from pathlib import Path

import pytest

from reliq import Admin, ConfigurationError, Layout, Outgoing, Queue, transitions as t
from reliq.admin.fsck.ids import check_ids

TAGGED, PLAIN = Layout.hdt3213(hash_tag=True), Layout.hdt3213()
HOUR = 3600


@pytest.fixture(params=[Layout.RELIQ, TAGGED, PLAIN], ids=str)
def layout(request):
    return request.param


@pytest.fixture
def queue(url, layout, client):
    """A queue with messages in every place: waiting, due, held, nacked, to be retried, ended, dead."""
    queue = Queue("q", bytes, url=url, layout=layout)
    for at, place in enumerate(("over", "dead", "retried", "held", "nacked")):
        queue.publish(b"body", id=place, retries=0 if place in ("over", "dead") else 3)
        lease_ms = 1 if place == "retried" else HOUR * 1000
        [one] = queue.moves.claim(t.CallNumber(f"lane-{place}", 1), limit=1, lease_ms=lease_ms).claimed
        if place in ("over", "dead"):
            queue.moves.nack([(one, 0, "rejected 1 x", b"body")])
        if place == "dead":
            queue.moves.collect(["dead"], letters_max=9, letters_ms=10**12)
        if place == "nacked":
            queue.moves.nack([(one, HOUR * 1000, "failed 1 x", b"")])
        if place == "retried":
            later = (client.time()[0] + 1) * 1_000_000
            assert queue.moves.reclaim(clock=later).overdue == ("retried",), at
    queue.publish_many([Outgoing(body=b"body", id=f"ready-{n}") for n in range(3)])
    queue.publish_many([Outgoing(body=b"body", id=f"late-{n}", delay=HOUR) for n in range(3)])
    yield queue
    queue.close()


@pytest.fixture
def check(url, layout):
    admin = Admin(url, layout=layout)

    def make(**options):
        report = admin.check("q", patience=0, **options)
        assert report.unproved == 0
        return {fault.name: fault for fault in report.faults}

    make.report = lambda: admin.check("q")
    return make


def names(faults):
    """What is wrong, the account left aside: hands that break a queue break it too, and Go keeps none."""
    return set(faults) - {"account"}


def looked_at(queue, client, id, **options):
    """What the script answers of an id."""
    call = check_ids(queue.keys, [id], part="both", **options)
    return call.read(client.execute_command(*call.command_in_full))[1][0]


def state(queue, client, id):
    """Where an id is, with its retry count."""
    client_state = looked_at(queue, client, id)
    at = ["pending", "unack", "garbage", None, None, None, None, None, "ready", "retry"]
    places = [name for name, part in zip(at, client_state, strict=False) if name and part not in (b"", 0)]
    return places, client_state[3].decode()


def test_a_sound_queue_is_sound(queue, check):
    report = check.report()

    assert report.faults == ()
    assert report.is_sound
    assert report.looked_at == 10


def test_a_queue_that_is_not_there_is_not_sound_but_unknown(url):
    with pytest.raises(ConfigurationError, match="there is no queue 'nothing'"):
        Admin(url).check("nothing")


#: How a hand breaks the queue, what is told of which id, and where it is after the repair.
BREAKS = {
    "ready and unack": (lambda c, k: c.lpush(k.ready, "held"), "twice", "held", ["unack"]),
    "ready twice": (lambda c, k: c.lpush(k.ready, "ready-1"), "twice", "ready-1", ["ready"]),
    "ready and retry": (lambda c, k: c.lpush(k.ready, "retried"), "twice", "retried", ["retry"]),
    "pending and unack": (lambda c, k: c.zadd(k.pending, {"nacked": 2e9}), "twice", "nacked", ["unack"]),
    "pending and ready": (lambda c, k: c.zadd(k.pending, {"ready-0": 2e9}), "twice", "ready-0", ["ready"]),
    "garbage and ready": (lambda c, k: c.sadd(k.garbage, "ready-0"), "twice", "ready-0", ["ready"]),
    "garbage and pending": (lambda c, k: c.zadd(k.pending, {"over": 2e9}), "twice", "over", ["garbage"]),
    "no count in a list": (lambda c, k: c.hdel(k.retries_left, "ready-2"), "no-count", "ready-2", ["ready"]),
    "no count of a pending": (lambda c, k: c.hdel(k.retries_left, "late-0"), "no-count", "late-0", ["pending"]),
    "no count of a held": (lambda c, k: c.hdel(k.retries_left, "held"), "no-count", "held", ["unack"]),
    "a count that is text": (lambda c, k: c.hset(k.retries_left, "late-0", "many"), "bad-count", "late-0", ["pending"]),
    "a count below 0": (lambda c, k: c.hset(k.retries_left, "ready-0", "-1"), "bad-count", "ready-0", ["ready"]),
    "a count at the end": (lambda c, k: c.hset(k.retries_left, "over", "3"), "ended-count", "over", ["garbage"]),
    "a count of nobody": (lambda c, k: c.hset(k.retries_left, "ghost", "3"), "stray-count", "ghost", []),
    "a word of nobody": (lambda c, k: c.hset(k.lease, "ghost", "suspect"), "stray-word", "ghost", []),
    "an error of nobody": (lambda c, k: c.hset(k.errors, "ghost", "failed 1 x"), "stray-error", "ghost", []),
    "a body of nobody": (lambda c, k: c.set(k.msg("ghost"), "body"), "stray-body", "ghost", []),
    "a nonce in a list": (lambda c, k: c.hset(k.lease, "ready-0", "l.1:9"), "wrong-word", "ready-0", ["ready"]),
    "a nonce of a pending": (lambda c, k: c.hset(k.lease, "late-0", "l.1:9"), "wrong-word", "late-0", ["pending"]),
    "nacked in a list": (lambda c, k: c.hset(k.lease, "retried", "nacked"), "wrong-word", "retried", ["retry"]),
    "a list's word in unack": (lambda c, k: c.hset(k.lease, "held", "@170"), "wrong-word", "held", ["unack"]),
    "a word at the end": (lambda c, k: c.hset(k.lease, "over", "suspect"), "wrong-word", "over", ["garbage"]),
    "due never": (lambda c, k: c.zadd(k.unack, {"nacked": "inf"}), "wrong-time", "nacked", ["unack"]),
    "a due time in ms": (lambda c, k: c.zadd(k.unack, {"nacked": 1.8e12}), "wrong-time", "nacked", ["unack"]),
    "a lease for ever": (lambda c, k: c.zadd(k.unack, {"held": 1.9e9}), "wrong-time", "held", ["unack"]),
    "a lease since ever": (lambda c, k: c.zadd(k.unack, {"held": "-inf"}), "wrong-time", "held", ["unack"]),
    "no body of a pending": (lambda c, k: c.delete(k.msg("late-1")), "no-body", "late-1", []),
    "no body of a nacked": (lambda c, k: c.delete(k.msg("nacked")), "no-body", "nacked", []),
    "no body in a list": (lambda c, k: c.delete(k.msg("ready-1")), "no-body", "ready-1", ["ready"]),
    "a strange body": (
        lambda c, k: (c.delete(k.msg("late-1")), c.sadd(k.msg("late-1"), "x")),
        "strange-body",
        "late-1",
        [],
    ),
    "taken out of ready": (lambda c, k: c.lrem(k.ready, 0, "ready-1"), "lost", "ready-1", ["ready"]),
    "taken out of pending": (lambda c, k: c.zrem(k.pending, "late-2"), "lost", "late-2", ["pending"]),
    "taken out of unack": (lambda c, k: c.zrem(k.unack, "held"), "lost", "held", ["ready"]),
}
#: Without an envelope nothing says where these belong.
DEAD_WHEN_BARE = {"lost"}


@pytest.mark.parametrize("how", BREAKS)
def test_what_is_broken_is_told_and_mended(how, queue, check, client, layout):
    hand, fault, id, places = BREAKS[how]
    hand(client, queue.keys)

    told = check()
    mended = check(repair=True)

    assert names(told) == {fault}
    assert (told[fault].count, told[fault].examples, told[fault].mended) == (1, (id,), 0)
    left_alone = how == "no body in a list"
    assert mended[fault].mended == (0 if left_alone else 1)
    gone_to_the_dead = layout.bare and fault in DEAD_WHEN_BARE
    assert state(queue, client, id)[0] == ([] if gone_to_the_dead else places)
    assert {name for name, fault in check().items() if not fault.passes and name != "account"} == set()
    if not layout.bare and fault not in ("stray-count", "stray-body"):
        assert "account" not in check(), "what was mended is counted"


@pytest.mark.parametrize("how", ["no count in a list", "a count that is text", "a count below 0"])
def test_a_count_that_was_lost_is_mended_to_one_more_delivery(how, queue, check, client):
    BREAKS[how][0](client, queue.keys)

    check(repair=True)

    assert state(queue, client, BREAKS[how][2])[1] == "0"


@pytest.mark.parametrize(
    "name", ["pending", "ready", "unack", "retry", "garbage", "retries_left", "lease", "errors", "dead"]
)
def test_a_key_of_another_type_is_put_aside_and_what_it_held_is_found_again(name, queue, check, client):
    key = getattr(queue.keys, name)
    client.delete(key)
    client.set(key, "not ours")

    told = check()
    mended = check(repair=True)

    assert told["wrong-type"].examples[0].startswith(f"{key} is a string, not a")
    assert mended["wrong-type"].mended == 1
    assert [client.get(one) for one in client.scan_iter(f"*:aside:*:{name}")] == [b"not ours"]
    assert names(check()) <= {"no-word"}


def test_a_body_of_nobody_becomes_a_letter_that_says_so(queue, check, client):
    client.set(queue.keys.msg("ghost"), b"body")

    check(repair=True)

    letter = queue.letters()[-1]
    assert (letter.id, letter.payload, letter.reason) == ("ghost", b"body", "lost")
    assert client.exists(queue.keys.msg("ghost")) == 0


def test_a_due_time_that_nothing_tells_makes_a_letter_of_a_message_without_envelope(url, client):
    queue = Queue("q", bytes, url=url, layout=TAGGED)
    queue.publish(b"body", id="m", delay=HOUR)
    client.zadd(queue.keys.pending, {"m": "inf"})

    [fault] = Admin(url, layout=TAGGED).check("q", repair=True, patience=0).faults

    assert (fault.name, fault.mended) == ("wrong-time", 1)
    assert [(one.id, one.reason) for one in queue.letters()] == [("m", "lost")]


def test_a_due_time_that_the_envelope_tells_is_taken_from_there(url, client):
    queue = Queue("q", bytes, url=url)
    due = queue.publish(b"body", id="m", delay=HOUR).due
    client.zadd(queue.keys.pending, {"m": "inf"})

    Admin(url).check("q", repair=True)

    assert client.zscore(queue.keys.pending, "m") == due


def test_messages_whose_list_was_deleted_are_all_handled_after_a_repair(url, client):
    queue = Queue("q", int, url=url)
    queue.publish_many(range(600))
    client.delete(queue.keys.ready)

    report = Admin(url).check("q", repair=True)

    assert [(fault.name, fault.count, fault.mended) for fault in report.faults] == [("lost", 600, 600)]
    assert report.is_sound
    handled = []
    while queue.counts().ready:
        with queue.receive(limit=500) as jobs:
            handled += [job.body for job in jobs]
    assert sorted(handled) == list(range(600))
    assert queue.counts().missing == 0


def test_a_message_that_was_cancelled_in_a_list_that_is_gone_ends_as_cancelled(url, client):
    queue = Queue("q", bytes, url=url)
    queue.publish(b"body", id="m")
    queue.cancel("m")
    client.delete(queue.keys.ready)

    Admin(url).check("q", repair=True)

    assert (queue.counts().totals["cancelled"], queue.counts().missing) == (1, 0)


def test_an_account_that_does_not_add_up_is_told_and_not_invented(url, client):
    queue = Queue("q", bytes, url=url)
    queue.publish(b"body")
    client.hincrby(queue.keys.totals, "published", 2)

    report = Admin(url).check("q", repair=True)

    [fault] = report.faults
    assert (fault.name, fault.count, fault.mended, fault.examples) == ("account", 2, 0, ("2 too few",))
    assert not report.is_sound


@pytest.mark.parametrize("total", ["many", "-5"])
def test_a_total_that_is_no_number_or_below_zero_is_told_and_stays(total, url, client):
    queue = Queue("q", bytes, url=url)
    queue.publish(b"body")
    client.hset(queue.keys.totals, "acked", total)

    [fault] = Admin(url).check("q", repair=True).faults

    assert (fault.name, fault.examples, fault.mended) == ("bad-total", ("acked",), 0)
    assert client.hget(queue.keys.totals, "acked") == total.encode()


def test_a_body_that_is_gone_and_a_lease_of_a_stranger_are_told_but_are_not_wrong(url, client):
    queue = Queue("q", bytes, url=url)
    queue.publish(b"body", id="expired")
    queue.publish(b"body", id="held")
    client.delete(queue.keys.msg("expired"))
    client.rpop(queue.keys.ready)
    queue.moves.promote()
    client.lpush(queue.keys.ready, "expired")
    client.lrem(queue.keys.ready, 0, "held")
    client.zadd(queue.keys.unack, {"held": client.time()[0] + 60})

    report = Admin(url).check("q")

    assert [(fault.name, fault.passes) for fault in report.faults] == [("no-body", True), ("no-word", True)]
    assert report.is_sound


def test_a_check_reads_and_writes_nothing(queue, check, client):
    for hand, *_ in BREAKS.values():
        hand(client, queue.keys)
    before = {key: client.dump(key) for key in client.scan_iter()}

    check()

    assert {key: client.dump(key) for key in client.scan_iter()} == before


def test_what_has_changed_since_it_was_seen_is_left_alone(queue, client):
    seen = looked_at(queue, client, "ready-0")[-1]
    client.hset(queue.keys.retries_left, "ready-0", "7")
    wish = {"ready-0": (seen, "", 0, "", "", "dead", "lost - x")}

    answer = looked_at(queue, client, "ready-0", wishes=wish)

    assert answer == b"changed"
    assert state(queue, client, "ready-0") == (["ready"], "7")


def test_everything_broken_at_once_is_mended(queue, check, client):
    for hand, *_ in BREAKS.values():
        hand(client, queue.keys)

    check(repair=True)
    check(repair=True)

    assert names(check()) <= {"no-body", "no-word"}


def break_at_random(client, keys, chance, id):
    """Leave anything anywhere in the name of an id."""
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
        client.hset(
            keys.lease, id, chance.choice(("a.1:500", "a.1:500!", "nacked", "suspect", "!", "@1800000000000?", "?"))
        )
    if chance.random() < 0.3:
        client.hset(keys.errors, id, "failed 1 x")
    if chance.random() < 0.6:
        head = chance.choice((b"", b'RELIQ/1 {"d":1800000000000,"r":3}\n', b'RELIQ/1 {"d":5}\n', b'RELIQ/1 {"d":'))
        client.set(keys.msg(id), head + b"body")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_left_anywhere_is_mended(seed, queue, check, client):
    chance = random.Random(seed)
    for number in range(300):
        break_at_random(client, queue.keys, chance, f"x-{number}")

    told, mended = check(), check(repair=True)

    assert len(names(told)) > 8
    assert {name: told[name].count for name in names(told)} == {name: mended[name].count for name in names(mended)}
    assert all(fault.mended == fault.count for fault in mended.values() if not fault.passes and fault.name != "account")
    assert {name for name, fault in check().items() if not fault.passes and name != "account"} == set()


RECORDED = json.loads((Path(__file__).parents[1] / "scripts/hdt3213-keyspaces.json").read_text("utf-8"))["cases"]


def restore(client, name):
    for key, held in RECORDED[name]["keys"].items():
        write = {"string": client.set, "zset": client.zadd, "list": lambda k, v: client.rpush(k, *v)}
        write["hash"] = lambda k, v: client.hset(k, mapping=v)
        write[held["type"]](key, held["value"])


@pytest.mark.parametrize("name", [name for name in RECORDED if RECORDED[name]["keys"]])
def test_what_the_go_original_left_behind_is_sound(name, client, url):
    restore(client, name)
    tagged = any(key.startswith("{") for key in RECORDED[name]["keys"])
    prefix = "acme" if "custom" in name else "dp"
    admin = Admin(url, layout=Layout.hdt3213(hash_tag=tagged, prefix=prefix))

    report = admin.check("orders")

    assert report.faults == ()
    assert report.looked_at == sum(":msg:" in key for key in RECORDED[name]["keys"])


def test_what_a_go_consumer_leaves_when_it_dies_between_two_commands_is_told_and_mended(client, url):
    admin, keys = Admin(url, layout=TAGGED), Queue("orders", bytes, layout=TAGGED, url=url).keys
    restore(client, "in_flight")
    held = client.zrange(keys.unack, 0, -1)[0].decode()
    client.zrem(keys.unack, held)  # it acked, and died before it deleted body and count
    client.set(keys.msg("published"), "body")  # it published, and died before the count and the place
    client.hset(keys.retries_left, "no-body", "3")

    told = {fault.name: fault.examples for fault in admin.check("orders", repair=True, patience=0).faults}

    assert told == {"lost": (held,), "stray-body": ("published",), "stray-count": ("no-body",)}
    assert admin.check("orders").faults == ()
