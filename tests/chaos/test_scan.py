"""A look at Redis finds what cannot be."""

from dataclasses import replace

import pytest

from tests.chaos.scan import Snapshot, broken

SOUND = Snapshot(
    pending=("a",),
    ready=("b",),
    unack=("c", "d"),
    retry=("e",),
    garbage=("f",),
    counts={"a": "1", "b": "1", "c": "1", "d": "0", "e": "2"},
    words={"c": "lane.1:2000", "d": "nacked", "e": "suspect"},
    totals={"published": 7, "acked": 1},
)


def test_a_sound_queue_has_nothing_broken():
    assert broken(SOUND) == []
    assert broken(replace(SOUND, words={**SOUND.words, "c": "lane.1:2000!", "b": "!"})) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"retry": ("b",), "words": {"c": "l.1:1", "d": "nacked"}, "counts": {**SOUND.counts, "e": "1"}}, "two places"),
        ({"counts": {"a": "1"}}, "without a retry count"),
        ({"counts": {**SOUND.counts, "z": "1"}}, "with a retry count but in no place"),
        ({"counts": {**SOUND.counts, "a": "x"}}, "with a retry count that is none"),
        ({"words": {"d": "nacked"}}, "held by nobody"),
        ({"words": {**SOUND.words, "b": "lane.2:2000"}}, "held, but not in unack"),
        ({"words": {**SOUND.words, "z": "suspect"}}, "with a state word but not alive"),
        ({"totals": {"published": 8, "acked": 1}}, "the account is off by 1"),
    ],
)
def test_each_thing_that_cannot_be_is_found(change, words):
    assert any(words in one for one in broken(replace(SOUND, **change)))
