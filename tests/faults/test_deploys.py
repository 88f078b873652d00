"""A shutdown loses no message and spends no retry, for waiting, running and interrupted messages."""

import itertools
import os
import random
import signal

import pytest
from waiting import eventually

from reliq import WorkerSettings

pytestmark = pytest.mark.slow

SIGTERMS = 300 if os.environ.get("RELIQ_LONG") else 50
#: More messages than workers handle between two SIGTERMs.
ENOUGH = 10_000
DEPLOYS = 20 if os.environ.get("RELIQ_LONG") else 4


def work_for_ever():
    import faulty

    faulty.consumer.run(WorkerSettings(concurrency=4), queues=["steady"])


@pytest.mark.timeout(400)
def test_many_sigterms_under_load_lose_nothing_and_spend_no_retry(fork, faulty, admin, monkeypatch):
    monkeypatch.setattr("reliq.publish.PUBLISH_SECONDS", 60.0)  # on a busy machine the disk may hang
    chance = random.Random(3)
    published = faulty.STEADY.publish_many(range(ENOUGH)).published

    working, ending = [fork(work_for_ever) for _ in range(4)], []
    eventually(lambda: faulty.STEADY.counts().totals.get("acked", 0) > 20, "work is done")
    for _ in range(SIGTERMS):
        admin.blpop(["nothing"], chance.uniform(0.01, 0.06))
        at = chance.randrange(len(working))
        os.kill(working[at].pid, signal.SIGTERM)
        ending.append(working[at])
        working[at] = fork(work_for_ever)
        if len(ending) > len(working):
            ending.pop(0).join()
        counts = faulty.STEADY.counts()
        assert (counts.missing, counts.alive) == (0, published - counts.totals["acked"])
        if counts.ready < ENOUGH // 2:  # so that SIGTERM always arrives during work
            published += faulty.STEADY.publish_many(range(ENOUGH)).published
    for child in itertools.chain(working, ending):
        os.kill(child.pid, signal.SIGTERM) if child.is_alive() else None
        child.join()

    counts = faulty.STEADY.counts()
    assert counts.ready > 0
    assert counts.totals["published"] == counts.totals["acked"] + counts.ready == published
    assert {kind for kind in counts.totals if kind.startswith("retried")} == set()
    assert set(admin.hvals(faulty.STEADY.keys.retries_left)) == {b"50"}
    assert counts.totals["claimed"] == counts.totals["acked"] + counts.totals["released"]
    assert set(admin.hvals("note:done")) == {b"1"}


@pytest.mark.timeout(600)
def test_long_job_keeps_its_retries_through_many_deploys(worker, faulty, admin):
    id = faulty.LONG.publish(600.0).id

    for deploy in range(1, DEPLOYS + 1):
        process = worker("--queue", "long", "--grace", "0.3")
        begun = str(deploy).encode()
        eventually(lambda begun=begun: admin.hget("note:started", f"{id} 1") == begun, "the job begins again")
        process.stop()

        counts = faulty.LONG.counts()
        assert (counts.ready, counts.unack, counts.missing) == (1, 0, 0)
        assert admin.hget(faulty.LONG.keys.retries_left, id) == b"3"
