"""Delayed replies make no message late and stop no queue, whether another server or this process was slow."""

from types import SimpleNamespace

import pytest

from reliq import OutgoingMessage
from reliq.lua.transitions import NOTHING_DUE, ClaimAnswer
from reliq.redis.connection import ServerConnections
from reliq.redis.wakeups import WakeTokens
from reliq.worker.fetcher import POLL_SECONDS

DELAY, LATE = 600.0, 0.3


@pytest.fixture
def held_up(caller, clock, monkeypatch):
    """A client whose replies arrive late by a held clock; its `seconds` can be changed."""
    monkeypatch.setattr("reliq.worker.upkeep.time", SimpleNamespace(monotonic=lambda: clock.now))

    def run_all(requests):
        answers = caller.run_all(requests)
        clock.now += client.seconds
        return answers

    client = SimpleNamespace(run_all=run_all, wake_tokens=caller.wake_tokens, observers=(), seconds=LATE)
    return client


@pytest.mark.parametrize("after", ["claim", "promotion"])
def test_a_due_time_counts_from_when_the_call_before_was_sent(queue, acking, held_up, clock, fetcher_of, after):
    made = fetcher_of(acking, 1, client=held_up)
    queue.publish("x", delay=DELAY)
    clock.now += POLL_SECONDS
    sent_at = clock.now

    if after == "claim":
        made.step()
    else:
        made.scheduler.note(queue.keys, ClaimAnswer(0, NOTHING_DUE, 0, []), clock.now)
    wait = made.scheduler.step()

    assert clock.now + wait < sent_at + DELAY + LATE / 2


def test_queue_with_keys_is_claimed_if_each_round_trip_takes_longer_than_the_poll_interval(
    queue, acking, held_up, fetcher_of
):
    """A round trip includes all nodes of a Cluster, so it takes as long as the slowest node."""
    held_up.seconds = 1.5 * POLL_SECONDS
    queue.publish_many([OutgoingMessage(body=key, key=key) for key in "abc"])
    made = fetcher_of(acking, client=held_up)

    made.step(4)  # a poll, a claim, the bodies, the start

    assert [one.delivery.claimed.key for one in made.held] == ["a", "b", "c"]


def test_waits_that_a_slow_node_accepts_late_start_in_separate_rounds(
    serve, consumer, caller, clock, fetcher_of, monkeypatch
):
    """Between two of these waits, a worker of many shards on this node can claim from other nodes."""
    open_wait, opened = WakeTokens._open, []

    def open_late(tokens, place, node):
        opened.append(place)
        clock.now += LATE
        return open_wait(tokens, place, node)

    monkeypatch.setattr(WakeTokens, "_open", open_late)
    monkeypatch.setattr(ServerConnections, "place", lambda _node, key: key)  # as in a Cluster: a wait for each queue
    for name in "abc":
        serve(name)
    made = fetcher_of(consumer, client=caller)
    made.step()  # a claim

    rounds = []
    for _ in range(3):
        made.step()
        rounds.append(len(opened))

    assert rounds == [1, 2, 3]
