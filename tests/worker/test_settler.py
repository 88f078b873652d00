"""What the settler tells Redis, and in which order."""

import pytest

from reliq.events import Lost
from reliq.transitions import Turn
from reliq.worker.flight import flights_of
from reliq.worker.inflight import Inflight
from reliq.worker.outcome import ACKED, RELEASED
from reliq.worker.settler import Settler


@pytest.fixture
def flights(queue, consumer):
    """Claim so many messages, as flights of a worker; the ids are numbers in the order of their publish."""
    consumer.handler(queue)(lambda body: None)

    def make(amount):
        for number in range(amount):
            queue.publish("x", id=str(number))
        answers = [
            queue.moves.claim(Turn("me", turn), limit=500, lease_ms=60_000) for turn in range(1, amount // 500 + 2)
        ]
        return [one for answer in answers for one in flights_of(answer.claimed, consumer.handlers[0], 0.0)]

    return make


@pytest.fixture
def settler(door, consumer):
    def make(flights):
        inflight = Inflight(consumer.handlers, 1)
        inflight.add(flights)
        return Settler(door, inflight, lambda: None, lambda: None), inflight

    return make


def test_many_that_go_back_keep_their_order(queue, client, flights, settler):
    held = flights(1200)
    one, inflight = settler(held)

    one.settle(inflight.withdraw(held), RELEASED)
    one.step()

    assert [int(id) for id in client.lrange(queue.keys.ready, 0, -1)][::-1] == list(range(1200))
    assert inflight.flights() == []


def test_an_ack_that_comes_too_late_is_told_once(queue, client, flights, settler, recorder):
    held = flights(2)
    one, inflight = settler(held)
    client.hset(queue.keys.lease, "0", "someone else")

    one.settle(held, ACKED)
    one.step()

    assert recorder.ids(Lost) == ["0"]
    assert inflight.flights() == []


def test_a_loss_that_is_known_is_not_told_again(queue, client, flights, settler, recorder):
    held = flights(1)
    one, _ = settler(held)
    client.hset(queue.keys.lease, "0", "someone else")
    held[0].lost = True

    one.settle(held, ACKED)
    one.step()

    assert recorder.ids(Lost) == []
