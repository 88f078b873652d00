"""A worker waits for a token, a due time or a slot, and never in a busy loop."""

import gc
import math
import time
from itertools import count, pairwise
from types import SimpleNamespace

import pytest
from transition import run_transition
from waiting import eventually

from reliq import Consumer, Nack, WorkerSettings
from reliq.consumer import EXIT_REPLACE
from reliq.errors import RedisUnavailableError
from reliq.events import Acked, Claimed, DeadLettered, Promoted, Reclaimed, RedisUnavailable, Started
from reliq.lua.transitions import CallNumber
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.worker.fetcher import POLL_SECONDS
from reliq.worker.upkeep import Scheduler


@pytest.fixture
def clock(clock, monkeypatch):
    """Shorten the wait for a token to a fifth of a second; the held clock decides when a poll is due."""
    monkeypatch.setattr("reliq.worker.fetcher.POLL_SECONDS", POLL_SECONDS / 5)
    return clock


@pytest.mark.parametrize("amount", [pytest.param(1, id="one queue"), pytest.param(50, id="fifty queues")])
def test_an_idle_worker_polls_all_queues_once_a_second(serve, consumer, fetcher_of, client, ran, clock, amount):
    for number in range(amount):
        serve(f"q{number}")
    fetcher = fetcher_of(consumer)
    fetcher.step(2)  # the first claim, and a wait
    gc.collect()  # Redis counts the end of an earlier test's connection as a read
    before, read_before = ran(), client.info("stats")["total_reads_processed"]

    for _ in range(2):
        clock.now += POLL_SECONDS
        fetcher.step(2)  # a claim, and the rest of the wait

    reads = client.info("stats")["total_reads_processed"] - read_before
    rounds = ran() - before
    assert (rounds["blpop"], rounds["evalsha"]) == (0, 2 * amount)
    assert amount > 1 or reads == 3  # two round trips of the worker, and INFO; many claims need two reads
    assert POLL_SECONDS == 1  # the timeout of such a wait


def test_a_poll_finds_a_message_without_a_token(queue, acking, fetcher_of, client, clock):
    """A publish of the Go original sets no token, and a token can be lost with the worker that took it."""
    fetcher = fetcher_of(acking)
    fetcher.step()
    queue.publish("x")
    client.delete(queue.keys.wake)

    fetcher.step()  # a wait without a token
    assert (fetcher.held, queue.counts().ready) == ([], 1)
    clock.now += POLL_SECONDS
    fetcher.step(3)  # the claim, the body, the start

    assert len(fetcher.held) == 1


def test_a_full_worker_or_one_of_a_paused_queue_asks_nothing(make_queue, consumer, fetcher_of, client, ran, clock):
    busy, paused, other = make_queue("busy"), make_queue("paused"), Consumer(consumer.target)
    consumer.handler(busy)(lambda body: None)
    other.handler(paused)(lambda body: None)
    full, idler = fetcher_of(consumer, concurrency=1), fetcher_of(other)
    busy.publish_many(["x", "y"])
    full.step(3)  # the claim, the body, the start
    before = ran()
    full.step()
    assert (len(full.held), ran()) == (1, before)

    paused.publish("x")
    paused.pause()
    idler.step()
    client.delete(paused.keys.wake)
    before = ran()
    idler.step()  # waits for a token, at most a second

    after = ran()
    assert (idler.held, after["evalsha"], after["blpop"]) == ([], before["evalsha"], before["blpop"] + 1)


def test_a_worker_notices_resumes_due_times_and_slots_without_looks(no_looks, queue, consumer, start, recorder, gate):
    nacked_at = []

    @consumer.handler(queue)
    def handle(body, job):
        if body == "fails":
            nacked_at.append(time.monotonic())
            if job.attempt < 4:
                raise Nack(delay=0.1)
        if body == "slow":
            gate.pass_through()

    queue.pause()
    queue.publish("x")
    start(concurrency=1)
    queue.publish("y")
    assert recorder.of(Claimed) == []
    queue.resume()
    recorder.wait_for(Acked, 2)

    queue.publish("later", delay=3600)
    queue.publish("sooner", id="sooner", delay=0.05)
    recorder.wait_for(Acked, 3)
    assert recorder.ids(Acked)[2:] == ["sooner"]

    queue.publish("fails")
    recorder.wait_for(Acked, 4)
    assert min(later - sooner for sooner, later in pairwise(nacked_at)) >= 0.1

    queue.publish("slow")
    gate.wait_for()
    queue.publish_many(["x"] * 50)
    gate.open()
    recorder.wait_for(Acked, 55)


def test_a_publish_wakes_one_idle_worker_of_several(no_looks, queue, workers, recorder, client, ran):
    workers(5, queue)
    eventually(lambda: client.info("clients")["blocked_clients"] == 5, "all wait")
    before = ran()["blpop"]

    queue.publish("x")
    recorder.wait_for(Acked)

    # The woken worker waits again; the other workers have waited all the time.
    assert ran()["blpop"] - before <= 2


def test_one_worker_watches_a_due_time_and_hands_its_token_on_when_it_stops(queue, acking, fetcher_of, client, clock):
    workers = [fetcher_of(acking) for _ in range(5)]
    queue.publish("x", delay=60)
    for one in workers:
        one.step()
        client.pexpire(queue.keys.watch, 2000)  # long enough for slow machines
    assert [one.scheduler.watches(queue.keys) for one in workers] == [True, False, False, False, False]

    queue.publish("y")
    workers[4].step()  # it takes the token and has not claimed yet
    assert client.llen(queue.keys.wake) == 0
    workers[4].fetcher.hand_on()
    workers[3].fetcher.hand_on()  # it took no token

    assert client.llen(queue.keys.wake) == 1
    assert client.exists(queue.keys.watch)


def test_messages_of_a_dead_worker_return_or_end_when_leases_expire(no_looks, queue, consumer, work_until, recorder):
    for retries in (1, 0):
        queue.publish("x", id=str(retries), retries=retries)
    run_transition(queue, "claim", CallNumber("dead", 1), limit=2, lease_ms=500)
    consumer.handler(queue, lease=1.5)(lambda body: None)  # a worker spares leases for a third of this after its start

    work_until(Acked)

    assert recorder.wait_for(Reclaimed)[0].overdue == ("1",)  # the reclaim and the ack report from different threads
    recorder.wait_for(DeadLettered)
    assert queue.counts().dead == 1


@pytest.mark.parametrize("how", ["start", "claim without an answer", "reclaim without an answer"])
def test_expired_leases_are_spared_after_a_start_or_an_outage(queue, consumer, caller, client, fetcher_of, how):
    """After an outage, the leases' workers may be alive and about to renew them."""
    consumer.handler(queue, lease=60)(lambda body: None)
    queue.publish("x", id="x")
    run_transition(queue, "claim", CallNumber("slow", 1), limit=1, lease_ms=60_000)
    client.zadd(queue.keys.unack, {"x": 1})  # its lease has expired
    is_away = [how] if how != "start" else []

    def run_all(requests):
        return [RedisUnavailableError("away")] * len(requests) if is_away else caller.run_all(requests)

    made = fetcher_of(consumer, client=SimpleNamespace(run_all=run_all, wake_tokens=caller.wake_tokens, observers=()))
    scheduler, claim = made.scheduler, CallNumber("me", 1)
    answer = run_transition(queue, "claim", claim, limit=1, lease_ms=60_000, watcher="me")
    scheduler.note(queue.keys, answer, time.monotonic() - 1)
    if is_away:
        scheduler._spared_at[None] = -math.inf  # as long after its start
        made.step() if how.startswith("claim") else scheduler.step()
        is_away.clear()
        scheduler.note(queue.keys, answer, time.monotonic() - 1)

    wait = scheduler.step()

    assert queue.counts().unack == 1
    assert 0 < wait <= 1


def test_a_worker_that_lost_redis_spares_the_leases_of_all_its_queues(own_server, own_consumer, recorder):
    own_consumer.handler("q")(lambda body: None)
    own_consumer.start()
    scheduler = own_consumer._engine._scheduler
    scheduler._spared_at[None] = -math.inf  # as long after its start

    own_server.kill()

    recorder.wait_for(RedisUnavailable, part="fetcher")
    assert scheduler._spared_at[None] > 0


def test_a_sooner_due_time_of_a_claim_is_not_overruled_by_an_older_answer(queue, acking, url):
    """The reply to a promote contains a wait of a day; before it is applied, a claim returns a wait of an hour."""
    turns = (CallNumber("me", number) for number in count(1))

    def claim():
        answer = run_transition(queue, "claim", next(turns), limit=1, lease_ms=60_000, watcher="me")
        scheduler.note(queue.keys, answer, time.monotonic())

    def meanwhile(event):
        if isinstance(event, Promoted):
            queue.publish("sooner", delay=3600)
            claim()

    scheduler = Scheduler(Client(Connection.to(url).wire(), [meanwhile]), acking.handlers, lambda: None)
    queue.publish("later", delay=86_400)
    queue.publish("now", delay=0.01)
    claim()
    while queue.counts().totals.get("promoted", 0) == 0:
        wait = scheduler.step()

    assert 0 < wait <= 3601


def test_a_token_says_which_queue_has_work_and_many_are_taken_together(serve, consumer, fetcher_of, ran, clock):
    """Taking tokens one by one made the last queue late: when a wait ends immediately, the worker takes all tokens."""
    queues = [serve(f"q{number}") for number in range(20)]
    fetcher = fetcher_of(consumer, concurrency=100)
    fetcher.step()
    queues[7].publish("x")
    before = ran()["evalsha"]

    fetcher.step(4)  # the token, the claim, the body, the start
    assert [one.handler.queue.name for one in fetcher.held] == ["q7"]
    assert ran()["evalsha"] == before + 2  # the claim, the body

    for queue in queues:
        queue.publish("x")
    rounds = 0
    while len(fetcher.held) < 21:
        fetcher.step()
        rounds += 1
    assert rounds < 20


@pytest.mark.parametrize("names", ["plain", "coroutine", "plain and coroutine"])
def test_worker_with_max_jobs_starts_exactly_so_many(make_queue, consumer, recorder, names):
    async def handle(body): ...

    handlers = {"plain": lambda body: None, "coroutine": handle}
    queues = [make_queue(name) for name in names.split(" and ")]
    for queue in queues:
        consumer.handler(queue)(handlers[queue.name])
        queue.publish_many(["x"] * 100)

    assert consumer.run(WorkerSettings(max_jobs=5)) == EXIT_REPLACE

    assert len(recorder.of(Started)) == 5
    assert len(recorder.ids(Acked)) == 5
    counts = [queue.counts() for queue in queues]
    assert (sum(one.ready for one in counts), sum(one.unack for one in counts)) == (100 * len(queues) - 5, 0)


def test_max_jobs_ends_only_a_consumer_that_is_run_and_has_room_for_a_successor(queue, acking, start, recorder):
    acking.must_stay = True
    queue.publish_many(["x"] * 100)
    assert acking.run(WorkerSettings(max_jobs=5, burst=True)) == 0
    assert len(recorder.of(Started)) == 100

    acking.must_stay = False
    queue.publish_many(["x"] * 20)
    start(max_jobs=5)

    recorder.wait_for(Acked, 120)


def test_queues_that_are_due_at_once_share_the_moves_of_a_round_trip(serve, consumer, caller, client):
    """Redis processes a whole round trip before it serves other clients."""
    queues = [serve(f"q{number}") for number in range(50)]
    scheduler = Scheduler(caller, consumer.handlers, lambda: None)
    for queue in queues:
        client.zadd(queue.keys.pending, {f"m{number}": 1 for number in range(60)})
        looked = run_transition(queue, "claim", CallNumber("me", 1), limit=0, lease_ms=60_000, watcher="me")
        scheduler.note(queue.keys, looked, time.monotonic())

    moved = []
    while not moved or moved[-1] < 50 * 60:
        assert scheduler.step() == 0
        moved.append(sum(queue.counts().ready for queue in queues))

    assert moved == [50 * 20, 50 * 40, 50 * 60]
