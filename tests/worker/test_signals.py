"""A signal may come at any moment, also while the process waits for it: noting it must never stop the process."""

import signal
import sys
import threading

import pytest
from waiting import eventually

from reliq import Consumer, child
from reliq.child import Plan
from reliq.signals import SignalNotes
from reliq.supervisor import Supervisor

PLAN = Plan(
    consumer="nowhere:consumer",
    queues=(),
    concurrency=1,
    grace=1,
    max_jobs=None,
    burst=False,
    allow_eviction=False,
    log_level="info",
    board="",
    report="",
)


def interrupted_everywhere(work, handler):
    """Run `work` while `handler` interrupts it before each line that Python runs, as a signal may."""
    depth = []

    def interrupt(frame, event, argument):
        if event == "line" and len(depth) < 2:  # a handler may be interrupted by another
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


def test_one_wait_sees_every_note_before_it():
    notes = SignalNotes()
    for _ in range(3):
        notes.note(signal.SIGUSR1)

    assert notes.wait(0)
    assert not notes.wait(0)


def test_a_consumer_may_be_interrupted_while_it_waits_for_the_signal_to_stop(url):
    consumer = Consumer(url)
    consumer._patient = True

    assert interrupted_everywhere(lambda: consumer.wait_for_signal(0.01), consumer._note_signal)

    assert consumer.wait_for_signal(0)


@pytest.fixture
def stack_wish():
    """The handler of a child process for SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    child._write_stacks_on_signal(Consumer())
    yield signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_a_wish_for_stacks_may_interrupt_another(stack_wish, caplog):
    assert interrupted_everywhere(lambda: stack_wish(signal.SIGUSR1, None), stack_wish)

    eventually(lambda: "stacks:" in caplog.text, "the stacks are written")


def test_a_supervisor_only_notes_its_signals(monkeypatch):
    taken = {}
    monkeypatch.setattr(signal, "signal", taken.__setitem__)
    supervisor = Supervisor(Consumer(), PLAN, processes=0)

    assert supervisor.run() == 0

    assert set(taken) == {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    assert {handler.__func__ for handler in taken.values()} == {SignalNotes.note}
