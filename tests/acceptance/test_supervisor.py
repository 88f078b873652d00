"""`reliq worker`: processes that are started, replaced, stopped in peace, and never left behind."""

import signal

import psutil
import pytest
from waiting import eventually
from worker_process import AT_ONCE, works

from reliq.keys import Keys
from reliq.shardmap import ShardMap


def test_it_prints_what_it_serves_works_and_ends_with_the_queues_empty(worker, jobs):
    jobs.ONCE.publish_many(range(200))

    process = worker("--queue", "once", "--processes", "2", "--burst=delayed")

    assert process.wait() == 0
    assert process.said("jobs.once")
    assert jobs.ONCE.counts().totals["acked"] == 200
    assert jobs.ONCE.counts().alive == 0


def test_sigterm_lets_running_handlers_finish_and_gives_the_rest_back_unspent(worker, jobs, client):
    jobs.LASTING.publish_many([1.0] * 6)
    process = worker("--queue", "lasting", "--concurrency", "2")
    eventually(lambda: client.scard("note:started") == 2, "two handlers run")

    process.process.send_signal(signal.SIGTERM)

    assert process.wait() == 0
    counts = jobs.LASTING.counts()
    assert (counts.ready, counts.unack, counts.totals["acked"]) == (4, 0, 2)
    assert set(client.hvals(jobs.LASTING.keys.retries_left)) == {b"3"}


def test_what_is_cut_off_at_the_end_of_the_grace_is_given_back_unspent_once_its_process_is_dead(worker, jobs, client):
    id = jobs.SLOW.publish(60.0).id
    process = worker("--queue", "slow", "--grace", "0.2")
    eventually(lambda: client.scard("note:started"), "the handler runs")

    process.process.send_signal(signal.SIGTERM)

    process.wait()
    counts = jobs.SLOW.counts()
    assert (counts.ready, counts.unack) == (1, 0)
    assert process.said(f"ended before its handlers; given back to slow: {id}")
    assert client.hvals(jobs.SLOW.keys.retries_left) == [b"3"]


def test_a_second_signal_ends_it_at_once(worker, jobs, client):
    jobs.LASTING.publish(300.0)
    process = worker("--queue", "lasting", "--grace", "300")
    eventually(lambda: client.scard("note:started"), "the handler runs")
    children = process.children()

    process.process.send_signal(signal.SIGINT)
    eventually(lambda: client.scard("note:stopping"), "the first signal is handed on")
    process.process.send_signal(signal.SIGINT)

    assert process.wait(100) == 130
    eventually(lambda: not any(map(works, children)), "its processes are gone")


def test_a_child_that_dies_is_replaced(worker, jobs):
    process = worker("--queue", "once", "--processes", "2")
    eventually(lambda: len(process.children()) == 2, "two children run")
    first = {child.pid for child in process.children()}

    process.children()[0].kill()

    eventually(lambda: len({c.pid for c in process.children()} - first) == 1, "another child has taken its place")


def test_what_a_killed_child_held_of_several_shards_is_given_back_to_each_at_once_and_unspent(worker, jobs, client):
    shards = [Keys("gathered", shard=number) for number in range(8)]
    client.set(shards[0].map, ShardMap(1, 8, 8).text)
    jobs.GATHERED.publish_many(["x"] * 24, chunk=1)
    process = worker("--queue", "gathered", "--queue", "once", "--processes", "1", change=AT_ONCE)
    held = [keys.unack for keys in shards]
    eventually(lambda: sum(map(client.zcard, held)) == 24, "it gathers a batch of all shards")
    jobs.ONCE.publish(1)
    eventually(lambda: client.scard("note:done"), "the supervisor knows by which name it claims")

    process.children()[0].kill()

    released = [(keys.totals, "released") for keys in shards]
    eventually(
        lambda: all(client.hget(*one) == b"3" for one in released), "all is given back, long before a lease ends"
    )


def test_children_do_not_outlive_a_killed_supervisor(worker, jobs):
    process = worker("--queue", "once", "--processes", "2")
    jobs.ONCE.publish(1)
    eventually(lambda: jobs.ONCE.counts().totals.get("acked"), "a child works")
    children = process.children()

    process.process.kill()

    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_a_process_is_replaced_after_so_many_jobs(worker, jobs):
    jobs.ONCE.publish_many(range(15))

    process = worker("--queue", "once", "--max-jobs", "5", "--concurrency", "1", change=AT_ONCE)

    eventually(lambda: jobs.ONCE.counts().alive == 0 and process.said("starting another"), "a process was replaced")
    assert jobs.ONCE.counts().totals["acked"] == 15


def test_a_process_that_grows_too_large_is_replaced(worker, jobs):
    process = worker("--queue", "once", "--max-memory", "1M")

    eventually(lambda: process.said("has grown over --max-memory"), "the process was seen to be too large")


def test_sigusr1_writes_the_stack_of_every_handler_with_its_message(worker, jobs, client):
    id = jobs.SLOW.publish(60.0).id
    process = worker("--queue", "slow", "--grace", "0.1")
    eventually(lambda: client.scard("note:started"), "the handler runs")

    process.process.send_signal(signal.SIGUSR1)

    eventually(lambda: process.said(f"on slow {id}") and process.said("time.sleep(seconds)"), "the stacks are written")


@pytest.mark.parametrize("body", [1, 2], ids=["burns CPU", "holds the interpreter"])
def test_a_single_handler_that_overruns_its_timeout_is_ended_with_its_process(worker, jobs, client, body):
    jobs.STUCK.publish(body)

    process = worker("--queue", "stuck", "--concurrency", "1", "--grace", "1")

    eventually(lambda: process.said("starting another"), "the process was replaced")
    eventually(lambda: jobs.STUCK.counts().dead == 1, "the message had no retry left")


def test_it_refuses_a_redis_that_may_evict_messages_unless_told(worker, jobs, client):
    client.config_set("maxmemory-policy", "volatile-lru")
    try:
        refused = worker("--queue", "once", "--burst=delayed")
        assert refused.wait() == 78
        assert refused.said("maxmemory-policy must be noeviction, not volatile-lru")

        assert worker("--queue", "once", "--burst=delayed", "--allow-eviction").wait() == 0
    finally:
        client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--queue", "nosuch"), "no handler for queue 'nosuch'"),
        (("--processes", "0"), "--processes must be 1 to 1000, not 0"),
        (("--concurrency", "0"), "concurrency must be 1 to 10000, not 0"),
        (("--grace", "-1"), "grace must be 0 to"),
        (("--max-memory", "lots"), "--max-memory must be a size such as 512M"),
        (("--url", "http://x"), "must begin with redis://, rediss:// or unix://"),
        (("--log-level", "loud"), "--log-level must be one of"),
    ],
)
def test_bad_options_are_one_line_that_says_what_is_wanted(worker, jobs, options, complaint):
    process = worker(*options)

    assert process.wait() == 2
    assert process.said(complaint)
    assert not process.said("Traceback")


def test_redis_that_comes_back_finds_the_worker_at_work(worker, jobs, redis_server, client):
    process = worker("--queue", "once")
    jobs.ONCE.publish(1)
    eventually(lambda: jobs.ONCE.counts().totals.get("acked") == 1, "the worker works")

    redis_server.kill()
    eventually(lambda: process.said("Redis is away"), "the worker has noticed")
    redis_server.start()
    jobs.ONCE.publish(2)

    eventually(lambda: jobs.ONCE.counts().totals.get("acked") == 1, "the worker works again")
    assert len(process.children()) == 1


def test_bodies_that_take_long_to_read_start_all_the_same(worker, jobs, client):
    for number in range(8):
        jobs.LARGE.publish(bytes(16 * 1024 * 1024 - number))

    assert worker("--queue", "large", "--burst=delayed").wait() == 0

    assert client.scard("note:done") == 8


def test_a_task_of_a_handler_that_raises_system_exit_ends_no_loop(worker, jobs, client):
    jobs.ENDING.publish("leaves")
    jobs.ENDING.publish("stays")

    process = worker("--queue", "ending")

    eventually(lambda: client.sismember("note:done", "stays"), "the other coroutine runs")
    assert len(process.children()) == 1


def test_what_a_handler_starts_reads_an_empty_standard_input(worker, jobs, client):
    jobs.ENDING.publish("reads")

    assert worker("--queue", "ending", "--burst=delayed").wait() == 0

    assert client.sismember("note:done", "reads")


def test_a_child_that_is_asked_to_stop_twice_still_lets_its_handler_finish(worker, jobs, client):
    jobs.SLOW.publish(2.0)
    process = worker("--queue", "slow")
    eventually(lambda: client.scard("note:started"), "the handler runs")

    for _ in range(3):
        process.children()[0].send_signal(signal.SIGTERM)
    process.process.send_signal(signal.SIGTERM)

    assert process.wait() == 0
    assert jobs.SLOW.counts().totals["acked"] == 1


def test_burst_goes_on_when_a_process_is_replaced_after_so_many_jobs(worker, jobs):
    jobs.ONCE.publish_many(range(30))

    assert (
        worker("--queue", "once", "--burst=delayed", "--max-jobs", "10", "--concurrency", "1", change=AT_ONCE).wait()
        == 0
    )

    assert jobs.ONCE.counts().alive == 0


def test_a_stop_while_redis_is_away_from_the_start_is_quick(worker, jobs, environment):
    environment["RELIQ_URL"] = "redis://127.0.0.1:1/0"
    process = worker("--queue", "once", "--grace", "60")
    eventually(lambda: process.said("Redis is away"), "the child tries")

    process.process.send_signal(signal.SIGTERM)

    assert process.wait(55) == 0  # less than its grace


def test_stacks_may_be_wished_for_before_a_child_is_ready(worker, jobs):
    process = worker("--queue", "once", "--processes", "2")
    eventually(lambda: len(process.children()) == 2, "the children start")
    first = {child.pid for child in process.children()}

    for child in process.children():
        child.send_signal(signal.SIGUSR1)
    jobs.ONCE.publish(1)

    eventually(lambda: jobs.ONCE.counts().totals.get("acked"), "they work")
    assert {child.pid for child in process.children()} == first


@pytest.mark.parametrize(("wished", "found"), [(None, "2"), ("5", "5")])
def test_threads_share_two_heaps_unless_another_number_is_wished_for(environment, worker, wished, found):
    environment.pop("MALLOC_ARENA_MAX", None)
    environment.update({"MALLOC_ARENA_MAX": wished} if wished else {})

    process = worker("--queue", "once", "--processes", "1")

    eventually(process.children, "the child starts")
    assert process.children()[0].environ()["MALLOC_ARENA_MAX"] == found
