"""`reliq worker`: its processes are started, replaced, stopped gracefully, and never orphaned."""

import signal

import pytest
from waiting import eventually
from worker_process import AT_ONCE, works

from reliq.keys import Keys
from reliq.redis.shards import ShardMap

pytestmark = pytest.mark.slow


def test_message_cut_off_at_the_end_of_the_grace_period_returns_unspent(worker, jobs, client):
    id = jobs.SLOW.publish(60.0).id
    process = worker("--queue", "slow", "--grace", "0.2")
    eventually(lambda: client.scard("note:started"), "the handler runs")

    process.stop()

    counts = jobs.SLOW.counts()
    assert (counts.ready, counts.unack) == (1, 0)
    assert process.said(f"ended before its handlers; returned messages to queue slow: {id}")
    assert client.hvals(jobs.SLOW.keys.retries_left) == [b"3"]


#: After a second signal, a worker gives back messages for half a second, which may be too short on a busy machine.
NO_HASTE = "import reliq.supervisor.supervisor as supervisor; supervisor.HASTY_SECONDS = 60"


def test_second_signal_ends_the_worker_at_once(worker, jobs, client):
    jobs.LASTING.publish(300.0)
    process = worker("--queue", "lasting", "--grace", "300", change=NO_HASTE)
    eventually(lambda: client.scard("note:started"), "the handler runs")
    children = process.children()

    process.process.send_signal(signal.SIGINT)
    eventually(lambda: client.scard("note:stopping"), "the first signal is handed on")
    eventually(lambda: process.process.send_signal(signal.SIGINT) or process.process.poll() is not None, "it ends")

    assert process.wait(100) == 130
    eventually(lambda: not any(map(works, children)), "its processes are gone")
    assert (client.llen(jobs.LASTING.keys.ready), client.hvals(jobs.LASTING.keys.retries_left)) == (1, [b"3"])


def test_messages_of_a_killed_process_return_to_each_shard_unspent(worker, jobs, client):
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


def test_process_over_max_memory_is_replaced(worker, jobs):
    process = worker("--queue", "once", "--max-memory", "1M")

    eventually(lambda: process.said("has grown over --max-memory"), "the process is found to be too large")
    eventually(lambda: process.said("starting another"), "another process takes its place")


def test_sigusr1_writes_the_stack_of_every_handler_with_its_message(worker, jobs, client):
    id = jobs.SLOW.publish(60.0).id
    process = worker("--queue", "slow", "--grace", "0.1")
    eventually(lambda: client.scard("note:started"), "the handler runs")

    process.process.send_signal(signal.SIGUSR1)

    eventually(lambda: process.said(f"handler on slow {id}") and process.said("/jobs.py:"), "the stacks are written")


@pytest.mark.parametrize("body", [1, 2], ids=["burns CPU", "holds the interpreter"])
def test_handler_that_overruns_its_timeout_ends_with_its_process(worker, jobs, client, body):
    jobs.STUCK.publish(body)

    process = worker("--queue", "stuck", "--concurrency", "1", "--grace", "1")

    eventually(lambda: process.said("starting another"), "the process was replaced")
    eventually(lambda: jobs.STUCK.counts().dead == 1, "the message had no retry left")


def test_worker_refuses_a_redis_that_may_evict_unless_allowed(worker, jobs, client):
    client.config_set("maxmemory-policy", "volatile-lru")
    try:
        refused = worker("--queue", "once", "--burst-delayed")
        assert refused.wait() == 78
        assert refused.said("maxmemory-policy must be noeviction, not volatile-lru")
        assert refused.said(
            "set it in redis.conf, or in the parameter group or console of a managed Redis, or start with"
        )
        assert refused.said("--allow-eviction")

        assert worker("--queue", "once", "--burst-delayed", "--allow-eviction").wait() == 0
    finally:
        client.config_set("maxmemory-policy", "noeviction")


BAD_OPTIONS = {
    "--queue": ("nosuch", "no handler for queue 'nosuch'"),
    "--processes": ("0", "--processes must be 1 to 1000, not 0"),
    "--max-memory": ("lots", "--max-memory must be a size such as 512M"),
    "--log-level": ("loud", "--log-level must be one of"),
}


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_worker_with_a_bad_option_ends_with_exit_code_2(worker, jobs, option):
    value, complaint = BAD_OPTIONS[option]

    process = worker(option, value)

    assert process.wait() == 2
    assert process.said(complaint)
    assert not process.said("Traceback")


def test_program_that_a_handler_starts_reads_an_empty_standard_input(worker, jobs, client):
    jobs.ENDING.publish("reads")

    assert worker("--queue", "ending", "--burst-delayed").wait() == 0

    assert client.sismember("note:done", "reads")


def test_process_that_gets_sigterm_twice_lets_its_handler_finish(worker, jobs, client):
    jobs.SLOW.publish(0.0)
    process = worker("--queue", "slow", place="beginnings:consumer")
    eventually(lambda: client.scard("note:started"), "the handler runs until it may go")
    (child,) = process.children()

    for _ in range(3):
        child.send_signal(signal.SIGTERM)
    eventually(lambda: process.said("worker: stopping; waiting"), "the process has got them")
    client.sadd("note:go", "1")

    assert process.stop() == 0
    assert jobs.SLOW.counts().totals["acked"] == 1


def test_process_is_replaced_after_max_jobs_and_a_burst_goes_on(worker, jobs):
    jobs.ONCE.publish_many(range(30))

    options = ("--queue", "once", "--burst-delayed", "--max-jobs", "10", "--concurrency", "1")
    process = worker(*options, change=AT_ONCE)

    assert process.wait() == 0
    assert process.said("starting another")
    assert (jobs.ONCE.counts().alive, jobs.ONCE.counts().totals["acked"]) == (0, 30)


def test_worker_that_never_reached_redis_stops_before_its_grace_period(worker, jobs, environment):
    environment["RELIQ_URL"] = "redis://127.0.0.1:1/0"
    process = worker("--queue", "once", "--grace", "60")
    eventually(lambda: process.said("Redis is away"), "the child tries")

    assert process.stop(seconds=55) == 0  # less than its grace period


def test_sigusr1_before_a_process_is_ready_does_no_harm(worker, jobs):
    process = worker("--queue", "once", "--processes", "2")
    eventually(lambda: len(process.children()) == 2, "the children start")
    first = {child.pid for child in process.children()}

    for child in process.children():
        child.send_signal(signal.SIGUSR1)
    jobs.ONCE.publish(1)

    eventually(lambda: jobs.ONCE.counts().totals.get("acked"), "they work")
    assert {child.pid for child in process.children()} == first


@pytest.mark.parametrize(("wished", "found"), [(None, "2"), ("5", "5")], ids=["by default", "five"])
def test_process_has_two_malloc_arenas_or_the_number_of_its_environment(environment, worker, wished, found):
    environment.pop("MALLOC_ARENA_MAX", None)
    environment.update({"MALLOC_ARENA_MAX": wished} if wished else {})

    process = worker("--queue", "once", "--processes", "1")

    eventually(process.children, "the child starts")
    assert process.children()[0].environ()["MALLOC_ARENA_MAX"] == found
