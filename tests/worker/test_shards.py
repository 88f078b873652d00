"""A worker of a sharded queue serves all shards in turn, and polls idle shards now and then."""

from operator import gt

import pytest
from waiting import eventually

from reliq import Admin, Nack, OutgoingMessage, Reject
from reliq.events import Acked, DeadLettered, Started
from reliq.keys import home
from reliq.lua.transitions import ClaimAnswer, Suspects
from reliq.redis.shards import ShardMap
from reliq.worker.claims import Capacity, PollJitter, QueueClaims, ServedQueues, taken_in_turn


def alive(client, shards):
    """Return the number of living messages in all shards."""
    return sum(client.hlen(keys.retries_left) for keys in shards)


def test_a_worker_serves_every_shard_of_a_queue_and_drains_it(queue, acking, work_until, recorder, spread, put, client):
    shards = spread(queue, 16)
    for keys in shards:
        put(keys, [f"{keys.shard}"] * 20)
    work_until(Acked, 320)
    for keys in shards:  # separately, while all shards are idle
        put(keys, ["again"])
    recorder.wait_for(Acked, 336)
    acking.stop()
    put(shards[3], ["later"], delay_ms=500)
    put(shards[0], ["now"])
    acking.drain()

    assert {event.queue for event in recorder.of(Started)} == {"q"}
    assert alive(client, shards) == 0
    assert sum(int(client.hget(keys.totals, "acked")) for keys in shards) == 338


def test_a_message_stays_in_its_shard_to_its_end(
    no_returns, queue, consumer, start, recorder, spread, put, client, gate
):
    shards = spread(queue, 4)

    @consumer.handler(queue, lease=3)
    def handle(body, job):
        if body == "fails" and job.attempt < 3:
            raise Nack(delay=0.01)
        if body == "bad":
            raise Reject
        if body == "slow":
            gate.pass_through()

    start(concurrency=8)
    for keys in shards:
        put(keys, ["fails", "bad"])
        put(keys, ["later"], delay_ms=50)
        put(keys, ["slow"])

    gate.wait_for(4)
    recorder.wait_for(Acked, 8)
    recorder.wait_for(DeadLettered, 4)
    eventually(lambda: all(client.hget(keys.totals, "claimed") == b"6" for keys in shards), "all are claimed")

    def ends():
        return [client.zrange(keys.unack, 0, 0, withscores=True)[0][1] for keys in shards]

    before = ends()
    eventually(lambda: all(map(gt, ends(), before)), "each lease is extended")
    gate.open()
    recorder.wait_for(Acked, 12)
    assert [client.xlen(keys.dead) for keys in shards] == [1] * 4
    assert alive(client, shards) == 0


@pytest.mark.parametrize("text", [b"", b"junk"], ids=["no map", "a corrupt map"])
@pytest.mark.parametrize("is_fresh", [False, True], ids=["a worker that runs", "a worker that starts"])
def test_a_worker_serves_every_shard_after_redis_has_lost_the_map(
    quick_beats, is_fresh, text, queue, acking, start, recorder, put, url, client, caplog
):
    queue.publish("one")
    Admin(url).resize("q", 8)
    client.set(queue.keys.map, ShardMap(1, 8, 8).text)
    shards = [queue.keys.of_shard(shard) for shard in range(8)]
    if not is_fresh:
        start()
        recorder.wait_for(Acked)
    client.delete(queue.keys.map, queue.keys.epoch)
    if text:
        client.set(queue.keys.map, text)
    if is_fresh:
        start()

    eventually(lambda: "Redis has lost the map of its shards" in caplog.text, "the worker logs it")
    for keys in shards:
        put(keys, ["eight"])

    recorder.wait_for(Acked, 9)
    assert caplog.text.count("Redis has lost the map of its shards") == 1


def test_a_map_is_found_by_a_later_fence(quick_beats, queue, acking, work_until, recorder, put, client, monkeypatch):
    """After Redis has lost all data, a publisher that still has the map writes the map together with the fences."""
    monkeypatch.setattr("reliq.worker.claims.FENCES_SECONDS", 0.0)
    queue.publish("one")
    work_until(Acked)

    client.set(queue.keys.of_shard(1).epoch, "1 8 8")
    put(queue.keys.of_shard(7), ["eight"])

    recorder.wait_for(Acked, 2)


def test_a_worker_ends_a_change_of_the_number_of_shards_and_serves_new_shards(
    quick_beats, queue, acking, start, recorder, spread, put, url, client, monkeypatch
):
    monkeypatch.setattr("reliq.worker.fetcher.POLL_SECONDS", 0.05)
    monkeypatch.setattr("reliq.worker.upkeep.ROUND_SECONDS", 0.1)
    spread(queue, 4)
    queue.publish_many([OutgoingMessage(body="later", delay=3600, id=f"later-{n}") for n in range(40)])
    queue.publish_many(["now"] * 40, chunk=1)
    Admin(url).resize("q", 2)
    start()

    for number in (2, 8):
        if number == 8:
            Admin(url).resize("q", 8)
        eventually(lambda: Admin(url).shards("q").map.was == number, f"it has {number} shards")  # noqa: B023

        homes = [queue.keys.of_shard(home(f"later-{n}", number)) for n in range(40)]
        assert all(client.zscore(keys.pending, f"later-{n}") for n, keys in enumerate(homes))
    recorder.wait_for(Acked, 40)
    assert (queue.counts().pending, queue.counts().missing) == (40, 0)
    put(queue.keys.of_shard(7), ["to a new shard"])
    recorder.wait_for(Acked, 41)


def test_a_worker_with_another_number_of_shards_than_its_queue_does_not_start(serve, spread, start):
    spread(serve(shards=4), 8)

    with pytest.raises(ValueError, match="has 8 shards, not 4"):
        start()


def capacity(messages, ahead=0, suspects=16):
    return Capacity(messages, ahead, suspects=Suspects(16, 0, suspects))


@pytest.fixture
def claims(queue, acking):
    """Return the claims of shards with backlogs of these sizes."""
    (handler,) = acking.handlers

    def make(*behind):
        made = []
        for shard, count in enumerate(behind):
            made.append(QueueClaims(handler, queue.keys.of_shard(shard), "lane"))
            made[-1].claim(capacity(0), "")
            made[-1].looked(ClaimAnswer(-1, -1, count, []))
        return made

    return make


def parts(asked):
    return {one.keys.shard: part.messages for one, part in asked if part.messages}


def test_shards_take_turns_and_those_with_few_messages_are_claimed_from_together(claims):
    full, few = claims(*[10_000] * 4), claims(3, 2, 500, 4)

    for shard in (0, 1, 2, 3, 0, 1, 2, 3):
        assert parts(taken_in_turn(full, capacity(16, 400))) == {shard: 416}
    # A claim takes at most a batch.
    assert parts(taken_in_turn(claims(*[10_000] * 4), capacity(16, 1184))) == {0: 500, 1: 500, 2: 200}
    assert parts(taken_in_turn(few, capacity(10))) == {0: 3, 1: 2, 2: 5}
    assert parts(taken_in_turn(few, capacity(10))) == {3: 4, 2: 6}
    # With unknown backlogs, all shards get the same number.
    assert parts(taken_in_turn(claims(*[0] * 8), capacity(16))) == dict.fromkeys(range(8), 2)
    assert parts(taken_in_turn(claims(*[0] * 8), capacity(3))) == dict.fromkeys(range(3), 1)


def test_one_shard_of_a_round_may_bring_suspects_and_the_others_are_asked_again(claims):
    """Two shards that each return a suspect could make two suspects run at once."""
    shards = claims(2, 2, 2)

    for takes in (0, 2):
        assert [one.keys.shard for one, part in taken_in_turn(shards, capacity(6)) if part.suspects.narrowest] == [
            takes
        ]
    [one] = claims(2)
    one.claim(capacity(2, suspects=0), "")
    one.answered(ClaimAnswer(-1, -1, 2, []))
    assert one.hot


def test_a_shard_that_another_watches_is_looked_at_seldom(queue, acking, fetcher_of, spread, caller, client, clock):
    """Otherwise sixteen idle workers poll sixteen shards once a second: 256 calls a second."""
    shards = spread(queue, 16)
    served = ServedQueues(acking.handlers)
    served.read(caller)
    fetcher = fetcher_of(acking, 16, served=served, workers=lambda: 16)
    for keys in shards:
        client.set(keys.watch, "another", px=2000)

    fetcher.step()

    [look_at] = {one.look_at for one in fetcher.fetcher._queues}  # one poll for all
    assert clock.now + 15 <= look_at <= clock.now + 25


@pytest.mark.parametrize("number", [pytest.param(1, id="one shard"), pytest.param(16, id="16 shards")])
def test_a_message_costs_four_scripts_and_a_wait_however_many_shards_there_are(
    no_looks, no_returns, queue, acking, start, recorder, spread, put, client, ran, monkeypatch, number
):
    monkeypatch.setattr("reliq.worker.fetcher.RUSH_SECONDS", -1.0)
    shards = spread(queue, number)
    engine = start()

    eventually(lambda: ran()["srandmember"] >= number, "the first round of the janitor is over")
    eventually(lambda: client.info("clients")["blocked_clients"], "it waits")
    before = ran()
    for count in range(20):
        engine._fetcher._glanced_at = float("-inf")  # as if messages were rare
        put(shards[count % number], ["x"])
        recorder.wait_for(Acked, count + 1)
        eventually(lambda: client.info("clients")["blocked_clients"], "it waits again")

    made = ran() - before
    # Scripts: publish, claim, read, ack. MGET in the read; one wait.
    assert [made[name] for name in ("evalsha", "mget", "lpop", "blpop")] == [4 * 20, 20, 0, 20]


def test_looks_of_all_workers_at_watched_shards_are_few_and_made_in_one_round():
    for workers, least, most in ((1, 0.75, 1.25), (2, 1, 5 / 3), (16, 15, 25), (1000, 15, 25)):
        assert all(least <= PollJitter(lambda count=workers: count).next(0.0) <= most for _ in range(100))
    looks = PollJitter(lambda: 16)
    first = looks.next(1000.0)

    assert {looks.next(now) for now in (1000.0, 1001.0, first - 0.001)} == {first}
    assert first + 15 <= looks.next(first) <= first + 25
