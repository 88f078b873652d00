"""Rule 11: at most one token, set when messages become claimable or the next due time moves forward; one watcher."""

import pytest
from held_clock import NOON, micros

from reliq import Queue
from reliq.lua import transitions as t

FAILED = "failed 1 x"


@pytest.fixture
def held(publish, claim, token):
    """Four messages with a lease of a minute, and no token."""
    publish(*"abcd")
    claimed = claim(lease_ms=60_000)
    token()
    return claimed


@pytest.mark.parametrize("verb", ["publish", "nack", "snooze", "reschedule", "reschedule nacked", "redrive"])
def test_only_a_due_time_before_all_others_pushes_a_token_and_ends_the_watch(
    verb, publish, held, die, run, keys, client, token, ask
):
    letters = [die(f"dead{number}") for number in range(2)]
    publish("head", delay_ms=60_000)
    publish("p0", "p1", delay_ms=90_000)
    run(t.nack(keys, [(one, 90_000, FAILED, b"") for one in held[2:]], clock=NOON))
    make = {
        "publish": lambda at, ms: publish(f"n{at}", delay_ms=ms),
        "nack": lambda at, ms: run(t.nack(keys, [(held[at], ms, FAILED, b"")], clock=NOON)),
        "snooze": lambda at, ms: run(t.snooze(keys, [(held[at], ms)], clock=NOON)),
        "reschedule": lambda at, ms: run(t.reschedule(keys, [f"p{at}"], delay_ms=ms, clock=NOON)),
        "reschedule nacked": lambda at, ms: run(t.reschedule(keys, [held[2 + at].id], delay_ms=ms, clock=NOON)),
        "redrive": lambda at, ms: run(
            t.redrive(keys, [(letters[at], f"dead{at}", 1)], ttl_ms=9000, delay_ms=ms, clock=NOON)
        ),
    }[verb]
    client.set(keys.watch, "me")  # as after a claim, but not for two seconds only
    token()

    make(0, 60_001)
    assert (client.get(keys.watch), token()) == (b"me", False)
    make(1, 59_999)
    assert (client.get(keys.watch), token()) == (None, True)
    assert 59_999 in ask("you")


def test_resume_lets_a_paused_queue_be_claimed_and_pushes_a_token(publish, claim, run, client, keys, token, url):
    queue = Queue("q", url=url)
    client.set(keys.paused, "1")
    publish("m")
    token()

    assert (claim(), run(t.counts(keys)).paused) == ([], True)
    assert (queue.resume(), token(), len(claim())) == (True, True, 1)
    assert queue.resume() is False


def test_a_claim_that_leaves_work_behind_pushes_a_token(publish, claim, run, keys, token):
    publish("a", "cancelled", "left")
    run(t.cancel(keys, ["cancelled"]))
    token()

    pushed = [([one.id for one in claim(limit=1)], token()) for _ in range(3)]

    assert pushed == [(["a"], True), ([], True), (["left"], False)]


# ---- the watch --------------------------------------------------------------


@pytest.fixture
def ask_together(client, keys, claim_turn):
    """
    Claim nothing, as processes that would watch; return their waits, and the process that watches then.

    All run in one step of the server, because a watch ends after two seconds.
    """

    def make(*watchers, clock=NOON):
        options = {"limit": 1, "lease_ms": 60_000, "clock": clock}
        calls = [t.claim(keys, claim_turn(), watcher=watcher, **options) for watcher in watchers]
        with client.pipeline() as pipe:
            for call in calls:
                pipe.execute_command(*call.command_in_full)
            *replies, watcher, left_ms = pipe.get(keys.watch).pttl(keys.watch).execute()
        assert watcher is None or 0 < left_ms <= 2000
        answers = [call.read(reply) for call, reply in zip(calls, replies, strict=True)]
        return [(answer.promote_in_ms, answer.reclaim_in_ms) for answer in answers], watcher

    return make


@pytest.fixture
def ask(ask_together):
    """Claim nothing, as a process that would watch; return its waits."""
    return lambda watcher, clock=NOON: ask_together(watcher, clock=clock)[0][0]


REFUSED = (t.NOT_WATCHING, t.NOT_WATCHING)
IDLE = (t.NOTHING_DUE, t.NOTHING_DUE)


def test_the_first_idle_process_watches_until_its_watch_is_over_or_lasts_too_long(ask_together, client, keys):
    assert ask_together("") == ([REFUSED], None)
    assert ask_together("me", "you", "me") == ([IDLE, REFUSED, IDLE], b"me")

    client.delete(keys.watch)
    assert ask_together("you") == ([IDLE], b"you")

    for name in (b"me", b"a dead one"):
        for lasts_ms in (600_000, 3_600_000, None):  # longer than two seconds, so not of a process
            client.set(keys.watch, name, px=lasts_ms)
            assert ask_together("me") == ([IDLE], b"me")


@pytest.mark.foreign_hands
def test_a_watch_of_another_type_is_written_anew(ask_together, publish, client, keys):
    client.sadd(keys.watch, "x")

    publish("m", delay_ms=1)
    assert client.exists(keys.watch) == 0
    client.sadd(keys.watch, "x")

    [waits], watcher = ask_together("me")
    assert (waits != REFUSED, watcher) == (True, b"me")


def test_the_watcher_gets_both_due_times_rounded_so_that_it_never_wakes_early(publish, claim, ask):
    publish("held")
    claim(lease_ms=700)
    publish("m", delay_ms=500)

    assert ask("me", clock=micros(100, us=999)) == (400, 600)
    assert ask("me", clock=micros(900)) == (0, 0)
