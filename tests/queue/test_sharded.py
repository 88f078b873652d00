"""Publishers, cancels and counts see a queue of several shards as one queue. All shards are in one Redis."""

import asyncio
import gc
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from transition import PATIENT_SECONDS

from reliq import ConfigurationError, Durability, OutgoingMessage, PublishFailed, Queue, WrongKeyTypeError
from reliq.admin import Admin
from reliq.keys import Keys, home
from reliq.lua import transitions as t
from reliq.publish import LOOKS, Sender
from reliq.redis import shards as shards_module
from reliq.redis.connection import ASYNCIO, BLOCKING, run_blocking
from reliq.redis.shards import WITNESSES, KnownMap, ShardMap

#: A repeated call would count twice.
pytestmark = pytest.mark.usefixtures("patient")

EIGHT = ShardMap(1, 8, 8, "steady")


@pytest.fixture
def remap(client):
    """Write a shard map of the queue."""
    return lambda written=EIGHT: client.set(Keys("q").map, written.text)


@pytest.fixture
def sharded(remap):
    """Give the queue eight shards before any client reads its map."""
    remap()


@pytest.fixture
def lengths(client):
    """Return the number of messages of each shard in ready and pending."""

    all = [Keys("q", shard=k) for k in range(8)]
    return lambda: [client.llen(keys.ready) + client.zcard(keys.pending) for keys in all]


def an_id_of(shard):
    """Return a chosen id that belongs to the given shard."""
    return next(id for n in range(10_000) if home(id := f"order-{n}", 8) == shard)


def test_generated_ids_take_the_shards_in_turn_and_contain_them(queue, call, sharded, lengths):
    receipts = [call(queue, "publish", {}) for _ in range(16)]

    assert lengths() == [2] * 8
    assert Counter(home(one.id, 8) for one in receipts) == Counter(dict.fromkeys(range(8), 2))
    assert all(("~" in one.id) == (home(one.id, 8) > 0) for one in receipts)


def test_queue_objects_begin_at_different_shards(url, sharded):
    begun = {home(Queue("q", url=url).publish({}).id, 8) for _ in range(40)}

    assert len(begun) > 3


def test_calls_of_publish_many_take_the_shards_in_turn(queue, call, sharded, lengths, commands):
    done = call(queue, "publish_many", ({"n": n} for n in range(1000)), chunk=125)

    assert (done.published, lengths()) == (1000, [125] * 8)
    assert commands()["evalsha"] <= 9  # a call is sent again in full if Redis has not loaded its script


def test_chosen_ids_are_published_in_their_home_shard(queue, call, sharded, client, url):
    ids = [f"order-{n}" for n in range(200)]

    call(queue, "publish_many", [OutgoingMessage(body={}, id=id) for id in ids[:100]], chunk=10)
    for id in ids[100:]:
        assert call(Queue("q", url=url), "publish", {}, id=id)

    assert all(client.exists(Keys("q", shard=home(id, 8)).msg(id)) for id in ids)
    assert not any(call(queue, "publish", {}, id=id) for id in ids)


def test_delayed_and_durable_publishes_go_to_shards(queue, call, sharded, lengths):
    one = call(queue, "publish", {}, delay=60, durability=Durability.replicas(1, timeout=0.01))
    other = call(queue, "publish", {}, at=datetime.now(UTC) + timedelta(hours=1))

    assert (bool(one), one.durable, bool(other)) == (True, False, True)
    assert sorted(lengths()) == [0] * 6 + [1, 1]


def test_publisher_with_an_old_map_reads_it_at_the_first_chosen_id(queue, call, remap, lengths):
    call(queue, "publish", {})
    id = an_id_of(5)
    remap()
    for shard in range(8):
        queue._clients.blocking(PATIENT_SECONDS).run(t.ask(Keys("q", shard=shard), [], fence="1 8 8"))

    assert call(queue, "publish", {}, id=id)

    assert lengths() == [1, 0, 0, 0, 0, 1, 0, 0]


def test_publisher_avoids_a_closed_shard(queue, call, sharded, remap, lengths, client):
    call(queue, "publish_many", [{}] * 8, chunk=1)
    remap(ShardMap(2, 4, 8, "shrinking"))
    for shard in range(8):
        queue._clients.blocking(PATIENT_SECONDS).run(
            t.ask(Keys("q", shard=shard), [], fence="2 4 8", closing=shard > 3)
        )

    done = call(queue, "publish_many", [{}] * 16, chunk=1)

    assert (done.published, sum(lengths()), lengths()[4:]) == (16, 24, [1] * 4)


@pytest.mark.parametrize("turns_of_others", [0, 1], ids=["next turn", "own turn again"])
def test_detour_leads_to_another_shard(queue, call, remap, monkeypatch, turns_of_others):
    remap(ShardMap(1, 2, 2))
    queue.shards()
    make, tried = Sender._call, []

    async def unreachable_at_first(self, driver, part, *given):
        tried.append(part.keys.shard)
        if len(tried) > 1:
            return await make(self, driver, part, *given)
        for _ in range(turns_of_others):
            queue.known_shards.turn()
        return None

    monkeypatch.setattr(Sender, "_call", unreachable_at_first)

    assert call(queue, "publish", {})

    assert set(tried) == {0, 1}


@pytest.mark.parametrize("ids", [["order-0", "order-1"], ["order-0", "order-0"]], ids=["two ids", "one id twice"])
def test_publish_reads_the_map_again_when_the_old_home_is_stale(call, remap, lengths, client, url, commands, ids):
    remap(ShardMap(1, 8, 1, "growing"))
    fresh = Queue("q", url=url)
    fresh.shards()
    remap(ShardMap(2, 8, 8))
    client.set(Keys("q").epoch, "2 8 8")
    assert home("order-0", 8) != 0 != home("order-1", 8)

    done = call(fresh, "publish_many", [OutgoingMessage(body={}, id=id) for id in ids])

    assert done.published == len(set(ids))
    assert lengths()[home("order-0", 8)] >= 1
    assert commands()["evalsha"] < 10  # otherwise it asks until its map is a minute old


def test_id_whose_home_moved_is_looked_up_in_its_old_home(queue, call, remap, lengths):
    id = an_id_of(5)
    assert call(queue, "publish", {}, id=id)
    remap(ShardMap(1, 8, 1, "growing"))
    fresh = Queue("q", url=queue.target)
    fresh.shards()

    assert call(fresh, "publish", {}, id=id).status == "duplicate"
    assert call(fresh, "publish", {}, id=an_id_of(6)).status == "published"

    assert lengths() == [1, 0, 0, 0, 0, 0, 1, 0]


def test_publish_of_unknown_outcome_is_published_once_by_its_id(proxy, make_queue, call, sharded, lengths):
    queue = make_queue(url=proxy.url)
    queue.publish_many([{}] * 8, chunk=1)
    proxy.lose_reply_to("EVALSHA", times=99)

    with pytest.raises(PublishFailed) as failed:
        call(queue, "publish", {"n": 1})
    proxy.lose_reply_to("nothing")

    assert failed.value.outcome == "unknown"
    assert call(queue, "publish", {"n": 1}, id=failed.value.id)
    assert sum(lengths()) == 9


def test_counts_are_those_of_all_shards(queue, call, sharded):
    queue.publish_many([{}] * 30, chunk=1)
    queue.publish({}, delay=60)

    counts = call(queue, "counts")

    assert (counts.ready, counts.pending, counts.totals["published"], counts.missing) == (30, 1, 31, 0)


def test_message_is_cancelled_and_rescheduled_in_any_shard(queue, call, sharded):
    generated = [call(queue, "publish", {}, delay=60).id for _ in range(8)]
    chosen = an_id_of(3)
    call(queue, "publish", {}, id=chosen, delay=60)

    assert [call(queue, "reschedule", id, delay=5) for id in (*generated, chosen)] == ["rescheduled"] * 9
    assert [call(queue, "cancel", id) for id in (*generated, chosen)] == ["cancelled"] * 9
    assert [call(queue, "cancel", id) for id in (generated[0], "nobody")] == ["cancelled", "not_found"]
    assert queue.counts().alive == 0


def test_cancel_by_an_old_map_reads_the_map_before_not_found(queue, call, remap, url):
    call(queue, "counts")
    remap()
    other = Queue("q", url=url)
    other.shards()
    for shard, name, options, answer in (
        (5, "cancel", {}, "cancelled"),
        (6, "reschedule", {"delay": 1}, "rescheduled"),
    ):
        other.publish({}, id=an_id_of(shard), delay=60)
        queue.connection().maps["q"] = KnownMap(ShardMap(), float("inf"))
        assert call(queue, name, an_id_of(shard), **options) == answer


def test_pause_and_resume_reach_every_shard(queue, call, sharded, client):
    all = [Keys("q", shard=k) for k in range(8)]

    call(queue, "pause", reason="deploy")
    assert client.exists(*(keys.paused for keys in all)) == 8

    assert call(queue, "resume") is True
    assert client.exists(*(keys.paused for keys in all)) == 0
    assert client.exists(*(keys.wake for keys in all)) == 8


@pytest.fixture
def letters_of(queue):
    """Let messages die in their shards; return their dead letters."""

    def make(*ids, **options):
        for id in ids:
            queue.publish({"id": id}, id=id, **options)
            with queue.receive() as [job]:
                job.reject()
            keys = Keys("q", shard=home(id, queue.known_shards.map.n))
            queue._clients.blocking(PATIENT_SECONDS).run(
                t.collect(keys, [id], dead_letter_limit=100, letters_ms=10**12)
            )
        return queue.dead_letters()

    return make


def test_letters_of_all_shards_are_listed_oldest_first_and_redriven(queue, call, sharded, letters_of, lengths):
    ids = [an_id_of(shard) for shard in (5, 0, 3, 7)]

    letters = letters_of(*ids)

    assert {one.id: one.shard for one in letters} == dict(zip(ids, (5, 0, 3, 7), strict=True))
    assert [one.died for one in letters] == sorted(one.died for one in letters)
    first = call(queue, "dead_letters", limit=2)
    assert first + call(queue, "dead_letters", after=first[-1].letter) == letters
    assert call(queue, "redrive", letters) == 4
    assert (lengths(), queue.dead_letters()) == ([1, 0, 0, 1, 0, 1, 0, 1], [])


def test_letter_whose_home_moved_stays_until_the_change_of_shards_moves_it(
    queue, call, remap, letters_of, lengths, url
):
    moved, stays = an_id_of(5), an_id_of(0)
    letters = letters_of(moved, stays)
    remap(ShardMap(1, 8, 1, "growing"))
    fresh = Queue("q", url=url)
    fresh.shards()

    assert call(fresh, "redrive", letters) == 1
    assert lengths() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert [one.id for one in fresh.dead_letters()] == [moved]

    Admin(url).finish_resize("q")
    assert call(fresh, "redrive", fresh.dead_letters()) == 1
    assert lengths() == [1, 0, 0, 0, 0, 1, 0, 0]
    assert (fresh.dead_letters(), fresh.counts().missing) == ([], 0)


def test_queue_with_another_number_of_shards_is_refused(url, call, sharded):
    queue = Queue("q", url=url, shards=16)

    for name, arguments in (("publish", [{}]), ("counts", [])):
        with pytest.raises(ConfigurationError, match=r"^queue 'q' has 8 shards, not 16: .* `reliq shards q 16`$"):
            call(queue, name, *arguments)

    assert call(Queue("q", url=url, shards=8), "counts").alive == 0


def test_corrupt_map_is_reported_by_its_redis_key(url, call, client):
    client.lpush(Keys("q").map, "x")
    with pytest.raises((WrongKeyTypeError, PublishFailed), match=r"'\{reliq:q\}:map'"):
        call(Queue("q", url=url), "publish", {})

    client.delete(Keys("q").map)
    client.set(Keys("q").map, "16 shards")
    with pytest.raises(Exception, match="got an unexpected reply"):
        call(Queue("q", url=url), "publish", {})


def test_publish_to_a_shard_with_a_later_map_than_redis_is_refused(queue, call, sharded, client, commands):
    client.set(Keys("q", shard=7).epoch, "2 8 8")

    with pytest.raises(
        PublishFailed, match=r"has a later shard map than .*has epoch 1: .*reliq check q --repair"
    ) as failed:
        call(queue, "publish", {}, id=an_id_of(7))

    assert failed.value.outcome == "refused"
    assert commands()["evalsha"] <= LOOKS + 2


def test_process_keeps_its_map_when_redis_has_lost_it(queue, call, remap, lengths, caplog):
    remap(ShardMap(3, 8, 8))
    call(queue, "publish", {})

    for earlier in (ShardMap(), ShardMap(2, 4, 4)):
        remap(earlier)
        run_blocking(queue.known_shards.read(BLOCKING))
    call(queue, "publish_many", [{}] * 15, chunk=1)

    assert queue.known_shards.map == ShardMap(3, 8, 8, "lost")
    assert lengths() == [2] * 8
    [warning] = caplog.messages
    assert "Restore the map: reliq check q --repair" in warning


def test_objects_of_a_queue_share_a_read_of_the_map(url, sharded, commands):
    for _ in range(20):
        Queue("q", url=url).publish({})

    assert commands()["getrange"] == 1 + WITNESSES


def test_first_publishes_of_many_tasks_share_a_read_of_the_map(queue, sharded, commands):
    async def all_at_once():
        await asyncio.gather(*(queue.apublish({"n": n}) for n in range(200)))
        await queue.aclose()

    asyncio.run(all_at_once())

    assert commands()["getrange"] == 1 + WITNESSES


def test_cancelled_task_does_not_cancel_the_read_of_the_map(queue, sharded):
    async def one_leaves():
        first, second = (asyncio.create_task(queue.known_shards.refresh(ASYNCIO)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await second
        await queue.aclose()
        return first.cancelled()

    assert asyncio.run(one_leaves())
    assert queue.known_shards.map == EIGHT


def test_event_loops_read_the_map_each_and_are_not_kept_alive(queue, sharded):
    loops = weakref.WeakSet()

    async def read():
        loops.add(asyncio.get_running_loop())
        queue.connection().maps.clear()
        await asyncio.gather(*(queue.known_shards.refresh(ASYNCIO) for _ in range(3)))
        await queue.aclose()

    for _ in range(3):
        asyncio.run(read())
    gc.collect()

    assert not loops


def test_old_map_is_read_again(url, remap, lengths, monkeypatch):
    queue = Queue("q", url=url)
    queue.publish({})
    remap()
    later = time.monotonic() + shards_module.MAP_SECONDS + 1
    monkeypatch.setattr(shards_module.time, "monotonic", lambda: later)

    queue.publish_many([{}] * 8, chunk=1)

    assert lengths() == [2, 1, 1, 1, 1, 1, 1, 1]


def test_receive_takes_messages_of_any_shard(queue, sharded, receive):
    ids = [queue.publish({}).id for _ in range(16)]
    got = []

    for _ in range(16):
        got += receive(queue, lambda jobs: [job.id for job in jobs])
    assert receive(queue, list) == []

    assert sorted(got) == sorted(ids)
    assert (queue.counts().totals["acked"], queue.counts().missing) == (16, 0)


def test_receive_waits_for_a_message_of_any_shard(queue, url, sharded):
    other = Queue("q", url=url)

    def take():
        with queue.receive(wait=20) as jobs:
            return [job.id for job in jobs]

    for _ in range(8):
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(take)
            assert [other.publish({}).id] == taken.result()


def test_rest_of_a_failed_publish_many_includes_other_shards(queue, call, client, sharded):
    for shard in range(8):
        client.set(Keys("q", shard=shard).ready, "not a list")
    items = (OutgoingMessage(body={"n": n}, id=f"id-{n}") for n in range(40))

    with pytest.raises(PublishFailed) as failed:
        call(queue, "publish_many", items, chunk=2)

    read = [one.id for one in failed.value.rest]
    assert len(read) > len(failed.value.ids)
    assert sorted([*read, *(one.id for one in items)]) == sorted(f"id-{n}" for n in range(40))
