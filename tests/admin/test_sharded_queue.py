"""Every command over a queue of four shards: it sees one queue, and with --shard one of them."""

import time
from itertools import count, product

import pytest
import redis
from handling import bury_all, lasting, pages, searches
from test_every_command import COMMANDS, options
from transition import PATIENT_SECONDS

from reliq import Admin, ConfigurationError, OutgoingMessage, Queue
from reliq.admin import Filter
from reliq.keys import Keys, home, new_id
from reliq.lua import transitions
from reliq.metrics import names
from reliq.metrics.serving import queue_collector
from reliq.metrics.snapshot import MAPS_SECONDS
from reliq.redis import commands
from reliq.redis.client import Client
from reliq.redis.commands import RunningJob
from reliq.redis.connection import ServerConnections
from reliq.redis.server import Connection
from reliq.redis.shards import WITNESSES, ShardMap

SHARDS = 4
#: Number of messages of each shard in each state.
HELD = {"pending": 3, "ready": 3, "unack": 2, "retry": 1, "garbage": 1, "dead": 2}
ALIVE = sum(HELD.values()) - HELD["dead"]
TOTAL = {state: number * SHARDS for state, number in HELD.items()}
KEYS = Keys("q")
_numbers = count(1)


class Shard:
    """One shard of a queue with messages in each state; their generated ids contain the shard's number."""

    def __init__(self, client, caller, shard):
        self._caller, self.shard, self.keys = caller, shard, KEYS.of_shard(shard)
        self.ids = {state: [new_id(shard) for _ in range(number)] for state, number in HELD.items()}
        claimed = {state: self._claim(state) for state in ("dead", "garbage", "retry", "unack")}
        ended = [*claimed["dead"], *claimed["garbage"]]
        caller.run(transitions.nack(self.keys, [(one, 0, "rejected 1 no such card", b"{}") for one in ended]))
        caller.run(transitions.collect(self.keys, self.ids["dead"], dead_letter_limit=9, letters_ms=10**12))
        caller.run(
            transitions.nack(self.keys, [(one, 10**8, "failed 1 gateway down", b"") for one in claimed["retry"]])
        )
        client.zrem(self.keys.unack, *self.ids["retry"])
        client.rpush(self.keys.retry, *self.ids["retry"])
        client.hset(self.keys.lease, self.ids["retry"][0], "suspect")
        self._publish("ready")
        self._publish("pending", delay_ms=3_600_000 - 1000 * shard)

    def _publish(self, state, **options):
        items = [(id, b',"r":3}\n{"number":%d}' % at) for at, id in enumerate(self.ids[state])]
        call = transitions.CallNumber("t", next(_numbers))
        self._caller.run(transitions.publish(self.keys, items, call, ttl_ms=10**8, retries=3, **options))

    def _claim(self, state):
        self._publish(state)
        call = transitions.CallNumber("w", next(_numbers))
        return self._caller.run(transitions.claim(self.keys, call, limit=HELD[state], lease_ms=10**8)).claimed


@pytest.fixture
def map_is(client):
    """Write the number of shards and the fence of each shard, as `reliq shards` does."""

    def write(n, was=None):
        client.set(KEYS.map, ShardMap(epoch=1, n=n, was=was or n).text)
        client.mset({KEYS.of_shard(shard).epoch: f"1 {n} {was or n}" for shard in range(n)})
        client.hset("reliq:queues", "q", int(time.time()) - 3600)

    return write


@pytest.fixture
def filled(client, url, map_is):
    """The shards of a queue with messages in every state, and an unrelated queue."""
    map_is(SHARDS)
    Queue("other", bytes, url=url).publish(b"{}")
    caller = Client(Connection.to(url).wire(PATIENT_SECONDS))
    return [Shard(client, caller, shard) for shard in range(SHARDS)]


def ids_of(shards, state):
    return {id for shard in shards for id in shard.ids[state]}


#: Commands that do not read the messages of shards.
ONE_FOR_ALL = {
    *("worker", "demo", "bench", "relay", "web", "health", "exporter", "watch", "init"),  # independent programs
    *("outbox sql", "outbox clean", "outbox retry", "doctor", "acl"),
    *("keys", "limits", "schedules"),  # a queue of several shards has no keys and limits; schedules are in shard 0
    *("publish", "show", "delete"),  # the id determines the shard; a shard cannot be deleted alone
}


def test_every_command_on_a_queue_has_the_option_shard():
    expected = {name for name in COMMANDS if name not in ONE_FOR_ALL and not name.startswith(("cron", "shards"))}
    assert {name for name in COMMANDS if "--shard" in options(name)} == expected


def test_queues_and_account_add_up_the_shards(command, filled):
    (view,) = command("queues", "q", "--json").json["queues"]
    (one,) = command("queues", "q", "--json", "--shard", "2").json["queues"]
    assert ({state: view[state] for state in HELD}, view["shards"]) == (TOTAL, SHARDS)
    assert ({state: one[state] for state in HELD}, one["shards"]) == (HELD, 1)
    assert [view["queue"] for view in command("queues", "--scan", "--json").json["queues"]] == ["other", "q"]

    whole, one = (
        command("queues", "q", "--check", "--json", *words).json["queues"][0]["account"]
        for words in ([], ["--shard", "1"])
    )
    assert (whole["published"], whole["alive"], whole["dead"], whole["missing"]) == (48, 4 * ALIVE, 8, 0)
    assert (one["published"], one["alive"], one["dead"], one["missing"]) == (12, ALIVE, 2, 0)


def test_list_shows_the_messages_of_all_shards(command, filled):
    for state in HELD:
        rows = command("list", "q", "--state", state, "--limit", "99", "--json").json
        assert {row["id"] for row in rows} == ids_of(filled, state)
        of_one = command("list", "q", "--state", state, "--shard", "3", "--json").json
        assert {row["id"] for row in of_one} == ids_of(filled[3:], state)
        assert command("list", "q", "--state", state, "--limit", "2", "--json").json == rows[:2]


def test_running_show_ends_and_dead_read_all_shards_or_one(command, filled, alive):
    mine, other = (shard.ids["unack"][0] for shard in filled[1:3])
    alive(running=tuple(RunningJob("q", id, 1, time.time()) for id in (mine, other)))
    assert {one["id"] for one in command("workers", "q", "--running", "--json").json} == {mine, other}
    assert [one["id"] for one in command("workers", "q", "--running", "--json", "--shard", "1").json] == [mine]

    for shard in filled:
        for state, ids in shard.ids.items():
            assert command("show", "q", ids[0], "--json").json["id"] == ids[0], (shard.shard, state)
    assert command("show", "q", "nobody").code == 2

    ends, letters = (
        command("list", "q", "--state", "ended", "--json").json,
        command("list", "q", "--state", "dead", "--json").json,
    )
    assert {one["id"] for one in ends} == {one["id"] for one in letters} == ids_of(filled, "dead")
    assert len(command("list", "q", "--state", "ended", "--limit", "3", "--json").json) == 3
    (group,) = command("list", "q", "--state", "dead", "--group", "--json").json["groups"]
    assert (group["reason"], group["count"]) == ("rejected", 2 * SHARDS)
    assert command("list", "q", "--state", "dead", "--group", "--json", "--shard", "1").json["looked"] == 2
    assert command("show", "q", filled[3].ids["dead"][0], "--json").json["reason"] == "rejected"


def test_pause_and_resume_change_all_shards_or_one(command, filled, client):
    assert command("pause", "q", "--reason", "we move").code == 0
    assert [client.exists(shard.keys.paused) for shard in filled] == [1] * SHARDS
    assert command("queues", "q", "--json").json["queues"][0]["pause"]["reason"] == "we move"

    assert command("resume", "q", "--json").json == {"was_paused": True}
    assert [client.exists(shard.keys.paused, shard.keys.wake) for shard in filled] == [1] * SHARDS  # the token

    command("pause", "q", "--shard", "2")
    assert [client.exists(shard.keys.paused) for shard in filled] == [0, 0, 1, 0]


def test_cancel_finds_messages_in_any_shard(command, filled, admin):
    ids = [shard.ids["ready"][0] for shard in filled]

    assert set(command("cancel", "q", *ids, "--json").json.values()) == {"cancelled"}
    assert command("cancel", "q", "--state", "pending", "--yes", "--shard", "0", "--json").json["done"] == 3
    assert command("cancel", "q", "--state", "pending", "--yes", "--json").json["done"] == 9
    assert admin.account("q").missing == 0


def test_purge_empties_a_state_of_all_shards_or_of_one(command, filled, admin):
    for state in ("pending", "ready", "unack", "retry", "garbage"):
        assert command("purge", "q", "--state", state, "--dry-run", "--json").json == {"found": TOTAL[state]}
        steps = []
        admin.in_shard(1).purge("q", state)
        left = TOTAL[state] if state == "unack" else TOTAL[state] - HELD[state]  # running messages stay
        assert admin.count("q", state) == left
        admin.purge("q", state, on_step=lambda _looked, sum_of, steps=steps: steps.append(sum_of.found))
        assert (steps[-1], steps) == (left, sorted(steps))
    assert admin.account("q").missing == 0


def test_dead_letters_are_redriven_moved_and_purged_up_to_the_limit(command, filled, admin):
    redrive = ("redrive", "q", "--all", "--yes", "--json")
    assert command(*redrive, "--limit", "3").json["done"] == 3
    assert command(*redrive, "--shard", "3").json["done"] == 2
    counts = [admin.in_shard(shard).account("q") for shard in range(SHARDS)]
    assert (sum(one.totals.get("redriven", 0) for one in counts), {one.missing for one in counts}) == (5, {0})

    assert command(*redrive, "--limit", "2", "--to", "other").json["done"] == 2
    assert admin.count("other", "ready") == 3
    assert command("purge", "q", "--state", "dead", "--reason", "rejected", "--yes", "--json").json["done"] == 1


def test_dead_letter_whose_home_shard_changed_is_redriven_after_the_change_of_shards(client, url, admin, map_is):
    queue = Queue("q", bytes, url=url)
    queue.publish(b"{}", id=next(id for id in (f"chosen-{at}" for at in range(99)) if home(id, 2) == 1))
    bury_all(queue)
    map_is(2, was=1)

    first = admin.redrive("q")
    admin.finish_resize("q")
    second = admin.redrive("q")

    assert (first.done, first.kept, second.done) == (0, 1, 1)
    assert (client.xlen(KEYS.dead), admin.in_shard(1).count("q", "ready")) == (0, 1)
    assert admin.account("q").missing == 0


def test_move_reads_all_shards_and_writes_to_any(command, filled, admin):
    assert command("move", "q", "other", "--state", "ready", "--limit", "7", "--yes", "--json").json["done"] == 7
    assert command("move", "q", "other", "--state", "ready", "--yes", "--json").json["done"] == 5
    assert (admin.count("q", "ready"), admin.count("other", "ready")) == (0, 13)

    assert command("move", "other", "q", "--state", "ready", "--yes", "--json").json["done"] == 13
    assert (admin.count("q", "ready"), admin.count("other", "ready")) == (13, 0)
    assert (admin.account("q").missing == 0, admin.account("other").missing == 0) == (True, True)


def test_check_reads_every_shard(command, filled, client):
    sound = command("check", "q", "--json")
    client.zadd(filled[2].keys.pending, {filled[2].ids["ready"][0]: time.time()})

    wrong, elsewhere = command("check", "q", "--json"), command("check", "q", "--json", "--shard", "1")

    assert (sound.code, sound.json["looked_at"], wrong.code, elsewhere.code) == (0, 4 * ALIVE, 1, 0)
    assert [(fault["name"], fault["count"]) for fault in wrong.json["faults"]] == [("twice", 1), ("account", 1)]
    assert command("check", "q", "--repair", "--json").json["faults"][0]["mended"] == 1
    assert command("check", "q").code == 0


def test_delete_removes_all_shards_and_the_map(command, filled, client, admin):
    assert "has 40 messages" in command("delete", "q", "--yes").err
    for state in ("pending", "ready", "retry", "garbage"):
        admin.purge("q", state)
    client.delete(*(shard.keys.unack for shard in filled), *(shard.keys.retries_left for shard in filled))
    assert "has 8 dead letters" in command("delete", "q", "--yes").err

    assert command("delete", "q", "--yes", "--letters").code == 0

    assert lasting(client) == set()


def test_shard_that_does_not_exist_is_refused(command, filled, admin):
    assert "has 4 shards, 0 to 3, and no shard 7" in command("queues", "q", "--check", "--shard", "7").err
    assert "has one shard, 0, and no shard 1" in command("queues", "other", "--check", "--shard", "1").err
    assert "a shard is given without a queue: name the queue" in command("queues", "--shard", "1").err
    assert command("queues", "q", "--check", "--shard", "256").code == 2
    with pytest.raises(ConfigurationError, match="shard must be"):
        Admin(shard=-1)


@pytest.mark.usefixtures("unhurried")
def test_pages_cover_all_shards_once(filled, admin):
    for state, limit in product(HELD, (1, 3, 50)):
        found = pages(admin, state, limit)
        entries = [entry for page in found for entry in page]

        assert all(len(page) == limit for page in found[:-1])
        assert {entry.id for entry in entries} == ids_of(filled, state)
        assert len(entries) == TOTAL[state]
        if state in ("pending", "unack", "dead"):
            of_one = [entry.when for entry in entries if entry.id in filled[0].ids[state]]
            assert of_one == sorted(of_one, reverse=state == "dead")
    for after in ("", "x", "9.", "-1.", "1"):
        with pytest.raises(ConfigurationError, match="after must be the `after` of an earlier page"):
            admin.page("q", "ready", after=after)


def test_dead_letters_of_the_same_time_in_two_shards_appear_once(client, map_is, admin):
    map_is(SHARDS)
    for shard, number in product(range(SHARDS), (1, 2)):
        told = {"id": f"s{shard}-{number}", "value": b"RELIQ/1 {}\n{}", "note": "failed 1 x"}
        client.xadd(KEYS.of_shard(shard).dead, told, id=f"1700000000000-{number}")

    seen = [entry.id for page in pages(admin, "dead", 1) for entry in page]

    assert seen == [f"s{shard}-{number}" for shard in range(SHARDS) for number in (2, 1)]


@pytest.mark.usefixtures("unhurried")
def test_search_continues_from_shard_to_shard(filled, admin):
    for state in ("pending", "ready", "unack", "dead"):
        found = searches(admin, state, Filter(match="number"), limit=2)

        ids = {entry.id for some in found for entry in some.items}
        assert state == "dead" or ids == ids_of(filled, state)
        assert {some.of for some in found} == {sum(some.looked for some in found)} == {TOTAL[state]}


def test_message_is_found_in_its_old_shard_during_a_resize(client, url, admin, map_is):
    ids = [id for id in (f"chosen-{at}" for at in range(99)) if home(id, 2) == 1][:2]
    Queue("q", bytes, url=url).publish_many(OutgoingMessage(body=b"{}", id=id, delay=60) for id in ids)
    map_is(2, was=1)

    assert admin.show("q", ids[0]).state == "pending"
    assert admin.cancel("q", [ids[0], "nobody"]) == {ids[0]: "cancelled", "nobody": "not_found"}
    assert admin.reschedule("q", ids[1], delay=600) == "rescheduled"
    assert admin.reschedule("q", "nobody", delay=600) == "not_found"


def test_history_is_the_sum_of_the_shards(filled, client, admin):
    now = int(time.time() * 1000)
    for shard in filled:
        for ago, published in ((120_000, 0), (60_000, 10), (30_000, 40)):
            totals = commands.Totals(now - ago, published, 0, 0, 0, 0, 5, now - ago - 1000 * shard.shard)
            for note in commands.note(shard.keys, totals):
                client.execute_command(*note.command)

    told = admin.history("q")
    [view] = admin.queues(["q"]).queues

    assert sum(one.published for one in told) >= 40
    assert {one.waiting for one in told} == {5 * SHARDS}
    assert max(one.oldest for one in told) == pytest.approx(3, abs=0.1)
    assert admin.in_shard(1).history("q")[0].waiting == 5
    assert view.rates is not None


def test_watch_shows_all_shards_as_one_queue(filled, admin):
    watcher = admin.watch(["q"])
    watcher.look()
    moment = watcher.look()

    [view] = moment.overview.queues
    assert ({state: getattr(view, state) for state in HELD}, view.rates.arrived) == (TOTAL, 0)
    assert len(moment.ends) == 2 * SHARDS
    assert {(one.error, one.count) for one in moment.errors} == {("gateway down", SHARDS), ("no such card", SHARDS)}


def test_exporter_sums_the_shards_and_notices_new_shards(filled, url, map_is, monkeypatch):
    collector = queue_collector(Connection.to(url), [Keys("q")])

    def ready():
        families = {family.spec: family.rows for family in collector.families()}
        return {labels: value for labels, value in families[names.MESSAGES].items() if labels[1] == "ready"}

    assert ready() == {("q", "ready"): 3 * SHARDS}
    map_is(2)
    assert ready() == {("q", "ready"): 3 * SHARDS}
    later = time.monotonic() + MAPS_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert ready() == {("q", "ready"): 6}


def test_acl_of_a_queue_allows_its_future_shards_and_no_other_queue(command, queue, login):
    queue.publish({})

    assert "{reliq:q#*}:ready" in command("acl", "--role", "producer", "--queue", "q", "--server", "7.0").out
    with redis.Redis.from_url(login("producer", "q")) as user, pytest.raises(redis.exceptions.NoPermissionError):
        user.execute_command("LPUSH", "{reliq:qq}:ready", "x")


LOOKS = (
    *(
        "queues q",
        "queues q --check",
        "list q --state ready",
        "show q m",
        "list q --state ended",
        "list q --state dead",
        "workers q --running",
    ),
    *("check q", "pause q", "resume q", "cancel q m", "purge q --state ready --yes", "redrive q --all --yes"),
)


def test_commands_on_one_shard_read_map_and_fences_along_with_other_data(command, queue, monkeypatch):
    queue.publish({}, id="m")
    trips, exchange = [], ServerConnections.exchange

    def counted(self, commands):
        trips.append(commands)
        return exchange(self, commands)

    monkeypatch.setattr(ServerConnections, "exchange", counted)
    fences = {KEYS.of_shard(shard).epoch for shard in range(WITNESSES)}

    for call in LOOKS:
        trips.clear()
        assert command(*call.split()).code == 0, call

        maps = [trip for trip in trips for one in trip if one[:2] == ("GETRANGE", KEYS.map)]
        assert all(len(trip) > 1 + WITNESSES for trip in maps), call
        parts = {str(part) for trip in trips for one in trip for part in one[1:] if one[0] != "EVAL"}
        assert {part for part in parts if "#" in part} <= fences, call
