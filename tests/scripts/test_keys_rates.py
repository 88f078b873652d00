"""Rates: starts are those that a bucket of permits allows, by the server's clock, and nobody looks in vain."""

import pytest
from held_clock import HOUR_MS, NOON, micros

from reliq import transitions as t

#: 100 a second, at most 5 at once.
RATE = {"rate_us": 10_000, "burst": 5}


class Process:
    """One of several that wait for tokens; when it is told a time, it promotes then."""

    def __init__(self, name):
        self.name, self.timer = name, None


class Fleet:
    """Processes by a held clock: whoever gets the token claims, whoever has the next time promotes at it."""

    def __init__(self, run, keys, take_token, size=4):
        self.run, self.keys, self.take_token, self.now, self.number = run, keys, take_token, NOON, 0
        self.processes = [Process(f"p{number}") for number in range(size)]
        self.starts, self.claims, self.empty, self.promotes = [], 0, 0, 0

    def claim(self, process):
        self.number += 1
        turn = t.CallNumber("fleet", self.number)
        answer = self.run(
            t.claim(self.keys, turn, limit=50, lease_ms=HOUR_MS, watcher=process.name, keyed=True, clock=self.now)
        )
        self.claims += 1
        self.empty += not answer.claimed
        self.starts += [self.now] * len(answer.claimed)
        if answer.promote_in_ms != t.NOT_WATCHING:
            process.timer = None if answer.promote_in_ms < 0 else self.now + answer.promote_in_ms * 1000
        self.run(t.ack(self.keys, [(one, None) for one in answer.claimed], clock=self.now))

    def promote(self, process):
        _, wait_ms = self.run(t.promote(self.keys, keyed=True, clock=self.now))
        self.promotes += 1
        process.timer = None if wait_ms < 0 else self.now + wait_ms * 1000

    def work(self, seconds):
        end = self.now + seconds * 1_000_000
        self.claim(self.processes[0])
        while True:
            if self.take_token():
                self.claim(self.processes[self.number % len(self.processes)])
                continue
            sleeping = [one for one in self.processes if one.timer is not None]
            first = min(sleeping, key=lambda one: one.timer, default=None)
            if first is None or first.timer > end:
                break
            self.now = max(self.now, first.timer)
            self.promote(first)


def test_four_processes_start_what_the_rate_permits_and_never_claim_in_vain(
    publish_under, run, keys, limit, token, request
):
    seconds = 60 if request.config.getoption("--long") else 20
    limit(**RATE)
    for at in range(0, 110 * seconds, 110):
        publish_under("", *(f"m{at + number}" for number in range(110)))
    token()
    fleet = Fleet(run, keys, token)

    fleet.work(seconds)

    permitted = 5 + 100 * seconds
    assert permitted * 0.99 <= len(fleet.starts) <= permitted
    assert fleet.empty == 0
    assert fleet.claims <= len(fleet.starts)
    assert fleet.promotes <= 2 * len(fleet.starts)
    for first, sixth in zip(fleet.starts, fleet.starts[5:], strict=False):
        assert sixth - first >= 10_000


def test_every_key_has_its_own_rate_and_a_slow_key_holds_no_other(publish_under, run, keys, limit, token):
    limit(key_rate_us=100_000, key_burst=2)
    for key in "abc":
        publish_under(key, *(f"{key}{number}" for number in range(40)))
    token()
    fleet = Fleet(run, keys, token)

    fleet.work(2)

    assert len(fleet.starts) == 3 * (2 + 20)
    assert fleet.empty == 0


def test_whoever_uses_the_rate_up_watches_for_the_next_start_and_wakes_nobody(
    publish_under, run, keys, limit, token, client
):
    limit(**RATE)
    publish_under("", *(f"m{number}" for number in range(20)))
    token()
    client.set(keys.watch, "another", px=2000)

    answer = run(t.claim(keys, t.CallNumber("w", 1), limit=50, lease_ms=1000, watcher="me", keyed=True, clock=NOON))

    assert (len(answer.claimed), answer.behind, answer.promote_in_ms) == (5, 0, 10)
    assert client.get(keys.watch) == b"me"
    assert not token()


def test_a_promote_wakes_somebody_when_the_rate_permits_a_start_and_not_before(
    publish_under, serve, run, keys, limit, token
):
    limit(**RATE)
    publish_under("", *(f"m{number}" for number in range(20)))
    serve()
    token()

    assert run(t.promote(keys, keyed=True, clock=micros(ms=9))) == (0, 1)
    assert not token()
    assert run(t.promote(keys, keyed=True, clock=micros(ms=10))) == (0, -1)
    assert token()


def test_a_producer_wakes_nobody_while_the_rate_is_used_up(publish_under, serve, limit, token):
    limit(**RATE)
    publish_under("a", *(f"m{number}" for number in range(5)))
    serve()
    token()

    publish_under("b", "later")

    assert not token()


def test_a_clock_that_goes_back_shuts_a_key_for_no_longer_than_one_message(publish_under, serve, run, keys, limit):
    limit(key_rate_us=1_000_000, key_burst=1)
    publish_under("a", *(f"m{number}" for number in range(9)))
    assert len(serve()) == 1
    back = -HOUR_MS
    served = []

    for second in range(4):
        clock = micros(ms=back + 1001 * second)
        run(t.promote(keys, keyed=True, clock=clock))
        served.append(len(serve(clock=clock)))

    assert served == [0, 1, 1, 1]


def test_a_clock_that_goes_back_shuts_the_queue_for_no_longer_than_one_message(
    publish_under, serve, run, keys, limit, token
):
    limit(rate_us=1_000_000, burst=1)
    publish_under("a", *(f"m{number}" for number in range(9)))
    assert len(serve()) == 1
    token()
    back = -HOUR_MS

    assert run(t.promote(keys, keyed=True, clock=micros(ms=back))) == (0, 1000)
    assert run(t.promote(keys, keyed=True, clock=micros(ms=back + 1000))) == (0, -1)
    assert token()
    assert len(serve(clock=micros(ms=back + 1000))) == 1


def test_a_clock_that_goes_back_wakes_no_key_that_was_told_to_sleep(publish_under, serve, run, keys, limit, client):
    limit(key_rate_us=1_000_000, key_burst=3)
    publish_under("a", "a1", "a2")
    run(t.release(keys, [*serve(1).values()], sleep_ms=HOUR_MS, clock=NOON))

    run(t.promote(keys, keyed=True, clock=micros(ms=-HOUR_MS)))

    assert client.zscore(keys.asleep, "a") is not None


def test_a_faster_rate_wakes_the_keys_that_slept_for_the_slower_one(publish_under, serve, run, keys, limit, token):
    limit(key_rate_us=HOUR_MS * 1000, key_burst=1)
    publish_under("a", "a1", "a2")
    serve()
    token()
    assert serve() == {}

    limit(key_rate_us=1000)

    assert token()
    assert serve() == {}
    assert run(t.promote(keys, keyed=True, clock=micros(ms=1)))[0] == 0
    assert [*serve(clock=micros(ms=1))] == ["a2"]


@pytest.mark.parametrize("limits", [{"rate_us": 10**6, "burst": 2}, {"key_rate_us": 10**6, "key_burst": 2}])
@pytest.mark.parametrize("cancelled", [[], ["a1"], ["a1", "a2"]])
def test_messages_that_expire_or_are_cancelled_spend_no_rate(
    limits, cancelled, publish_under, serve, run, keys, limit, token
):
    limit(**limits)
    publish_under("a", *(f"a{number}" for number in range(1, 8)))
    gone = [(one, None) for one in serve().values()]
    run(t.cancel(keys, cancelled, clock=NOON))
    token()

    run(t.ack(keys, gone, kind="expired", clock=micros(ms=5)))

    assert token()
    late = [(one, None) for one in serve(clock=micros(ms=5)).values()]
    assert [one.id for one, _ in late] == ["a3", "a4"]
    assert serve(clock=micros(ms=5)) == {}
    # One of both starts has filled up by itself until now, and is used: it is not given back once more.
    run(t.promote(keys, keyed=True, clock=micros(ms=1005)))
    assert [*serve(clock=micros(ms=1005))] == ["a5"]
    run(t.ack(keys, late, kind="expired", clock=micros(ms=1005)))
    assert [*serve(clock=micros(ms=1005))] == ["a6"]
    assert serve(clock=micros(ms=1005)) == {}


@pytest.mark.parametrize("rate", ["", 1000])
def test_limits_changed_twice_reach_thousands_of_sleeping_keys(rate, publish_under, serve, run, keys, limit, client):
    """Changes reach keys beyond the first 1,000, also a change that the next follows; told sleeps and pauses last."""
    limit(key_rate_us=HOUR_MS * 1000, key_burst=1, per_key=1)
    names = [f"key-{number}" for number in range(4000)]
    for part in range(0, 4000, 500):
        for name in names[part : part + 500]:
            publish_under(name, f"{name}.1", f"{name}.2")
    while serve(500):
        pass
    assert client.zcard(keys.asleep) == 4000
    run(t.sleep(keys, "key-7", for_ms=None, clock=NOON))
    run(t.sleep(keys, "key-8", for_ms=9 * HOUR_MS, clock=NOON))

    limit(key_rate_us=HOUR_MS * 900)
    limit(key_rate_us=rate, per_key=2)
    for ms in range(40):
        if not 0 <= run(t.promote(keys, keyed=True, clock=micros(ms=ms)))[1] < 1000:
            break

    assert ms < 39
    assert {*client.zrange(keys.asleep, 0, -1)} == {b"key-7", b"key-8"}
    assert client.zcard(keys.ring) == 3998


def test_buckets_that_are_full_are_forgotten(publish_under, serve, run, keys, limit, client):
    limit(key_rate_us=1000, key_burst=1)
    publish_under("a", "a1")
    serve()
    assert client.zcard(keys.rates) == 1

    run(t.promote(keys, keyed=True, clock=micros(ms=2)))

    assert client.zcard(keys.rates) == 0


def test_keys_that_come_once_leave_no_more_buckets_than_are_not_full_yet(publish_under, serve, limit, client, keys):
    limit(key_rate_us=1000, key_burst=2)
    left = []

    for second in range(20):
        for number in range(20):
            publish_under(f"{second}-{number}", f"m{second}-{number}", clock=micros(ms=1000 * second))
        assert len(serve(clock=micros(ms=1000 * second))) == 20
        left.append(client.zcard(keys.rates))

    assert left == [20] * 20


def test_tidy_forgets_the_buckets_of_keys_of_which_nothing_comes_any_more(
    publish_under, serve, run, keys, limit, client
):
    limit(key_rate_us=1000, key_burst=5)
    for number in range(200):
        publish_under(f"tenant-{number}", f"m{number}")
    serve(200)
    assert client.zcard(keys.rates) == 200

    run(t.tidy(keys, clock=NOON))
    assert client.zcard(keys.rates) == 200

    run(t.tidy(keys, clock=micros(ms=2)))
    assert client.zcard(keys.rates) == 0


def test_keys_that_are_paused_do_not_keep_the_buckets_of_others(publish_under, serve, run, keys, limit, client):
    limit(key_rate_us=1000, key_burst=5)
    for number in range(150):
        publish_under(f"tenant-{number:03}", f"m{number}", clock=NOON)
    serve(150)
    for number in range(120):
        run(t.sleep(keys, f"tenant-{number:03}", for_ms=None, clock=NOON))

    for _ in range(2):
        run(t.promote(keys, keyed=True, clock=micros(ms=2)))

    assert client.zcard(keys.rates) == 0


def test_a_claim_that_a_rate_held_back_is_counted_and_a_look_is_none(publish_under, serve, limit, total):
    limit(key_rate_us=HOUR_MS * 1000, key_burst=1)
    publish_under("a", "a1", "a2")
    serve()
    assert total("limited") == 1

    limit(key_rate_us="", rate_us=HOUR_MS * 1000, burst=1)
    serve()
    assert total("limited") == 2
    serve()
    serve(limit=0)
    assert total("limited") == 3
