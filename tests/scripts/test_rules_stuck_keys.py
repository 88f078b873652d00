"""A key that stands still because somebody who knows of no keys has settled its message goes on by itself."""

import pytest
from held_clock import HOUR_MS, NOON
from msgspec.structs import replace

from reliq import transitions as t

pytestmark = pytest.mark.foreign_hands


@pytest.fixture
def take(claim):
    return lambda **options: [one.id for one in claim(keyed=True, **options)]


@pytest.fixture
def tidy(run, keys):
    return lambda: run(t.tidy(keys, clock=NOON))


@pytest.fixture
def in_order(run, keys, publish):
    """A queue of one at a time per key, with two messages of A."""
    run(t.limit(keys, {"ordered": "1", "per_key": "1"}, clock=NOON))
    publish("first", "second", message_keys=["A", "A"])


@pytest.mark.parametrize("verb", ["ack", "nack", "snooze", "release"])
def test_a_key_whose_message_was_settled_by_an_old_worker_is_freed_by_tidy(
    verb, in_order, claim, take, run, keys, tidy
):
    [held] = claim(keyed=True)
    plain = replace(held, key=None)
    answers = {
        "ack": lambda: t.ack(keys, [(plain, None)], clock=NOON),
        "nack": lambda: t.nack(keys, [(plain, HOUR_MS, "failed 1 x", b"")], clock=NOON),
        "snooze": lambda: t.snooze(keys, [(plain, HOUR_MS)], clock=NOON),
        "release": lambda: t.release(keys, [plain], clock=NOON),
    }
    run(answers[verb]())
    stood_still = take()

    tidy()

    assert stood_still == []
    assert len(take() + take()) == 1


def test_tidy_leaves_the_place_of_a_message_that_runs(in_order, claim, take, tidy):
    [held] = claim(keyed=True)

    tidy()

    assert held.id == "first"
    assert take() == []


@pytest.mark.parametrize("verb", ["nack", "snooze"])
def test_tidy_leaves_the_place_that_is_kept_for_a_message_that_waits(verb, in_order, claim, take, run, keys, tidy):
    [held] = claim(keyed=True)
    waits = {
        "nack": lambda: t.nack(keys, [(held, HOUR_MS, "failed 1 x", b"")], clock=NOON),
        "snooze": lambda: t.snooze(keys, [(held, HOUR_MS)], clock=NOON),
    }
    run(waits[verb]())

    tidy()

    assert take() == []


def test_tidy_serves_a_key_that_lost_its_turn(in_order, client, keys, take, tidy):
    client.delete(keys.ring)

    tidy()

    assert take() == ["first"]


def test_tidy_looks_at_a_bounded_piece_of_many_keys(publish, client, keys, run, tidy):
    names = [f"key-{number}" for number in range(400)]
    publish(*names, message_keys=names)
    client.delete(keys.ring)

    tidy()

    assert 0 < client.zcard(keys.ring) <= 100
