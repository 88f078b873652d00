"""The state words that the scripts write are those that Python reads."""

from held_clock import NOON, micros

from reliq import transitions as t
from reliq.wireformat import Backoff, Delayed, Held, StateWord, Suspect, Unset


def test_every_state_word_is_read_as_the_scripts_write_it(publish, claim, run, client, keys):
    publish("held", "nacked", "twice-dead", "once-dead", "cancelled")

    def look(id):
        return StateWord.parse(client.hget(keys.lease, id))

    held = {one.id: one for one in claim(lease_ms=60_000, limit=2)}
    run(t.nack(keys, [(held["nacked"], 5000, "failed 1 x", b"")], clock=NOON))
    claim(lease_ms=1)
    assert look("held") == Held(False, 0, held["held"].nonce, "worker", 60_000)
    assert look("nacked") == Backoff()
    run(t.cancel(keys, ["cancelled"], clock=NOON))
    assert look("cancelled").cancelled

    run(t.reclaim(keys, clock=micros(10)))
    assert look("once-dead") == Suspect(deaths=1)
    (again,) = claim(lease_ms=1, limit=1, clock=micros(10))
    assert look(again.id) == Held(False, 1, again.nonce, "worker", 1)
    run(t.reclaim(keys, clock=micros(20)))
    assert look(again.id) == Suspect(deaths=2)

    publish("late", "gone")
    run(t.reschedule(keys, ["late"], at_ms=10**13, clock=NOON))
    run(t.cancel(keys, ["gone"], clock=NOON))
    assert look("late") == Delayed(due_ms=10**13)
    assert look("gone") == Unset(cancelled=True)
