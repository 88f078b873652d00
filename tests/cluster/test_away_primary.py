"""A primary is paused and no replica is promoted: a sharded queue continues with its other shards."""

from contextlib import suppress

import pytest
from rich.console import Console
from typer.testing import CliRunner
from waiting import eventually

from reliq import Admin, Consumer, Queue, RedisUnavailableError, WorkerSettings, web
from reliq.cli.app import app
from reliq.cli.watch import draw
from reliq.keys import QUEUES_KEY, WORKERS_KEY, Keys
from reliq.metrics import names
from reliq.metrics.queues import QueueCollector
from reliq.metrics.snapshot import SnapshotReader
from reliq.redis import session
from reliq.redis.client import Client
from reliq.redis.connection import run_blocking
from reliq.redis.server import Connection
from reliq.redis.shards import ShardMap
from tests.cluster_moves import SlotMove, my_id
from tests.web.site_page import serving

pytestmark = pytest.mark.slow

SHARDS = 8


@pytest.fixture
def queue(cluster):
    """A sharded queue with one message in each shard; this process has read its map."""
    keys = Keys("q")
    map = ShardMap(1, SHARDS, SHARDS)
    fences = [("SET", keys.of_shard(shard).epoch, map.fence) for shard in range(SHARDS)]
    run_blocking(Connection.to(cluster.url).wire().exchange([("SET", keys.map, map.text), *fences]))
    queue = Queue("q", int, url=cluster.url)
    queue.publish_many(range(SHARDS), chunk=1)
    yield queue
    queue.close()


@pytest.fixture
def away(cluster, queue, stand_still, monkeypatch):
    """Stop the primary of a shard or of another Redis key; return the shards on that primary."""

    def stop(place):
        server = cluster.primary_of(place if isinstance(place, str) else Keys("q", shard=place).ready)
        there = [at for at in range(SHARDS) if cluster.primary_of(Keys("q", shard=at).ready) == server]
        monkeypatch.setattr(session, "PATIENCE_SECONDS", 0.1)
        stand_still(server)
        return there

    return stop


@pytest.fixture
def registries_apart(cluster, queue):
    """Place the queue registry and the worker registry on two nodes."""
    source = cluster.primary_of(WORKERS_KEY)
    target = next(one for one in cluster.primaries() if one != cluster.primary_of(QUEUES_KEY))
    for node in (target, source):
        move = SlotMove(cluster, WORKERS_KEY, node)
        move.begin()
        move.end()
        if node == target:
            yield


def test_a_receive_serves_the_other_shards_while_a_primary_is_away(queue, receive, away):
    there = away(0)

    bodies = []
    for _ in range(SHARDS + 2):
        bodies += receive(queue, lambda jobs: [job.body for job in jobs])

    assert len(set(bodies)) == len(bodies) == SHARDS - len(there)
    spared = {shard for shard in range(SHARDS) if queue._receiver.spares_leases(queue.known_shards.keys(shard))}
    assert spared
    assert spared <= set(there)


def test_an_operator_sees_the_reachable_part_while_a_primary_is_away(cluster, queue, away, call):
    home = cluster.primary_of(queue.keys.ready)
    other = next(at for at in range(SHARDS) if cluster.primary_of(Keys("q", shard=at).ready) != home)
    well = next(name for name in map(str, range(99)) if cluster.primary_of(Keys(name).ready) == home)
    Queue(well, int, url=cluster.url).publish(1)
    queues, admin = [queue.keys, Keys(well)], Admin(cluster.url)
    client = Client.to(Connection.to(cluster.url), 1.0)
    reader = SnapshotReader(client, lambda: queues)
    for shard in range(SHARDS):
        dead = Keys("q", shard=shard).dead
        fields = {"id": f"letter-{shard}", "value": b"RELIQ/1 {}\n{}", "note": "failed 1 x"}
        cluster.client(cluster.primary_of(dead)).xadd(dead, fields)
    there = tuple(away(other))
    here = [at for at in range(SHARDS) if at not in there]

    counts, account, look = call(queue, "counts"), admin.account("q"), reader.look()
    views = admin.queues(["q", well]).queues
    commands = (
        ["queues"],
        ["queues", "--check"],
        ["shards"],
        ["list", "--state", "dead"],
        ["list", "--group"],
        ["check"],
    )
    shown = [CliRunner().invoke(app, [*command, "q", "--url", cluster.url]) for command in commands]
    by_shard = admin.shards("q")
    with pytest.raises(RedisUnavailableError) as half:
        call(queue, "pause")

    assert counts.away == account.away == there
    assert counts.ready == account.totals["published"] == len(here)
    assert [(view.queue, view.away, view.ready) for view in views] == [("q", there, len(here)), (well, (), 1)]
    assert [at for at, one in enumerate(by_shard.counts) if one and one.ready] == here
    assert by_shard.away == there
    assert [one.exit_code for one in shown] == [0, 0, 0, 0, 0, 1]
    assert all(f"letter-{shard}" in shown[3].output for shard in here)
    assert [one.count for one in admin.dead_groups("q", without=there).groups] == [len(here)]
    assert all(f"partial: without shard{'s' * (len(there) > 1)} {there[0]}" in one.output for one in shown)
    assert f"in the shards {str(here)[1:-1]}, but not in {str(there)[1:-1] if len(there) > 1 else there[0]}" in str(
        half.value
    )
    assert admin.in_shard(here[0]).queues(["q"]).queues[0].pause
    rows = {family.spec: family.rows for family in QueueCollector(client, lambda: look, ()).families()}
    assert rows[names.BACKLOG] == {(well,): 1}  # totals without the missing shards would seem to decrease
    assert rows[names.UNREADABLE] == {("q",): 1, (well,): 0}


def test_resume_while_a_primary_is_away_reports_each_shard_not_reached(cluster, queue, away, call):
    admin = Admin(cluster.url)
    admin.pause("q")
    server, there = cluster.primary_of(Keys("q", shard=5).ready), away(5)
    here = [at for at in range(SHARDS) if at not in there]

    failures = []
    for resume in (lambda: call(queue, "resume"), lambda: admin.resume("q")):
        with pytest.raises(RedisUnavailableError) as failure:
            resume()
        failures.append(str(failure.value))

    reached, missed = (", ".join(map(str, shards)) for shards in (here, there))
    report = f"queue 'q' is resumed in the shards {reached}, but not in {missed}, whose Redis is unavailable: "
    assert [failure.startswith(report) for failure in failures] == [True, True], failures
    assert [at for at in here if admin.in_shard(at).queues(["q"]).queues[0].pause] == []
    cluster.resume(server)
    cluster.wait_until_ok()

    def resumed():  # soon this process pings the server again
        with suppress(RedisUnavailableError):
            admin.resume("q")
            return True

    eventually(resumed, "every shard is resumed")
    assert [at for at in range(SHARDS) if admin.in_shard(at).queues(["q"]).queues[0].pause] == []


def test_process_that_starts_without_shard_0_serves_the_other_shards(cluster, away):
    there = tuple(away(0))
    Connection.to(cluster.url).maps.clear()
    fresh, admin, consumer, done = Queue("q", int, url=cluster.url), Admin(cluster.url), Consumer(cluster.url), []
    reader = SnapshotReader(Client.to(Connection.to(cluster.url), 1.0), lambda: [fresh.keys])

    assert admin.account("q").away == admin.check("q").away == there
    assert [one.away for one in reader.look().queues.values()] == [there]
    with fresh.receive() as jobs:
        done += [job.body for job in jobs]
    assert len(done) == 1
    consumer.handler(fresh)(done.append)
    consumer.start(WorkerSettings())
    try:
        eventually(lambda: len(done) == SHARDS - len(there), "the worker serves the other shards")
    finally:
        consumer.stop(grace=0)


def test_queues_are_shown_while_the_registry_of_workers_is_away(cluster, queue, registries_apart, away):
    admin, there = Admin(cluster.url), away(WORKERS_KEY)

    overview = admin.queues()
    [view], workers = overview.queues, overview.workers
    shown = CliRunner().invoke(app, ["queues", "--url", cluster.url])
    moment = admin.watch().look()
    with serving(web.app(cluster.url, access=lambda _request: web.Access.READ)) as site:
        pages = [site.client().get(path) for path in ("/", "/queues/q", "/workers")]

    assert (view.ready, view.workers, view.slots, view.busy, workers) == (SHARDS - len(there), None, None, None, None)
    assert shown.exit_code == 0
    assert "The workers are unknown: the Redis of their registry is away." in shown.output
    unknown = "The workers are unknown: the Redis of their registry is away."
    console = Console(width=200, height=50)
    with console.capture() as captured:
        console.print(draw(console, moment, "", 1.0))
    assert unknown in captured.get()
    assert [(page.status_code, "unknown" in page.text, "no worker" in page.text.lower()) for page in pages] == [
        (200, True, False)
    ] * 3


def test_a_look_asks_another_node_for_the_time_when_the_first_is_away(cluster, queue, away):
    [asked] = run_blocking(Connection.to(cluster.url).wire().exchange([("CLUSTER", "MYID")]))
    [node] = [one for one in cluster.primaries() if my_id(cluster, one) == asked]
    there = away(next(at for at in range(SHARDS) if cluster.primary_of(Keys("q", shard=at).ready) == node))

    [seen] = SnapshotReader(Client.to(Connection.to(cluster.url), 1.0), lambda: [queue.keys]).look().queues.values()

    assert seen.ready == SHARDS - len(there)


def test_a_list_of_queues_says_that_its_registry_is_away(cluster, queue, away):
    away(QUEUES_KEY)

    said = r"^the Redis of the queue registry, reliq:queues, is away .*; name the queues to show$"
    with pytest.raises(RedisUnavailableError, match=said):
        Admin(cluster.url).queues()
