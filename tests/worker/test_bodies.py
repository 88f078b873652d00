"""Bodies are read in replies of bounded size, and messages start before all bodies are read."""

from types import SimpleNamespace

import pytest
from tenacity import wait_fixed
from transition import run_transition

from reliq.lua.transitions import CallNumber
from reliq.receive.bodies import BodyReader
from reliq.redis.commands import Call
from reliq.settings import MIB
from reliq.worker.loop import QueueBackoff
from reliq.worker.slots import deliveries_of


class NotingClient:
    """Records the calls in each round trip, with their number of bodies."""

    def __init__(self, caller):
        self._client = caller
        self.trips = []

    def run_all(self, requests):
        notes = [
            f"ask {len(one.keys)}" if isinstance(one, Call) else f"read {len(one.command) - 1}" for one in requests
        ]
        self.trips.append(", ".join(notes))
        return self._client.run_all(requests)


@pytest.fixture
def parts(caller):
    """
    A reader with the claimed messages of each queue, and a function that reads all bodies.

    `groups` records each batch of messages that became ready: round trips so far, and messages.
    """

    def make(consumer):
        noted, groups, troubles = NotingClient(caller), [], QueueBackoff("fetcher")
        max_body = {handler.queue.name: handler.queue.settings.max_body for handler in consumer.handlers}
        reader = BodyReader(max_body, troubles.until)
        for handler in consumer.handlers:
            claimed = run_transition(handler.queue, "claim", CallNumber("me", 1), limit=500, lease_ms=30_000).claimed
            reader.add(handler.queue.keys, deliveries_of(claimed, handler, 0.0))

        def note():
            if reader.ready:
                groups.append((len(noted.trips), len(reader.ready)))
                reader.ready = []

        def read():
            while reads := reader.next_reads():
                reader.take(reads, noted.run_all([one.request for one in reads]))
                note()

        return SimpleNamespace(reader=reader, read=read, note=note, noted=noted, groups=groups, troubles=troubles)

    return make


LARGE = ["ask 40", "read 15", "read 15", "read 10"]
SEVERAL = ["ask 4, ask 4, ask 4", "read 4, read 3, read 1", "read 1, read 3"]


@pytest.mark.parametrize(
    ("queues", "amount", "size", "trips", "groups"),
    [
        pytest.param(1, 300, 1, ["ask 300"], [(1, 300)], id="small bodies"),
        # With its header a body is a little more than 64 KiB. The first messages start before the rest is read.
        pytest.param(1, 40, MIB // 16, LARGE, [(2, 15), (3, 15), (4, 10)], id="large bodies"),
        pytest.param(3, 4, MIB // 8, SEVERAL, [(2, 8), (3, 4)], id="large bodies of several queues"),
    ],
)
def test_bodies_are_read_in_trips_of_limited_size(
    serve, consumer, parts, monkeypatch, queues, amount, size, trips, groups
):
    monkeypatch.setattr("reliq.receive.bodies.READ_BYTES", MIB)
    for number in range(queues):
        serve(f"q{number}", ["x" * size] * amount, max_body=2 * MIB)
    made = parts(consumer)

    made.read()

    assert (made.noted.trips, made.groups) == (trips, groups)


def test_a_read_that_fails_is_made_again_and_loses_nothing(serve, consumer, parts, monkeypatch):
    monkeypatch.setattr("reliq.worker.loop.RECONNECT", wait_fixed(60))  # the test ends the backoff itself
    broken, _ = (serve(name, ["x"] * 4) for name in ("broken", "whole"))
    made = parts(consumer)
    reads = made.reader.next_reads()
    replies = made.noted.run_all([one.request for one in reads])

    failures = made.reader.take(reads, [ValueError("none of its replies"), replies[1]])
    made.note()
    for one, failure in failures:
        made.troubles.note(one.keys, failure)
    assert made.reader.next_reads() == []  # this queue is skipped for a while
    made.troubles.over(broken.keys)
    made.read()

    assert [messages for _, messages in made.groups] == [4, 4]
