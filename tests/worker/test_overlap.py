"""A worker claims ahead, so that the worker and Redis work at the same time."""

from types import SimpleNamespace

from reliq.errors import RedisUnavailableError
from reliq.events import Acked
from reliq.worker.claims import QueueClaims
from reliq.worker.slots import UNSETTLED_LIMIT


def be_quick(inflight):
    """Set the pace of a handler that is known to end immediately."""
    inflight.queues["q"].pace = 1e-6


def client_of(caller, run_all):
    return SimpleNamespace(run_all=run_all, observers=(), wake_tokens=caller.wake_tokens)


def test_one_round_trip_reads_claimed_bodies_and_claims_the_next_messages(serve, consumer, caller, clock, fetcher_of):
    notes = []
    serve(bodies=["x"] * 1600, max_body=1000)

    def run_all(requests):
        notes.append(len(requests))
        return caller.run_all(requests)

    def submit(deliveries):
        notes.append(f"{len(deliveries)} start")

    fetcher = fetcher_of(consumer, 16, client=client_of(caller, run_all), submit=submit)
    be_quick(fetcher.inflight)

    fetcher.step(4)

    assert notes == [1, *[2, "500 start"] * 2, 1, "500 start"]  # in the end there is no room for more


def test_messages_that_were_read_start_though_the_next_claim_failed(serve, consumer, caller, clock, fetcher_of):
    serve(bodies=["x"] * 600, max_body=1000)

    def run_all(requests):
        answers = caller.run_all(requests)
        return [answers[0], RedisUnavailableError("BUSY")] if len(answers) > 1 else answers

    fetcher = fetcher_of(consumer, 16, client=client_of(caller, run_all))
    be_quick(fetcher.inflight)
    fetcher.step(2)

    assert len(fetcher.held) == 500


def test_no_more_is_claimed_ahead_than_is_soon_read(serve, consumer, clock, fetcher_of, monkeypatch):
    monkeypatch.setattr("reliq.receive.bodies.READ_BYTES", 10_000)
    serve(bodies=["x" * 900] * 600, max_body=1000)
    fetcher = fetcher_of(consumer)
    be_quick(fetcher.inflight)

    fetcher.step(3)

    assert len(fetcher.inflight.deliveries()) <= 4 + 3 * 10


def test_a_quick_handler_that_gets_stuck_holds_up_no_other(queue, consumer, work_until, recorder, gate):
    @consumer.handler(queue)
    def handle(body):
        if body == "stuck":
            gate.pass_through()

    queue.publish_many(["quick"] * 300)
    work_until(Acked, 300)

    queue.publish_many([*["stuck", "quick"] * 15, *["quick"] * 300])

    recorder.wait_for(Acked, 300 + 15 + 300)  # one slot is left
    gate.open()
    recorder.wait_for(Acked, 300 + 30 + 300)


def test_no_more_is_claimed_while_redis_has_yet_to_hear_of_many_that_ended(acking, inflight_of, new_deliveries):
    """Otherwise, if settling is slow, leases expire and every message runs twice."""
    inflight, claims = inflight_of(16), QueueClaims(acking.handlers[0])
    deliveries = new_deliveries(UNSETTLED_LIMIT)
    inflight.add(deliveries)

    unsettled = inflight.withdraw(deliveries[1:])
    assert claims.can_claim(inflight.wait_for_capacity([claims], 0)[0])
    unsettled += inflight.withdraw(deliveries[:1])
    assert not claims.can_claim(inflight.wait_for_capacity([claims], 0)[0])
    inflight.settled(unsettled[:1])

    assert claims.can_claim(inflight.wait_for_capacity([claims], 0)[0])


def test_queues_take_turns_though_bodies_are_read_between_their_claims(serve, consumer, fetcher_of):
    for name in "ab":
        serve(name, ["x"] * 4)
    order = []

    def work(deliveries):
        inflight.enqueue(deliveries)
        order.extend(held.queue for held in deliveries)
        run = inflight.next_plain(None)
        run.began = False  # no pace is measured, so no message is prefetched
        with inflight._lock:
            inflight._finish([run])
        inflight.settled(run.deliveries)

    fetcher = fetcher_of(consumer, 1, submit=work)
    inflight = fetcher.inflight
    while len(order) < 8:
        fetcher.step()

    assert sorted(order[:4]) == ["a", "a", "b", "b"]
