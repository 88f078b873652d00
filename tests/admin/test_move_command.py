"""`reliq move`: the selected messages, and no others, go to another queue with all their data."""

import time

import pytest
from handling import handle_all
from transition import run_transition

from reliq import Queue
from reliq.admin import bulk
from reliq.admin.bulk import HOLD_MS
from reliq.wire_format import open_envelope

KEPT = "kept: their ids are in use, or the queue refuses them\n"
KEY_OR_PRIORITY = pytest.mark.parametrize(
    "options", [{"key": "tenant-7"}, {"priority": "high"}], ids=["key", "priority"]
)


@pytest.fixture
def other(url):
    """The target queue; the registry lists it because it had a message before."""
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

    assert ran.out == "1 moved, 1 kept: a worker runs them\n"
    assert client.zscore(other.keys.pending, "waits") == pytest.approx(again, abs=0.0021)
    assert client.hget(other.keys.retries_left, "waits") == b"12"


def test_move_obeys_filter_and_limit(command, queue, other):
    for n in range(600):
        queue.publish({"n": n}, id=f"m{n}", headers={"odd": str(n % 2)})

    matched = command("move", "q", "other", "--state", "ready", "--header", "odd=1", "--limit", 270, "--yes", "--json")

    assert (matched.json["found"], matched.json["done"]) == (270, 270)
    assert bodies(other) == [n for n in range(540) if n % 2]
    assert sorted(bodies(queue)) == sorted({*range(600)} - {n for n in range(540) if n % 2})


def test_message_whose_id_is_used_or_invalid_in_the_target_stays(command, queue, other, client):
    queue.publish({"n": 1}, id="alive")
    other.publish({"n": 2}, id="alive")
    queue.publish({"n": 3}, id="first")  # this id ended in the target a moment ago
    queue.publish({"n": 4}, id="free")
    client.set(queue.keys.msg("a b"), b'{"n":5}')
    client.hset(queue.keys.retries_left, "a b", 3)
    client.rpush(queue.keys.ready, "a b")
    client.hincrby(queue.keys.totals, "published", 1)

    ran = command("move", "q", "other", "--state", "ready", "--yes")

    assert ran.out == f"1 moved, 3 {KEPT}"
    assert sorted(bodies(queue)) == [1, 3, 5]
    assert sorted(bodies(other)) == [2, 4]


@pytest.fixture
def cut_off(queue):
    """A move of three messages to `other` that was interrupted: two ready messages and one delayed message are held."""
    due = queue.publish({"n": 3}, id="later", delay=3600).due
    queue.publish({"n": 1}, id="a")
    queue.publish({"n": 2}, id="b")
    for id, at in (("a", time.time()), ("b", time.time()), ("later", due)):
        run_transition(queue, "reschedule", [id], at_ms=round(at * 1000) + HOLD_MS)
    return due


def test_move_that_was_cut_off_before_its_publish_is_finished_by_a_repetition(cut_off, command, queue, other, client):
    assert command("move", "q", "other", "--state", "ready", "--yes").out == "2 moved\n"
    assert command("move", "q", "other", "--state", "pending", "--yes").out == "1 moved\n"

    assert (queue.counts().alive, other.counts().alive, bodies(queue)) == (0, 3, [])
    due = client.zrange(other.keys.pending, 0, -1, withscores=True)
    assert due[-1] == (b"later", pytest.approx(cut_off + HOLD_MS / 1000, abs=0.01))


def test_move_that_was_cut_off_after_its_publish_runs_nothing_twice(cut_off, command, queue, other):
    for number, id in enumerate(("a", "b"), 1):
        other.publish({"n": number}, id=id, dedup=7 * 86400)

    assert command("move", "q", "other", "--state", "ready", "--yes").out == "2 moved\n"

    assert (sorted(bodies(other)), bodies(queue)) == ([1, 2], [])


def test_repeated_move_deletes_no_message_whose_id_was_published_in_the_target(cut_off, command, queue, other, client):
    other.publish({"n": 99}, id="a")
    other.publish({"n": 98}, id="later")
    other.cancel("b", tombstone=60)

    ran = [command("move", "q", "other", "--state", state, "--yes").out for state in ("ready", "pending")]

    assert ran == [f"0 moved, 2 {KEPT}", f"0 moved, 1 {KEPT}"]
    assert (bodies(other), queue.counts().alive) == ([99, 98], 3)


def test_message_that_is_published_in_the_target_during_a_move_stays(admin, queue, other, client, monkeypatch):
    queue.publish({"n": 1}, id="m", delay=600)
    queue.publish({"n": 2}, id="n", delay=600)
    due = client.zscore(queue.keys.pending, "m")
    postpone = bulk.postpone

    def publish_there_first(*args):
        monkeypatch.setattr(bulk, "postpone", postpone)
        other.publish({"n": 99}, id="m")
        return postpone(*args)

    monkeypatch.setattr(bulk, "postpone", publish_there_first)
    done = admin.move("q", "other", "pending")

    assert (done.done, done.kept) == (1, 1)
    assert client.zscore(queue.keys.pending, "m") == pytest.approx(due, abs=0.01)
    assert bodies(other) == [99]


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
