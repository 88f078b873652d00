"""An operator asks through Redis where the handlers of a worker stand; it answers with places, and with no values."""

import asyncio
import threading
import time

import pytest
from waiting import eventually

from reliq import ConfigurationError, commands, stacks
from reliq.admin import Admin, Worker
from reliq.keys import stack_request_key, stacks_key
from reliq.worker import heartbeat, stack_report
from reliq.worker.stack_report import STACK_FRAMES


@pytest.fixture(autouse=True)
def beats_quickly(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)


@pytest.fixture
def over():
    """Let the handlers end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def admin(url):
    admin = Admin(url)
    yield admin
    admin.close()


@pytest.fixture
def stay(running, over):
    """Say that a handler stands where it is to be seen, and stay there."""

    def wait():
        running.stands.set()
        over.wait(60)

    return wait


@pytest.fixture
def running(queue, consumer, start, over, caller, admin):
    """Run a handler until it stands; return its worker's stacks, as asked for through Redis."""

    def run(handler, body="CANARY in a body", **options):
        consumer.handler(queue, **options)(handler)
        queue.publish(body, id="m1", headers={"tenant": "CANARY in a header"})
        start(concurrency=2)
        eventually(lambda: any(one.busy for one in admin.workers()), "it runs")
        [worker] = admin.workers()
        eventually(stands.is_set, "it stands where it is to be seen")
        return admin.stacks([worker.id], for_seconds=30)[worker.id]

    stands = run.stands = threading.Event()
    return run


def names(stack):
    return [frame.rpartition(" ")[2].rpartition(".")[2] for frame in stack.frames]


def test_a_plain_handler_is_shown_with_its_calls_and_without_values(running, over):
    def pay(body):
        card = "CANARY in a variable"
        charge(card)

    def charge(card):
        running.stands.set()
        over.wait(60)  # CANARY in a line of code

    report = running(pay)

    [stack] = report.stacks
    assert (stack.queue, stack.id, report.left_out) == ("q", "m1", 0)
    assert names(stack)[:2] == ["pay", "charge"]
    assert all(frame.startswith("/") and ".py:" in frame for frame in stack.frames)
    assert "CANARY" not in str(report)


def test_a_coroutine_is_shown_with_its_awaits_and_the_thread_of_the_loop(running, over):
    async def pay(body):
        await charge("CANARY in a variable")

    async def charge(card):
        running.stands.set()
        await asyncio.to_thread(over.wait, 60)

    report = running(pay)

    loop, stack = report.stacks
    assert loop.queue == ""
    assert names(stack)[:2] == ["pay", "charge"]
    assert "CANARY" not in str(report)


def test_a_coroutine_that_blocks_the_loop_is_seen_in_its_thread(running, stay):
    async def pay(body):
        stay()

    loop = running(pay).stacks[0]

    assert "pay" in names(loop)


def test_a_report_has_a_bounded_size_and_a_bounded_life_as_has_a_request(running, stay, client, caller, monkeypatch):
    monkeypatch.setattr(stack_report, "REPORT_CHARACTERS", 10)

    report = running(lambda body: stay())
    [id] = caller.run(commands.worker_ids())
    caller.run_all(stacks.request("dead"))

    assert (report.stacks, report.left_out) == ((), 1)
    assert client.exists(stack_request_key(id)) == 0
    assert 0 < client.pttl(stacks_key(id)) <= stacks.REPORT_MS
    assert 0 < client.pttl(stack_request_key("dead")) <= stacks.REQUEST_MS


def test_a_deep_stack_shows_its_innermost_frames(running, stay):
    def dive(depth):
        dive(depth - 1) if depth else stay()

    def pay(body):
        dive(100)

    [stack] = running(pay).stacks

    assert len(stack.frames) == STACK_FRAMES
    assert "dive" in names(stack)


def test_a_worker_that_is_silent_or_unknown_is_not_asked(admin, client, caller):
    now = time.time()
    caller.run_all(commands.write_worker(Worker("silent", "h", 1, "1", ("q",), 1, 0, now, now, now)))
    client.delete("reliq:worker:silent")

    assert admin.worker("silent").record is None
    for id, why in (("silent", "said nothing for 15 s"), ("nobody", "no worker 'nobody' was alive")):
        with pytest.raises(ConfigurationError, match=why):
            admin.ask_stacks(id)


def test_foreign_values_are_read_as_no_report(admin, client, caller):
    now = time.time()
    caller.run_all(commands.write_worker(Worker("w", "h", 1, "1", ("q",), 1, 0, now, now, now)))
    for text in (b"\xff", b"[" * 5000, b'{"at":1e400,"stacks":[]}', b'{"at":-1,"stacks":[]}', b"{}"):
        client.set(stacks_key("w"), text)
        assert admin.worker("w").report is None
    client.delete(stacks_key("w"))
    client.rpush(stacks_key("w"), "a list")
    assert admin.worker("w").report is None
