"""Each count of the checker finds what it is for, in histories written by hand, and nothing in a clean one."""

import pytest

from tests.harness.chaos.checker import AFTER_THE_DRAIN, ALWAYS, check
from tests.harness.chaos.handwritten import A, B, History
from tests.harness.chaos.picture import draw
from tests.harness.chaos.report import report
from tests.harness.chaos.timing import measure


@pytest.fixture
def history():
    return History()


def test_a_clean_run_is_valid(history):
    story = history.published().done_by(A, "n1", 2.0).used(2.3).story()

    verdict = check(story)

    assert (verdict.word, verdict.violations.keys()) == ("valid", ALWAYS.keys() | AFTER_THE_DRAIN.keys())


def test_a_run_that_is_not_drained_is_violated(history):
    history.drained = False

    verdict = check(history.published().done_by(A, "n1", 2.0).used(2.3).story())

    assert verdict.word == "violated"
    assert {name for name, some in verdict.violations.items() if some} == {"not drained"}


def test_a_run_without_its_last_look_is_violated(history):
    story = history.published().done_by(A, "n1", 2.0).used(2.3).story()
    del story.finals["sturdy"]

    assert check(story).violations["not drained"] == ["the last look is missing"]


def test_lost(history):
    history.totals = {"published": 1}

    assert history.published().claimed(2.0).found() == {"lost", "conservation"}


@pytest.mark.parametrize("place", ["dead", "alive"])
def test_a_message_that_is_dead_or_alive_at_the_end_is_not_lost(history, place):
    setattr(history, place, ["m"])
    history.totals = {"published": 1, "dead": len(history.dead)}

    assert history.published().found() == set()


def test_a_message_whose_ack_was_never_answered_may_be_done(history):
    assert history.published().done_by(A, "n1", 2.0).used(2.3, answer="").found() == set()


def test_an_ack_that_was_refused_is_none(history):
    history.totals = {"published": 1}

    assert "lost" in history.published().done_by(A, "n1", 2.0).used(2.3, answer="lost").found()


def test_an_ack_made_late_on_purpose_and_never_answered_is_none(history):
    assert "lost" in history.published().done_by(A, "n1", 2.0).used(2.3, answer="unknown", late=True).found()


def test_unexpected(history):
    history.totals = {}

    assert history.started(2.0, name="stranger").found() == {"unexpected"}


def test_what_was_refused_for_good_and_runs_is_unexpected(history):
    history.write(1.0, "p", "publish", call=1, names=["m"], queue="frail", delay=0.0)
    history.write(1.1, "p", "unpublished", call=1, ids=["m"], unknown=False)

    assert "unexpected" in history.done_by(A, "n1", 2.0).used(2.3).found()


def test_what_has_no_known_outcome_and_runs_is_recovered(history):
    history.write(1.0, "p", "publish", call=1, names=["m"], queue="frail", delay=0.0)

    story = history.done_by(A, "n1", 2.0).used(2.3).story()

    assert check(story).word == "valid"
    assert "| recovered: started, publish unknown | 1 |" in page(story)


def test_duplicated_without_a_reason(history):
    history.published().done_by(A, "n1", 2.0).done_by(B, "n2", 9.0).used(9.3, who=B, nonce="n2")

    assert history.found() == {"duplicated without a reason"}


def test_what_its_holder_wrote_down_is_a_reason(history):
    reasons = {
        "nack": lambda h: h.used(2.3, "nack"),
        "unknown ack": lambda h: h.used(2.3, answer=""),
        "killed": lambda h: h.write(3.0, "arena", "died", of=A, code=-9),
        "failed call": lambda h: h.used(2.7, "extend", answer="unknown"),
        "slow call": lambda h: h.used(2.7, "extend", took=1.5),
        "late renewal": lambda h: h.write(4.5, A, "late", seconds=1.0),
        "stalled": lambda h: h.write(5.0, A, "stalled", since=2.5),
        "the machine stalled": lambda h: h.write(5.0, "arena", "stalled", since=2.5),
        "paused": lambda h: h.write(0.5, "arena", "born", of=A, pid=1).write(
            5.5, "arena", "fault", of="consumer_paused", victim=0, began=2.5
        ),
        "stopped": lambda h: (
            h.write(0.5, "arena", "born", of=A, pid=1)
            .write(9.4, "arena", "died", of=A, code=75)
            .write(9.5, "arena", "born", of="consumer-0.1", pid=2)
            .write(9.6, "arena", "fault", of="consumer_stopped", victim=0, began=2.2)
        ),
    }
    for name, write in reasons.items():
        one = History().published().done_by(A, "n1", 2.0).done_by(B, "n2", 9.0).used(9.3, who=B, nonce="n2")
        write(one)
        assert one.found() == set(), name


def test_what_another_process_wrote_down_is_none(history):
    history.published().done_by(A, "n1", 2.0).done_by(B, "n2", 9.0).used(9.3, who=B, nonce="n2")

    history.write(5.0, "consumer-2.0", "stalled", since=2.5)

    assert history.found() == {"duplicated without a reason"}


def test_one_that_was_paused_right_before_its_start_begins_after_the_next(history):
    history.published().claimed(2.0).write(5.0, A, "stalled", since=2.01).started(5.0).ended(5.1)

    assert history.done_by(B, "n2", 4.8).used(5.2, who=B, nonce="n2").found() == set()


def test_after_ack(history):
    history.published().done_by(A, "n1", 2.0).used(2.3).claimed(3.0, B, "n2")

    assert history.found() == {"after ack"}


def test_a_claim_that_was_under_way_when_the_ack_was_confirmed_is_not_after_it(history):
    history.published().done_by(A, "n1", 2.0).used(2.3).claimed(3.0, B, "n2", asked=2.2)

    assert "after ack" not in history.found()


def test_leased_while_held(history):
    history.published().claimed(2.0).claimed(3.0, B, "n2").used(3.1, who=B, nonce="n2")

    assert history.found() == {"leased while held"}


def test_an_extension_holds_the_lease(history):
    history.published().claimed(2.0).used(3.5, "extend").claimed(4.5, B, "n2").used(4.6, who=B, nonce="n2")

    assert history.found() == {"leased while held"}


@pytest.mark.parametrize("verb", ["nack", "release", "snooze"])
def test_who_has_let_go_does_not_hold(history, verb):
    history.published().claimed(2.0).used(2.5, verb).claimed(3.0, B, "n2").used(3.1, who=B, nonce="n2")

    assert history.found() == set()


def test_of_two_claims_that_were_under_way_at_once_either_may_have_been_first(history):
    history.published().claimed(2.2, B, "n2").claimed(4.9, A, "n1", asked=0.1).used(2.3, "nack", B, "n2")

    assert history.used(5.0).found() == set()


def test_overlapping_without_a_reason(history):
    history.published().claimed(2.0).started(2.1).claimed(9.0, B, "n2").started(9.1, B, "n2").ended(9.5)

    assert "overlapping without a reason" in history.used(9.6).found()


def test_after_cancel(history):
    history.totals = {"published": 1, "cancelled": 1}

    assert history.published().cancelled(1.5).claimed(2.0).started(2.1).found() == {"after cancel"}


def test_what_was_started_before_or_answered_running_is_not_after_cancel(history):
    history.published().done_by(A, "n1", 2.0).cancelled(2.15, "running").used(2.3)

    assert history.found() == set()


def test_a_cancel_without_an_answer_may_have_ended_the_message(history):
    history.totals = {"published": 1, "cancelled": 1}

    assert history.published().cancelled(1.5, answer=None).found() == set()


def test_a_cancel_that_was_made_again_may_find_nothing_of_what_it_took_from_its_holder(history):
    history.totals = {"published": 1, "expired": 1}
    history.published().claimed(2.0).used(2.15, "expired", took=0.001).cancelled(2.1, "not_found", took=0.1)

    assert history.found() == set()


def test_a_message_that_lost_its_body_without_a_cancel_is_lost(history):
    history.totals = {"published": 1, "expired": 1}
    history.published().claimed(2.0).used(2.15, "expired", took=0.001).cancelled(3.0, "not_found")

    assert history.found() == {"lost"}


def test_early(history):
    history.published(delay=3.0).done_by(A, "n1", 3.5).used(3.8)

    assert history.found() == {"early"}


def test_the_drift_of_the_clocks_is_allowed_for(history):
    history.published(delay=2.0).done_by(A, "n1", 2.85).used(3.5)
    assert history.found() == {"early"}

    for t, ahead in ((1.0, 50.0), (2.0, 50.2)):
        history.write(t, "arena", "clock", ahead=ahead)

    assert history.found() == set()


@pytest.mark.parametrize("verb", ["acked", "nack", "extend", "release", "snooze"])
def test_stale_accepted(history, verb):
    history.published().claimed(2.0).used(2.1, "nack").claimed(2.5, B, "n2").used(2.9, who=B, nonce="n2")

    assert history.found() == set()
    assert "stale accepted" in history.used(2.7, verb, nonce="n1").found()


def test_a_receipt_that_is_accepted_once_more_is_stale(history):
    history.published().done_by(A, "n1", 2.0).used(2.3)

    assert history.used(2.4, late=True).found() == {"stale accepted"}


def test_a_stale_receipt_that_was_refused_is_well(history):
    history.published().claimed(2.0).used(2.1, "nack").claimed(2.5, B, "n2").used(2.9, who=B, nonce="n2")

    assert history.used(2.7, nonce="n1", answer="lost", late=True).found() == set()


def test_attempts(history):
    history.published()
    for number in range(3):
        history.claimed(2.0 + number, nonce=f"n{number}").used(2.5 + number, "nack", nonce=f"n{number}")
    history.claimed(9.0, nonce="n9").used(9.1, nonce="n9")

    assert history.found() == {"attempts"}


def test_what_was_given_back_unspent_is_no_attempt(history):
    history.published()
    for number, verb in enumerate(["nack", "release", "snooze"]):
        history.claimed(2.0 + number, nonce=f"n{number}").used(2.5 + number, verb, nonce=f"n{number}")
    history.claimed(9.0, nonce="n9").used(9.1, nonce="n9")

    assert history.found() == set()


def test_leaks(history):
    history.left = {"lease": 2}

    assert history.published().done_by(A, "n1", 2.0).used(2.3).found() == {"leaks"}


def test_conservation(history):
    history.published().done_by(A, "n1", 2.0).used(2.3)
    for totals in (
        {"published": 2, "acked": 1},
        {"published": 1},
        {"published": 1, "acked": 1, "dead": 1},
        {"published": 2, "acked": 2},
        {"published": 1, "cancelled": 1},
    ):
        history.totals = totals
        assert history.found() == {"conservation"}, totals


def test_invariants(history):
    history.published().done_by(A, "n1", 2.0).used(2.3)

    history.write(3.0, "arena", "look", queue="frail", alive=1, totals={}, broken=["1 ids in two places, such as m"])

    assert history.found() == {"invariants"}


def test_the_report_names_what_it_found_and_the_picture_shades_the_faults(history):
    history.published().done_by(A, "n1", 2.0).used(2.3).claimed(3.0, B, "n2")
    story = history.write(4.0, "arena", "fault", of="server_killed", victim=0, began=3.5).story()

    assert "# Chaos, seed 7: violated" in page(story)
    assert "- m: n2 of consumer-1.0" in page(story)
    assert "<title>server_killed</title>" in draw(story, "a run")


def page(story):
    return report(story, check(story), measure(story), seed=7, events=1)
