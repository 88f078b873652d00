"""The fence of a shard: who knows an earlier map publishes no chosen id there, and a closed shard takes nothing."""

import pytest
from cutting import run_by
from held_clock import HOUR_MS, NOON

from reliq import transitions as t
from reliq.keys import Keys
from reliq.wireformat import envelope_rest

OLD, NEW, LATER = "2 4 2", "3 8 4", "4 16 8"


@pytest.fixture(params=[0, 5], ids=["shard 0", "shard 5"])
def keys(request):
    return Keys("q", shard=request.param)


@pytest.fixture
def fence(client, keys):
    """Set what the shard knows; without a text return it."""
    return lambda text=None: (client.get(keys.epoch) or b"").decode() if text is None else client.set(keys.epoch, text)


@pytest.fixture
def ask(run, keys):
    return lambda *ids, known=NEW, **options: run(t.ask(keys, ids, fence=known, clock=NOON, **options))


@pytest.fixture
def written(dump, keys):
    """Return all keys but the number of the last call."""
    return lambda: {key: value for key, value in dump().items() if key != keys.lane("publisher")}


def test_a_chosen_id_by_an_earlier_map_is_not_published_and_nothing_is_written(fence, publish, written):
    fence(NEW)
    before = written()

    answer = publish("x", window_ms=1000, fence=OLD)

    assert (answer.is_stale, answer.refused) == (True, {})
    assert written() == before


def test_a_refused_call_stays_refused_whatever_the_fence_says_now(fence, run, keys, written):
    """A copy of it that was sent earlier may arrive when its message has been published elsewhere."""
    fence(NEW)
    number, options = t.CallNumber("publisher", 1), {"ttl_ms": HOUR_MS, "retries": 3, "clock": NOON}
    refused = t.publish(keys, [("x", envelope_rest(3) + b"{}")], number, window_ms=1000, fence="never", **options)
    before = written()

    assert run(refused).is_stale
    assert run(t.publish(keys, [("x", envelope_rest(3) + b"{}")], number, fence=NEW, **options)).is_stale

    assert written() == before


def test_a_call_that_must_not_run_is_refused_by_a_shard_without_a_fence(publish, written):
    assert publish("x", window_ms=1000, fence="never").is_stale

    assert written() == {}


def test_a_chosen_id_by_the_map_of_the_shard_is_published(fence, publish, where):
    fence(NEW)

    assert not publish("x", window_ms=1000, fence=NEW).is_stale

    assert where() == {"ready": ["x"]}


def test_whoever_knows_a_later_map_raises_the_fence(fence, publish, where):
    publish("x", window_ms=1000, fence=OLD)
    publish("y", window_ms=1000, fence=NEW)
    late = publish("z", window_ms=1000, fence=OLD)

    assert fence() == NEW
    assert late.is_stale
    assert where() == {"ready": ["x", "y"]}


def test_a_generated_id_is_published_by_any_map(fence, publish, where):
    fence(NEW)

    assert not publish("x", fence=OLD).is_stale

    assert (where(), fence()) == ({"ready": ["x"]}, NEW)


@pytest.mark.parametrize("known", [OLD, NEW])
def test_a_closed_shard_takes_nothing_by_the_map_that_closed_it(known, ask, publish, keys, written):
    ask(closing=True)
    before = written()

    assert publish("x", window_ms=1000, fence=known).is_stale
    assert keys.shard == 0 or publish("y", fence=known).is_stale  # shard 0 is never closed

    assert written() == before


def test_a_shard_is_open_again_by_a_later_map(ask, fence, publish, where):
    ask(closing=True)

    assert not publish("x", window_ms=1000, fence=LATER).is_stale

    assert (where(), fence()) == ({"ready": ["x"]}, LATER)


def test_a_call_that_was_made_has_its_answer_whatever_the_fence_says_now(fence, run, keys, where):
    call = t.publish(
        keys,
        [("x", envelope_rest(3, 1, 1000) + b"x")],
        t.CallNumber("p", 1),
        ttl_ms=HOUR_MS,
        retries=3,
        window_ms=1000,
        fence=OLD,
    )
    first = run(call)
    fence(NEW)

    assert run(call) == first
    assert where() == {"ready": ["x"]}


def test_an_old_home_tells_what_may_be_published_elsewhere(ask, publish, claim, run, keys, bury, die):
    die("dead")
    bury("in-garbage")
    publish("ready", "running", "ended", "off", "free-again", window_ms=60_000)
    held = {one.id: one for one in claim()}
    run(t.ack(keys, [(held["ended"], 60_000)], clock=NOON))
    run(t.release(keys, [held[id] for id in ("ready", "off", "free-again")], clock=NOON))
    run(t.cancel(keys, ["off"], tombstone_ms=60_000, clock=NOON))
    run(t.cancel(keys, ["free-again"], clock=NOON))

    ids = ("ready", "running", "ended", "off", "free-again", "dead", "in-garbage", "unknown")
    assert ask(*ids) == [*("duplicate", "duplicate", "duplicate", "tombstoned", "free", "free", "duplicate", "free")]
    assert ask("ended", "off", "ready", replace=True) == ["free", "free", "duplicate"]


def test_an_ask_raises_the_fence_with_its_answer(ask, fence, publish):
    assert ask("x") == ["free"]

    assert fence() == NEW
    assert publish("x", window_ms=1000, fence=OLD).is_stale


def test_who_asks_by_an_earlier_map_is_told_so(ask, fence):
    fence(NEW)

    assert ask("x", "y", known=OLD) == ["stale", "stale"]
    assert fence() == NEW


def test_an_ask_leaves_a_closed_shard_closed(ask, fence):
    ask(closing=True)
    ask("x")
    ask(closing=True, known=OLD)

    assert fence() == f"{NEW} closed"


def test_letters_are_redriven_by_the_map_of_the_shard_alone(die, fence, run, keys, where):
    letter = die("x")
    fence(NEW)

    def redrive(known):
        return run(t.redrive(keys, [(letter, "x", 3)], ttl_ms=HOUR_MS, fence=known, clock=NOON))

    assert redrive(OLD) == ["stale"]
    assert where() == {"dead": ["x"]}
    assert redrive(NEW) == ["redriven"]
    assert where() == {"ready": ["x"]}


def test_a_closed_shard_redrives_nothing_in_itself(die, ask, run, keys, where):
    letter = die("x")
    ask(closing=True)

    assert run(t.redrive(keys, [(letter, "x", 3)], ttl_ms=HOUR_MS, fence=NEW, clock=NOON)) == ["stale"]
    assert where() == {"dead": ["x"]}


def test_a_map_is_written_over_the_one_that_was_read_and_over_no_other(run, client, keys):
    assert run(t.remap(keys, b"", b"one")) == b"one"
    assert run(t.remap(keys, b"", b"two")) == b"one"
    assert run(t.remap(keys, b"one", b"two")) == b"two"

    assert client.get(keys.of_shard(0).map) == b"two"


def test_a_queue_that_is_not_sharded_pays_for_the_fence_with_one_read_for_a_chosen_id(client):
    keys = Keys("q")

    def runs(**options):
        call = t.publish(keys, [("x", b',"r":3}\nx')], t.CallNumber("p", 1), ttl_ms=HOUR_MS, retries=3, **options)
        client.flushdb()
        return {command for command, key in run_by(client, call) if key == "epoch"}

    assert runs() == set()
    assert runs(window_ms=1000) == {"GET"}


@pytest.mark.parametrize("text", ["what is this", "3", "999999999999999999 8 4", "999999999999999999 8 4 closed"])
def test_a_corrupt_fence_refuses_no_publish_and_is_overwritten(text, fence, publish, where):
    fence(text)

    assert not publish("x", window_ms=1000, fence="0 1 1").is_stale
    assert not publish("y", window_ms=1000, fence=OLD).is_stale
    assert (where(), fence()) == ({"ready": ["x", "y"]}, OLD)
