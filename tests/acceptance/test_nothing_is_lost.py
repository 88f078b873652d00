"""Whatever dies, every message that was confirmed ends in exactly one way."""

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import redis
from forked import end_forked, forked
from ports import free_port
from waiting import eventually

from reliq import Outgoing, PublishFailed, WorkerSettings
from reliq.embedded import EmbeddedRedis

KILLS, LONG_KILLS = 80, 200
DUE_AT_ONCE = 60_000


def leftovers(client: redis.Redis, queue) -> dict[str, int]:
    """How much the structures hold that must be empty when nothing is alive."""
    keys = queue.keys
    sizes = {"unack": client.zcard(keys.unack), "retry": client.llen(keys.retry)}
    return sizes | {name: client.hlen(getattr(keys, name)) for name in ("retries_left", "lease", "errors")}


NOTHING = {"unack": 0, "retry": 0, "retries_left": 0, "lease": 0, "errors": 0}


@pytest.mark.timeout(400)
def test_20000_mixed_jobs_survive_a_process_killed_every_two_seconds(worker, jobs, client):
    chance = random.Random(7)
    moods = chance.choices(["good", "flaky", "fails"], [0.85, 0.1, 0.05], k=20_000)
    ids = [f"job-{number}" for number in range(20_000)]
    process = worker("--queue", "mixed", "--processes", "4", "--log-level", "error")
    eventually(lambda: len(process.children()) == 4, "there is something to kill")

    jobs.MIXED.publish_many(
        Outgoing(body={"mood": mood}, id=id, delay=chance.choice([0, 0, chance.uniform(0, 5)]))
        for id, mood in zip(ids, moods, strict=True)
    )
    answers = [jobs.MIXED.cancel(id) for id in chance.sample(ids, 500)]
    is_over = lambda: jobs.MIXED.counts().alive == 0  # noqa: E731
    killed = kill_one_now_and_then(process, client, until=is_over)
    eventually(is_over, "everything is handled in the end")

    counts = jobs.MIXED.counts()
    assert killed >= 2
    assert counts.missing == 0
    assert counts.totals["published"] == 20_000
    assert counts.totals["cancelled"] >= answers.count("cancelled")
    assert counts.totals["dead"] <= moods.count("fails") + 5
    assert leftovers(client, jobs.MIXED) == NOTHING


def kill_one_now_and_then(process, client, until) -> int:
    """Kill a child every two seconds until `until`; return how many."""
    killed = 0
    for _ in range(60):
        client.blpop(["nothing"], 2)
        if until():
            return killed
        for child in process.children()[:1]:
            child.kill()
            killed += 1
    return killed


def test_a_message_that_kills_its_process_takes_none_of_its_batch_with_it(worker, jobs):
    jobs.DEADLY.publish("killer")
    jobs.DEADLY.publish_many(["good"] * 99)

    process = worker("--queue", "deadly", "--burst=delayed", "--log-level", "error")

    assert process.wait(100) == 0
    totals = jobs.DEADLY.counts().totals
    assert (totals["acked"], totals["dead"]) == (99, 1)
    assert [letter.payload for letter in jobs.DEADLY.letters()] == [b"killer"]
    assert jobs.DEADLY.letters()[0].reason == "lease"


@pytest.mark.timeout(600)
def test_very_many_messages_due_at_once_are_delivered_by_bounded_calls(worker, jobs, client):
    jobs.MIXED.publish_many(Outgoing(body={"mood": "good"}, delay=3) for _ in range(DUE_AT_ONCE))

    process = worker("--queue", "mixed", "--processes", "2", "--burst=delayed", "--log-level", "error")

    assert process.wait(400) == 0
    assert not process.said("Traceback")
    assert jobs.MIXED.counts().totals["acked"] == DUE_AT_ONCE
    # How long a call holds others up is bounded by how much it does: none moves more than 500.
    assert client.info("commandstats")["cmdstat_zrem"]["calls"] >= DUE_AT_ONCE / 500


@pytest.fixture
def fork(jobs) -> Iterator[Callable[..., ForkServerProcess]]:
    """Start functions in processes that end with the test."""
    yield forked
    end_forked()


def publish_for_ever(folder: str) -> None:
    """Publish, and write down each confirmed id so that it survives us."""
    import jobs

    file = os.open(Path(folder) / f"{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in itertools.count():
        # A publisher does not outrun the workers by more than a little.
        done = jobs.ONCE.publish_many([number] * 20, max_backlog=200)
        receipt = jobs.ONCE.publish(number, delay=random.choice([0, 0.05]))
        assert done.published == 20
        os.write(file, receipt.id.encode() + b"\n")


def work_for_ever() -> None:
    import jobs

    jobs.consumer.run(WorkerSettings(concurrency=4), queues=["once"])


def accounted_for(client: redis.Redis, queue, confirmed: set[bytes]) -> set[bytes]:
    """Return the confirmed ids that are nowhere: not alive, not handled, not dead."""
    keys = queue.keys
    with client.pipeline(transaction=True) as snapshot:
        snapshot.hkeys(keys.retries_left).smembers(keys.garbage).smembers("note:done")
        alive, garbage, done = snapshot.execute()
    return confirmed - set(alive) - garbage - done - dead_ids(queue)


def dead_ids(queue) -> set[bytes]:
    """Return the ids of all dead letters."""
    ids: set[bytes] = set()
    after = ""
    while letters := queue.letters(limit=500, after=after):
        ids |= {letter.id.encode() for letter in letters}
        after = letters[-1].letter
    return ids


@pytest.mark.timeout(600)
def test_after_each_of_many_sigkills_the_account_balances_and_every_confirmed_message_is_there(
    jobs, client, fork, tmp_path, request
):
    chance = random.Random(11)
    targets = [(work_for_ever,), (work_for_ever,), (publish_for_ever, str(tmp_path))]
    children = [fork(*target) for target in targets]
    eventually(lambda: jobs.ONCE.counts().totals.get("acked", 0) > 20, "work is done")
    for _ in range(LONG_KILLS if request.config.getoption("--long") else KILLS):
        client.blpop(["nothing"], chance.uniform(0.02, 0.15))
        victim = chance.randrange(len(children))
        os.kill(children[victim].pid, signal.SIGKILL)
        children[victim].join()
        confirmed = {line for file in tmp_path.iterdir() for line in file.read_bytes().split()}

        assert jobs.ONCE.counts().missing == 0
        assert accounted_for(client, jobs.ONCE, confirmed) == set()

        children[victim] = fork(*targets[victim])

    os.kill(children[2].pid, signal.SIGKILL)
    eventually(lambda: jobs.ONCE.counts().alive == 0, "everything is handled in the end")
    assert confirmed - client.smembers("note:done") - dead_ids(jobs.ONCE) == set()
    assert jobs.ONCE.counts().missing == 0
    assert leftovers(client, jobs.ONCE) == NOTHING


def test_redis_killed_in_the_middle_loses_nothing_that_publish_confirmed(
    worker, jobs, environment, monkeypatch, server_path
):
    options = {"appendonly": "yes", "appendfsync": "always"}
    with EmbeddedRedis(server=server_path, port=free_port(), options=options) as server:
        monkeypatch.setenv("RELIQ_URL", server.url)
        environment["RELIQ_URL"] = server.url
        process = worker("--queue", "once", "--processes", "2", "--log-level", "error")
        client = redis.Redis.from_url(server.url)
        confirmed: set[bytes] = set()
        unknown = 0
        for number in range(4000):
            if number in (1000, 2500):
                server.kill()
            try:
                confirmed.add(jobs.ONCE.publish(number).id.encode())
            except PublishFailed:
                unknown += 1
                server.start()
        eventually(lambda: jobs.ONCE.counts().alive == 0, "everything is handled in the end")

        assert unknown == 2
        assert confirmed - client.smembers("note:done") == set()
        assert jobs.ONCE.counts().missing == 0
        assert not process.said("Traceback"), "".join(process.lines)
        client.close()
        jobs.ONCE.close()
