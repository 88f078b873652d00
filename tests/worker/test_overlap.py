"""How a worker keeps itself and Redis at work at once: it claims ahead."""

import time

import pytest

from reliq.errors import RedisUnavailableError
from reliq.events import Acked
from reliq.message import Claimed
from reliq.transitions import CallNumber
from reliq.worker.claims import QueueClaims
from reliq.worker.delivery import deliveries_of
from reliq.worker.fetcher import Fetcher
from reliq.worker.inflight import Inflight
from reliq.worker.scheduler import Scheduler
from reliq.worker.served import Served
from reliq.worker.slots import UNSETTLED_LIMIT


class NotingDoor:
    """A client that notes what it sends, and when that is answered."""

    def __init__(self, client, notes):
        self._client, self.notes = client, notes
        self.observers = ()

    def run_all(self, requests):
        self.notes.append("+".join(request.command[0] for request in requests))
        answers = self._client.run_all(requests)
        self.notes.append("answered")
        return answers


def wait_until(is_so):
    """Wait for what another thread will do."""
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until


def be_quick(inflight, queue):
    """Have the handler be one that is known to end at once."""
    inflight._table.queues[queue.name].learn(1e-6)


def test_one_round_trip_reads_what_was_claimed_and_claims_what_is_next(no_heartbeat, make_queue, consumer, caller):
    queue = make_queue(max_body=1000)
    queue.publish_many(["x"] * 1600)
    consumer.handler(queue)(lambda body: None)
    inflight, notes = Inflight(consumer.handlers, 16), []
    be_quick(inflight, queue)
    scheduler = Scheduler(caller, consumer.handlers, lambda: None)
    submit = lambda deliveries: notes.append(len(deliveries))  # noqa: E731
    noting = NotingDoor(caller, notes)
    fetcher = Fetcher(
        noting, Served(consumer.handlers), inflight, scheduler, submit, lambda deliveries, outcome: None, no_heartbeat
    )

    for _ in range(4):
        fetcher.step()

    assert notes == [
        *("EVALSHA", "answered"),
        *("EVALSHA+EVALSHA", "answered", 500),
        *("EVALSHA+EVALSHA", "answered", 500),
        *("EVALSHA", "answered", 500),  # there is no room for more
    ]


def test_what_has_been_read_starts_also_when_redis_could_not_answer_the_claim_beside_it(
    no_heartbeat, make_queue, consumer, caller
):
    queue = make_queue(max_body=1000)
    queue.publish_many(["x"] * 600)
    consumer.handler(queue)(lambda body: None)
    inflight, started = Inflight(consumer.handlers, 16), []
    be_quick(inflight, queue)

    class BusyDoor:
        observers = ()

        def run_all(self, requests):
            answers = caller.run_all(requests)
            return [answers[0], RedisUnavailableError("BUSY")] if len(answers) > 1 else answers

    scheduler = Scheduler(caller, consumer.handlers, lambda: None)
    fetcher = Fetcher(
        BusyDoor(),
        Served(consumer.handlers),
        inflight,
        scheduler,
        started.extend,
        lambda deliveries, outcome: None,
        no_heartbeat,
    )
    fetcher.step()
    fetcher.step()

    assert len(started) == 500


def test_no_more_is_claimed_ahead_than_is_soon_read(no_heartbeat, make_queue, consumer, caller, monkeypatch):
    monkeypatch.setattr("reliq.worker.bodies.READ_BYTES", 10_000)
    queue = make_queue(max_body=1000)
    queue.publish_many(["x" * 900] * 600)
    consumer.handler(queue)(lambda body: None)
    inflight = Inflight(consumer.handlers, 4)
    be_quick(inflight, queue)
    scheduler = Scheduler(caller, consumer.handlers, lambda: None)
    fetcher = Fetcher(
        caller,
        Served(consumer.handlers),
        inflight,
        scheduler,
        lambda deliveries: None,
        lambda deliveries, outcome: None,
        no_heartbeat,
    )

    for _ in range(3):
        fetcher.step()

    assert len(inflight.deliveries()) <= 4 + 3 * 10


@pytest.fixture
def held(queue, consumer):
    """What is claimed of a queue with five messages, and a handler that is known to be quick."""
    queue.publish_many(["x"] * 5)
    consumer.handler(queue)(lambda body: None)
    inflight = Inflight(consumer.handlers, 16)
    claimed = queue.moves.claim(CallNumber("me", 1), limit=5, lease_ms=60_000).claimed
    deliveries = deliveries_of(claimed, consumer.handlers[0], time.monotonic())
    inflight.add(deliveries)
    be_quick(inflight, queue)
    return inflight, deliveries


def test_a_quick_handler_that_gets_stuck_holds_up_no_other(queue, consumer, start, recorder, gate):
    @consumer.handler(queue)
    def handle(body):
        if body == "stuck":
            gate.pass_through()

    queue.publish_many(["quick"] * 300)
    start()
    recorder.wait_for(Acked, 300)

    queue.publish_many([*["stuck", "quick"] * 15, *["quick"] * 300])

    recorder.wait_for(Acked, 300 + 15 + 300)  # one slot is left
    gate.open()
    recorder.wait_for(Acked, 300 + 30 + 300)


def test_no_more_is_claimed_while_redis_has_yet_to_be_told_of_what_ended(held, consumer, queue):
    """Else a settler that cannot keep up lets leases run out, and everything is done twice."""
    inflight, _ = held
    claims = QueueClaims(consumer.handlers[0])
    claimed = [Claimed(f"m{number}", "me.1", 3) for number in range(UNSETTLED_LIMIT)]
    deliveries = deliveries_of(claimed, consumer.handlers[0], time.monotonic())
    inflight.add(deliveries)

    unsettled = inflight.withdraw(deliveries[1:])
    assert claims.can_claim(inflight.wait_for_capacity([claims], 0)[0])
    unsettled += inflight.withdraw(deliveries[:1])
    assert not claims.can_claim(inflight.wait_for_capacity([claims], 0)[0])
    inflight.settled(unsettled[:1])

    assert claims.can_claim(inflight.wait_for_capacity([claims], 0)[0])


def test_queues_take_turns_though_bodies_are_read_between_their_claims(no_heartbeat, make_queue, consumer, caller):
    queues = [make_queue("a"), make_queue("b")]
    for queue in queues:
        queue.publish_many(["x"] * 4)
        consumer.handler(queue)(lambda body: None)
    inflight, order = Inflight(consumer.handlers, 1), []
    scheduler = Scheduler(caller, consumer.handlers, lambda: None)

    def work(deliveries):
        inflight.hold(deliveries)
        order.extend(held.queue for held in deliveries)
        run = inflight.next_plain(None)
        run.began = False  # so that nothing is learned of its pace, and nothing held ahead
        with inflight._lock:
            inflight._finish([run])
        inflight.settled(run.deliveries)

    fetcher = Fetcher(
        caller, Served(consumer.handlers), inflight, scheduler, work, lambda deliveries, outcome: None, no_heartbeat
    )
    while len(order) < 8:
        fetcher.step()

    assert sorted(order[:4]) == ["a", "a", "b", "b"]
