"""How bodies are read: a bounded number of bytes in one reply, and what is there can start before the rest is read."""

import pytest
from transition import run_transition

from reliq.lua.transitions import CallNumber
from reliq.redis.commands import Call
from reliq.settings import MIB
from reliq.worker.fetcher import BodyReader
from reliq.worker.loop import QueueBackoff
from reliq.worker.slots import deliveries_of


class NotingClient:
    """Notes which calls for how many bodies went in each round trip."""

    def __init__(self, caller):
        self._client = caller
        self.trips = []

    def run_all(self, requests):
        notes = [
            f"ask {len(one.keys)}" if isinstance(one, Call) else f"read {len(one.command) - 1}" for one in requests
        ]
        self.trips.append(", ".join(notes))
        return self._client.run_all(requests)


def read(reader, caller):
    """Read everything, and start what each round trip has brought."""
    while reads := reader.next_reads():
        reader.take(reads, caller.run_all([one.request for one in reads]))
        reader.start()


@pytest.fixture
def parts(caller, inflight_of):
    """A reader with what was claimed of each queue; what it starts is noted as number of round trips, and messages."""

    def make(consumer):
        noted, groups, troubles = NotingClient(caller), [], QueueBackoff("fetcher")

        def submit(deliveries):
            groups.append((len(noted.trips), len(deliveries)))

        reader = BodyReader(consumer.handlers, inflight_of(), troubles, submit, lambda *_: None)
        for handler in consumer.handlers:
            claimed = run_transition(handler.queue, "claim", CallNumber("me", 1), limit=500, lease_ms=30_000).claimed
            reader.add(deliveries_of(claimed, handler, 0.0))
        return reader, noted, groups, troubles

    return make


LARGE = ["ask 40", "read 15", "read 15", "read 10"]
SEVERAL = ["ask 4, ask 4, ask 4", "read 4, read 3, read 1", "read 1, read 3"]


@pytest.mark.parametrize(
    ("queues", "amount", "size", "trips", "groups"),
    [
        pytest.param(1, 300, 1, ["ask 300"], [(1, 300)], id="small bodies"),
        # With its header a body is a little more than 64 KiB. What is there starts before the rest is read.
        pytest.param(1, 40, MIB // 16, LARGE, [(2, 15), (3, 15), (4, 10)], id="large bodies"),
        pytest.param(3, 4, MIB // 8, SEVERAL, [(2, 8), (3, 4)], id="large bodies of several queues"),
    ],
)
def test_bodies_are_read_in_trips_of_limited_size(
    serve, consumer, parts, monkeypatch, queues, amount, size, trips, groups
):
    monkeypatch.setattr("reliq.worker.fetcher.READ_BYTES", MIB)
    for number in range(queues):
        serve(f"q{number}", ["x" * size] * amount, max_body=2 * MIB)
    reader, noted, started, _ = parts(consumer)

    read(reader, noted)

    assert (noted.trips, started) == (trips, groups)


def test_a_read_that_fails_is_made_again_and_loses_nothing(serve, consumer, parts):
    broken, _ = (serve(name, ["x"] * 4) for name in ("broken", "whole"))
    reader, noted, groups, troubles = parts(consumer)
    reads = reader.next_reads()
    replies = noted.run_all([one.request for one in reads])

    failures = reader.take(reads, [ValueError("none of its replies"), replies[1]])
    reader.start()
    for keys, failure in failures:
        troubles.note(keys, failure)
    assert reader.next_reads() == []  # it is let alone for a while
    troubles.over(broken.keys)
    read(reader, noted)

    assert [messages for _, messages in groups] == [4, 4]
