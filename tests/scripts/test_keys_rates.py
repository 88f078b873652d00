"""Rate limits: starts follow a token bucket on the server's clock, and workers make no useless claims."""

import pytest
from held_clock import HOUR_MS, NOON, micros

from reliq.lua import transitions as t

#: 100 starts a second, with a burst of 5.
RATE = {"rate_us": 10_000, "burst": 5}


class Fleet:
    """Four processes on a held clock: the process with the token claims; the process with the next time promotes."""

    def __init__(self, run, keys, take_token):
        self.run, self.keys, self.take_token, self.now, self.number = run, keys, take_token, NOON, 0
        self.timers = dict.fromkeys(range(4))  # process -> time of its next promote
        self.starts, self.claims, self.empty, self.promotes = [], 0, 0, 0

    def claim(self, process):
        self.number += 1
        options = {"limit": 50, "lease_ms": HOUR_MS, "watcher": f"p{process}", "clock": self.now}
        answer = self.run(t.claim(self.keys, t.CallNumber("fleet", self.number), **options))
        self.claims += 1
        self.empty += not answer.claimed
        self.starts += [self.now] * len(answer.claimed)
        if answer.promote_in_ms != t.NOT_WATCHING:
            self.wait(process, answer.promote_in_ms)
        self.run(t.ack(self.keys, [(one, None) for one in answer.claimed], clock=self.now))

    def wait(self, process, wait_ms):
        self.timers[process] = None if wait_ms < 0 else self.now + wait_ms * 1000

    def work(self, seconds):
        end = self.now + seconds * 1_000_000
        self.claim(0)
        while True:
            if self.take_token():
                self.claim(self.number % 4)
                continue
            waiting = [(when, process) for process, when in self.timers.items() if when is not None]
            first, process = min(waiting, default=(end + 1, 0))
            if first > end:
                break
            self.now = max(self.now, first)
            self.wait(process, self.run(t.promote(self.keys, clock=self.now))[1])
            self.promotes += 1


@pytest.fixture
def promote(run, keys):
    return lambda ms=0: run(t.promote(keys, clock=micros(ms=ms)))


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


def test_the_claim_that_uses_the_rate_up_watches_for_the_next_start(
    publish_under, run, keys, limit, token, client, promote
):
    limit(**RATE)
    publish_under("", *(f"m{number}" for number in range(20)))
    token()
    client.set(keys.watch, "another", px=2000)

    call = t.claim(keys, t.CallNumber("w", 1), limit=50, lease_ms=1000, watcher="me", clock=NOON)
    with client.pipeline() as pipe:  # the watch would end after two seconds
        reply, _ = pipe.execute_command(*call.command_in_full).persist(keys.watch).execute()
    answer = call.read(reply)
    assert (len(answer.claimed), answer.behind, answer.promote_in_ms) == (5, 0, 10)
    publish_under("b", "later")
    assert (client.get(keys.watch), token()) == (b"me", False)

    assert (promote(ms=9), token()) == ((0, 1), False)
    assert (promote(ms=10), token()) == ((0, -1), True)


def test_a_clock_that_goes_back_shuts_a_key_for_no_longer_than_one_message(publish_under, serve, limit, promote):
    limit(key_rate_us=1_000_000, key_burst=1)
    publish_under("a", *(f"m{number}" for number in range(9)))
    assert len(serve()) == 1

    served = []
    for ms in (0, 1001, 2002, 3003):
        promote(ms=ms - HOUR_MS)
        served.append(len(serve(clock=micros(ms=ms - HOUR_MS))))

    assert served == [0, 1, 1, 1]


def test_a_clock_that_goes_back_shuts_the_queue_for_no_longer_than_one_message(publish_under, serve, limit, promote):
    limit(rate_us=1_000_000, burst=1)
    publish_under("a", "a1", "a2")
    assert len(serve()) == 1

    assert promote(ms=-HOUR_MS) == (0, 1000)
    assert len(serve(clock=micros(ms=1000 - HOUR_MS))) == 1


def test_a_clock_that_goes_back_wakes_no_key_that_a_handler_put_to_sleep(
    publish_under, serve, run, keys, limit, client, promote
):
    limit(key_rate_us=1_000_000, key_burst=3)
    publish_under("a", "a1", "a2")
    run(t.release(keys, [*serve(1).values()], sleep_ms=HOUR_MS, clock=NOON))

    promote(ms=-HOUR_MS)

    assert client.zscore(keys.asleep, "a") is not None


def test_a_faster_rate_wakes_the_keys_that_slept_for_the_slower_one(publish_under, serve, limit, token, promote):
    limit(key_rate_us=HOUR_MS * 1000, key_burst=1)
    publish_under("a", "a1", "a2")
    serve()
    token()
    assert serve() == {}

    limit(key_rate_us=1000)

    assert (token(), serve(), promote(ms=1)[0]) == (True, {}, 0)
    assert [*serve(clock=micros(ms=1))] == ["a2"]


@pytest.mark.parametrize("prefix", ["", "key_"], ids=["queue", "key"])
@pytest.mark.parametrize("cancelled", [[], ["a1"], ["a1", "a2"]], ids=["expired", "one cancelled", "both cancelled"])
def test_messages_that_expire_or_are_cancelled_spend_no_rate(
    prefix, cancelled, publish_under, serve, run, keys, limit, token, promote
):
    limit(**{f"{prefix}rate_us": 10**6, f"{prefix}burst": 2})
    publish_under("a", *(f"a{number}" for number in range(1, 8)))
    gone = [(one, None) for one in serve().values()]
    run(t.cancel(keys, cancelled, clock=NOON))
    token()

    run(t.ack(keys, gone, kind="expired", clock=micros(ms=5)))

    assert token()
    late = [(one, None) for one in serve(clock=micros(ms=5)).values()]
    assert [one.id for one, _ in late] == ["a3", "a4"]
    assert serve(clock=micros(ms=5)) == {}
    # The permit of one start has been refilled and used meanwhile: it is not returned a second time.
    promote(ms=1005)
    assert [*serve(clock=micros(ms=1005))] == ["a5"]
    run(t.ack(keys, late, kind="expired", clock=micros(ms=1005)))
    assert [*serve(clock=micros(ms=1005))] == ["a6"]
    assert serve(clock=micros(ms=1005)) == {}


def test_a_start_that_is_given_back_has_somebody_wait_for_the_sooner_time(publish_under, run, keys, limit, token):
    """The older start returns less than one permit to its key, which then sleeps for a shorter time."""

    def claim(number, ms):
        call = t.CallNumber("w", number)
        return run(t.claim(keys, call, limit=10, lease_ms=HOUR_MS, watcher="me", clock=micros(ms=ms)))

    limit(key_rate_us=10**7, key_burst=1)
    publish_under("b", "b1")
    gone = claim(1, 0).claimed
    publish_under("a", "a1", "a2")
    gone += claim(2, 3000).claimed
    claim(3, 3000)
    token()

    run(t.ack(keys, [(one, None) for one in gone], kind="expired", clock=micros(ms=3000)))

    assert token()
    assert claim(4, 3000).promote_in_ms == 3000


@pytest.mark.parametrize("rate", ["", 1000], ids=["no rate", "another rate"])
def test_limits_changed_twice_reach_thousands_of_sleeping_keys(
    rate, publish_under, serve, run, keys, limit, client, promote
):
    """A change reaches keys beyond the first 1,000, also with a second change; explicit sleeps and pauses stay."""
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
        if not 0 <= promote(ms)[1] < 1000:
            break

    assert ms < 39
    assert {*client.zrange(keys.asleep, 0, -1)} == {b"key-7", b"key-8"}
    assert client.zcard(keys.ring) == 3998


def test_buckets_that_are_full_are_forgotten_by_the_next_claims(publish_under, serve, limit, client, keys):
    limit(key_rate_us=1000, key_burst=2)
    left = []

    for second in range(20):
        for number in range(20):
            publish_under(f"{second}-{number}", f"m{second}-{number}", clock=micros(ms=1000 * second))
        assert len(serve(clock=micros(ms=1000 * second))) == 20
        left.append(client.zcard(keys.rates))

    assert left == [20] * 20


def test_tidy_forgets_full_buckets(publish_under, serve, run, keys, limit, client):
    limit(key_rate_us=1000, key_burst=5)
    for number in range(200):
        publish_under(f"tenant-{number:03}", f"m{number}")
    serve(200)

    run(t.tidy(keys, clock=NOON))
    assert client.zcard(keys.rates) == 200
    run(t.tidy(keys, clock=micros(ms=2)))
    assert client.zcard(keys.rates) == 0


def test_a_claim_that_a_rate_held_back_is_counted_and_a_look_is_not(publish_under, serve, limit, total):
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
