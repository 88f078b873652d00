"""`reliq move`: messages go to another queue with all that they carry, and only those that are meant."""

import pytest
from handling import handle_all
from transition import run_transition
from waiting import eventually

from reliq import Consumer, Layout, Queue
from reliq.keys import Keys
from reliq.wire_format import open_envelope

KEPT = "kept: their ids are in use there, or it cannot have them\n"
KEY_OR_PRIORITY = pytest.mark.parametrize(
    "options", [{"key": "tenant-7"}, {"priority": "high"}], ids=["key", "priority"]
)


@pytest.fixture
def other(url):
    """The queue that gets them, known because it had a message once."""
    queue = Queue("other", url=url)
    queue.publish({"n": -1}, id="first")
    with queue.receive():
        pass
    yield queue
    queue.close()


@pytest.fixture(autouse=True)
def the_accounts_balance(queue, other):
    yield
    assert (queue.counts().missing, other.counts().missing) == (0, 0)


def bodies(queue):
    return [body["n"] for body in handle_all(queue)]


def test_ready_messages_move_in_order_with_all_their_fields(command, queue, other, client):
    due = [queue.publish({"n": n}, id=f"m{n}", retries=5, headers={"n": str(n)}, ttl=600).due for n in range(3)]

    assert command("move", "q", "other", "--state", "ready", "--dry-run")[:2] == (0, "3 would be moved\n")
    assert command("move", "q", "other", "--state", "ready", "--yes")[:2] == (0, "3 moved\n")

    found = command("list", "other", "--json").json
    assert [(one["headers"], one["retries_left"]) for one in found] == [({"n": str(n)}, 5) for n in range(3)]
    assert [one["when"] for one in found] == pytest.approx(due, abs=0.0021)
    assert 500 < client.pttl(other.keys.msg("m1")) / 1000 <= 601
    counts = queue.counts()
    assert (counts.alive, counts.totals["purged"]) == (0, 3)
    assert bodies(other) == [0, 1, 2]


def test_messages_in_backoff_move_and_running_messages_stay(command, queue, other, client, claim):
    queue.publish({"n": 1}, id="waits")
    queue.publish({"n": 2}, id="runs")
    waits, _runs = claim(queue, 2)
    run_transition(queue, "nack", [(waits, 600_000, "failed 1 x", b"")])
    again = client.zscore(queue.keys.unack, "waits")

    ran = command("move", "q", "other", "--state", "unack", "--yes")

    assert ran.out == "1 moved, 1 kept: a worker has them\n"
    assert client.zscore(other.keys.pending, "waits") == pytest.approx(again, abs=0.0021)
    assert client.hget(other.keys.retries_left, "waits") == b"12"


def test_move_obeys_filter_and_limit(command, queue, other):
    for n in range(600):
        queue.publish({"n": n}, id=f"m{n}", headers={"odd": str(n % 2)})

    matched = command("move", "q", "other", "--state", "ready", "--header", "odd=1", "--limit", 270, "--yes", "--json")

    assert (matched.json["found"], matched.json["moved"]) == (270, 270)
    assert bodies(other) == [n for n in range(540) if n % 2]
    assert sorted(bodies(queue)) == sorted({*range(600)} - {n for n in range(540) if n % 2})


def test_message_whose_id_is_used_or_invalid_in_the_target_stays(command, queue, other, client):
    queue.publish({"n": 1}, id="alive")
    other.publish({"n": 2}, id="alive")
    queue.publish({"n": 3}, id="first")  # ended there a moment ago
    queue.publish({"n": 4}, id="free")
    client.set(queue.keys.msg("a b"), b'{"n":5}')
    client.hset(queue.keys.retries_left, "a b", 3)
    client.rpush(queue.keys.ready, "a b")
    client.hincrby(queue.keys.totals, "published", 1)

    ran = command("move", "q", "other", "--state", "ready", "--yes")

    assert ran.out == f"1 moved, 3 {KEPT}"
    assert sorted(bodies(queue)) == [1, 3, 5]
    assert sorted(bodies(other)) == [2, 4]


def test_move_after_another_that_was_cut_off_is_refused_until_that_is_finished(command, queue, other, client):
    Queue("third", url=queue.target).publish({})
    queue.publish({"n": 1}, id="m")
    client.set(queue.keys.moving, "other")
    run_transition(queue, "reschedule", ["m"], at_ms=5 * 10**12)

    listed = command("list", "q", "--json").json
    refused = command("move", "q", "third", "--state", "ready", "--yes")
    finished = command("move", "q", "other", "--state", "pending", "--yes")

    assert [(one["mark"], one["when"]) for one in listed] == [("moving", 10**9)]
    assert (refused.code, "a move of 'q' to 'other' was cut off; finish it first" in refused.err) == (2, True)
    assert finished.out == "1 moved\n"
    assert (bodies(other), bodies(queue)) == ([1], [])
    assert command("move", "other", "q", "--state", "ready", "--yes").out == "0 moved\n"


def test_refused_move_quotes_a_hostile_name_in_the_command_it_prints(command, url, client):
    for name in ("go", "third"):
        Queue(name, bytes, url=url, layout=Layout.hdt3213()).publish(b"x")
    client.set(Keys("go", Layout.hdt3213()).moving, "x;reboot")

    refused = command("move", "go", "third", "--state", "ready", "--layout", "hdt3213", "--yes")

    assert refused.err.endswith("finish it first: reliq move go 'x;reboot' --state ready --layout hdt3213\n")


@pytest.fixture
def cut_off(queue, client):
    """A move of three messages to `other` that was cut off when they were put off: two ready ones, one delayed."""
    due = queue.publish({"n": 3}, id="later", delay=3600).due
    queue.publish({"n": 1}, id="a")
    queue.publish({"n": 2}, id="b")
    client.set(queue.keys.moving, "other")
    for id, at in (("a", due - 3600), ("b", due - 3600), ("later", due)):
        run_transition(queue, "reschedule", [id], at_ms=round(at * 1000) + 4 * 10**12)
    return due


def test_repeated_move_deletes_no_message_whose_id_was_published_in_the_target(cut_off, command, queue, other, client):
    other.publish({"n": 99}, id="a")
    other.publish({"n": 98}, id="later")
    other.cancel("b", tombstone=60)

    ran = command("move", "q", "other", "--state", "pending", "--yes")

    assert ran.out == f"0 moved, 3 {KEPT}"
    assert bodies(other) == [99, 98]
    with queue.receive(limit=2, wait=30) as jobs:  # a message in a list gets its due time when it is met
        assert sorted(job.body["n"] for job in jobs) == [1, 2]
    assert client.zscore(queue.keys.pending, "later") == pytest.approx(cut_off, abs=0.01)
    queue.cancel("later")


def test_repeated_move_recognizes_its_own_copy(cut_off, command, queue, other):
    other.publish({"n": 1}, id="a", dedup=7 * 86400)

    assert command("move", "q", "other", "--state", "pending", "--yes").out == "3 moved\n"
    assert (sorted(bodies(other)), bodies(queue), queue.counts().alive) == ([1, 2], [], 0)
    other.cancel("later")


def test_message_put_off_for_a_move_reaches_no_worker_and_is_no_fault(command, queue, url):
    queue.publish({"n": 1}, id="listed")
    queue.publish({"n": 1}, id="delayed", delay=60)
    run_transition(queue, "reschedule", ["listed", "delayed"], at_ms=4 * 10**12 + 1_800_000_000_000)
    before = queue.counts()
    ran = command("check", "q", "--repair")
    assert (ran.code, queue.counts()) == (0, before), ran.out

    handled = []
    consumer = Consumer(url=url)
    consumer.handler(queue)(lambda body: handled.append(body["n"]))
    consumer.start()
    queue.publish({"n": 2}, delay=0.2)
    eventually(lambda: handled, "the other message is handled")
    consumer.stop()

    assert (handled, queue.counts().pending) == ([2], 2)


@KEY_OR_PRIORITY
def test_pending_message_moves_with_its_due_time_ttl_and_key(command, queue, other, client, options):
    due = queue.publish({"n": 1}, id="m1", delay=600, ttl=60, **options).due
    line = options.get("key", "\x01high")

    assert command("move", "q", "other", "--state", "pending", "--yes").out == "1 moved\n"
    assert client.hget(other.keys.retries_left, "m1") == f"12 {line}".encode()
    assert open_envelope(client.get(other.keys.msg("m1")))[0].line == line
    assert client.zscore(other.keys.pending, "m1") == pytest.approx(due, abs=0.0021)
    assert 600 < client.pttl(other.keys.msg("m1")) / 1000 <= 661


@KEY_OR_PRIORITY
def test_message_with_a_key_stays_when_the_target_has_several_shards(command, queue, other, options):
    queue.publish({"n": 1}, id="m1", delay=60, **options)
    assert command("shards", "other", "2", "--yes").code == 0

    ran = command("move", "q", "other", "--state", "pending", "--yes")

    assert ran.out == f"0 moved, 1 {KEPT}"
    assert command("list", "q", "--state", "pending", "--json").json[0]["mark"] == ""
