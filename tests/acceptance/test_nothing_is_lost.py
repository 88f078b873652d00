"""After kills of any process, every confirmed message ends in exactly one way."""

import itertools
import os
import random
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import redis
from forked import end_forked, forked
from waiting import eventually
from worker_process import AT_ONCE

from reliq import OutgoingMessage, WorkerSettings
from tests.harness.chaos.scan import leftovers

pytestmark = pytest.mark.slow

KILLS, LONG_KILLS = 40, 200
MIXED = 3000


@pytest.mark.timeout(600)
def test_mixed_jobs_survive_the_kill_of_a_process_again_and_again(worker, jobs, client):
    """Kill a process after each tenth of the jobs is acked."""
    chance = random.Random(7)
    moods = chance.choices(["good", "flaky", "fails"], [0.85, 0.1, 0.05], k=MIXED)
    ids = [f"job-{number}" for number in range(MIXED)]
    process = worker("--queue", "mixed", "--processes", "4", "--log-level", "error", change=AT_ONCE)
    eventually(lambda: len(process.children()) == 4, "there is something to kill")

    jobs.MIXED.publish_many(
        OutgoingMessage(body={"mood": mood}, id=id, delay=chance.choice([0, 0, chance.uniform(0, 3)]))
        for id, mood in zip(ids, moods, strict=True)
    )
    answers = [jobs.MIXED.cancel(id) for id in chance.sample(ids, 100)]
    for tenth in range(1, 8):
        acked = tenth * MIXED // 10
        eventually(lambda acked=acked: jobs.MIXED.counts().totals.get("acked", 0) >= acked, "work goes on")
        eventually(process.children, "there is something to kill")[0].kill()
    eventually(lambda: jobs.MIXED.counts().alive == 0, "everything is handled in the end")

    counts = jobs.MIXED.counts()
    assert counts.missing == 0
    assert counts.totals["published"] == MIXED
    assert counts.totals["cancelled"] >= answers.count("cancelled")
    assert leftovers(client, jobs.MIXED.keys) == {}


def test_message_that_kills_its_process_spares_its_batch(worker, jobs):
    jobs.DEADLY.publish("killer")
    jobs.DEADLY.publish_many(["good"] * 99)

    process = worker("--queue", "deadly", "--burst-delayed", "--log-level", "error")

    assert process.wait(100) == 0
    totals = jobs.DEADLY.counts().totals
    assert (totals["acked"], totals["dead"]) == (99, 1)
    assert [letter.payload for letter in jobs.DEADLY.dead_letters()] == [b"killer"]
    assert jobs.DEADLY.dead_letters()[0].reason == "lease"


@pytest.fixture
def fork(jobs) -> Iterator[Callable[..., ForkServerProcess]]:
    """Start functions in processes that end with the test."""
    yield forked
    end_forked()


def publish_for_ever(folder: str) -> None:
    """Publish without an end, and record each confirmed id so that it survives a kill."""
    import jobs

    file = os.open(Path(folder) / f"{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in itertools.count():
        # Do not publish much faster than the workers handle.
        done = jobs.ONCE.publish_many([number] * 20, max_backlog=200)
        receipt = jobs.ONCE.publish(number, delay=random.choice([0, 0.05]))
        assert done.published == 20
        os.write(file, receipt.id.encode() + b"\n")


def work_for_ever() -> None:
    import jobs

    jobs.consumer.run(WorkerSettings(concurrency=4), queues=["once"])


def accounted_for(client: redis.Redis, queue, confirmed: set[bytes]) -> set[bytes]:
    """Return the confirmed ids that are missing: not alive, not handled, not dead."""
    keys = queue.keys
    with client.pipeline(transaction=True) as snapshot:
        snapshot.hkeys(keys.retries_left).smembers(keys.garbage).smembers("note:done")
        alive, garbage, done = snapshot.execute()
    return confirmed - set(alive) - garbage - done - dead_ids(queue)


def dead_ids(queue) -> set[bytes]:
    """Return the ids of all dead letters."""
    letters = queue.dead_letters(limit=500)
    assert len(letters) < 500
    return {letter.id.encode() for letter in letters}


@pytest.mark.timeout(600)
def test_account_balances_after_each_of_many_sigkills(jobs, client, fork, tmp_path, request):
    chance = random.Random(11)
    targets = [(work_for_ever,), (work_for_ever,), (publish_for_ever, str(tmp_path))]
    children = [fork(*target) for target in targets]
    eventually(lambda: jobs.ONCE.counts().totals.get("acked", 0) > 20, "work is done")
    for _ in range(LONG_KILLS if request.config.getoption("--long") else KILLS):
        client.blpop(["nothing"], chance.uniform(0.02, 0.15))
        victim = chance.randrange(len(children))
        children[victim].kill()
        children[victim].join()
        confirmed = {line for file in tmp_path.iterdir() for line in file.read_bytes().split()}

        assert jobs.ONCE.counts().missing == 0
        assert accounted_for(client, jobs.ONCE, confirmed) == set()

        children[victim] = fork(*targets[victim])

    children[2].kill()
    eventually(lambda: jobs.ONCE.counts().alive == 0, "everything is handled in the end")
    assert confirmed - client.smembers("note:done") - dead_ids(jobs.ONCE) == set()
    assert jobs.ONCE.counts().missing == 0
    assert leftovers(client, jobs.ONCE.keys) == {}
