"""`reliq worker` runs and stops: quick tests of its core promises; the other files in this folder are slow."""

from waiting import eventually


def test_worker_prints_its_queues_and_a_burst_ends_when_they_are_empty(worker, jobs):
    jobs.ONCE.publish_many(range(200))

    process = worker("--queue", "once", "--processes", "2", "--burst-delayed")

    assert process.wait() == 0
    assert process.said("jobs.once")
    assert jobs.ONCE.counts().totals["acked"] == 200
    assert jobs.ONCE.counts().alive == 0


def test_burst_of_two_processes_runs_tasks_of_each_kind_once(worker, jobs, client):
    import tasks

    tasks.app.queue.publish_many(tasks.plain.outgoing(number) for number in range(40))
    tasks.app.queue.publish_many(tasks.coroutine.outgoing(number) for number in range(40))
    tasks.app.queue.publish_many(tasks.parent.outgoing(number) for number in range(40))
    tasks.resuming.publish(pages=4)

    process = worker("--processes", "2", "--burst", place="tasks:app")

    assert process.wait() == 0
    assert process.said("tasks plain, ")
    numbers = {kind: {int(number) for number in client.smembers(f"note:{kind}")} for kind in ("plain", "coroutine")}
    assert numbers == {"plain": {*range(1, 41), *range(100, 140)}, "coroutine": {*range(40)}}
    assert client.smembers("note:pages") == {b"1: 0", b"1: 1", b"2: 1", b"2: 2", b"2: 3"}
    counts = tasks.app.queue.counts()
    assert (counts.alive, counts.totals["acked"], counts.totals["nacked"]) == (0, 161, 1)


def test_sigterm_lets_handlers_finish_and_returns_other_messages_unspent(worker, jobs, client):
    jobs.LASTING.publish_many([1.0] * 6)
    process = worker("--queue", "lasting", "--concurrency", "2")
    eventually(lambda: client.scard("note:started") == 2, "two handlers run")

    assert process.stop() == 0
    counts = jobs.LASTING.counts()
    assert (counts.ready, counts.unack, counts.totals["acked"]) == (4, 0, 2)
    assert set(client.hvals(jobs.LASTING.keys.retries_left)) == {b"3"}
