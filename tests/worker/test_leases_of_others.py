"""What a process holds, as its supervisor finds it in Redis when the process says nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from begun import begun
from waiting import eventually

from reliq import Consumer, Queue
from reliq.consumer.board import Board, BoardView
from reliq.health import Pulse
from reliq.process.child import RESTART_SECONDS, SLOWEST_RESTART_SECONDS, Child, Silence
from reliq.process.leases import Leases
from reliq.process.main import _report_unfinished
from reliq.process.recovery import FREE_RELEASES, Recovery
from reliq.shardmap import ShardMap
from reliq.transitions import CallNumber

LANE = "lane-of-another"


@pytest.fixture
def leases(consumer, queue):
    consumer.handler(queue)(lambda body: None)
    return Leases(consumer)


@pytest.mark.parametrize("count", ["5000000", "9" * 5000])
def test_a_count_that_is_beyond_all_measure_stops_nothing(leases, queue, client, count):
    queue.publish_many(["x"] * 3)
    odd, *others = queue.moves.claim(CallNumber(LANE, 1), limit=3, lease_ms=60_000).claimed
    client.hset(queue.keys.retries_left, odd.id, count)

    leases.release(queue.keys, leases.held(queue.keys, LANE))

    again = queue.moves.claim(CallNumber("another", 1), limit=3, lease_ms=60_000).claimed
    assert {one.id for one in others} <= {one.id for one in again}


def test_what_a_process_holds_of_keys_goes_back_to_the_heads_of_their_lines(leases, queue, client):
    for body in ("a0", "a1", "a2", "b0"):
        queue.publish(body, id=body, key=body[0])
    queue.publish("plain", id="plain")
    queue.moves.claim(CallNumber(LANE, 1), limit=4, lease_ms=60_000, keyed=True)
    (shard,) = leases.shards(["q"])

    held = leases.held(shard, LANE)
    leases.release(shard, held)

    assert {one.id: one.key for one in held} == {"a0": "a", "a1": "a", "b0": "b", "plain": ""}
    assert client.lrange(queue.keys.line("a"), 0, -1) == [b"a2", b"a1", b"a0"]
    assert client.zcard(queue.keys.held) == 0


def test_nothing_that_goes_wrong_there_ends_a_supervisor_and_other_queues_are_settled(url, tmp_path, caplog):
    consumer, queue = Consumer(url), Queue("good", str, url=url)
    for one in (Queue("bad", str, url=url), queue):
        consumer.handler(one)(lambda body: None)
    queue.publish("x", id="x")
    (held,) = queue.moves.claim(CallNumber(LANE, 1), limit=1, lease_ms=60_000).claimed
    child = Child(0, tmp_path, Pulse(), consumer.handlers)
    rows = [{"queue": "bad", "shard": 0, "id": "x", "nonce": None, "left": 1}]
    rows += [{"queue": "good", "shard": 0, "id": held.id, "nonce": held.nonce, "left": held.left}]
    child.report.write_text(json.dumps(rows))

    Recovery(consumer, concurrency=2).give_back(child, 1)

    assert "bad: what a process held could not be settled" in caplog.text
    assert queue.counts().ready == 1


def test_a_supervisor_does_not_wait_for_a_redis_that_is_away_once_for_each_queue(own_server, tmp_path, caplog):
    consumer, names = Consumer(own_server.url), ["a", "b", "c"]
    for name in names:
        consumer.handler(Queue(name, str))(lambda body: None)
    child = Child(0, tmp_path, Pulse(), consumer.handlers)
    child.report.write_text(
        json.dumps([{"queue": one, "shard": 0, "id": "x", "nonce": "n.1:9", "left": 1} for one in names])
    )
    own_server.stop()

    Recovery(consumer, concurrency=2).give_back(child, 1)

    (told,) = [one.getMessage() for one in caplog.records if "could not be settled" in one.getMessage()]
    assert told.startswith("a, b, c: ")


@pytest.fixture
def held(consumer, queue, tmp_path):
    """A child of one slot whose process holds one message that has not started, and the process's side of its board."""
    consumer.handler(queue, lease=10)(lambda body: None)
    child = Child(0, tmp_path, Pulse(), consumer.handlers)
    child.board = BoardView(tmp_path / "board", ["q"], 1)
    board = Board(tmp_path / "board", consumer, consumer.handlers, 1)
    board._lanes["q"] = LANE
    board._note_lanes()
    board.look()
    queue.publish("x", id="x")
    claim(queue)
    return child, board


def claim(queue, number=1):
    (claimed,) = queue.moves.claim(CallNumber(LANE, number), limit=1, lease_ms=60_000).claimed
    return claimed


def silent(child, seconds):
    child.silence = Silence(seconds, beat=child.board.beat)


def test_a_token_and_the_watch_that_a_killed_process_had_taken_are_there_for_others(consumer, queue, tmp_path, client):
    shards = [queue.keys.of_shard(shard) for shard in range(4)]
    client.set(queue.keys.map, ShardMap(1, 4, 4).text)
    consumer.handler(queue)(lambda body: None)
    for keys in shards:
        client.set(keys.watch, "the dead one", px=2000)
    child = Child(0, tmp_path, Pulse(), consumer.handlers)

    Recovery(consumer, concurrency=2).give_back(child, 1)

    assert not client.exists(*(keys.watch for keys in shards))
    assert [client.llen(keys.wake) for keys in shards] == [1] * 4


def test_what_waits_in_a_silent_process_of_one_slot_goes_back_and_its_process_stands_still_meanwhile(
    held, consumer, queue
):
    child, _ = held
    silent(child, 20)
    child.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        Recovery(consumer, concurrency=1).help(child)

        assert queue.counts().ready == 1
        went_on = os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOHANG)
        assert went_on.si_status == signal.SIGCONT
    finally:
        child.process.communicate(b"\n")


def test_what_waits_in_a_process_that_has_just_woken_stays_there(held, consumer, queue):
    child, board = held
    silent(child, 20)
    board.look()

    Recovery(consumer, concurrency=1).help(child)

    assert queue.counts().unack == 1


def test_a_message_that_nobody_has_started_pays_for_its_process_in_the_end(held, consumer, queue, caplog):
    child, _ = held
    recovery = Recovery(consumer, concurrency=1)
    for number in range(FREE_RELEASES):
        recovery.give_back(child, 1)
        assert queue.counts().ready == 1
        claim(queue, number + 2)

    recovery.give_back(child, 1)

    assert (queue.counts().ready, queue.counts().unack) == (0, 1)
    assert "q: processes died one after another that held these" in caplog.text


def test_what_ran_in_a_process_that_is_dead_comes_back_at_once_and_when_it_dies_again_after_its_lease(
    held, consumer, queue, client
):
    child, board = held
    board.begins(begun(consumer.handlers[0], "x"))
    recovery, whole = Recovery(consumer, concurrency=1), client.zscore(queue.keys.unack, "x")

    recovery.give_back(child, 1)
    assert whole - client.zscore(queue.keys.unack, "x") > 30
    eventually(lambda: queue.moves.reclaim().overdue == ("x",), "its lease is over")
    again = claim(queue, 2)
    until = client.zscore(queue.keys.unack, "x")
    recovery.give_back(child, 2)

    assert (again.left, again.deaths) == (queue.settings.retries - 1, 1)
    assert client.zscore(queue.keys.unack, "x") == until
    assert queue.counts().totals.get("released", 0) == 0


def test_it_does_not_pay_for_a_process_that_was_ended_for_another_message(held, consumer, queue):
    child, _ = held
    child.kill("hung", charged=[])
    recovery = Recovery(consumer, concurrency=1)
    for number in range(FREE_RELEASES + 1):
        recovery.give_back(child, 1)
        assert queue.counts().ready == 1
        claim(queue, number + 2)


def test_a_process_that_has_not_stopped_reports_nothing_and_its_board_counts(held, consumer, start, queue, tmp_path):
    child, _ = held
    start()
    _report_unfinished(consumer, child.report)

    Recovery(consumer, concurrency=1).give_back(child, 1)

    assert not child.report.exists()
    assert queue.counts().totals["released"] == 1


def test_time_for_which_the_supervisor_itself_stood_still_is_no_overrun(held, consumer):
    child, board = held
    board.begins(begun(consumer.handlers[0], "x"))
    (row,) = child.rows()
    child.hear(row.timeout_at)
    child.hear(row.timeout_at + 1000)
    assert not child.is_half_lease_over(child.overran(row.timeout_at + 1000))

    for second in range(5):
        child.hear(row.timeout_at + 1001 + second)

    assert child.is_half_lease_over(child.overran(row.timeout_at + 1005))


@pytest.mark.parametrize(("returncode", "crashes"), [(1, 4), (-signal.SIGSEGV, 4), (-signal.SIGKILL, 0), (0, 0)])
def test_a_process_that_is_killed_at_its_start_comes_back_ever_later_and_is_no_crash(tmp_path, returncode, crashes):
    child = Child(0, tmp_path, Pulse(), [])
    for _ in range(4):
        child.note_end(returncode)

    assert (child.failures, child.crashes) == (4, crashes)
    child.started_at = time.monotonic() - RESTART_SECONDS
    assert not child.may_start()
    child.started_at = time.monotonic() - SLOWEST_RESTART_SECONDS
    assert child.may_start()


def test_a_process_that_its_first_message_ends_before_anybody_has_looked_has_come_through_its_start(held, consumer):
    """Else a worker whose first messages kill it, one after another, is ended as one that cannot start."""
    child, board = held
    board.begins(begun(consumer.handlers[0], "x"))

    child.note_end(9)

    assert (child.failures, child.crashes) == (0, 0)
