"""Rule 11: at most one token, pushed by whatever makes work claimable or the next due time sooner; one watcher."""

import pytest
from held_clock import NOON, micros

from reliq import Queue, transitions as t

FAILED = "failed 1 x"


@pytest.fixture
def held(publish, claim, token):
    """Four messages under a lease of a minute, and no token."""
    publish(*"abcd")
    claimed = claim(lease_ms=60_000)
    token()
    return claimed


@pytest.fixture
def tokens(client, keys):
    return lambda: client.llen(keys.wake)


def test_a_publish_pushes_a_token(publish, tokens):
    publish("m")

    assert tokens() == 1


def test_there_is_never_more_than_one_token(publish, held, run, keys, tokens, url):
    publish("m")
    publish("n", delay_ms=1)
    run(t.release(keys, held))
    Queue("q", url=url).resume()

    assert tokens() == 1


def test_only_a_delayed_publish_that_makes_the_head_sooner_pushes_a_token(publish, token):
    publish("first", delay_ms=500)
    assert token()

    publish("later", delay_ms=501)
    assert not token()

    publish("sooner", delay_ms=499)
    assert token()


def test_promote_pushes_a_token_when_something_moved(publish, run, keys, token):
    publish("m", delay_ms=5)
    token()

    run(t.promote(keys, clock=micros(4)))
    assert not token()

    run(t.promote(keys, clock=micros(5)))
    assert token()


@pytest.mark.parametrize(("delay_ms", "pushed"), [(59_999, True), (60_001, False)])
def test_a_nack_pushes_a_token_when_the_head_of_unack_is_sooner(delay_ms, pushed, held, run, keys, token):
    run(t.nack(keys, [(held[0], delay_ms, FAILED, b"")], clock=NOON))

    assert token() == pushed


@pytest.mark.parametrize(("delay_ms", "pushed"), [(499, True), (501, False)])
def test_a_snooze_pushes_a_token_when_the_head_of_pending_is_sooner(delay_ms, pushed, publish, held, run, keys, token):
    publish("m", delay_ms=500)
    token()

    run(t.snooze(keys, [(held[0], delay_ms)], clock=NOON))

    assert token() == pushed


@pytest.mark.parametrize(("delay_ms", "pushed"), [(499, True), (501, False)])
def test_a_reschedule_pushes_a_token_when_the_head_is_sooner(delay_ms, pushed, publish, run, keys, token):
    publish("m", delay_ms=500)
    publish("n", delay_ms=1000)
    token()

    run(t.reschedule(keys, ["n"], delay_ms=delay_ms, clock=NOON))

    assert token() == pushed


@pytest.mark.parametrize(("delay_ms", "pushed"), [(499, True), (501, False)])
def test_a_reschedule_of_a_nacked_message_pushes_a_token_when_the_head_is_sooner(
    delay_ms, pushed, held, run, keys, token
):
    run(t.nack(keys, [(held[0], 500, FAILED, b""), (held[1], 1000, FAILED, b"")], clock=NOON))
    token()

    run(t.reschedule(keys, [held[1].id], delay_ms=delay_ms, clock=NOON))

    assert token() == pushed


def test_a_release_pushes_a_token(held, run, keys, token):
    run(t.release(keys, held[:1]))

    assert token()


def test_a_reclaim_pushes_a_token_when_something_can_be_claimed_again(publish, claim, held, run, keys, token):
    run(t.reclaim(keys, clock=micros(59_999)))
    assert not token()

    run(t.reclaim(keys, clock=micros(60_000)))
    assert token()


def test_a_reclaim_that_only_buries_pushes_no_token(publish, claim, run, keys, token):
    publish("m", retries=0)
    claim(lease_ms=1)
    token()

    run(t.reclaim(keys, clock=micros(1)))

    assert not token()


@pytest.mark.parametrize("delay_ms", [0, 5])
def test_a_redrive_pushes_a_token(delay_ms, die, run, keys, token):
    letter = die("m")
    token()

    run(t.redrive(keys, [(letter, "m", 3)], ttl_ms=1000, delay_ms=delay_ms, clock=NOON))

    assert token()


def test_resume_lets_a_paused_queue_be_claimed_and_pushes_a_token(publish, claim, run, client, keys, token, url):
    queue = Queue("q", url=url)
    client.set(keys.paused, "1")
    publish("m")
    token()

    assert claim() == []
    assert run(t.counts(keys)).paused
    assert queue.resume() is True
    assert token()
    assert len(claim()) == 1
    assert queue.resume() is False


def test_a_claim_that_leaves_work_behind_pushes_a_token(publish, claim, token):
    publish("a", "b")
    token()

    claim(limit=1)
    assert token()

    claim(limit=1)
    assert not token()


def test_a_claim_that_drops_a_cancelled_message_and_leaves_work_behind_pushes_a_token(publish, claim, run, keys, token):
    publish("cancelled", "left")
    run(t.cancel(keys, ["cancelled"]))
    token()

    assert claim(limit=1) == []

    assert token()


def test_a_claim_by_a_full_worker_or_of_a_paused_queue_pushes_no_token(publish, claim, client, keys, token):
    publish("m")
    token()

    claim(limit=0)
    client.set(keys.paused, "1")
    claim(limit=5)

    assert not token()


@pytest.mark.parametrize("settle", ["ack", "extend", "reject"])
def test_what_makes_nothing_claimable_pushes_no_token(settle, held, run, keys, token):
    calls = {
        "ack": t.ack(keys, [(held[0], None)]),
        "extend": t.extend(keys, held, lease_ms=70_000, clock=NOON),
        "reject": t.nack(keys, [(held[0], 0, "rejected 1 x", b"v")], clock=NOON),
    }

    run(calls[settle])

    assert not token()


# ---- the watch --------------------------------------------------------------


@pytest.fixture
def ask(run, keys, claim_turn):
    """An idle claim by a process that would watch; its waits."""

    def make(watcher, clock=NOON):
        answer = run(t.claim(keys, claim_turn(), limit=1, lease_ms=60_000, watcher=watcher, clock=clock))
        return answer.promote_in_ms, answer.reclaim_in_ms

    return make


REFUSED = (t.NOT_WATCHING, t.NOT_WATCHING)
IDLE = (t.NOTHING_DUE, t.NOTHING_DUE)


def test_the_first_idle_process_watches_and_another_is_refused(ask, client, keys):
    assert ask("me") == IDLE
    assert ask("you") == REFUSED
    assert ask("me") == IDLE

    assert client.get(keys.watch) == b"me"
    assert 0 < client.pttl(keys.watch) <= 2000


def test_the_watcher_renews_its_watch(ask, client, keys):
    ask("me")
    client.pexpire(keys.watch, 60_000)

    assert ask("me") == IDLE
    assert 0 < client.pttl(keys.watch) <= 2000


@pytest.mark.parametrize("lasts_ms", [600_000, 3_600_000, None])
def test_a_watch_that_would_last_longer_than_two_seconds_is_taken_over(lasts_ms, ask, client, keys):
    client.set(keys.watch, "a dead one", px=lasts_ms)

    assert ask("me") == IDLE

    assert client.get(keys.watch) == b"me"
    assert 0 < client.pttl(keys.watch) <= 2000


@pytest.mark.foreign_hands
def test_a_watch_of_another_type_is_written_anew(ask, publish, client, keys):
    client.sadd(keys.watch, "x")

    publish("m", delay_ms=1)
    assert client.exists(keys.watch) == 0
    client.sadd(keys.watch, "x")

    assert ask("me") != REFUSED
    assert client.get(keys.watch) == b"me"


def test_another_watches_once_the_watch_is_over(ask, client, keys):
    ask("me")
    client.delete(keys.watch)

    assert ask("you") == IDLE


def test_a_process_that_would_not_watch_is_told_no_waits(ask, client, keys):
    assert ask("") == REFUSED
    assert client.exists(keys.watch) == 0


def test_the_watcher_is_told_both_due_times_rounded_so_that_it_never_wakes_early(publish, claim, ask):
    publish("held")
    claim(lease_ms=700)
    publish("m", delay_ms=500)

    assert ask("me", clock=micros(100, us=999)) == (400, 600)
    assert ask("me", clock=micros(900)) == (0, 0)


@pytest.mark.parametrize("sooner", ["publish", "nack", "snooze", "reschedule", "redrive"])
def test_whatever_makes_the_next_due_time_sooner_ends_the_watch(
    sooner, publish, claim, die, run, ask, keys, token, client
):
    letter = die("dead")
    publish("held")
    (held,) = claim(lease_ms=60_000)
    publish("m", delay_ms=60_000)
    ask("me")
    token()
    calls = {
        "publish": lambda: publish("n", delay_ms=1),
        "nack": lambda: run(t.nack(keys, [(held, 1, FAILED, b"")], clock=NOON)),
        "snooze": lambda: run(t.snooze(keys, [(held, 1)], clock=NOON)),
        "reschedule": lambda: run(t.reschedule(keys, ["m"], delay_ms=1, clock=NOON)),
        "redrive": lambda: run(t.redrive(keys, [(letter, "dead", 1)], ttl_ms=9000, delay_ms=1, clock=NOON)),
    }

    calls[sooner]()

    assert client.exists(keys.watch) == 0
    assert token()
    assert 0 <= min(wait for wait in ask("you") if wait >= 0) <= 1


def test_a_later_due_time_leaves_the_watch_alone(publish, ask, client, keys):
    publish("m", delay_ms=500)
    ask("me")
    client.persist(keys.watch)

    publish("n", delay_ms=501)

    assert client.get(keys.watch) == b"me"
