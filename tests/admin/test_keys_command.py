"""Keys and limits for operators: list them, change them, and the commands that take a key."""

import pytest
from handling import lasting

from reliq import ConfigurationError, Limit, OutgoingMessage, Queue
from reliq.admin import Filter, SharedLimit
from reliq.lua.transitions import book
from reliq.redis.shards import WITNESSES


@pytest.fixture
def tenants(queue):
    """Three messages of tenant a, one of b, one without a key."""
    queue.publish_many(
        [OutgoingMessage(body={"n": n}, id=f"a{n}", key="a", headers={"n": str(n)}) for n in range(3)]
        + [OutgoingMessage(body={"n": 9}, id="b0", key="b"), OutgoingMessage(body={"n": 8}, id="none")]
    )
    return queue


@pytest.fixture
def serve(queue, claim):
    """Claim as a worker of a queue with keys does; return the ids."""
    return lambda limit: [one.id for one in claim(queue, limit)]


def test_keys_lists_the_largest_keys_first_with_their_state(tenants, command):
    told = command("keys", "q")

    lines = [" ".join(line.split()) for line in told.out.splitlines()]
    assert lines[0].startswith("key waiting")
    assert lines[1] == "a 3 0 1 in turn for a worker"
    assert lines[2].startswith("b 1")
    assert told.out.endswith("4 waiting, 0 running; 2 keys in turn, 0 throttled or paused\n")
    assert [one["key"] for one in command("keys", "q", "--json").json["largest"]] == ["a", "b"]
    assert command("keys", "q", "--key", "a", "--json").json["waiting"] == 3
    assert {line.split()[0] for line in command("keys", "q", "--all").out.splitlines()[1:]} == {"a", "b"}


def test_waiting_messages_are_counted_in_every_command(tenants, command, admin):
    counts = tenants.counts()

    assert (counts.waiting, counts.ready, counts.alive, counts.missing, counts.keyed) == (4, 1, 5, 0, True)
    assert command("queues", "q", "--check").code == 0
    [view] = admin.queues(["q"]).queues
    assert (view.waiting, view.due, view.alive) == (4, 5, 5)
    assert [one.key for one in view.lines.largest] == ["a", "b"]
    table = command("queues").out.splitlines()
    assert [line.split()[-1] for line in table[:2]] == ["waiting", "4"]
    assert admin.count("q", "waiting") == 4
    assert admin.count("q", "waiting", Filter(key="a")) == 3


def test_commands_on_a_queue_without_keys_show_no_keys(queue, command):
    queue.publish({})

    assert (queue.counts().waiting, queue.counts().keyed) == (0, False)
    assert "waiting" not in command("queues").out
    assert command("keys", "q").out == "0 waiting, 0 running; 0 keys in turn, 0 throttled or paused\n"
    assert command("limits", "q").out == "q has no limits\n"
    assert command("list", "q", "--state", "waiting").out == "no waiting messages in q\n"


def test_list_shows_waiting_messages_key_by_key_in_order(tenants, command, admin):
    first = command("list", "q", "--state", "waiting", "--json").json

    assert [one["id"] for one in first if one["key"] == "a"] == ["a0", "a1", "a2"]
    assert sorted(one["id"] for one in first) == ["a0", "a1", "a2", "b0"]
    assert {one["state"] for one in first} == {"waiting"}
    assert [one["id"] for one in command("list", "q", "--key", "a", "--json").json] == ["a0", "a1", "a2"]
    assert "key" in command("list", "q", "--key", "a").out.splitlines()[0]
    found = command("list", "q", "--state", "waiting", "--header", "n=1", "--json").json
    assert [(one["id"], one["key"]) for one in found] == [("a1", "a")]
    page = admin.page("q", "waiting", Filter(key="a"), limit=2)
    rest = admin.page("q", "waiting", Filter(key="a"), limit=2, after=page.after)
    assert [one.id for one in (*page.items, *rest.items)] == ["a0", "a1", "a2"]
    with pytest.raises(ConfigurationError, match="by key"):
        admin.page("q", "waiting")


def test_show_of_a_waiting_message_has_its_key_place_and_reason(tenants, command, admin, serve):
    shown = " ".join(command("show", "q", "a2").out.split())
    assert all(fact in shown for fact in ("state waiting", "key a ", "in its line 2 come before it"))
    assert "it waits in turn for a worker" in shown
    assert admin.show("q", "none").state == "ready"
    command("pause", "q", "--key", "a", "--for", "10m")
    assert "throttled until" in command("show", "q", "a2").out
    command("resume", "q", "--key", "a")
    admin.set_limits("q", per_key=1)
    assert sorted(serve(10)) == ["a0", "b0", "none"]
    assert admin.show("q", "a1").line.state == "saturated"
    assert (admin.show("q", "a0").state, admin.show("q", "a0").key) == ("unack", "a")
    assert admin.keys("q").running == 3


def test_paused_key_is_not_served_until_it_is_resumed(tenants, command, serve):
    paused = command("pause", "q", "--key", "a")

    assert (paused.code, paused.out) == (0, "key a of q is paused; `reliq resume q --key a` ends it\n")
    assert sorted(serve(10)) == ["b0", "none"]
    assert command("keys", "q", "--key", "a", "--json").json["state"] == "paused"
    assert command("resume", "q", "--key", "a").out == "key a of q is resumed\n"
    assert serve(10) == ["a0", "a1", "a2"]
    assert command("resume", "q", "--key", "a").out == "key a of q was not paused\n"


def test_purge_of_a_key_deletes_its_waiting_messages_only(tenants, command, client):
    client.config_resetstat()
    assert command("purge", "q", "--key", "a", "--dry-run", "--json").json == {"found": 3}
    looks = client.info("commandstats")["cmdstat_getrange"]["calls"]
    assert looks == 2 * (1 + WITNESSES), "two maps of shards with their fences, and no message"

    done = command("purge", "q", "--key", "a", "--yes", "--json").json

    assert (done["found"], done["done"]) == (3, 3)
    assert (tenants.counts().waiting, tenants.counts().alive, tenants.counts().missing) == (1, 2, 0)
    assert command("purge", "q", "--yes").code == 2
    assert command("purge", "q", "--state", "waiting", "--yes", "--json").json["done"] == 1


def test_waiting_messages_of_a_key_are_cancelled_and_moved(tenants, command, url, admin):
    assert command("cancel", "q", "--state", "waiting", "--key", "b", "--yes", "--json").json["done"] == 1
    other = Queue("other", dict, url=url)
    other.publish({}, id="there")

    moved = command("move", "q", "other", "--state", "waiting", "--key", "a", "--yes", "--json").json

    assert (moved["found"], moved["done"]) == (3, 3)
    assert [one.id for one in admin.messages("other", "waiting")] == ["a0", "a1", "a2"]
    assert {admin.show("other", f"a{n}").key for n in range(3)} == {"a"}
    other.close()


def test_waiting_message_is_cancelled_or_rescheduled_by_id(tenants, command, admin, serve):
    assert command("cancel", "q", "a0").out == "cancelled a0\n"
    assert admin.reschedule("q", "a1", delay=600) == "rescheduled"

    assert sorted(serve(10)) == ["a2", "b0", "none"]
    assert (admin.show("q", "a1").state, admin.show("q", "a1").key) == ("pending", "a")
    assert [one["id"] for one in command("list", "q", "--state", "pending", "--key", "a", "--json").json] == ["a1"]


def test_limits_shows_and_changes_limits_that_hold_at_once(tenants, command, serve):
    done = command("limits", "q", "--per-key", "2", "--rate", "100/s", "--weight", "vip=4")

    assert done.code == 0
    assert [line.strip() for line in done.out.splitlines()] == [
        "per-key  2",
        "rate  100/s",
        "burst  10",
        "weight  vip=4",
    ]
    assert command("limits", "q").out == done.out
    assert sorted(serve(10)) == ["a0", "a1", "b0", "none"]
    shown = command("limits", "q", "--clear", "per-key", "--clear", "weight:vip", "--rate", "5/m", "--json").json
    assert (shown["per_key"], shown["key_weights"], shown["rate"], shown["burst"]) == (None, {}, "5/m", 1)


def test_bad_limit_is_refused_and_ordered_ends_only_by_clear(tenants, command, admin, client):
    before = client.hgetall(tenants.keys.limits)

    for words, said in {
        "--per-key 0": "per_key",
        "--burst 5": "burst is for a rate",
        "--ordered --per-key 3": "leave out per_key",
    }.items():
        done = command("limits", "q", *words.split())
        assert (done.code, said in done.err) == (2, True)
    assert client.hgetall(tenants.keys.limits) == before

    client.hset(tenants.keys.limits, "per_key", "many")  # an invalid value by another program
    told = command("limits", "q")
    assert (told.code, "--clear NAME" in told.err) == (2, True)
    assert command("limits", "q", "--clear", "per-key").code == 0

    command("limits", "q", "--ordered")
    assert "leave out per_key" in command("limits", "q", "--per-key", "4").err
    assert command("limits", "q", "--clear", "ordered", "--per-key", "4").code == 0
    assert (admin.limits("q").ordered, admin.limits("q").per_key) == (False, 4)
    assert command("limits", "q", "--clear", "ordered").code == 0
    assert admin.limits("q").per_key is None


def test_queue_in_the_go_layout_refuses_keys_and_limits(url, command, client):
    client.lpush("dp:go:ready", "x")
    client.hset("dp:go:retry:cnt", "x", 3)

    for words in (["limits", "go", "--per-key", "2"], ["pause", "go", "--key", "a"]):
        done = command(*words, "--layout", "hdt3213")
        assert done.code == 2
        assert "Go layout" in done.err


def test_delete_removes_everything_of_a_queue_with_keys(tenants, command, client):
    command("limits", "q", "--rate", "5/s")
    command("pause", "q", "--key", "a")
    for state in ("waiting", "ready"):
        command("purge", "q", "--state", state, "--yes")
    client.hset("reliq:queues", "q", 1)

    done = command("delete", "q", "--yes")

    assert (done.code, done.err) == (0, "")
    assert lasting(client) == set()


def test_shared_limits_are_listed_with_their_rate_and_the_free_starts(command, admin, client):
    assert command("limits", "--shared").out == "no shared limits\n"

    api, idle = Limit("api", rate="5/h", burst=4), Limit("idle", rate="100/s")
    for call in (book(api, 3), book(idle, 0)):
        client.execute_command(*call.command_in_full)

    assert [line.split() for line in command("limits", "--shared").out.splitlines()] == [
        ["limit", "rate", "burst", "free"],
        ["api", "5/h", "4", "1"],
        ["idle", "100/s", "10", "10"],
    ]
    assert admin.shared_limits()[0] == SharedLimit("api", "5/h", 4, 1)
    for words in ([], ["q", "--shared"], ["--shared", "--rate", "5/s"]):
        refused = command("limits", *words)
        assert (refused.code, "give either a queue, or --shared" in refused.err) == (2, True)
