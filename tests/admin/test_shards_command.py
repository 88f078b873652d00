"""`reliq shards`: a queue grows and shrinks under load; each step can be interrupted and repeated."""

import json

import pytest
from handling import handle_all, lasting
from prometheus_client import CollectorRegistry

from reliq import Admin, ConfigurationError, Layout, OutgoingMessage, PublishFailed, Queue
from reliq.keys import Keys, home
from reliq.lua import transitions as t
from reliq.metrics.serving import queue_collector
from reliq.redis.shards import ShardMap


@pytest.fixture
def queue(url):
    queue = Queue("q", url=url)
    queue.publish({})
    return queue


def ids(number=40):
    return [f"order-{n}" for n in range(number)]


def chosen(number=40, **options):
    return [OutgoingMessage(body={}, id=id, **options) for id in ids(number)]


@pytest.fixture
def resize(admin, queue):
    """Change the number of shards, handle all messages, and finish the resize."""

    def make(number):
        admin.resize("q", number)
        handle_all(queue)
        assert not admin.finish_resize("q")

    return make


def test_queue_grows_from_1_to_8_to_16_and_accepts_each_id_once(admin, queue, url, client):
    stale = Queue("q", url=url)
    stale.publish_many(chosen(dedup=0))

    admin.resize("q", 8)
    told = [Queue("q", url=url).publish_many(chosen(80)) for _ in range(2)]
    assert [one.published for one in told] == [40, 0]
    assert stale.publish_many(chosen(120)).published == 40
    left = admin.finish_resize("q")
    assert 30 < left <= 40  # ready messages: workers take them before any move
    with pytest.raises(ConfigurationError, match="from 1 to 8 shards is not finished: reliq shards q --finish"):
        admin.resize("q", 16)

    handle_all(Queue("q", url=url))
    assert not admin.finish_resize("q")
    admin.resize("q", 16)

    view = admin.shards("q")
    assert view.map == ShardMap(2, 16, 8, "growing")
    assert sum(one.totals["published"] for one in view.counts if one.totals) == 121
    assert all(client.get(Keys("q", shard=k).epoch) == b"2 16 8" for k in range(16))


def test_deduplicated_ids_move_to_their_new_shards(resize, queue, url, client):
    queue.publish_many(chosen(dedup=1000))

    resize(8)

    assert not Queue("q", url=url).publish_many(chosen()).published
    places = [Keys("q", shard=home(id, 8)).dedup(id) for id in ids()]
    assert all(900_000 < client.pttl(key) <= 1_000_000 for key in places)
    assert len(client.keys("*:dd:*")) == 40


def test_resize_that_was_cut_off_is_finished_by_a_repetition(admin, queue, client):
    client.set(Keys("q").map, ShardMap(1, 8, 1, "growing").text)
    admin.pause("q", reason="deploy", for_=600)

    admin.resize("q", 8)

    assert client.get(Keys("q").map) == ShardMap(1, 8, 1, "growing").text
    assert all(client.get(Keys("q", shard=k).epoch) == b"1 8 1" for k in range(8))
    assert all(500_000 < client.pttl(Keys("q", shard=k).paused) <= 600_000 for k in range(8)), (
        "new shards are paused too"
    )


def shard_findings(admin):
    return [one for one in admin.doctor() if one.name == "shards"]


def metric(queue):
    page = CollectorRegistry()
    page.register(queue_collector(queue.connection(), [queue.keys]))
    return page.get_sample_value("reliq_shard_map_lost", {"queue": "q"})


def test_lost_map_is_reported_and_restored_and_no_id_runs_twice(admin, resize, queue, url, client):
    resize(4)
    many = Queue("q", url=url)
    many.publish_many(chosen(dedup=100))
    assert (metric(queue), shard_findings(admin), admin.check("q").is_sound) == (0, [], True)

    client.delete(*client.scan_iter("[{]reliq:q}:*"))  # a failover, detected by another process
    queue.connection().maps.clear()

    again = Queue("q", url=url).publish_many(chosen())
    assert again.published == sum(home(id, 4) == 0 for id in ids())  # these were lost with their shard
    assert metric(queue) == 1
    assert shard_findings(admin)[0].mend == "reliq check q --repair"
    assert [one.name for one in admin.check("q").faults] == ["lost-map"]
    assert admin.shards("q").map == ShardMap(1, 4, 1, "lost")
    assert admin.check("q", repair=True).is_sound
    assert ShardMap.parse(client.get(Keys("q").map)) == ShardMap(1, 4, 1, "growing")
    assert (metric(queue), shard_findings(admin), admin.check("q").faults) == (0, [], ())
    handle_all(many)
    assert not admin.finish_resize("q")


def test_shard_with_a_newer_map_refuses_publishes_until_a_repair(admin, resize, queue, url, client):
    resize(8)
    client.set(Keys("q", shard=5).epoch, "2 8 8")  # a failover lost the writes of the map and of the other fences
    queue.connection().maps.clear()
    id = next(id for id in ids() if home(id, 8) == 5)

    with pytest.raises(PublishFailed, match="restore it with: reliq check q --repair"):
        Queue("q", url=url).publish({}, id=id)
    assert admin.check("q", repair=True).is_sound

    queue.connection().maps.clear()
    assert Queue("q", url=url).publish({}, id=id).status == "published"


@pytest.fixture(params=[b"junk", b'{"epoch":1,"n":1000}', None], ids=["junk", "impossible", "a list"])
def spoil(request, client, queue):
    """Overwrite the map as a foreign program; read it in another process."""

    def write():
        client.delete(queue.keys.map)
        client.rpush(queue.keys.map, "x") if request.param is None else client.set(queue.keys.map, request.param)
        queue.connection().maps.clear()
        return "wrong-type" if request.param is None else "lost-map"

    return write


def test_corrupt_map_is_reported_and_restored_from_the_fences(admin, resize, queue, url, client, spoil):
    queue.publish_many(chosen())
    resize(8)
    resize(4)
    published = admin.account("q").totals["published"]

    fault = spoil()

    assert Queue("q", url=url).publish_many(chosen(80)).published == 40
    assert admin.shards("q").map == ShardMap(2, 4, 8, "lost")
    assert metric(queue) == 1
    assert fault in [one.name for one in admin.check("q").faults]
    assert admin.check("q", repair=True).is_sound
    assert json.loads(client.get(queue.keys.map)) == {"epoch": 2, "n": 4, "was": 8, "state": "shrinking", "most": 8}
    handle_all(Queue("q", url=url))
    assert not admin.finish_resize("q")
    assert len(admin.shards("q").counts) == 4
    assert admin.account("q").totals["published"] == published + 40
    assert admin.check("q").faults == ()


def test_map_restored_after_a_shrink_keeps_the_totals_of_removed_shards(admin, resize, queue, url, client):
    resize(8)
    Queue("q", url=url).publish_many(chosen())
    for number in (4, 1):
        resize(number)

    for text in (b"", b"junk"):
        client.set(queue.keys.map, text)
        queue.connection().maps.clear()
        assert admin.check("q", repair=True).is_sound

        assert not admin.finish_resize("q")
        assert admin.shards("q").map == ShardMap(3, 1, 1)
        assert admin.account("q").totals["published"] == 41


def test_corrupt_map_without_a_fence_is_repaired_as_one_shard(admin, queue, command, spoil):
    fault = spoil()
    remedy = "" if fault == "wrong-type" else "Repair it: reliq check q --repair"

    done = command("queues", "q", "--check")
    assert (done.code, queue.keys.map in done.err, remedy in done.err) == (1, True, True)
    assert remedy in command("queues", "--json").json["unreadable"]["q"]
    assert [one.name for one in admin.check("q").faults] == [fault]
    assert admin.check("q", repair=True).is_sound
    assert admin.check("q").faults == ()
    assert admin.account("q").missing == 0
    assert queue.publish({}, id="order-1")


def test_corrupt_fence_is_reported_and_repaired(admin, queue, client):
    texts = ("999999999999999999", "1000000001 8 8 closed", "5 999 8")
    for text in texts:
        client.set(queue.keys.epoch, text)
        assert [one.name for one in admin.check("q").faults] == ["bad-fence"]
        assert admin.check("q", repair=True).is_sound
        assert admin.check("q").faults == ()

    admin.resize("q", 2)
    for text in texts:
        client.set(queue.keys.epoch, text)
        assert admin.check("q", repair=True).is_sound
        assert client.get(queue.keys.epoch) == b"1 2 1"
    assert queue.publish({}, id="order-1")


def test_queue_at_the_last_epoch_stays_usable(admin, queue, client):
    client.set(queue.keys.epoch, "1000000000 1 1")

    assert admin.check("q", repair=True).is_sound
    with pytest.raises(
        ConfigurationError, match="have epoch 1000000000, the highest possible, so their number cannot change"
    ):
        admin.resize("q", 2)

    queue.connection().maps.clear()
    assert queue.publish({}, id="order-1")


def test_queue_that_shrinks_keeps_messages_and_totals(admin, resize, url, client):
    resize(8)
    many = Queue("q", url=url)
    many.shards()
    many.publish_many([{}] * 16, chunk=1)
    before = admin.account("q").totals["published"]

    admin.resize("q", 2)

    assert client.get(Keys("q", shard=5).epoch) == b"2 2 8 closed"
    assert many.publish_many(chosen(dedup=0)).published == 40
    assert [one.ready for one in admin.shards("q").counts[2:]] == [2] * 6
    assert not admin.finish_resize("q")
    assert admin.shards("q").map == ShardMap(2, 2, 2, "steady")
    assert many.counts().ready == 16 + 40
    handle_all(many)
    assert many.counts().alive == 0
    seen = admin.queues(["q"])
    assert seen.queues[0].shards == 2
    for totals in (many.counts().totals, seen.queues[0].totals):
        assert totals["published"] == admin.account("q").totals["published"] == before + 40
    client.hset("reliq:queues", "q", 0)
    client.delete(Keys("q").map)  # without a map all shards are still found
    assert admin.delete_queue("q") == 0
    assert lasting(client) == set()


def test_concurrent_resize_is_not_overwritten(admin, queue, client, monkeypatch):
    write = t.remap

    def late(*args, **options):
        client.set(Keys("q").map, ShardMap(1, 2, 1, "growing").text)
        return write(*args, **options)

    monkeypatch.setattr(t, "remap", late)

    with pytest.raises(ConfigurationError, match="another process has changed the shards of 'q' meanwhile"):
        admin.resize("q", 8)
    assert client.get(Keys("q").map) == ShardMap(1, 2, 1, "growing").text


def test_queue_of_go_and_queue_with_keys_keep_their_one_shard(url, admin, queue, command, client):
    Queue("q", url=url, layout=Layout.hdt3213()).publish({})
    with pytest.raises(ConfigurationError, match="the Go library does not support more"):
        Admin(url, layout=Layout.hdt3213()).resize("q", 8)
    with pytest.raises(ConfigurationError, match="the Go library does not support more"):
        Queue("q", url=url, layout=Layout.hdt3213(), shards=8)

    queue.publish({}, key="tenant-7")
    with pytest.raises(ConfigurationError, match="queue 'q' has keys or limits, which need a single shard"):
        admin.resize("q", 4)
    assert client.exists(queue.keys.map) == 0
    assert command("shards", "q", "4", "--yes").code == 2
    assert queue.publish({}, key="tenant-8")


def test_shards_shows_grows_and_finishes(queue, command):
    assert command("shards", "q").out.splitlines()[-1] == "q has 1 shard (epoch 0)"
    id = next(id for id in ids() if home(id, 4))
    queue.publish({}, id=id)
    grown = command("shards", "q", "4", "--yes")
    last = (
        "q has 4 shards (epoch 1); growing, there were 1: workers finish the change, or run `reliq shards q --finish`"
    )
    assert (grown.code, grown.out.splitlines()[-1]) == (0, last)

    unfinished = command("shards", "q", "--finish")
    said = "not finished: 1 message that workers run or are claiming"
    assert (unfinished.code, unfinished.out.splitlines()[-1]) == (3, said)
    assert command("shards", "q", "8", "--yes").code == 2

    handle_all(queue)
    told = command("shards", "q", "--finish", "--json").json
    assert told["map"] == {"epoch": 1, "n": 4, "was": 4, "state": "steady", "most": 4}
    assert sum(one["ready"] for one in told["counts"]) == 0
