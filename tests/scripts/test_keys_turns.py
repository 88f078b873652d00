"""Keys take turns: a busy key delays no other key, weights and priorities get their shares, nothing remains."""

from collections import Counter

import pytest
from held_clock import HOUR_MS, NOON

from reliq.lua import transitions as t


@pytest.fixture
def fill(client, keys):
    """Publish many messages of a key in pipelined calls of 500."""
    lanes = iter(range(1, 10**6))

    def make(key, number, name=None):
        with client.pipeline(transaction=False) as pipe:
            for at in range(0, number, 500):
                ids = [f"{name or key}.{one}" for one in range(at, min(at + 500, number))]
                items = [(id, b',"r":3}\n' + id.encode()) for id in ids]
                options = {"ttl_ms": HOUR_MS, "retries": 3, "message_keys": [key] * len(ids), "clock": NOON}
                call = t.publish(keys, items, t.CallNumber("filler", next(lanes)), **options)
                pipe.execute_command(*(call.command if at else call.command_in_full))
                if at % 10_000 == 0:
                    pipe.execute()
            pipe.execute()

    return make


@pytest.fixture
def drain(serve, ack):
    """Claim and ack until the queue is empty or `most` messages ran; yield their keys in the order of the starts."""

    def make(limit, most=10**9):
        done = 0
        while done < most and (held := serve(limit)):
            done += len(held)
            yield from (one.key for one in held.values())
            ack(*held.values())

    return make


def one_by_one_or(number):
    return pytest.mark.parametrize("limit_of_a_claim", [1, number], ids=["one by one", f"{number} at once"])


@one_by_one_or(64)
def test_a_quiet_key_is_served_soon_however_much_waits_under_a_noisy_one(limit_of_a_claim, fill, drain, request):
    fill("noisy", 200_000 if request.config.getoption("--long") else 10_000)
    for number in range(50):
        fill(f"quiet{number}", 3)

    order = [*drain(limit_of_a_claim, most=400)]

    last = max(at for at, key in enumerate(order, 1) if key.startswith("quiet"))
    assert last <= 150 + 2 * 3 + 1
    assert sum(key.startswith("quiet") for key in order) == 150


@pytest.mark.parametrize("limit_of_a_claim", [1, 7, 50], ids=lambda number: f"{number} at once")
def test_a_key_of_weight_four_has_four_times_the_starts(limit_of_a_claim, fill, drain, limit):
    limit(**{"weight:vip": 4})
    for key in ("vip", "one", "two"):
        fill(key, 600)

    order = Counter(drain(limit_of_a_claim, most=600))

    share = order["vip"] / (order["one"] + order["two"])
    assert 1.8 <= share <= 2.2


def test_a_claim_is_bounded_whatever_the_weights(fill, serve, limit):
    limit(**{f"weight:{key}": 1000 for key in ("vip", "other")})
    for key in ("vip", "other", "plain"):
        fill(key, 3000)

    order = Counter(one.key for one in serve(500).values())

    assert sum(order.values()) == 500
    assert abs(order["vip"] - order["other"]) <= 2
    assert order["plain"] <= 2


@one_by_one_or(10)
def test_high_normal_and_low_have_sixteen_four_and_one_part(limit_of_a_claim, fill, publish, drain):
    fill("\1high", 600, "high")
    fill("\1low", 600, "low")
    publish(*(f"n{number}" for number in range(300)))

    order = Counter(drain(limit_of_a_claim, most=420))

    high, normal, low = (order[key] / sum(order.values()) * 21 for key in ("\1high", "", "\1low"))
    assert 15 <= high <= 17
    assert 3.2 <= normal <= 4.8
    assert 0.7 <= low <= 1.5


def test_a_high_message_is_among_the_next_three_claimed_and_keys_share_with_none(fill, publish, serve, drain):
    publish(*(f"n{number}" for number in range(400)))
    fill("\1low", 50, "low")
    fill("\1high", 1, "high")
    assert "high.0" in [*serve(1), *serve(1), *serve(1)]

    fill("a", 400)
    order = Counter(drain(10, most=200))
    assert abs(order["a"] - order[""]) <= 10


def test_cancelled_messages_at_the_head_of_a_line_are_passed_over_in_few_claims(fill, serve, run, keys, limit, client):
    limit(ordered=1)
    number = 4_000
    fill("a", number + 1)
    for at in range(0, number, 500):
        run(t.cancel(keys, [f"a.{one}" for one in range(at, at + 500)], clock=NOON))

    claims = 0
    while not (held := serve(16)):
        claims += 1

    assert [*held] == [f"a.{number}"]
    assert claims <= number / 30
    assert client.exists(keys.line("a")) == 0


def test_a_drained_queue_keeps_nothing_of_its_keys(fill, drain, limit, client, keys, run):
    limit(per_key=2, key_rate_us=1, key_burst=1000)
    used = []

    for _ in range(2):  # the first round leaves totals and ends
        for number in range(400):
            fill(f"tenant-{number}", 5)
        assert len([*drain(200)]) == 2000
        while client.zcard(keys.rates):
            run(t.tidy(keys, clock=NOON + 10**9))
        client.delete(keys.lane("filler"), keys.lane("worker"))
        used.append({name: len(client.dump(name)) for name in client.keys("*")})

    names = {key.decode() for key in client.scan_iter()}
    assert names & {keys.ring, keys.held, keys.asleep} == set()
    assert not [name for name in names if name.startswith(keys.line(""))]
    assert used[1] == used[0]


def test_keys_share_after_a_purge_of_all_that_had_no_key(fill, serve, limit, run, keys, client):
    limit(concurrency=100_000)
    fill("", 10, "plain")
    serve(5)
    run(t.purge(keys, [f"plain.{at}" for at in range(5, 10)], state="ready", clock=NOON))
    fill("a", 400)
    serve(100)
    fill("b", 90)

    shares = Counter(one.key for one in serve(50).values())

    assert shares["a"] >= 20
    assert client.zscore(keys.ring, "") is None


@pytest.mark.foreign_hands
def test_a_message_of_a_line_whose_count_is_gone_has_a_place_of_its_key(publish_under, serve, limit, client, keys):
    limit(per_key=1)
    publish_under("a", "a1", "a2")
    client.hdel(keys.retries_left, "a1")

    (held,) = serve().values()

    assert (held.id, held.key, held.left) == ("a1", "a", 0)
    assert serve() == {}
