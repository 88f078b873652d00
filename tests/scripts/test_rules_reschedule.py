"""Reschedule in every place, and revival: a cancelled message that is published again where it still lies."""

import pytest
from held_clock import NOON, millis

from reliq import transitions as t


@pytest.fixture
def reschedule(run, keys):
    return lambda *ids, **options: run(t.reschedule(keys, ids or ["m"], clock=NOON, **options))


@pytest.mark.parametrize(
    "options", [{"delay_ms": 700}, {"at_ms": millis(700)}, {"at_ms": millis(-5000)}], ids=["delay", "date", "past"]
)
def test_a_pending_message_gets_another_due_time(options, publish, reschedule, run, keys, due, where):
    publish("m", delay_ms=5000)

    assert reschedule(**options) == ["rescheduled"]

    assert where() == {"pending": ["m"]}
    is_past = options.get("at_ms", NOON) < millis()
    assert is_past or due(keys.pending, "m") == millis(700)
    assert run(t.promote(keys, clock=NOON)) == ((1, -1) if is_past else (0, 700))


# ---- revival ----------------------------------------------------------------
