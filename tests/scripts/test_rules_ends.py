"""Every message ends in one way and is counted: collect, redrive, purge, expiry; and what the janitor finds."""

import pytest
from held_clock import HOUR_MS, NOON, micros, millis

from reliq import transitions as t

FOR_EVER_MS = 10**12


@pytest.fixture
def collect(run, keys):
    def make(*ids, letters_max=100, letters_ms=FOR_EVER_MS, clock=NOON):
        return run(t.collect(keys, ids, letters_max=letters_max, letters_ms=letters_ms, clock=clock))

    return make


@pytest.fixture
def redrive(run, keys):
    def make(*letters, **options):
        return run(t.redrive(keys, letters, ttl_ms=HOUR_MS, clock=NOON, **options))

    return make


# ---- acked, expired ---------------------------------------------------------


def test_an_acked_message_leaves_nothing_behind(publish, claim, run, client, keys, total):
    publish("m")

    run(t.ack(keys, [(one, None) for one in claim()]))

    assert {key.decode() for key in client.keys("*")} == {
        *(keys.totals, keys.wake, keys.token, keys.lane("publisher"), keys.lane("worker"))
    }
    assert total("acked") == 1


def test_a_message_whose_body_was_gone_is_counted_as_expired(publish, claim, run, client, keys, total, where):
    publish("m")
    client.delete(keys.msg("m"))

    run(t.ack(keys, [(one, None) for one in claim()], kind="expired"))

    assert (where(), total("expired"), total("acked")) == ({}, 1, 0)


# ---- collect ----------------------------------------------------------------


def test_collect_turns_garbage_into_a_letter_with_its_body_and_reason(bury, collect, client, keys, total):
    bury("m")
    value = client.get(keys.msg("m"))

    assert collect("m") == (("m",), ())

    ((_, letter),) = client.xrange(keys.dead)
    assert letter == {b"id": b"m", b"value": value, b"note": f"rejected 1 bad card\x1d{NOON // 1000}".encode()}
    assert client.smembers(keys.garbage) == set()
    assert client.keys(keys.msg("*")) == client.hkeys(keys.errors) == []
    assert total("dead") == 1


def test_a_message_whose_worker_died_at_its_last_try_says_so_in_its_letter(publish, claim, collect, run, client, keys):
    publish("m", retries=0)
    claim(lease_ms=1)
    run(t.reclaim(keys, clock=micros(1)))

    collect("m")

    assert client.xrange(keys.dead)[0][1][b"note"].startswith(b"lease - \x1d")


@pytest.mark.parametrize("place", ["nowhere", "ready", "pending", "unack"])
def test_collect_leaves_an_id_alone_that_is_not_garbage(place, publish, claim, collect, where, client, keys):
    if place != "nowhere":
        publish("m", delay_ms=5 if place == "pending" else 0)
    if place == "unack":
        claim()
    before = where()

    assert collect("m") == ((), ())

    assert where() == before
    assert client.exists(keys.msg("m")) == (place != "nowhere")


def test_collect_given_an_id_twice_makes_one_letter(bury, collect, where):
    bury("m")

    assert collect("m", "m") == (("m",), ())
    assert where() == {"dead": ["m"]}


def test_collect_of_a_message_whose_body_is_gone_ends_it_as_expired(bury, collect, client, keys, where, total):
    bury("m")
    client.delete(keys.msg("m"))

    assert collect("m") == ((), ("m",))
    assert (where(), total("expired"), total("dead")) == ({}, 1, 0)


def test_the_oldest_letters_go_when_there_are_too_many(bury, collect, where, total):
    bury("a", "b", "c")

    collect("a", "b", "c", letters_max=2)

    assert where() == {"dead": ["b", "c"]}
    assert (total("dead"), total("letters_dropped")) == (3, 1)


def test_a_queue_that_keeps_no_letters_counts_them_all_the_same(bury, collect, where, total):
    bury("m")

    assert collect("m", letters_max=0) == (("m",), ())
    assert (where(), total("dead")) == ({}, 1)


def test_letters_go_when_they_are_too_old(die, collect, where, client, total):
    die("m")
    seconds, _ = client.time()

    collect(letters_ms=HOUR_MS, clock=(seconds + 3500) * 1_000_000)
    assert where() == {"dead": ["m"]}

    collect(letters_ms=HOUR_MS, clock=(seconds + 3700) * 1_000_000)
    assert (where(), total("letters_dropped")) == ({}, 1)


def test_an_id_can_die_more_than_once(die, publish, where):
    die("m")
    die("m")

    assert where() == {"dead": ["m", "m"]}


# ---- redrive ----------------------------------------------------------------


def test_a_redriven_letter_is_a_message_again(die, redrive, claim, where, total, client, keys):
    letter = die("m")

    assert redrive((letter, "m", 7)) == ["redriven"]

    assert (where(), total("redriven")) == ({"ready": ["m"]}, 1)
    assert [(one.id, one.left) for one in claim()] == [("m", 7)]
    assert client.get(keys.msg("m")).endswith(b"\nm")


def test_a_repeated_redrive_adds_nothing(die, redrive, where):
    letter = die("m")

    assert redrive((letter, "m", 7), (letter, "m", 7)) == ["redriven", "not_found"]
    assert redrive((letter, "m", 7)) == ["not_found"]
    assert where() == {"ready": ["m"]}


@pytest.mark.parametrize("place", ["ready", "garbage"])
def test_the_letter_of_an_id_that_lives_is_kept(place, die, publish, bury, redrive, where):
    letter = die("m")
    publish("m") if place == "ready" else bury("m")

    assert redrive((letter, "m", 7)) == ["alive"]
    assert where() == {place: ["m"], "dead": ["m"]}


def test_two_letters_of_one_id_are_redriven_one_at_a_time(die, redrive, where):
    first, second = die("m"), die("m")

    assert redrive((first, "m", 7), (second, "m", 7)) == ["redriven", "alive"]
    assert where() == {"ready": ["m"], "dead": ["m"]}


def test_a_letter_is_redriven_only_under_its_own_id(die, redrive, where):
    letter = die("m")

    assert redrive((letter, "another", 7), ("1-1", "m", 7)) == ["not_found", "not_found"]
    assert where() == {"dead": ["m"]}


def test_a_letter_is_redriven_with_a_delay(die, redrive, where, keys, due):
    letter = die("m")

    redrive((letter, "m", 7), delay_ms=700)

    assert where() == {"pending": ["m"]}
    assert due(keys.pending, "m") == millis(700)


# ---- purge ------------------------------------------------------------------


@pytest.fixture
def purge(run, keys):
    return lambda state, *ids: run(t.purge(keys, ids, state=state))


def test_purge_deletes_pending_messages_that_are_still_pending(publish, purge, where, total, client, keys):
    publish("a", "b", delay_ms=5)
    publish("ready")

    assert purge("pending", "a", "ready", "nowhere") == 1

    assert (where(), total("purged")) == ({"pending": ["b"], "ready": ["ready"]}, 1)
    assert client.exists(keys.msg("a")) == 0


def test_purge_deletes_garbage_without_a_letter(bury, purge, where, client, keys):
    bury("a", "b")

    assert purge("garbage", "a", "nowhere") == 1

    assert where() == {"garbage": ["b"]}
    assert client.hkeys(keys.errors) == [b"b"]


@pytest.mark.parametrize(
    ("asked", "rest"), [("ab", "cd"), ("a", "bcd"), ("abcd", ""), ("bc", "abcd"), ("acb", "bcd"), ("xab", "abcd")]
)
def test_purge_takes_from_a_list_only_what_is_still_its_oldest(asked, rest, publish, purge, where):
    publish(*"abcd")

    assert purge("ready", *asked) == 4 - len(rest)

    assert where().get("ready", []) == list(rest)


def test_purge_of_one_list_leaves_the_other(publish, purge, where):
    publish("a")

    assert purge("retry", "a") == 0
    assert where() == {"ready": ["a"]}


# ---- tidy -------------------------------------------------------------------


def test_tidy_pulls_back_a_lease_that_ends_too_far_ahead(publish, claim, run, keys, due, where):
    publish("m", "fine")
    claim(limit=1, lease_ms=1000, clock=micros(HOUR_MS))
    claim(limit=1, lease_ms=1000)

    assert run(t.tidy(keys, clock=NOON)) == (0, 0, 1, 0)

    assert (due(keys.unack, "m"), due(keys.unack, "fine")) == (millis(1000), millis(1000))
    assert where() == {"unack": ["fine", "m"]}


def test_tidy_pulls_back_the_lease_of_a_cancelled_message_too(publish, claim, run, keys, due):
    publish("m")
    claim(lease_ms=1000, clock=micros(HOUR_MS))
    run(t.cancel(keys, ["m"]))

    run(t.tidy(keys, clock=NOON))

    assert due(keys.unack, "m") == millis(1000)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_tidy_leaves_a_lease_that_was_extended_for_longer_than_claimed(is_cancelled, publish, claim, run, keys, due):
    publish("m")
    (held,) = claim(lease_ms=1000)
    if is_cancelled:
        run(t.cancel(keys, ["m"]))
    run(t.extend(keys, [held], lease_ms=HOUR_MS, clock=NOON))
    run(t.extend(keys, [held], lease_ms=2000, clock=NOON))
    assert run(t.extend(keys, [held], lease_ms=HOUR_MS, clock=NOON)).lost == ()

    assert run(t.tidy(keys, clock=NOON)) == (0, 0, 0, 0)

    assert due(keys.unack, "m") == millis(HOUR_MS)
    assert run(t.tidy(keys, clock=micros(-HOUR_MS)))[2] == 1
    assert due(keys.unack, "m") == millis(0)
    assert run(t.ack(keys, [(held, None)], clock=NOON)).lost == ()


@pytest.mark.foreign_hands
def test_tidy_leaves_redelivery_times_and_foreign_leases_where_they_are(publish, claim, run, client, keys, dump):
    publish("m")
    run(t.nack(keys, [(one, HOUR_MS, "failed 1 x", b"") for one in claim()], clock=NOON))
    client.zadd(keys.unack, {"foreign": NOON / 1e6 + 9999})
    before = dump()

    assert run(t.tidy(keys, clock=NOON)) == (0, 0, 0, 0)
    assert dump() == before


@pytest.mark.foreign_hands
def test_tidy_removes_state_words_without_a_message(publish, claim, bury, run, client, keys):
    publish("held")
    claim()
    bury("garbage")
    client.hset(keys.lease, mapping={"orphan": "w.1:5", "garbage": "w.1:5"})
    client.hset(keys.errors, "orphan", "failed 1 x")
    client.hdel(keys.retries_left, "held")

    assert run(t.tidy(keys, clock=NOON)) == (0, 0, 0, 1)

    assert set(client.hkeys(keys.lease)) == {b"held", b"garbage"}
    assert client.hkeys(keys.errors) == [b"garbage"]


@pytest.mark.foreign_hands
def test_tidy_looks_through_a_great_deal_a_piece_at_a_time(run, client, keys):
    client.hset(keys.lease, mapping={f"orphan-{number}": "w.1:5" for number in range(2000)})

    cursor, swept, calls = 0, 0, 0
    while calls == 0 or cursor:
        _, cursor, _, more = run(t.tidy(keys, lease_cursor=cursor))
        swept, calls = swept + more, calls + 1

    assert (swept, client.hlen(keys.lease)) == (2000, 0)
    assert calls > 5
