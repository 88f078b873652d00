"""Ages of messages without a due time: how long looks have seen them, never more than is true."""

import pytest
from go_original import GoProgram
from patience import page, value
from transition import run_transition

from reliq import Layout, Queue
from reliq.keys import QUEUES_KEY, Keys
from reliq.metrics.queues import QueueCollector
from reliq.metrics.snapshot import MARKS_LIMIT

KEYS = Keys("orders", Layout.hdt3213())


@pytest.fixture
def go(client):
    return GoProgram(client, KEYS)


@pytest.fixture
def snapshots(reader):
    return reader(KEYS)


@pytest.fixture
def look(snapshots, client):
    """Look as if so many seconds had passed since the test began; return what is known of the ages."""
    start = client.time()[0]
    return lambda seconds: snapshots.look((start + seconds) * 1000).queues[0].oldest


def ready(go, count=1):
    """Have messages of a Go program come due."""
    ids = [go.publish(due=1) for _ in range(count)]
    go.promote(1)
    return ids


def test_age_is_unknown_at_the_first_look_and_then_the_time_watched(go, look):
    ready(go, 500)

    assert "ready" not in look(0)
    assert look(20)["ready"] == 20
    assert look(320)["ready"] == 320


def test_age_of_a_moving_queue_is_its_longest_wait(go, look):
    """A backlog of ten looks: each message is seen for nine, though the first one is another at each look."""
    ready(go, 10)
    ages = []
    for second in range(100):
        ages.append(look(second).get("ready", 0))
        ready(go)
        go.claim(1)

    assert set(ages[20:]) == {9}


def test_age_of_a_redelivery_counts_from_its_return_to_retry(go, look, client):
    [id] = ready(go)
    look(0)
    go.claim(1)
    go.nack(id, 1)
    go.reclaim(1)

    assert look(50) | {"pending": 0, "unack": 0} == {"pending": 0, "ready": 0, "retry": 0, "unack": 0}
    assert look(60)["retry"] == 10
    assert client.lrange(KEYS.retry, 0, -1) == [id.encode()]


def test_age_of_a_delayed_message_does_not_count_from_its_publish(url, look):
    """Its id tells when it was made, not when it was due: a delay of half an hour is not half an hour late."""
    queue = Queue("orders", bytes, url=url, layout=Layout.hdt3213())
    queue.publish(b"x", delay=0.001)
    while not run_transition(queue, "promote")[0]:
        pass

    assert "ready" not in look(0)
    assert look(7)["ready"] == 7


def test_marks_are_bounded_and_keep_the_oldest(go, look, snapshots):
    for second in range(3 * MARKS_LIMIT):
        ready(go)
        look(second)

    assert len(snapshots._waits.marks[KEYS.entry]) <= MARKS_LIMIT
    assert look(1000)["ready"] == 1000


def test_page_has_a_queue_that_only_go_works_on(go, client, reader):
    ready(go, 5)
    client.hset(QUEUES_KEY, KEYS.entry, "1")
    collector = QueueCollector(reader().look)

    before, after = (page(collector) for _ in range(2))

    assert value(before, "reliq_messages", queue="orders", state="ready") == 5
    assert value(before, "reliq_shared", queue="orders") == 1
    assert value(after, "reliq_account_missing", queue="orders") is None
    assert value(before, "reliq_oldest_seconds", queue="orders", state="ready") is None
    assert value(after, "reliq_oldest_seconds", queue="orders", state="ready") >= 0
