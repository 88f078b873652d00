"""A signal may arrive at any moment, also while the process waits for it; handling it must not block the process."""

import signal
import sys
import threading

from reliq import Consumer, WorkerSettings
from reliq.consumer import SignalNotes, StopSignals
from reliq.supervisor.plan import ChildPlan
from reliq.supervisor.supervisor import Supervisor


def interrupted_everywhere(work, handler):
    """Run `work`, and call `handler` before each line of Python, as a signal may interrupt it."""
    depth = []

    def interrupt(frame, event, argument):
        if event == "line" and len(depth) < 2:  # a second signal may interrupt a handler
            depth.append(frame)
            handler(signal.SIGTERM, frame)
            depth.pop()
        return interrupt

    def traced():
        sys.settrace(interrupt)
        work()
        sys.settrace(None)

    thread = threading.Thread(target=traced, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_note_may_interrupt_a_wait_and_another_note():
    notes = SignalNotes()

    assert interrupted_everywhere(lambda: notes.wait(0.01), notes.note)
    assert interrupted_everywhere(lambda: notes.note(signal.SIGTERM), notes.note)

    assert set(notes.numbers) == {signal.SIGTERM}


def test_one_wait_sees_every_note_and_an_echo_within_a_second_counts_once(monkeypatch):
    notes = SignalNotes()
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        notes.note(number)
    assert notes.wait(0)
    assert not notes.wait(0)
    assert notes.numbers == [signal.SIGHUP, signal.SIGTERM]

    monkeypatch.setattr("reliq.consumer.ECHO_SECONDS", 0.0)
    notes.note(signal.SIGTERM)

    assert notes.numbers == [signal.SIGHUP, signal.SIGTERM, signal.SIGTERM]


def test_a_consumer_may_be_interrupted_while_it_waits_for_the_signal_to_stop():
    with StopSignals(patient=True) as signals:
        signals.only_note()

        assert interrupted_everywhere(lambda: signals.wait(0.01), signals.take_note)

    assert set(signals.numbers) == {signal.SIGTERM}


def test_a_supervisor_only_notes_its_signals(monkeypatch):
    taken = {}
    monkeypatch.setattr(signal, "signal", taken.__setitem__)
    plan = ChildPlan(consumer="", queues=(), settings=WorkerSettings(), log_level="")
    supervisor = Supervisor(Consumer(), plan, processes=0)

    assert supervisor.run() == 0

    assert set(taken) == {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
    assert {handler.__func__ for handler in taken.values()} == {SignalNotes.note}
