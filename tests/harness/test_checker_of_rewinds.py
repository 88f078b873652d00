"""When a replica takes its primary's place: what may be forgotten then is excused, and nothing else."""

import pytest

from tests.harness.chaos.handwritten import A, B, History


@pytest.fixture
def history():
    return History()


@pytest.mark.parametrize("durable", [None, False])
def test_what_no_replica_had_confirmed_may_be_gone_with_its_primary(history, durable):
    history.totals = {}

    assert history.published(durable=durable).rewound(0.9, 1.2).found() == set()


def test_what_a_replica_had_confirmed_may_not(history):
    history.totals = {"published": 1}

    assert "lost" in history.published(durable=True).rewound(0.9, 1.2).found()


@pytest.mark.parametrize("rewind", [(0.5, 0.9, "frail"), (1.2, 1.5, "frail"), (0.9, 1.2, "sturdy")])
def test_what_was_published_at_another_time_or_place_may_not(history, rewind):
    history.totals = {"published": 1}

    assert "lost" in history.published().rewound(*rewind).found()


def twice(history):
    """The message is done by A, and once more by B, before A's lease is over."""
    return history.published().done_by(A, "n1", 2.0).used(2.3).claimed(2.6, B, "n2").started(2.7, B, "n2").ended(2.8, B)


def test_an_ack_that_its_primary_forgot_brings_the_message_back(history):
    assert {"after ack", "duplicated without a reason"} <= twice(history).found()
    assert twice(History()).rewound(2.25, 2.5).found() == set()


def test_a_claim_that_its_primary_forgot_is_made_by_another(history):
    def claimed_by_both(history):
        history.published().claimed(2.0).started(2.1).claimed(2.5, B, "n2").started(2.6, B, "n2").ended(2.7, B, "n2")
        return history.used(2.75, who=B, nonce="n2")

    assert {"leased while held", "overlapping without a reason"} <= claimed_by_both(history).found()
    assert claimed_by_both(History()).rewound(1.95, 2.3).found() == set()


def test_a_cancel_that_its_primary_forgot_ends_nothing(history):
    def cancelled_and_done(history):
        return history.published().cancelled(1.5).done_by(A, "n1", 2.0).used(2.3)

    assert "after cancel" in cancelled_and_done(history).found()
    assert cancelled_and_done(History()).rewound(1.45, 1.9).found() == set()


def test_a_receipt_is_good_again_when_its_use_was_forgotten(history):
    def used_twice(history):
        return history.published().done_by(A, "n1", 2.0).used(2.3).used(2.6, late=True)

    assert used_twice(history).found() == {"stale accepted"}
    assert used_twice(History()).rewound(2.25, 2.5).found() == set()


def test_a_rewind_gives_back_the_attempts_that_were_made_in_it(history):
    def claimed_four_times(history):
        history.published()
        for number in range(4):
            history.claimed(2.0 + number, nonce=f"n{number}")
            history.used(2.5 + number, "nack" if number < 3 else "acked", nonce=f"n{number}")
        return history

    assert claimed_four_times(history).found() == {"attempts"}
    assert claimed_four_times(History()).rewound(2.1, 2.2).found() == {"attempts"}
    assert claimed_four_times(History()).rewound(2.1, 3.2).found() == set()
