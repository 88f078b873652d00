"""`reliq worker` runs and stops: quick tests of its core promises; the other files in this folder are slow."""

from waiting import eventually


def test_worker_prints_its_queues_and_a_burst_ends_when_they_are_empty(worker, jobs):
    jobs.ONCE.publish_many(range(200))

    process = worker("--queue", "once", "--processes", "2", "--burst-delayed")

    assert process.wait() == 0
    assert process.said("jobs.once")
    assert jobs.ONCE.counts().totals["acked"] == 200
    assert jobs.ONCE.counts().alive == 0


def test_sigterm_lets_handlers_finish_and_returns_other_messages_unspent(worker, jobs, client):
    jobs.LASTING.publish_many([1.0] * 6)
    process = worker("--queue", "lasting", "--concurrency", "2")
    eventually(lambda: client.scard("note:started") == 2, "two handlers run")

    assert process.stop() == 0
    counts = jobs.LASTING.counts()
    assert (counts.ready, counts.unack, counts.totals["acked"]) == (4, 0, 2)
    assert set(client.hvals(jobs.LASTING.keys.retries_left)) == {b"3"}
