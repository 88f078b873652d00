"""`reliq shards`: a live queue grows and shrinks; each step can be cut off and made again."""

import json

import pytest
from typed import reliq

from reliq import Admin, ConfigurationError, Layout, Outgoing, PublishFailed, Queue, transitions as t
from reliq.ids import home
from reliq.keys import Keys
from reliq.shardmap import ShardMap


@pytest.fixture
def admin(url):
    return Admin(url)


@pytest.fixture
def queue(url):
    queue = Queue("q", url=url)
    queue.publish({})
    return queue


def ids(number=40):
    return [f"order-{n}" for n in range(number)]


def drain(queue):
    while True:
        with queue.receive(limit=100) as jobs:
            if not jobs:
                return


def test_a_queue_grows_from_1_to_8_to_16_and_each_chosen_id_is_accepted_once(admin, queue, url, client):
    stale = Queue("q", url=url)
    stale.publish_many([Outgoing(body={}, id=id, dedup=0) for id in ids()])

    admin.resize("q", 8)
    told = [Queue("q", url=url).publish_many([Outgoing(body={}, id=id) for id in ids(80)]) for _ in range(2)]
    assert [one.published for one in told] == [40, 0]
    assert stale.publish_many([Outgoing(body={}, id=id) for id in ids(120)]).published == 40
    left = admin.finish_resize("q")
    assert 30 < left.alive <= 40  # they are ready: workers have them sooner than any move
    with pytest.raises(ConfigurationError, match="from 1 to 8 shards is not finished: reliq shards q --finish"):
        admin.resize("q", 16)

    drain(Queue("q", url=url))
    assert not admin.finish_resize("q")
    admin.resize("q", 16)

    view = admin.shards("q")
    assert view.map == ShardMap(2, 16, 8, "growing")
    assert sum(one.totals["published"] for one in view.counts if one.totals) == 121
    assert all(client.get(Keys("q", shard=k).epoch) == b"2" for k in range(16))


def test_ids_that_stay_taken_are_taken_where_they_belong(admin, queue, url, client):
    queue.publish_many([Outgoing(body={}, id=id, dedup=100) for id in ids()])
    drain(queue)
    admin.resize("q", 8)

    assert not admin.finish_resize("q")

    assert not Queue("q", url=url).publish_many([Outgoing(body={}, id=id) for id in ids()]).published
    places = [Keys("q", shard=home(id, 8)).dedup(id) for id in ids()]
    assert all(90_000 < client.pttl(key) <= 100_000 for key in places)
    assert len(list(client.scan_iter("*:dd:*"))) == 40


def test_a_growth_that_was_cut_off_goes_on_when_it_is_made_again(admin, queue, client):
    client.set(Keys("q").map, ShardMap(1, 8, 1, "growing").text)

    admin.resize("q", 8)

    assert client.get(Keys("q").map) == ShardMap(1, 8, 1, "growing").text
    assert all(client.get(Keys("q", shard=k).epoch) == b"1" for k in range(8))


def test_a_map_that_was_lost_is_told_and_written_again_behind_its_fences(admin, queue, url, client):
    admin.resize("q", 4)
    drain(queue)
    assert not admin.finish_resize("q")
    many = Queue("q", url=url)
    many.publish_many([Outgoing(body={}, id=id) for id in ids()])
    client.delete(Keys("q").map)
    late = Queue("q", url=url)
    late.connection().maps.clear()  # as in another process

    with pytest.raises(PublishFailed, match="by the number of shards that there were: reliq shards q NUMBER"):
        late.publish({}, id="order-0")
    admin.resize("q", 4)
    late.connection().maps.clear()

    assert admin.shards("q").map == ShardMap(2, 4, 1, "growing")
    assert not Queue("q", url=url).publish_many([Outgoing(body={}, id=id) for id in ids()]).published
    assert not admin.finish_resize("q")
    assert Queue("q", url=url).counts().ready == 40


def test_a_queue_that_is_paused_is_paused_in_its_new_shards_too(admin, queue, client):
    admin.pause("q", reason="deploy", for_=60)

    admin.resize("q", 4)

    assert all(50_000 < client.pttl(Keys("q", shard=k).paused) <= 60_000 for k in range(4))


def test_a_queue_shrinks_and_what_was_in_its_upper_shards_is_in_the_others(admin, queue, url, client):
    admin.resize("q", 8)
    drain(queue)
    assert not admin.finish_resize("q")
    many = Queue("q", url=url)
    many.shards()
    many.publish_many([{}] * 16, chunk=1)

    admin.resize("q", 2)

    assert client.get(Keys("q", shard=5).epoch) == b"2 closed"
    assert many.publish_many([Outgoing(body={}, id=id, dedup=0) for id in ids()]).published == 40
    assert [one.ready for one in admin.shards("q").counts[2:]] == [2] * 6
    assert not admin.finish_resize("q")
    assert admin.shards("q").map == ShardMap(2, 2, 2, "steady")
    assert many.counts().ready == 16 + 40
    drain(many)
    assert many.counts().alive == 0


def test_what_somebody_else_changed_meanwhile_is_not_overwritten(admin, queue, client, monkeypatch):
    write = t.remap

    def late(*args, **options):
        client.set(Keys("q").map, ShardMap(1, 2, 1, "growing").text)
        return write(*args, **options)

    monkeypatch.setattr(t, "remap", late)

    with pytest.raises(ConfigurationError, match="somebody else has changed the shards of 'q' meanwhile"):
        admin.resize("q", 8)
    assert client.get(Keys("q").map) == ShardMap(1, 2, 1, "growing").text


@pytest.mark.parametrize("number", [0, 3, 512])
def test_a_number_that_is_no_power_of_two_is_refused(admin, queue, number):
    with pytest.raises(ConfigurationError, match=f"power of two from 1 to 256, not {number}"):
        admin.resize("q", number)


def test_a_queue_of_go_is_refused(url):
    Queue("q", url=url, layout=Layout.hdt3213()).publish({})

    with pytest.raises(ConfigurationError, match="the Go original knows of no others"):
        Admin(url, layout=Layout.hdt3213()).resize("q", 8)
    with pytest.raises(ConfigurationError, match="the Go original knows of no others"):
        Queue("q", url=url, layout=Layout.hdt3213(), shards=8)


def test_the_command_shows_grows_and_finishes(queue, url):
    assert reliq("shards", "q", url=url)[1].splitlines()[-1] == "q has 1 shard (epoch 0)"

    code, out, _ = reliq("shards", "q", "4", "--yes", url=url)
    assert (code, out.splitlines()[-1]) == (
        0,
        "q has 4 shards (epoch 1); growing, there were 1: workers end it, and `reliq shards q --finish` does",
    )
    queue.publish({}, id=next(id for id in ids() if home(id, 4)))
    code, out, _ = reliq("shards", "q", "--finish", "--json", url=url)
    told = json.loads(out)
    assert (code, told["map"]) == (0, {"epoch": 1, "n": 4, "was": 4, "state": "steady"})
    assert told["counts"][0]["ready"] == 1


def test_the_command_says_what_keeps_it_from_being_finished(queue, url):
    queue.publish({}, id=next(id for id in ids() if home(id, 4)))
    reliq("shards", "q", "4", "--yes", url=url)

    code, out, _ = reliq("shards", "q", "--finish", url=url)

    assert (code, out.splitlines()[-1]) == (3, "not finished: 1 message that workers have or are about to have")
    assert reliq("shards", "q", "8", "--yes", url=url)[0] == 2


def test_a_queue_with_keys_keeps_its_one_shard(admin, queue, command, client):
    queue.publish({}, key="tenant-7")

    with pytest.raises(ConfigurationError, match="queue 'q' has keys or limits, and keeps its one shard"):
        admin.resize("q", 4)

    assert client.exists(queue.keys.map) == 0
    assert command("shards", "q", "4", "--yes").code == 2
    assert queue.publish({}, key="tenant-8")


def test_servers_of_a_queue_with_keys_get_no_places(queue, url):
    queue.publish({}, key="tenant-7")
    many = Queue("q", shards=[url, f"{url.removesuffix('/0')}/1"])

    with pytest.raises(ConfigurationError, match="queue 'q' has keys or limits at .*, and is in one place"):
        many.counts()
