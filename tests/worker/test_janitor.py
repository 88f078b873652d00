"""The janitor's round, which also detects that Redis has lost data."""

from types import SimpleNamespace

import pytest
from transition import run_transition

from reliq.events import CountersRegressed
from reliq.lua.transitions import CallNumber
from reliq.worker.claims import ServedQueues
from reliq.worker.upkeep import Janitor


@pytest.fixture
def look(caller, queue, monkeypatch):
    """Run a round of the janitor."""
    janitor = Janitor(caller, ServedQueues([SimpleNamespace(queue=queue)]), None)

    def make():
        janitor._round_at = 0.0
        janitor.step()

    return make


@pytest.fixture
def claim(queue):
    """Publish and claim `count` messages."""

    def make(count, turn):
        queue.publish_many(["x"] * count)
        run_transition(queue, "claim", CallNumber("worker", turn), limit=count, lease_ms=60_000)

    return make


def test_a_queue_that_was_flushed_is_reported_and_no_other(look, claim, client, recorder):
    look()
    for turn in range(1, 4):
        claim(2, turn)
        look()
        look()
    assert recorder.of(CountersRegressed) == []

    client.flushall()
    claim(2, 1)
    look()

    assert recorder.of(CountersRegressed) == [CountersRegressed("q", 6, 2)]


def test_an_account_that_cannot_be_read_disturbs_no_round(look, claim, client, recorder, queue):
    claim(2, 1)
    look()
    client.hset(queue.keys.totals, "claimed", b"many")
    look()
    client.delete(queue.keys.totals)
    client.set(queue.keys.totals, "no hash")
    look()

    assert recorder.of(CountersRegressed) == []
