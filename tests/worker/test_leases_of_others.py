"""The supervisor finds the messages of a dead process in Redis when the process left no report."""

import os
import signal
import subprocess
import sys
import time

import pytest
from begun import begun
from transition import run_transition
from waiting import eventually

from reliq.lua.transitions import CallNumber
from reliq.redis.shards import ShardMap
from reliq.supervisor.child import RESTART_SECONDS, SLOWEST_RESTART_SECONDS, Child, HeartbeatMonitor
from reliq.supervisor.main import _report_unfinished
from reliq.supervisor.recovery import FREE_RELEASES, Recovery
from reliq.supervisor.status import ProcessStatus, ProcessStatusView

LANE = "lane-of-another"


@pytest.fixture
def recovery(acking):
    return Recovery(acking, concurrency=1)


def give_back(consumer, *held):
    """Let a supervisor return the messages in the report of a process: queue, nonce and retries left of each."""
    child = Child(ProcessStatusView([], 1), consumer.handlers)
    fields = ("queue", "nonce", "left")
    rows = [dict(zip(fields, one, strict=True)) | {"id": "x", "shard": 0} for one in held]
    if rows:
        ProcessStatus(child.board.descriptor, consumer, [], 1).report(rows)
    Recovery(consumer, concurrency=2).give_back(child, 1)


def test_a_report_that_cannot_be_settled_keeps_no_other_queue_from_its_messages(acking, queue, caplog):
    acking.handler("bad")(lambda body: None)
    queue.publish("x", id="x")
    held = claim(queue)

    give_back(acking, ("bad", None, 1), ("q", held.nonce, held.left))

    assert "queue bad: could not renew or return messages" in caplog.text
    assert queue.counts().ready == 1


def test_a_redis_that_is_away_is_waited_for_once_and_not_for_each_queue(own_server, own_consumer, caplog):
    for name in "abc":
        own_consumer.handler(name)(lambda body: None)
    own_server.stop()

    give_back(own_consumer, *((name, "n.1:9", 1) for name in "abc"))

    (told,) = [one.getMessage() for one in caplog.records if "could not renew or return" in one.getMessage()]
    assert told.startswith("queue a, b, c: ")


def test_a_count_of_retries_beyond_all_measure_stops_nothing(recovery, queue, client):
    queue.publish_many(["x"] * 4)
    far, farther, *others = run_transition(queue, "claim", CallNumber(LANE, 1), limit=4, lease_ms=60_000).claimed
    client.hset(queue.keys.retries_left, mapping={far.id: "5000000", farther.id: "9" * 5000})

    recovery.release(queue.keys, recovery.held(queue.keys, LANE))

    again = run_transition(queue, "claim", CallNumber("another", 1), limit=4, lease_ms=60_000).claimed
    assert {one.id for one in others} <= {one.id for one in again}


def test_messages_of_keys_go_back_to_the_heads_of_their_key_queues(recovery, queue, client):
    for body in ("a0", "a1", "a2", "b0"):
        queue.publish(body, id=body, key=body[0])
    queue.publish("plain", id="plain")
    run_transition(queue, "claim", CallNumber(LANE, 1), limit=4, lease_ms=60_000)
    (shard,) = recovery.shards(["q"])

    held = recovery.held(shard, LANE)
    recovery.release(shard, held)

    assert {one.id: one.key for one in held} == {"a0": "a", "a1": "a", "b0": "b", "plain": ""}
    assert client.lrange(queue.keys.line("a"), 0, -1) == [b"a2", b"a1", b"a0"]
    assert client.zcard(queue.keys.held) == 0


@pytest.fixture
def held(consumer, queue):
    """A child process of one slot that holds one message before its start, and the process's status page."""
    consumer.handler(queue, lease=10)(lambda body: None)
    child = Child(ProcessStatusView(["q"], 1), consumer.handlers)
    board = ProcessStatus(child.board.descriptor, consumer, consumer.handlers, 1)
    board._lanes["q"] = LANE
    board._note_lanes()
    board.look()
    queue.publish("x", id="x")
    claim(queue)
    return child, board


def claim(queue, number=1):
    (claimed,) = run_transition(queue, "claim", CallNumber(LANE, number), limit=1, lease_ms=60_000).claimed
    return claimed


def test_the_token_and_the_watch_of_a_killed_process_go_to_others(acking, queue, client):
    shards = [queue.keys.of_shard(shard) for shard in range(4)]
    client.set(queue.keys.map, ShardMap(1, 4, 4).text)
    for keys in shards:
        client.set(keys.watch, "the dead one", px=2000)

    give_back(acking)

    assert not client.exists(*(keys.watch for keys in shards))
    assert [client.llen(keys.wake) for keys in shards] == [1] * 4


def test_messages_that_wait_in_a_silent_process_go_back_while_it_is_stopped(held, consumer, queue):
    child, board = held
    child.silence = HeartbeatMonitor(20, beat=child.board.beat)
    child.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        Recovery(consumer, concurrency=1).help(child)

        assert queue.counts().ready == 1
        went_on = os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOHANG)
        assert went_on.si_status == signal.SIGCONT
    finally:
        child.process.communicate(b"\n")

    claim(queue, 2)
    board.look()  # as after a start
    Recovery(consumer, concurrency=1).help(child)
    assert queue.counts().unack == 1


@pytest.mark.parametrize("cause", ["unknown", "another message"])
def test_an_unstarted_message_pays_in_the_end_for_deaths_of_unknown_cause(held, consumer, queue, caplog, cause):
    child, _ = held
    if cause == "another message":
        child.kill("hung", charged=[])
    recovery = Recovery(consumer, concurrency=1)
    for number in range(FREE_RELEASES):
        recovery.give_back(child, 1)
        assert queue.counts().ready == 1
        claim(queue, number + 2)

    recovery.give_back(child, 1)

    assert queue.counts().unack == (cause == "unknown")
    assert ("queue q: several processes died that had prefetched these messages" in caplog.text) == (cause == "unknown")


def test_a_message_of_a_dead_process_comes_back_at_once_and_later_by_its_lease(held, consumer, queue, client):
    child, board = held
    board.begins(begun(consumer.handlers[0], "x"))
    recovery, whole = Recovery(consumer, concurrency=1), client.zscore(queue.keys.unack, "x")

    recovery.give_back(child, 1)
    assert whole - client.zscore(queue.keys.unack, "x") > 30
    eventually(lambda: run_transition(queue, "reclaim").overdue == ("x",), "its lease is over")
    again = claim(queue, 2)
    until = client.zscore(queue.keys.unack, "x")
    recovery.give_back(child, 2)

    assert (again.left, again.deaths) == (queue.settings.retries - 1, 1)
    assert client.zscore(queue.keys.unack, "x") == until
    assert queue.counts().totals.get("released", 0) == 0


def test_the_board_counts_for_a_process_that_has_not_stopped(held, consumer, start, queue):
    child, board = held
    start()
    _report_unfinished(consumer, board)

    Recovery(consumer, concurrency=1).give_back(child, 1)

    assert not child.board.report
    assert queue.counts().totals["released"] == 1


def test_time_in_which_the_supervisor_stood_still_counts_for_no_timeout(held, consumer):
    child, board = held
    board.begins(begun(consumer.handlers[0], "x"))
    (row,) = child.board.rows()
    child.hear(row.timeout_at)
    child.hear(row.timeout_at + 1000)
    assert not child.is_half_lease_over(child.overran(row.timeout_at + 1000))

    for second in range(5):
        child.hear(row.timeout_at + 1001 + second)

    assert child.is_half_lease_over(child.overran(row.timeout_at + 1005))


def test_a_process_that_ends_at_its_start_is_started_ever_later():
    for returncode, crashes in ((1, 4), (-signal.SIGSEGV, 4), (-signal.SIGKILL, 0)):
        child = Child(ProcessStatusView([], 1), [])
        for _ in range(4):
            child.note_end(returncode)

        assert (child.failures, child.crashes) == (4, crashes), returncode
        child.started_at = time.monotonic() - RESTART_SECONDS
        assert not child.may_start()
        child.started_at = time.monotonic() - SLOWEST_RESTART_SECONDS
        assert child.may_start()


def test_a_process_that_its_first_message_ends_did_not_fail_to_start(held, consumer):
    """Otherwise the supervisor would stop a worker whose first messages kill it, as if it failed to start."""
    child, board = held
    board.begins(begun(consumer.handlers[0], "x"))

    child.note_end(9)

    assert (child.failures, child.crashes) == (0, 0)
