"""Messages with keys: each waits in the line of its key, and the keys take turns."""

import pytest

pytestmark = pytest.mark.foreign_hands


@pytest.fixture
def publish_under(publish):
    """Publish messages under a key."""
    return lambda key, *ids, **options: publish(*ids, message_keys=[key] * len(ids), **options)


@pytest.fixture
def serve(claim):
    """Claim as a queue with keys is; return the ids."""
    return lambda limit=100, **options: [one.id for one in claim(limit, keyed=True, **options)]


def test_messages_of_a_key_come_in_the_order_of_their_publish_and_keys_take_turns(publish_under, serve):
    publish_under("a", "a1", "a2", "a3")
    publish_under("b", "b1", "b2")
    publish_under("", "none")

    assert serve() == ["none", "a1", "a2", "b1", "a3", "b2"]


def test_a_claim_says_the_key_of_each_message(publish_under, claim):
    publish_under("a", "one")
    publish_under("", "none")

    assert {one.id: one.key for one in claim(keyed=True)} == {"one": "a", "none": ""}
