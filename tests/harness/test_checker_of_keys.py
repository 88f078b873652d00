"""What the judge says of messages with keys: how many of a key at once, and in which order."""

import pytest

from tests.harness.chaos.checker import out_of_order, over_the_limit
from tests.harness.chaos.scan import Snapshot, broken
from tests.harness.chaos.story import Delivery, Message, Settling, Story

LEASE = 2.0


def delivery(id, claimed, settled=None, verb="acked"):
    """A delivery that was claimed, and settled unless its holder died."""
    settlings = [] if settled is None else [Settling(verb, "c", settled, ended=settled, result="ok")]
    asked = claimed - 0.01
    return Delivery(id, f"n{claimed}", "c", asked, claimed, LEASE, [(asked, claimed)], settlings=settlings)


def message(id, asked, *deliveries, key="a", **facts):
    return Message(
        id, id, "inorder", 0.0, asked, asked + 0.1, outcome="ok", key=key, deliveries=list(deliveries), **facts
    )


@pytest.fixture
def story():
    """A run of messages in a queue of one at a time per key, or of as many."""

    def make(*messages, per_key=1):
        return Story(per_key={"inorder": per_key}, messages={one.name: one for one in messages})

    return make


def test_two_of_a_key_at_once_are_over_a_limit_of_one(story):
    one, other = message("m1", 1.0, delivery("m1", 2.0, 2.5)), message("m2", 1.5, delivery("m2", 2.2, 2.6))

    assert over_the_limit(story(one, other)) == ["inorder: 2 of a at once"]
    assert over_the_limit(story(one, other, per_key=2)) == []


@pytest.mark.parametrize("second", [2.51, 4.1])
def test_one_after_the_other_is_not_over_the_limit(story, second):
    ended = 2.5 if second < 3 else None
    one, other = message("m1", 1.0, delivery("m1", 2.0, ended)), message("m2", 1.5, delivery("m2", second, 9.0))

    assert over_the_limit(story(one, other)) == []


def test_keys_have_limits_of_their_own(story):
    one, other = message("m1", 1.0, delivery("m1", 2.0)), message("m2", 1.5, delivery("m2", 2.1), key="b")

    assert over_the_limit(story(one, other)) == []


def test_a_message_that_overtakes_one_of_its_key_is_out_of_order(story):
    one, other = message("m1", 1.0, delivery("m1", 3.0, 3.1)), message("m2", 1.5, delivery("m2", 2.0, 2.1))

    assert out_of_order(story(one, other)) == ["m2 of a"]


def test_a_message_that_overtakes_a_redelivery_is_out_of_order(story):
    failed = [delivery("m1", 2.0, 2.1, "nack"), delivery("m1", 3.0, 3.1)]

    assert out_of_order(story(message("m1", 1.0, *failed), message("m2", 1.5, delivery("m2", 2.5, 2.6)))) == ["m2 of a"]


@pytest.mark.parametrize(
    "change", [{"called_off": True}, {"key": "b"}, {"delay": 1.0}, {"told": None}, {"told": 1.6}], ids=str
)
def test_what_has_no_order_is_never_out_of_it(story, change):
    one, other = message("m1", 1.0, delivery("m1", 3.0, 3.1)), message("m2", 1.5, delivery("m2", 2.0, 2.1))
    for name, value in change.items():
        setattr(one, name, value)

    assert out_of_order(story(one, other)) == []


def test_a_snoozed_message_has_no_order(story):
    snoozed = [delivery("m1", 2.0, 2.1, "snooze"), delivery("m1", 3.0, 3.1)]

    assert out_of_order(story(message("m1", 1.0, *snoozed), message("m2", 1.5, delivery("m2", 2.5, 2.6)))) == []


SOUND = {
    "counts": {"held": "3 key-1", "waits": "3 key-1", "free": "3 key-2"},
    "words": {"held": "lane.1:2000"},
    "unack": ("held",),
    "lines": {"key-1": ("waits",), "key-2": ("free",)},
    "places": frozenset({"key-1\0held"}),
    "served": frozenset({"key-2"}),
    "totals": {"published": 3},
}
NOWHERE = {"pending": (), "ready": (), "retry": (), "garbage": ()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"places": frozenset()}, "without a place of their key"),
        ({"served": frozenset()}, "nobody will serve"),
        ({"places": frozenset({"key-1\0held", "key-1\0a", "key-1\0b"})}, "more places than any queue has"),
    ],
)
def test_a_look_finds_what_cannot_be_of_keys(change, words):
    found = broken(Snapshot(**NOWHERE, **SOUND | change))

    assert any(words in one for one in found) if words else found == []
