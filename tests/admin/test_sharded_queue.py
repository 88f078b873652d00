"""Every command over a queue of four shards: it sees one queue, and with --shard one of them."""

import asyncio
import time
from itertools import count

import pytest
import redis
from test_every_command import COMMANDS, options
from waiting import eventually

from reliq import Admin, ConfigurationError, Consumer, Queue, WorkerSettings, commands, minutes, transitions
from reliq.admin import AsyncAdmin, Filter, LetterFilter, RedriveOptions
from reliq.client.client import Client
from reliq.client.moves import Moves
from reliq.ids import home, new_id
from reliq.keys import Keys
from reliq.metrics import names
from reliq.metrics.queues import QueueCollector
from reliq.roster import Slot, Worker
from reliq.shardmap import WITNESSES, ShardMap
from reliq.snapshot.snapshot import SnapshotReader
from reliq.transport.connection import Connection

SHARDS = 4
#: How many messages each shard has in each state.
HELD = {"pending": 3, "ready": 3, "unack": 2, "retry": 1, "garbage": 1, "dead": 2}
ALIVE = sum(HELD.values()) - HELD["dead"]
KEYS = Keys("q")
_numbers = count(1)


class Shard:
    """One shard of a queue, filled by hand."""

    def __init__(self, client, moves, shard):
        self._client, self._moves, self.shard, self.keys = client, moves, shard, KEYS.of_shard(shard)
        self.ids = {}

    def publish(self, state, number, **options):
        """Publish messages whose generated ids say the shard."""
        ids = self.ids[state] = [new_id(self.shard) for _ in range(number)]
        items = [(id, b',"r":3}\n{"number":%d}' % at) for at, id in enumerate(ids)]
        self._moves.publish(items, transitions.CallNumber("t", next(_numbers)), ttl_ms=10**8, retries=3, **options)
        return ids

    def _claim(self, state, lease_ms=10**8):
        number = len(self.publish(state, HELD[state]))
        return self._moves.claim(transitions.CallNumber("w", next(_numbers)), limit=number, lease_ms=lease_ms).claimed

    def fill(self):
        dead = [(one, 0, "rejected 1 no such card", b"{}") for one in self._claim("dead")]
        self._moves.nack(dead)
        self._moves.collect(self.ids["dead"], letters_max=9, letters_ms=10**12)
        self._moves.nack([(one, 0, "rejected 1 no such card", b"{}") for one in self._claim("garbage")])
        self._moves.nack([(one, 10**8, "failed 1 gateway down", b"") for one in self._claim("retry")])
        self._client.zrem(self.keys.unack, *self.ids["retry"])
        self._client.rpush(self.keys.retry, *self.ids["retry"])
        self._client.hset(self.keys.lease, self.ids["retry"][0], "suspect")
        self._claim("unack")
        self.publish("ready", HELD["ready"])
        self.publish("pending", HELD["pending"], delay_ms=3_600_000 - 1000 * self.shard)
        return self


@pytest.fixture
def map_is(client):
    """Write how many shards the queue has, and the fence of each, as `reliq shards` would."""

    def write(n, was=None):
        client.set(KEYS.map, ShardMap(epoch=1, n=n, was=was or n).text)
        client.mset({KEYS.of_shard(shard).epoch: f"1 {n} {was or n}" for shard in range(n)})
        client.hset("reliq:queues", "q", int(time.time()) - 3600)

    return write


@pytest.fixture
def filled(client, url, map_is):
    """The shards of a queue, with messages in every state, and a queue beside it."""
    map_is(SHARDS)
    Queue("other", bytes, url=url).publish(b"{}")
    caller = Client(Connection.to(url).wire())
    return [Shard(client, Moves(KEYS.of_shard(shard), lambda: caller), shard).fill() for shard in range(SHARDS)]


@pytest.fixture
def admin(url):
    admin = Admin(url)
    yield admin
    admin.close()


def ids_of(shards, state):
    return {id for shard in shards for id in shard.ids[state]}


def ids_in(rows):
    return {row["id"] for row in rows}


# ---- the commands


def states(of=SHARDS):
    return {state: number * of for state, number in HELD.items()}


#: Commands that say nothing of one queue's messages, or are of shard 0 or of the queue's name alone, and why.
ONE_FOR_ALL = {
    **dict.fromkeys(("worker", "demo", "bench", "relay", "web", "health", "exporter", "watch"), "they run"),
    **dict.fromkeys(("outbox sql", "outbox clean", "outbox refused", "outbox retry"), "they are of no queue"),
    **dict.fromkeys(("doctor", "scripts load", "acl", "workers"), "they are of no queue"),
    **dict.fromkeys(("keys", "limits"), "a queue of several shards has neither"),
    **dict.fromkeys(("init", "config"), "they are of a program"),
    "publish": "the publisher spreads messages: tests/queue",
    "show": "the id says the shard",
    "forget": "a shard alone cannot be forgotten",
}


def test_every_command_of_a_queue_takes_a_shard():
    assert {name for name in COMMANDS if "--shard" in options(name)} == {
        name for name in COMMANDS if name not in ONE_FOR_ALL and not name.startswith(("cron", "shards"))
    }


def test_queues_counts_them_as_one(command, filled):
    (view,) = command("queues", "q", "--interval", "0", "--json").json["queues"]
    (one,) = command("queues", "q", "--interval", "0", "--json", "--shard", "2").json["queues"]

    assert ({state: view[state] for state in HELD}, view["shards"]) == (states(), SHARDS)
    assert ({state: one[state] for state in HELD}, one["shards"]) == (states(1), 1)
    assert command("queues", "--interval", "50ms").out.splitlines()[2].split()[-1] == str(SHARDS)
    assert [view["queue"] for view in command("queues", "--scan", "--json").json["queues"]] == ["other", "q"]


def test_account_adds_them_up(command, filled):
    whole, one = command("account", "q", "--json").json, command("account", "q", "--json", "--shard", "1").json

    assert (whole["published"], whole["alive"], whole["dead"], whole["balanced"]) == (48, 4 * ALIVE, 8, True)
    assert (one["published"], one["alive"], one["dead"], one["balanced"]) == (12, ALIVE, 2, True)


@pytest.mark.parametrize("state", HELD)
def test_list_has_the_messages_of_all(state, command, filled):
    rows = command("list", "q", "--state", state, "--limit", "99", "--json").json

    assert ids_in(rows) == ids_of(filled, state)
    assert ids_in(command("list", "q", "--state", state, "--shard", "3", "--json").json) == ids_of(filled[3:], state)
    assert [row["id"] for row in command("list", "q", "--state", state, "--limit", "2", "--json").json] == [
        row["id"] for row in rows[:2]
    ]
    if state in ("pending", "dead"):
        assert [row["when"] for row in rows] == sorted(row["when"] for row in rows)


def test_show_finds_an_id_in_its_shard(command, filled):
    for shard in filled:
        for state, ids in shard.ids.items():
            told = command("show", "q", ids[0], "--json")
            assert (told.code, told.json["id"]) == (0, ids[0]), (shard.shard, state)
    assert command("show", "q", "nobody").code == 2


def test_ends_and_dead_letters_are_those_of_all_newest_and_oldest_first(command, filled):
    ends = command("ends", "q", "--json").json
    letters = command("dead", "list", "q", "--json").json

    assert ids_in(ends) == ids_in(letters) == ids_of(filled, "dead")
    assert [end["at"] for end in ends] == sorted((end["at"] for end in ends), reverse=True)
    assert [letter["died"] for letter in letters] == sorted(letter["died"] for letter in letters)
    assert len(command("ends", "q", "--limit", "3", "--json").json) == 3
    (group,) = command("dead", "list", "q", "--group", "--json").json["groups"]
    assert (group["reason"], group["count"]) == ("rejected", 2 * SHARDS)
    assert command("dead", "list", "q", "--group", "--json", "--shard", "1").json["looked"] == 2
    assert command("dead", "show", "q", filled[3].ids["dead"][0], "--json").json["reason"] == "rejected"


def test_running_knows_the_shard_of_an_id(command, filled, client):
    now, [mine, other] = time.time(), [shard.ids["unack"][0] for shard in filled[1:3]]
    slots = tuple(Slot("q", id, 1, now) for id in (mine, other))
    for beat in commands.write_worker(Worker("w", "h", 1, "1", ("q",), 4, 2, now, now, now, slots)):
        client.execute_command(*beat.command)

    assert ids_in(command("running", "q", "--json").json) == {mine, other}
    assert ids_in(command("running", "q", "--json", "--shard", "1").json) == {mine}


def test_a_pause_is_one_of_all_shards_and_so_is_its_end(command, filled, client):
    assert command("pause", "q", "--reason", "we move").code == 0
    assert [client.exists(shard.keys.paused) for shard in filled] == [1] * SHARDS
    assert command("queues", "q", "--json", "--interval", "0").json["queues"][0]["pause"]["reason"] == "we move"

    assert command("resume", "q", "--json").json == {"was_paused": True}
    assert [client.exists(shard.keys.paused, shard.keys.wake) for shard in filled] == [1] * SHARDS  # the token

    command("pause", "q", "--shard", "2")
    assert [client.exists(shard.keys.paused) for shard in filled] == [0, 0, 1, 0]


def test_cancel_takes_ids_of_any_shard_and_states_of_all(command, filled, admin):
    ids = [shard.ids["ready"][0] for shard in filled]

    assert set(command("cancel", "q", *ids, "--json").json.values()) == {"cancelled"}
    assert command("cancel", "q", "--state", "pending", "--yes", "--shard", "0", "--json").json["cancelled"] == 3
    assert command("cancel", "q", "--state", "pending", "--yes", "--json").json["cancelled"] == 9
    assert admin.account("q").balanced


@pytest.mark.parametrize("state", ["pending", "ready", "unack", "retry", "garbage"])
def test_purge_empties_a_state_of_all(state, command, filled, admin):
    assert command("purge", "q", "--state", state, "--dry-run", "--json").json == {"found": HELD[state] * SHARDS}
    steps = []
    admin.in_shard(1).purge("q", state, on_step=lambda looked, sum_of: steps.append(sum_of.found))
    assert admin.size("q", state) == HELD[state] * (SHARDS - 1) or state == "unack"
    done = admin.purge("q", state, on_step=lambda looked, sum_of: steps.append(sum_of.found))

    left = HELD[state] * (SHARDS if state == "unack" else SHARDS - 1)  # what runs stays
    assert (done.found, steps[-1]) == (left, left)
    assert steps[1:] == sorted(steps[1:])
    assert admin.account("q").balanced


def test_dead_letters_are_redriven_in_their_shards_up_to_the_limit(command, filled, admin):
    assert command("dead", "redrive", "q", "--all", "--yes", "--limit", "3", "--json").json["redriven"] == 3
    assert command("dead", "redrive", "q", "--all", "--yes", "--json", "--shard", "3").json["redriven"] == 2
    assert command("dead", "redrive", "q", "--all", "--yes", "--json").json["redriven"] == 3

    counts = [admin.in_shard(shard).account("q") for shard in range(SHARDS)]
    assert [(one.redriven, one.balanced) for one in counts] == [(2, True)] * SHARDS


def test_dead_letters_go_to_another_queue_and_are_deleted(command, filled, admin):
    assert (
        command("dead", "redrive", "q", "--all", "--yes", "--limit", "3", "--to", "other", "--json").json["redriven"]
        == 3
    )
    assert admin.size("other", "ready") == 4
    assert command("dead", "purge", "q", "--reason", "rejected", "--yes", "--json").json == {"deleted": 5}


def test_a_letter_whose_home_is_another_shard_by_now_is_published_there(client, url, admin, map_is):
    letters = Keys("q")
    id = next(id for id in (f"chosen-{at}" for at in range(99)) if home(id, 2) == 1)
    queue = Queue("q", bytes, url=url)
    queue.publish(b"{}", id=id, retries=0)
    with queue.receive() as [job]:
        job.reject()
    queue.moves.collect([id], letters_max=9, letters_ms=10**12)
    map_is(2, was=1)

    done = admin.redrive("q", LetterFilter(), RedriveOptions())

    assert (done.redriven, client.xlen(letters.dead)) == (1, 0)
    assert admin.in_shard(1).size("q", "ready") == 1
    assert admin.account("q").balanced


def test_move_takes_them_from_all_and_brings_them_to_any(command, filled, admin):
    assert command("move", "q", "other", "--state", "ready", "--limit", "7", "--yes", "--json").json["moved"] == 7
    assert command("move", "q", "other", "--state", "ready", "--yes", "--json").json["moved"] == 5
    assert (admin.size("q", "ready"), admin.size("other", "ready")) == (0, 13)

    assert command("move", "other", "q", "--state", "ready", "--yes", "--json").json["moved"] == 13
    assert (admin.size("q", "ready"), admin.size("other", "ready")) == (13, 0)
    assert (admin.account("q").balanced, admin.account("other").balanced) == (True, True)


def test_check_looks_at_each(command, filled, client):
    sound = command("check", "q", "--json")
    client.zadd(filled[2].keys.pending, {filled[2].ids["ready"][0]: time.time()})

    wrong, elsewhere = command("check", "q", "--json"), command("check", "q", "--json", "--shard", "1")

    assert (sound.code, sound.json["looked_at"], wrong.code, elsewhere.code) == (0, 4 * ALIVE, 1, 0)
    assert [(fault["name"], fault["count"]) for fault in wrong.json["faults"]] == [("twice", 1), ("account", 1)]
    assert command("check", "q", "--repair", "--json").json["faults"][0]["mended"] == 1
    assert command("check", "q").code == 0


def test_forget_takes_the_shards_and_their_map_along(command, filled, client, admin):
    assert "has 40 messages" in command("forget", "q", "--yes").err
    for state in ("pending", "ready", "retry", "garbage"):
        admin.purge("q", state)
    client.delete(*(shard.keys.unack for shard in filled), *(shard.keys.retries_left for shard in filled))
    assert "has 8 dead letters" in command("forget", "q", "--yes").err

    assert command("forget", "q", "--yes", "--letters").code == 0

    families = (":msg:", ":lane:", ":dd:")
    assert [key for key in client.keys("{reliq:q*") if not any(one in key.decode() for one in families)] == []


def test_a_shard_that_there_is_not_is_an_error_that_says_so(command, filled, admin):
    assert "has 4 shards, 0 to 3, and no shard 7" in command("account", "q", "--shard", "7").err
    assert "has one shard, 0, and no shard 1" in command("account", "other", "--shard", "1").err
    assert "name the queue whose shard is meant" in command("queues", "--shard", "1").err
    assert command("account", "q", "--shard", "256").code == 2
    with pytest.raises(ConfigurationError, match="shard must be"):
        Admin(shard=-1)


@pytest.mark.parametrize("text", [b"junk", b'{"epoch":1,"n":1000}', b'{"n":-1}', b"[" * 5000, b"\xff"])
def test_a_map_that_something_else_wrote_is_named(text, command, queue, client):
    queue.publish({})
    client.set(KEYS.map, text)

    why = "the Redis key '{reliq:q}:map' does not say how many shards the queue has; something else wrote it. "
    why += "Mend it: reliq check q --repair"
    assert (command("account", "q").code, command("account", "q").err) == (1, f"reliq: {why}\n")
    assert command("queues", "--interval", "0", "--json").json["unreadable"] == {"q": why}


# ---- programs


@pytest.mark.parametrize("state", HELD)
@pytest.mark.parametrize("limit", [1, 3, 50])
def test_pages_are_one_list_and_keep_their_place(state, limit, filled, admin):
    pages, after = [], None
    while True:
        page = admin.page("q", state, after=after, limit=limit)
        pages.append(page.items)
        after = page.after
        if after is None:
            break

    entries = [entry for items in pages for entry in items]
    assert len(entries) == len({entry.id for entry in entries}) == HELD[state] * SHARDS
    assert {len(items) for items in pages[:-1]} <= {limit}
    if state in ("pending", "unack"):
        assert [entry.when for entry in entries] == sorted(entry.when for entry in entries)
    if state == "dead":
        assert [entry.when for entry in entries] == sorted((entry.when for entry in entries), reverse=True)


def test_letters_of_one_moment_in_two_shards_are_each_in_one_page(client, map_is, admin):
    map_is(SHARDS)
    for shard in range(SHARDS):
        for number in (1, 2):
            told = {"id": f"s{shard}-{number}", "value": b"RELIQ/1 {}\n{}", "note": "failed 1 x"}
            client.xadd(KEYS.of_shard(shard).dead, told, id=f"1700000000000-{number}")

    seen, after = [], None
    for _ in range(SHARDS * 2):
        page = admin.page("q", "dead", after=after, limit=1)
        seen += [entry.id for entry in page.items]
        after = page.after

    assert seen == [f"s{shard}-{number}" for number in (2, 1) for shard in range(SHARDS)]
    assert after is None


@pytest.mark.parametrize("state", ["pending", "ready", "unack", "dead"])
def test_a_search_goes_on_from_shard_to_shard(state, filled, admin):
    found, after, looked = [], None, 0
    for _ in range(99):
        some = admin.search("q", state, Filter(match="number"), after=after, limit=2)
        found, looked, after = [*found, *(entry.id for entry in some.items)], looked + some.looked, some.after
        assert some.of == HELD[state] * SHARDS
        if after is None:
            break

    assert sorted(found) == sorted(ids_of(filled, state) if state != "dead" else found)
    assert looked == HELD[state] * SHARDS


def test_async_code_sees_the_same(filled, url):
    async def look():
        whole, one = AsyncAdmin(url), AsyncAdmin(url, shard=1)
        try:
            return (await whole.account("q")).alive, (await one.account("q")).alive
        finally:
            await whole.aclose()
            await one.aclose()

    assert asyncio.run(look()) == (4 * ALIVE, ALIVE)


@pytest.mark.parametrize("after", ["", "x", "9.", "-1.", "1.x", "1"])
def test_a_place_that_no_page_told_is_refused(after, filled, admin):
    with pytest.raises(ConfigurationError, match="after must be the `after` of an earlier page"):
        admin.page("q", "ready", after=after)


def test_while_the_number_of_shards_changes_a_message_is_found_where_it_was(client, url, admin, map_is):
    ids = [id for id in (f"chosen-{at}" for at in range(99)) if home(id, 2) == 1][:3]
    queue = Queue("q", bytes, url=url)
    for id in ids:
        queue.publish(b"{}", id=id, delay=60)
    map_is(2, was=1)

    assert admin.show("q", ids[0]).state == "pending"
    assert admin.cancel("q", [ids[0], "nobody"]) == {ids[0]: "cancelled", "nobody": "not_found"}
    assert admin.reschedule("q", ids[1], delay=600) == "rescheduled"
    assert admin.reschedule("q", "nobody", delay=600) == "not_found"


def test_the_last_minutes_are_the_sum_of_those_of_the_shards(filled, client, admin):
    now = int(time.time() * 1000)
    for shard in filled:
        for ago, published in ((120_000, 0), (60_000, 10), (30_000, 40)):
            totals = minutes.Totals(now - ago, published, 0, 0, 0, 0, 5, now - ago - 1000 * shard.shard)
            for note in minutes.note(shard.keys, totals):
                client.execute_command(*note.command)

    told = admin.history("q")
    [view] = admin.overview(["q"]).queues

    assert sum(one.published for one in told) >= 40
    assert {one.waiting for one in told} == {5 * SHARDS}
    assert max(one.oldest for one in told) == pytest.approx(3, abs=0.1)
    assert admin.in_shard(1).history("q")[0].waiting == 5
    assert view.rates is not None


def test_a_watcher_sees_one_queue(filled, admin):
    watcher = admin.watch(["q"])
    watcher.look()
    moment = watcher.look()

    [view] = moment.overview.queues
    assert ({state: getattr(view, state) for state in HELD}, view.rates.arrived) == (states(), 0)
    assert len(moment.ends) == 2 * SHARDS
    assert {(one.error, one.count) for one in moment.errors} == {("gateway down", SHARDS), ("no such card", SHARDS)}


def test_the_exporter_tells_of_one_queue_and_notices_that_it_has_grown(filled, url, map_is, monkeypatch):
    reader = SnapshotReader(Client(Connection.to(url).wire()), lambda: [Keys("q")])

    def ready():
        families = {family.spec: family.rows for family in QueueCollector(reader.look).families()}
        return {labels: value for labels, value in families[names.MESSAGES].items() if labels[1] == "ready"}

    assert ready() == {("q", "ready"): 3 * SHARDS}
    map_is(2)
    assert ready() == {("q", "ready"): 3 * SHARDS}
    monkeypatch.setattr("reliq.snapshot.shard_maps.MAPS_SECONDS", 0)
    assert ready() == {("q", "ready"): 6}


# ---- rights


@pytest.fixture
def login(client, url):
    """Make a user with exactly the rule that is printed for a role; return its URL."""
    made = []

    def make(role, queue="q", **options):
        rule = Admin(url).acl([role], [queue], user=f"the-{role}", **options)
        client.execute_command("ACL", "SETUSER", rule.user, "reset", *rule.rules, "on", ">secret")
        client.acl_log_reset()
        made.append((rule.user, url.replace("redis://", f"redis://{rule.user}:secret@")))
        return made[-1][1]

    yield make
    for user, known_by in made:
        client.acl_deluser(user)
        Connection.to(known_by).maps.clear()  # the next test has another queue of that name


@pytest.fixture
def refused(client):
    return lambda: {one["object"] for one in client.acl_log() if not one["object"].startswith(("client", "info"))}


def test_the_rule_of_a_role_is_for_every_shard(filled, login, refused, url):
    ids = [shard.ids["ready"][0] for shard in filled]

    assert Admin(login("viewer")).account("q").alive == 4 * ALIVE
    assert Admin(login("operator")).cancel("q", ids) == dict.fromkeys(ids, "cancelled")
    queue = Queue("q", dict, url=login("producer"))
    queue.publish_many([{}] * 8)
    queue.publish({}, id="chosen")
    assert refused() == set()


def test_the_rule_of_an_operator_mends_a_corrupt_map_and_fence(filled, login, refused, client):
    for shard, text in enumerate(("1 4 4", "1 4 4 x", "1 4 4", "1 4 4")):
        client.set(Keys("q", shard=shard).epoch, text)
    client.set(KEYS.map, "junk")

    report = Admin(login("operator")).check("q", repair=True)

    assert {"bad-fence", "lost-map"} <= {one.name for one in report.faults if one.mended == one.count}
    assert ShardMap.parse(client.get(KEYS.map)) == ShardMap(1, SHARDS, SHARDS)
    assert client.get(Keys("q", shard=1).epoch) == b"1 4 4"
    assert refused() == set()


def test_a_worker_needs_the_rule_of_a_consumer_alone(map_is, login, refused, url):
    map_is(SHARDS)
    as_consumer, queue = login("consumer"), Queue("q", dict, url=url)
    consumer = Consumer(as_consumer)
    consumer.handler(Queue("q", dict, url=as_consumer))(lambda body: None)
    queue.publish_many([{}] * 20)
    consumer.start(WorkerSettings(concurrency=2))
    try:
        eventually(lambda: queue.counts().totals.get("acked") == 20, "all are worked")
    finally:
        consumer.stop()
    assert refused() == set()


def test_the_rule_for_a_queue_has_the_shards_that_it_may_get_and_no_other_queue(command, queue, client, login, url):
    queue.publish({})

    assert "{reliq:q#*}:ready" in str(Admin(url).acl(["producer"], ["q"]))
    assert "{reliq:q#*}:ready" in command("acl", "--role", "producer", "--queue", "q", "--server", "7.0").out
    with (
        redis.Redis.from_url(login("producer")) as user,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        user.execute_command("LPUSH", "{reliq:qq}:ready", "x")


# ---- what it costs a queue that is not sharded

#: Commands that look, each with the words after its name.
LOOKS = {
    "queues": ["q", "--interval", "0"],
    "account": ["q"],
    "list": ["q", "--state", "ready"],
    "show": ["q", "m"],
    "ends": ["q"],
    "dead list": ["q"],
    "running": ["q"],
    "check": ["q"],
    "pause": ["q"],
    "resume": ["q"],
    "cancel": ["q", "m"],
    "purge": ["q", "--state", "ready", "--yes"],
    "dead redrive": ["q", "--all", "--yes"],
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_queue_of_one_shard_costs_only_the_map_and_fences_which_go_along(name, command, queue, url, monkeypatch):
    queue.publish({}, id="m")
    trips, exchange = [], Client._exchange

    def counted(self, requests, **options):
        trips.append([one.command for one in requests])
        return exchange(self, requests, **options)

    monkeypatch.setattr(Client, "_exchange", counted)

    assert command(*name.split(), *LOOKS[name]).code == 0

    fences = {KEYS.of_shard(shard).epoch for shard in range(WITNESSES)}
    maps = [trip for trip in trips for one in trip if one[:2] == ("GETRANGE", KEYS.map)]
    assert all(len(trip) > 1 + WITNESSES for trip in maps), "they go along with something else"
    parts = {str(part) for trip in trips for one in trip for part in one[1:] if one[0] != "EVAL"}
    assert {part for part in parts if "#" in part} <= fences
