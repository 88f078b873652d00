"""A key that got stuck because a worker of an earlier version settled its message recovers by itself."""

import pytest
from held_clock import HOUR_MS, NOON
from msgspec.structs import replace

from reliq.lua import transitions as t

pytestmark = pytest.mark.foreign_hands

SETTLE = {
    "ack": lambda keys, one: t.ack(keys, [(one, None)], clock=NOON),
    "nack": lambda keys, one: t.nack(keys, [(one, HOUR_MS, "failed 1 x", b"")], clock=NOON),
    "snooze": lambda keys, one: t.snooze(keys, [(one, HOUR_MS)], clock=NOON),
    "release": lambda keys, one: t.release(keys, [one], clock=NOON),
}


@pytest.fixture
def tidy(run, keys):
    return lambda: run(t.tidy(keys, clock=NOON))


@pytest.fixture
def in_order(limit, publish_under):
    """A queue with one message of each key at a time, and two messages of A."""
    limit(ordered=1, per_key=1)
    publish_under("A", "first", "second")


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("verb", SETTLE)
def test_a_key_whose_message_was_settled_by_an_old_worker_is_freed_by_tidy(verb, serve, run, keys, tidy):
    [held] = serve().values()
    run(SETTLE[verb](keys, replace(held, key=None)))
    assert serve() == {}

    tidy()

    assert len([*serve(), *serve()]) == 1


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("verb", ["nack", "snooze"])
def test_tidy_leaves_the_place_of_a_message_that_runs_or_keeps_it_while_it_waits(verb, serve, run, keys, tidy):
    [held] = serve().values()
    tidy()
    assert (held.id, serve()) == ("first", {})

    run(SETTLE[verb](keys, held))
    tidy()
    assert serve() == {}


def test_tidy_serves_keys_that_lost_their_turn_a_bounded_piece_at_a_time(publish, client, keys, serve, tidy):
    names = [f"key-{number}" for number in range(400)]
    publish(*names, message_keys=names)
    client.delete(keys.ring)

    tidy()

    assert 0 < client.zcard(keys.ring) <= 100
    assert 0 < len(serve(500)) <= 100
