"""Keys and limits as an operator sees and changes them: keys, limits, and the commands that take a key."""

import pytest

from reliq import ConfigurationError, Outgoing, Queue, transitions
from reliq.admin import Admin
from reliq.cli.watch import line_of
from reliq.client.client import Client
from reliq.shardmap import WITNESSES
from reliq.transport.connection import Connection


@pytest.fixture
def admin(url):
    admin = Admin(url)
    yield admin
    admin.close()


@pytest.fixture
def tenants(queue):
    """Three messages of tenant a, one of b, one without a key."""
    queue.publish_many(
        [Outgoing(body={"n": n}, id=f"a{n}", key="a", headers={"n": str(n)}) for n in range(3)]
        + [Outgoing(body={"n": 9}, id="b0", key="b"), Outgoing(body={"n": 8}, id="none")]
    )
    return queue


class Server:
    """Claims as a worker that knows keys does."""

    def __init__(self, url, keys):
        self._client, self._keys, self._numbers = Client(Connection.to(url).wire(5.0)), keys, iter(range(1, 99))

    def run(self, call):
        return self._client.run(call, for_seconds=5)

    def claim(self, limit):
        turn = transitions.CallNumber("w", next(self._numbers))
        return self.run(transitions.claim(self._keys, turn, limit=limit, lease_ms=60_000, keyed=True)).claimed

    def __call__(self, limit):
        """Claim; return the ids."""
        return [one.id for one in self.claim(limit)]


@pytest.fixture
def serve(url, queue):
    return Server(url, queue.keys)


def test_the_keys_with_most_messages_come_first_with_why_they_wait(tenants, command):
    told = command("keys", "q")

    lines = [line.split() for line in told.out.splitlines()]
    assert told.code == 0
    assert lines[0][:2] == ["key", "waiting"]
    assert lines[1] == ["a", "3", "0", "1", "in", "turn", "for", "a", "worker"]
    assert lines[2][:2] == ["b", "1"]
    assert told.out.endswith("4 waiting, 0 running; 2 keys in turn, 0 asleep\n")
    assert [one["key"] for one in command("keys", "q", "--json").json["largest"]] == ["a", "b"]
    assert command("keys", "q", "--key", "a", "--json").json["waiting"] == 3
    assert {line.split()[0] for line in command("keys", "q", "--all").out.splitlines()} == {"a", "b"}
    assert command("keys", "q", "--all", "--key", "a").code == 2


def test_waiting_messages_are_counted_wherever_messages_are_counted(tenants, command, admin):
    counts = tenants.counts()

    assert (counts.waiting, counts.ready, counts.alive, counts.missing, counts.keyed) == (4, 1, 5, 0, True)
    assert command("account", "q").code == 0
    [view] = admin.queues(["q"], interval=0).queues
    assert (view.waiting, view.due, view.alive) == (4, 5, 5)
    assert [one.key for one in view.lines.largest] == ["a", "b"]
    table = command("queues", "--interval", "0").out.splitlines()
    assert table[0].split()[-1] == "waiting"
    assert table[1].split()[-1] == "4"
    assert admin.size("q", "waiting") == 4
    assert admin.size("q", "waiting", key="a") == 3


def test_a_queue_without_keys_is_as_it_was(queue, command):
    queue.publish({})

    assert (queue.counts().waiting, queue.counts().keyed) == (0, False)
    assert "waiting" not in command("queues", "--interval", "0").out
    assert command("keys", "q").out == "0 waiting, 0 running; 0 keys in turn, 0 asleep\n"
    assert command("limits", "q").out == "q has no limits\n"
    assert command("list", "q", "--state", "waiting").out == "no waiting messages in q\n"


def test_waiting_messages_are_listed_as_keys_take_turns_or_of_one_key_in_order(tenants, command, admin):
    first = command("list", "q", "--state", "waiting", "--json").json

    assert sorted((first[0]["id"], first[1]["id"])) == ["a0", "b0"]
    assert [one["id"] for one in first[2:]] == ["a1", "a2"]
    assert {one["state"] for one in first} == {"waiting"}
    assert [one["id"] for one in command("list", "q", "--key", "a", "--json").json] == ["a0", "a1", "a2"]
    assert "key" in command("list", "q", "--key", "a").out.splitlines()[0]
    found = command("list", "q", "--state", "waiting", "--header", "n=1", "--json").json
    assert [(one["id"], one["key"]) for one in found] == [("a1", "a")]
    page = admin.page("q", "waiting", key="a", limit=2)
    rest = admin.page("q", "waiting", key="a", limit=2, after=page.after)
    assert [one.id for one in (*page.items, *rest.items)] == ["a0", "a1", "a2"]
    with pytest.raises(ConfigurationError, match="by key"):
        admin.page("q", "waiting")


def test_a_message_that_waits_says_its_key_its_place_and_why(tenants, command, admin):
    shown = command("show", "q", "a2")

    assert shown.code == 0
    facts = dict(line.strip().split("  ", 1) for line in shown.out.splitlines() if "  " in line.strip())
    assert facts["state"] == "waiting"
    assert facts["key"] == "a"
    assert facts["in its line"] == "2 come before it"
    assert facts["it waits"] == "in turn for a worker"
    assert admin.show("q", "none").state == "ready"
    command("pause", "q", "--key", "a", "--for", "10m")
    assert "asleep until" in command("show", "q", "a2").out


def test_what_a_key_with_one_place_waits_for_is_told(tenants, admin, serve):
    admin.set_limits("q", per_key=1)

    assert sorted(serve(10)) == ["a0", "b0", "none"]
    assert admin.show("q", "a1").line.state == "saturated"
    assert (admin.show("q", "a0").state, admin.show("q", "a0").key) == ("leased", "a")
    assert admin.keys("q").running == 3


def test_a_paused_key_is_not_served_until_it_is_resumed(tenants, command, serve):
    paused = command("pause", "q", "--key", "a")

    assert (paused.code, paused.out) == (0, "key a of q is paused; `reliq resume q --key a` ends it\n")
    assert sorted(serve(10)) == ["b0", "none"]
    assert command("keys", "q", "--key", "a", "--json").json["state"] == "paused"
    assert command("resume", "q", "--key", "a").out == "key a of q is resumed\n"
    assert serve(10) == ["a0", "a1", "a2"]
    assert command("resume", "q", "--key", "a").out == "key a of q was not paused\n"
    assert command("pause", "q", "--key", "a", "--reason", "x").code == 2
    assert command("pause", "q", "--key", "a\x01").code == 2


def test_what_waits_of_one_key_is_purged_and_nothing_else(tenants, command, client):
    client.config_resetstat()
    assert command("purge", "q", "--key", "a", "--dry-run", "--json").json == {"found": 3}
    assert client.info("commandstats")["cmdstat_getrange"]["calls"] == 2 * (1 + WITNESSES), (
        "two maps of shards with their fences, and no message"
    )

    done = command("purge", "q", "--key", "a", "--yes", "--json").json

    assert (done["found"], done["purged"]) == (3, 3)
    assert (tenants.counts().waiting, tenants.counts().alive, tenants.counts().missing) == (1, 2, 0)
    assert command("purge", "q", "--yes").code == 2
    assert command("purge", "q", "--state", "waiting", "--yes", "--json").json["purged"] == 1


def test_waiting_messages_are_cancelled_by_key_and_moved_with_it(tenants, command, url, admin):
    assert command("cancel", "q", "--state", "waiting", "--key", "b", "--yes", "--json").json["cancelled"] == 1
    other = Queue("other", dict, url=url)
    other.publish({}, id="there")

    moved = command("move", "q", "other", "--state", "waiting", "--key", "a", "--yes", "--json").json

    assert (moved["found"], moved["moved"]) == (3, 3)
    assert [one.id for one in admin.messages("other", "waiting")] == ["a0", "a1", "a2"]
    assert {admin.show("other", f"a{n}").key for n in range(3)} == {"a"}
    other.close()


def test_a_waiting_message_is_cancelled_or_given_another_time_by_its_id(tenants, command, admin, serve):
    assert command("cancel", "q", "a0").out == "cancelled a0\n"
    assert admin.reschedule("q", "a1", delay=600) == "rescheduled"

    assert sorted(serve(10)) == ["a2", "b0", "none"]
    assert (admin.show("q", "a1").state, admin.show("q", "a1").key) == ("pending", "a")
    assert [one["id"] for one in command("list", "q", "--state", "pending", "--key", "a", "--json").json] == ["a1"]


def test_a_watch_says_how_many_wait_by_key(tenants, admin):
    said = line_of(admin.watch(["q"]).look())

    assert " waiting=4 " in said


def test_dead_letters_of_a_key_are_chosen_and_redriven_into_its_line(queue, command, admin, serve, client):
    for id, key in (("x", "a"), ("y", "b")):
        queue.publish({}, id=id, key=key)
    values = {id: client.get(queue.keys.msg(id)) for id in ("x", "y")}
    serve.run(transitions.nack(queue.keys, [(one, 0, "rejected 1 x", values[one.id]) for one in serve.claim(2)]))
    queue.moves.collect(["x", "y"], letters_max=1000, letters_ms=10**9)

    assert [one["id"] for one in command("dead", "list", "q", "--key", "a", "--json").json] == ["x"]
    assert command("dead", "redrive", "q", "--key", "a", "--yes", "--json").json["redriven"] == 1
    assert [one.id for one in admin.messages("q", "waiting")] == ["x"]


def test_limits_are_shown_and_changed_and_hold_at_once(tenants, command, serve):
    done = command("limits", "q", "--per-key", "2", "--rate", "100/s", "--weight", "vip=4")

    assert done.code == 0
    assert [line.strip() for line in done.out.splitlines()] == [
        "per key  2 at once",
        "rate  100/s, 10 at once after a pause",
        "weight  vip: 4",
    ]
    assert command("limits", "q").out == done.out
    assert sorted(serve(10)) == ["a0", "a1", "b0", "none"]
    shown = command("limits", "q", "--clear", "per-key", "--clear", "weight:vip", "--rate", "5/m", "--json").json
    assert (shown["per_key"], shown["key_weights"], shown["rate"], shown["burst"]) == (None, {}, "5/m", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "fast"], "rate must be a number"),
        (["--per-key", "0"], "per_key"),
        (["--burst", "5"], "burst is for a rate"),
        (["--weight", "vip"], "a weight is written KEY=N"),
        (["--clear", "everything"], "what is cleared must be one of"),
        (["--ordered", "--per-key", "3"], "leave out per_key"),
    ],
)
def test_a_limit_that_is_none_is_refused_and_changes_nothing(words, said, tenants, command, client):
    before = client.hgetall(tenants.keys.limits)

    done = command("limits", "q", *words)

    assert done.code == 2
    assert said in done.err
    assert client.hgetall(tenants.keys.limits) == before


def test_order_is_given_up_by_its_own_name_alone(tenants, command, admin):
    command("limits", "q", "--ordered")

    assert "leave out per_key" in command("limits", "q", "--per-key", "4").err
    assert command("limits", "q", "--no-ordered", "--per-key", "4").code == 0
    assert (admin.limits("q").ordered, admin.limits("q").per_key) == (False, 4)
    assert command("limits", "q", "--no-ordered").code == 0
    assert admin.limits("q").per_key is None


def test_limits_that_make_no_sense_are_told_and_can_be_cleared(tenants, command, client):
    client.hset(tenants.keys.limits, "per_key", "many")

    told = command("limits", "q")

    assert told.code == 2
    assert "--clear NAME" in told.err
    assert command("limits", "q", "--clear", "per-key").code == 0


def test_queues_that_can_have_no_keys_are_refused_by_name(url, command, client):
    client.lpush("dp:go:ready", "x")
    client.hset("dp:go:retry:cnt", "x", 3)

    for words in (["limits", "go", "--per-key", "2"], ["pause", "go", "--key", "a"]):
        done = command(*words, "--layout", "hdt3213")
        assert done.code == 2
        assert "Go layout" in done.err


def test_a_queue_with_keys_is_forgotten_with_all_that_it_has(tenants, command, client):
    command("limits", "q", "--rate", "5/s")
    command("pause", "q", "--key", "a")
    for state in ("waiting", "ready"):
        command("purge", "q", "--state", state, "--yes")
    client.hset("reliq:queues", "q", 1)

    done = command("forget", "q", "--yes")

    assert (done.code, done.err) == (0, "")
    assert [
        key for key in client.keys("*q}*") if b":msg:" not in key and b":dd:" not in key and b":lane:" not in key
    ] == []
