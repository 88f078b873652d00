"""A publisher with an old shard map publishes no chosen id, and a closed shard accepts no publish."""

import pytest
from cutting import run_by
from held_clock import HOUR_MS, NOON

from reliq.keys import Keys
from reliq.lua import transitions as t
from reliq.wire_format import envelope_rest

OLD, NEW, LATER = "2 4 2", "3 8 4", "4 16 8"


@pytest.fixture(params=[0, 5], ids=["shard 0", "shard 5"])
def keys(request):
    return Keys("q", shard=request.param)


@pytest.fixture
def fence(client, keys):
    """Set the fence of the shard; without a text return it."""
    return lambda text=None: (client.get(keys.epoch) or b"").decode() if text is None else client.set(keys.epoch, text)


@pytest.fixture
def ask(run, keys):
    return lambda *ids, known=NEW, **options: run(t.ask(keys, ids, fence=known, clock=NOON, **options))


@pytest.fixture
def written(dump, keys):
    """Return all Redis keys except the number of the last call."""
    return lambda: {key: value for key, value in dump().items() if key != keys.lane("publisher")}


def test_a_chosen_id_is_published_by_the_map_of_the_shard_and_by_no_earlier_one(fence, publish, written, where):
    fence(NEW)
    before = written()

    answer = publish("x", window_ms=1000, fence=OLD)
    assert (answer.is_stale, answer.refused, written()) == (True, {}, before)

    assert not publish("x", window_ms=1000, fence=NEW).is_stale
    assert not publish("generated", fence=OLD).is_stale
    assert (where(), fence()) == ({"ready": ["x", "generated"]}, NEW)


def test_a_call_that_must_not_run_is_refused_for_ever(fence, publish, run, keys, written):
    """An earlier copy of the call may arrive after its message has been published elsewhere."""
    assert publish("x", window_ms=1000, fence="never").is_stale
    assert written() == {}

    fence(NEW)
    number, options = t.CallNumber("publisher", 2), {"ttl_ms": HOUR_MS, "retries": 3, "clock": NOON}
    items, before = [("x", envelope_rest(3) + b"{}")], written()
    assert run(t.publish(keys, items, number, window_ms=1000, fence="never", **options)).is_stale
    assert run(t.publish(keys, items, number, fence=NEW, **options)).is_stale
    assert written() == before


def test_a_publisher_that_knows_a_later_map_raises_the_fence(fence, publish, where):
    stale = [publish(id, window_ms=1000, fence=known).is_stale for id, known in (("x", OLD), ("y", NEW), ("z", OLD))]

    assert stale == [False, False, True]
    assert (where(), fence()) == ({"ready": ["x", "y"]}, NEW)


def test_a_closed_shard_takes_nothing_until_a_later_map(ask, fence, publish, keys, written, where):
    ask(closing=True)
    before = written()

    for known in (OLD, NEW):
        assert publish("x", window_ms=1000, fence=known).is_stale
        assert keys.shard == 0 or publish("y", fence=known).is_stale  # shard 0 is never closed
    assert written() == before

    assert not publish("x", window_ms=1000, fence=LATER).is_stale
    assert fence() == LATER
    assert "x" in where()["ready"]


def test_a_call_that_was_made_has_its_answer_whatever_the_fence_is_now(fence, run, keys, where):
    items, options = [("x", envelope_rest(3, 1, 1000) + b"x")], {"ttl_ms": HOUR_MS, "retries": 3, "window_ms": 1000}
    call = t.publish(keys, items, t.CallNumber("p", 1), fence=OLD, **options)
    first = run(call)
    fence(NEW)

    assert run(call) == first
    assert where() == {"ready": ["x"]}


def test_an_old_home_answers_which_ids_may_be_published_elsewhere(ask, publish, claim, run, keys, bury, die):
    die("dead")
    bury("in-garbage")
    publish("ready", "running", "ended", "off", "free-again", window_ms=60_000)
    held = {one.id: one for one in claim()}
    run(t.ack(keys, [(held["ended"], 60_000)], clock=NOON))
    run(t.release(keys, [held[id] for id in ("ready", "off", "free-again")], clock=NOON))
    run(t.cancel(keys, ["off"], tombstone_ms=60_000, clock=NOON))
    run(t.cancel(keys, ["free-again"], clock=NOON))

    answers = {
        **dict.fromkeys(("ready", "running", "ended", "in-garbage"), "duplicate"),
        **dict.fromkeys(("free-again", "dead", "unknown"), "free"),
        "off": "tombstoned",
    }
    assert dict(zip(answers, ask(*answers), strict=True)) == answers
    assert ask("ended", "off", "ready", replace=True) == ["free", "free", "duplicate"]


def test_an_ask_raises_the_fence_with_its_answer_and_leaves_a_closed_shard_closed(ask, fence, publish):
    assert ask("x") == ["free"]
    assert fence() == NEW
    assert publish("x", window_ms=1000, fence=OLD).is_stale
    assert ask("x", "y", known=OLD) == ["stale", "stale"]
    assert fence() == NEW

    ask(closing=True)
    ask("x")
    ask(closing=True, known=OLD)
    assert fence() == f"{NEW} closed"


def test_dead_letters_are_redriven_by_the_map_of_the_shard_alone(die, ask, fence, run, keys, where):
    letters = {id: die(id) for id in ("x", "y")}
    fence(NEW)

    def redrive(id, known):
        return run(t.redrive(keys, [(letters[id], id, 3)], ttl_ms=HOUR_MS, fence=known, clock=NOON))

    assert redrive("x", OLD) == ["stale"]
    assert where() == {"dead": ["x", "y"]}
    assert redrive("x", NEW) == ["redriven"]
    ask(closing=True)
    assert redrive("y", NEW) == ["stale"]
    assert where() == {"ready": ["x"], "dead": ["y"]}


def test_a_map_is_written_over_the_one_that_was_read_and_for_a_queue_without_limits(run, client, keys):
    assert run(t.remap(keys, b"", b"one")) == b"one"
    assert run(t.remap(keys, b"", b"two")) == b"one"
    assert run(t.remap(keys, b"one", b"two")) == b"two"

    client.hset(keys.of_shard(0).limits, "on", "1")
    assert run(t.remap(keys, b"two", b'{"n":2}')) == b"keyed"
    assert client.get(keys.of_shard(0).map) == b"two"
    assert run(t.remap(keys, b"two", b'{"n":1}')) == b'{"n":1}'


def test_a_queue_without_shards_pays_for_the_fence_with_one_read_for_a_chosen_id(client):
    keys = Keys("q")

    def runs(**options):
        call = t.publish(keys, [("x", b',"r":3}\nx')], t.CallNumber("p", 1), ttl_ms=HOUR_MS, retries=3, **options)
        client.flushdb()
        return {command for command, key in run_by(client, call) if key == "epoch"}

    assert runs() == set()
    assert runs(window_ms=1000) == {"GET"}


@pytest.mark.parametrize("text", ["no epoch", "3", "999999999999999999 8 4", "999999999999999999 8 4 closed"], ids=repr)
def test_a_corrupt_fence_refuses_no_publish_and_is_overwritten(text, fence, publish, where):
    fence(text)

    assert not publish("x", window_ms=1000, fence="0 1 1").is_stale
    assert not publish("y", window_ms=1000, fence=OLD).is_stale
    assert (where(), fence()) == ({"ready": ["x", "y"]}, OLD)
