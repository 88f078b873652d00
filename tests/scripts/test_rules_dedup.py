"""A chosen id stays taken for its deduplication window, after any end and in either layout; a cancel frees it."""

import pytest
from held_clock import HOUR_MS

from reliq.keys import Keys, Layout
from reliq.lua import transitions as t
from reliq.wire_format import envelope_rest

WINDOW_MS = 600_000


@pytest.fixture(params=[Layout.RELIQ, Layout.hdt3213(hash_tag=True)], ids=["reliq", "go"])
def keys(request):
    return Keys("q", request.param)


@pytest.fixture
def send(run, keys):
    """Publish the message `m` under its chosen id; return the reason of a refusal, or None."""
    numbers = iter(range(1, 9))

    def make(window_ms=WINDOW_MS, **options):
        value = b"x" if keys.bare else envelope_rest(0, 1, window_ms) + b"x"
        turn = t.CallNumber("p", next(numbers))
        call = t.publish(
            keys, [("m", value)], turn, ttl_ms=HOUR_MS, retries=0, window_ms=window_ms, bare=keys.bare, **options
        )
        return run(call).refused.get(0)

    return make


@pytest.fixture
def end(run, client, keys, claim_turn):
    """End the message in the given way, as a client that only has data from Redis."""

    def make(how):
        if how == "purged":
            assert run(t.purge(keys, ["m"], state="ready")) == 1
            return
        (one,) = run(t.claim(keys, claim_turn(), limit=1, lease_ms=60_000)).claimed
        match how:
            case "acked":
                run(t.ack(keys, [(one, None if keys.bare else WINDOW_MS)]))
            case "expired":
                client.delete(keys.msg("m"))
                run(t.ack(keys, [(one, None)], kind="expired"))
            case _:
                run(t.nack(keys, [(one, 0, "rejected 1 x", b"value")]))
        if how == "expired in garbage":
            client.delete(keys.msg("m"))
        if how == "purged from garbage":
            assert run(t.purge(keys, ["m"], state="garbage")) == 1
        if how in ("dead", "expired in garbage"):
            run(t.collect(keys, ["m"], dead_letter_limit=9, letters_ms=10**12))

    return make


ENDS = ["acked", "expired", "dead", "expired in garbage", "purged", "purged from garbage"]


@pytest.mark.parametrize("how", ENDS)
def test_a_chosen_id_stays_taken_from_every_end_also_after_a_redrive(how, send, end, run, client, keys):
    def stays_taken():
        assert send() == "duplicate"
        assert WINDOW_MS - 30_000 < client.pttl(keys.dedup("m")) <= WINDOW_MS
        assert client.exists(keys.windows) == 0
        client.delete(keys.dedup("m"))

    for first in (how, "dead"):
        assert send() is None
        end(first)
        stays_taken()
    [(letter, _)] = client.xrange(keys.dead)[-1:]
    assert run(t.redrive(keys, [(letter.decode(), "m", 0)], ttl_ms=HOUR_MS)) == ["redriven"]
    end(how)
    stays_taken()


@pytest.mark.parametrize("how", ENDS[1:])
def test_without_a_window_an_id_is_free_at_its_end(how, send, end, client, keys):
    for _ in range(2):
        assert send(window_ms=0) is None
        end(how)
    assert client.exists(keys.dedup("m")) == client.exists(keys.windows) == 0


@pytest.mark.parametrize("delay_ms", [0, 60_000], ids=["ready", "pending"])
def test_a_cancelled_id_is_free_and_nothing_is_left_of_its_window(delay_ms, send, run, client, keys, claim_turn):
    send(delay_ms=delay_ms)
    run(t.cancel(keys, ["m"]))
    assert run(t.claim(keys, claim_turn(), limit=1, lease_ms=1)).claimed == []
    run(t.tidy(keys))

    assert client.exists(keys.windows) == 0
    assert send() is None


@pytest.mark.foreign_hands
def test_a_spoilt_table_of_windows_stops_nothing(send, end, run, client, keys):
    client.set(keys.windows, "no hash")

    assert send() is None
    end("acked")
    run(t.tidy(keys))

    assert run(t.counts(keys)).totals["acked"] == 1
