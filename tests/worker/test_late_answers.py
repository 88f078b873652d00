"""A delayed reply makes no message late, whether another server was slow or this process was held up."""

from types import SimpleNamespace

import pytest

from reliq.lua.transitions import NOTHING_DUE, ClaimAnswer
from reliq.worker.fetcher import POLL_SECONDS

DELAY, LATE = 600.0, 0.3


@pytest.fixture
def held_up(caller, clock, monkeypatch):
    """A client whose replies arrive LATE by a held clock."""
    monkeypatch.setattr("reliq.worker.upkeep.time", SimpleNamespace(monotonic=lambda: clock.now))

    def run_all(requests):
        answers = caller.run_all(requests)
        clock.now += LATE
        return answers

    return SimpleNamespace(run_all=run_all, wake_tokens=caller.wake_tokens, observers=())


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
