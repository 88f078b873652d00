"""A worker reports the stacks of its handlers, through Redis and on SIGUSR1: file, line and function, no values."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from waiting import eventually

from reliq import ConfigurationError
from reliq.admin import Admin, Worker, calls
from reliq.events import WorkerStopping
from reliq.keys import stack_request_key, stacks_key
from reliq.redis import commands
from reliq.supervisor import main as child
from reliq.worker import upkeep
from reliq.worker.upkeep import STACK_FRAMES


@pytest.fixture
def admin(url):
    with closing(Admin(url)) as admin:
        yield admin


@pytest.fixture
def running(quick_beats, queue, consumer, start, gate, admin):
    """Run a handler up to the gate; return its worker's stacks, as an operator requests them through Redis."""

    def run(handler):
        consumer.handler(queue)(handler)
        queue.publish("CANARY in a body", id="m1", headers={"tenant": "CANARY in a header"})
        start(concurrency=2)
        gate.wait_for()
        eventually(lambda: any(one.busy for one in admin.workers()), "it runs")
        [worker] = admin.workers()
        return admin.stacks([worker.id], for_seconds=30)[worker.id]

    return run


def names(stack):
    return [frame.rpartition(" ")[2].rpartition(".")[2] for frame in stack.frames]


def test_a_plain_handler_is_shown_with_its_calls_and_without_values(running, gate):
    def pay(body):
        card = "CANARY in a variable"
        charge(card)

    def charge(card):
        gate.pass_through()  # CANARY in a line of source code

    report = running(pay)

    [stack] = report.stacks
    assert (stack.queue, stack.id, report.left_out) == ("q", "m1", 0)
    assert names(stack)[:2] == ["pay", "charge"]
    assert all(frame.startswith("/") and ".py:" in frame for frame in stack.frames)
    assert "CANARY" not in str(report)


def test_a_coroutine_is_shown_with_its_awaits_and_the_thread_of_the_loop(running, gate):
    async def pay(body):
        await charge("CANARY in a variable")

    async def charge(card):
        await asyncio.to_thread(gate.pass_through)

    report = running(pay)

    loop, stack = report.stacks
    assert loop.queue == ""
    assert names(stack)[:2] == ["pay", "charge"]
    assert "CANARY" not in str(report)


def test_a_coroutine_that_blocks_the_loop_is_seen_in_its_thread(running, gate):
    async def pay(body):
        gate.pass_through()

    loop = running(pay).stacks[0]

    assert "pay" in names(loop)


def test_a_report_has_a_bounded_size_and_a_bounded_life_as_has_a_request(running, gate, client, caller, monkeypatch):
    monkeypatch.setattr(upkeep, "REPORT_CHARACTERS", 10)

    report = running(lambda body: gate.pass_through())
    [id] = caller.run(calls.worker_ids())
    caller.run_all(calls.ask_stacks("dead"))

    assert (report.stacks, report.left_out) == ((), 1)
    assert client.exists(stack_request_key(id)) == 0
    assert 0 < client.pttl(stacks_key(id)) <= commands.REPORT_MS
    assert 0 < client.pttl(stack_request_key("dead")) <= calls.REQUEST_MS


def test_a_deep_stack_shows_its_innermost_frames(running, gate):
    def dive(depth):
        dive(depth - 1) if depth else gate.pass_through()

    [stack] = running(lambda body: dive(100)).stacks

    assert len(stack.frames) == STACK_FRAMES
    assert "dive" in names(stack)


@pytest.fixture
def silent(caller):
    """Write the record of a worker that has stopped working."""
    now = time.time()
    caller.run_all(commands.write_worker(Worker("silent", "h", 1, "1", ("q",), 1, 0, now, now, now)))


def test_a_worker_that_is_silent_or_unknown_is_not_asked(silent, admin, client):
    client.delete("reliq:worker:silent")

    assert admin.worker("silent").record is None
    for id, why in (("silent", "no record for 15 s"), ("nobody", "no worker 'nobody' was alive")):
        with pytest.raises(ConfigurationError, match=why):
            admin.ask_stacks(id)


def test_foreign_values_are_read_as_no_report(silent, admin, client):
    for text in (b"\xff", b"[" * 5000, b'{"at":1e400,"stacks":[]}', b'{"at":-1,"stacks":[]}', b"{}"):
        client.set(stacks_key("silent"), text)
        assert admin.worker("silent").report is None
    client.delete(stacks_key("silent"))
    client.rpush(stacks_key("silent"), "a list")
    assert admin.worker("silent").report is None


EVIL = "m\n2026-11-22 ERROR reliq all is lost\x1b[2J\u202e"


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_stacks_during_a_stop_name_messages_in_one_line(kind, consumer, make_queue, start, recorder, gate, client):
    queue = make_queue(body=bytes)
    client.set(queue.keys.msg(EVIL), b"x")
    client.hset(queue.keys.retries_left, EVIL, 3)
    client.lpush(queue.keys.ready, EVIL)

    async def handle(body):
        await asyncio.to_thread(gate.pass_through)

    consumer.handler(queue)(handle if kind == "async" else lambda body: gate.pass_through())
    start()
    gate.wait_for()
    name = r"q m\n2026-11-22 ERROR reliq all is lost\x1b[2J\u202e"
    place = ".<locals>.handle" if kind == "async" else ".pass_through"
    with ThreadPoolExecutor() as pool:
        pool.submit(consumer.stop)
        recorder.wait_for(WorkerStopping)
        eventually(lambda: place in child.stacks(consumer).partition(name)[2], "the handler is shown where it waits")
        lines = child.stacks(consumer).split("\n")
        gate.open()

    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("2026-11-22 ERROR") for line in lines)
    assert not any("gate.pass_through()" in line for line in lines)  # source lines may contain parts of bodies
