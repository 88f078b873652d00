"""`reliq delete` deletes unused queues, keeps queues with living messages, and allows a deleted queue's name again."""

import time

import pytest
from handling import lasting
from transition import PATIENT_SECONDS
from waiting import eventually

from reliq import Consumer, WorkerSettings, publish as naming
from reliq.keys import QUEUES_KEY
from reliq.worker.upkeep import HistoryRollup


@pytest.fixture
def old(client):
    """Make a queue's last use in the registry an hour old."""
    return lambda name="q": client.hset(QUEUES_KEY, name, int(time.time()) - 3600)


@pytest.fixture
def empty(queue, die, client, old):
    """A queue whose messages have all finished, in every way that leaves Redis keys."""
    queue.publish({}, id="acked", dedup=1)
    with queue.receive():
        pass
    queue.publish({}, id="cancelled", delay=60)
    queue.cancel("cancelled")
    queue.pause(reason="for good")
    HistoryRollup(queue._clients.blocking(PATIENT_SECONDS), lambda: [queue.keys]).step(int(time.time() * 1000))
    old()


def test_delete_removes_everything_of_an_empty_queue(empty, command, queue, client):
    assert lasting(client) != set()

    done = command("delete", "q", "--yes")

    assert (done.code, done.out) == (0, "q is deleted\n")
    assert (lasting(client), client.hgetall(QUEUES_KEY)) == (set(), {})
    assert command("queues", "q", "--check").code == 2
    assert command("queues", "--json").json["queues"] == []


@pytest.mark.parametrize("state", ["pending", "ready", "unack", "retry", "garbage", "lost"])
def test_delete_refuses_a_queue_with_a_message(state, empty, command, queue, client, url):
    queue.resume()
    queue.publish({}, id="m", delay=60 if state == "pending" else 0)
    if state == "unack":
        with queue.receive() as [job]:
            job.nack(delay=60)
    elif state in ("retry", "garbage", "lost"):
        client.lrem(queue.keys.ready, 0, "m")
    if state == "retry":
        client.rpush(queue.keys.retry, "m")
    if state == "garbage":
        client.sadd(queue.keys.garbage, "m")
    before = {key: client.dump(key) for key in lasting(client)}

    done = command("delete", "q", "--yes")

    assert (done.code, done.out) == (2, "")
    assert "queue 'q' has 1 message; purge it first" in done.err
    assert {key: client.dump(key) for key in lasting(client)} == before


def test_delete_removes_dead_letters_only_with_letters(command, queue, client, die, old):
    die("a", "b")
    old()

    refused = command("delete", "q", "--yes")
    done = command("delete", "q", "--letters", "--yes", "--json")

    assert (refused.code, "has 2 dead letters; delete it with --letters" in refused.err) == (2, True)
    assert (done.code, done.json) == (0, {"deleted": ["q"], "letters": 2})
    assert lasting(client) == set()


def test_delete_refuses_a_queue_in_use(empty, command, alive, queue, client):
    alive("w")
    served = command("delete", "q", "--yes")
    assert (served.code, "queue 'q' is served by a worker: db1 pid 7" in served.err) == (2, True)

    client.delete("reliq:worker:w")
    client.hset(QUEUES_KEY, "q", int(time.time()))
    recent = command("delete", "q", "--yes")
    assert (recent.code, "was in use less than 60 s ago; it can be deleted in " in recent.err) == (2, True)


def test_delete_ignores_a_time_that_something_else_wrote(command, client):
    for told in ("many", "99999999999999999999", "9" * 4301, str(2**62)):
        client.hset(QUEUES_KEY, "junk", told)

        assert (command("delete", "junk", "--yes").code, client.hlen(QUEUES_KEY)) == (0, 0)


def test_delete_refuses_one_queue_and_deletes_the_others(command, client, queue, old):
    queue.publish({})
    client.hset(QUEUES_KEY, mapping={f"junk-{number}": "1" for number in range(20)})

    done = command("delete", *(f"junk-{number}" for number in range(10)), "q", "nobody", "--yes", "--json")

    assert (done.code, len(done.json["deleted"]), done.err.count("\n")) == (2, 10, 2)
    assert client.hlen(QUEUES_KEY) == 11


def test_forgotten_queue_is_registered_again_by_a_publish_or_a_worker(empty, url, admin, queue, client, monkeypatch):
    admin.delete_queue("q")
    assert client.hgetall(QUEUES_KEY) == {}
    later = time.monotonic() + naming.NAMING_SECONDS + 1  # after this time a publisher registers the queue again
    with monkeypatch.context() as patch:
        patch.setattr(naming.time, "monotonic", lambda: later)
        queue.publish({}, delay=60, id="m")
    assert list(client.hgetall(QUEUES_KEY)) == [b"q"]

    client.delete(QUEUES_KEY)
    consumer = Consumer(url)
    consumer.handler(queue)(lambda body: None)
    consumer.start(WorkerSettings(concurrency=1))
    try:
        eventually(lambda: client.hexists(QUEUES_KEY, "q"), "the worker names its queue")
    finally:
        consumer.stop()
