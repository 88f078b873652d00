"""Publishing, blocking and async: receipts, chosen ids, and the cost of many messages."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from reliq import OutgoingMessage, Queue
from reliq.events import Published, PublishEnded

#: A repeated call would count twice.
pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def now(client):
    """Return the time of Redis in seconds."""

    def read():
        seconds, micros = client.time()
        return seconds + micros / 1_000_000

    return read


def test_publish_is_ready_at_once_as_a_line_of_headers_and_the_body(make_queue, call, client, now):
    seen, before = [], now()
    queue = make_queue(observers=[seen.append])

    receipt = call(queue, "publish", {"a": 1})

    assert (receipt.status, len(receipt.id)) == ("published", 22)
    assert before - 0.001 <= receipt.due <= now()
    assert queue.counts().ready == 1
    assert client.get(queue.keys.msg(receipt.id)) == b'RELIQ/1 {"d":%d,"r":12}\n{"a":1}' % round(receipt.due * 1000)
    assert [event.ids for event in seen if isinstance(event, Published)] == [(receipt.id,)]
    assert [event.outcomes for event in seen if isinstance(event, PublishEnded)] == [{"published": 1}]


def test_delayed_publish_waits_in_pending_and_is_never_early(queue, client, now):
    before = now()

    receipt = queue.publish({"a": 1}, delay=timedelta(minutes=1))

    assert before + 60 <= receipt.due <= now() + 60.001
    assert queue.counts().pending == 1
    assert round(client.zscore(queue.keys.pending, receipt.id), 3) == receipt.due


@pytest.mark.parametrize("zone", [UTC, None], ids=["utc", "elsewhere"])
def test_publish_with_at_is_due_at_that_time(queue, zone):
    at = datetime.now(UTC).astimezone(zone) + timedelta(hours=1)

    receipt = queue.publish({}, at=at)
    queue.publish({}, at=datetime(2020, 1, 1, tzinfo=UTC))

    assert 0 <= receipt.due - at.timestamp() < 0.0011
    assert (queue.counts().pending, queue.counts().ready) == (1, 1)


def test_living_chosen_id_is_a_duplicate(queue, call):
    first = call(queue, "publish", {"n": 1}, id="order-1")
    second = call(queue, "publish", {"n": 2}, id="order-1")

    assert (first.status, second.status) == ("published", "duplicate")
    assert (bool(first), bool(second)) == (True, False)
    with queue.receive(limit=5) as jobs:
        assert [job.body for job in jobs] == [{"n": 1}]


def test_finished_or_expired_chosen_id_is_a_duplicate_until_its_window_ends(queue, client):
    queue.publish({}, id="order-1")
    with queue.receive():
        pass

    assert queue.publish({}, id="order-1").status == "duplicate"
    assert queue.publish({}, id="order-1", ignore_dedup=True).status == "published"
    queue.publish({}, id="order-2", dedup=0)
    with queue.receive(limit=2):
        pass
    assert queue.publish({}, id="order-2").status == "published"
    client.delete(queue.keys.msg("order-2"))
    with queue.receive() as jobs:
        assert jobs == []
    assert queue.counts().totals["expired"] == 1
    assert queue.publish({}, id="order-2").status == "duplicate"


def test_cancelled_id_is_free_unless_a_tombstone_keeps_it(queue):
    assert queue.publish({"n": 1}, id="order-1", delay=60).status == "published"
    assert queue.cancel("order-1") == "cancelled"
    assert queue.publish({"n": 2}, id="order-1", delay=60).status == "published"
    assert (queue.counts().pending, queue.counts().missing) == (1, 0)

    id = uuid4()
    assert queue.cancel(id, tombstone=60) == "not_found"
    receipt = queue.publish({}, id=id)
    assert (bool(receipt), receipt.status, receipt.id) == (False, "tombstoned", str(id))
    assert queue.publish({}, id=str(id), ignore_dedup=True).status == "published"


def test_headers_retries_and_ttl_are_stored_with_the_message(queue, client):
    receipt = queue.publish({}, headers={"trace": "abc"}, retries=2, ttl=300, delay=100)

    assert 300_001 < client.pttl(queue.keys.msg(receipt.id)) <= 400_001
    queue.reschedule(receipt.id)
    with queue.receive(wait=30) as [job]:
        assert (job.headers, job.retries_left, job.attempt) == ({"trace": "abc"}, 2, 1)


def test_publish_many_reports_duplicates_and_tombstoned_ids(queue, call):
    call(queue, "publish", {}, id="old")
    call(queue, "cancel", "gone", tombstone=60)

    result = call(
        queue,
        "publish_many",
        [
            {"n": 1},
            OutgoingMessage(body={"n": 2}, delay=60),
            OutgoingMessage(body={}, id="old"),
            OutgoingMessage(body={}, id="gone"),
        ],
    )

    assert (result.published, result.duplicates, result.tombstoned) == (2, ("old",), ("gone",))
    assert (queue.counts().ready, queue.counts().pending) == (2, 1)


def test_publish_many_sends_limited_numbers_and_bytes_in_a_round_trip(make_queue, call, commands, monkeypatch):
    monkeypatch.setattr("reliq.queue.CHUNK_BYTES", 2**20)
    queue, large = make_queue(), make_queue(bytes)
    assert (call(queue, "publish_many", []).published, commands()) == (0, {})

    assert call(queue, "publish_many", ({"n": n} for n in range(1500))).published == 1500
    ran = commands()
    assert ran["evalsha"] == 3
    assert ran.get("eval", 0) <= 1  # the script's text, if the server has not loaded it yet

    assert call(large, "publish_many", (b"x" * 2**17 for _ in range(20))).published == 20
    assert commands()["evalsha"] >= 3 + 3


def test_publish_many_reads_items_as_it_sends_them_in_order(queue, call):
    most_ahead, taken = 0, 0

    def items():
        nonlocal most_ahead, taken
        for n in range(50):
            taken += 1
            most_ahead = max(most_ahead, taken - queue.counts().ready)
            yield {"n": n}

    call(queue, "publish_many", items(), chunk=10)

    assert 10 <= most_ahead <= 20  # the current call and the next
    with queue.receive(limit=50) as jobs:
        assert [job.body["n"] for job in jobs] == list(range(50))


def test_tasks_of_an_event_loop_share_round_trips(queue, client):
    async def publish_all():
        await queue.apublish({"n": -1})
        before = client.info("stats")["total_reads_processed"]
        receipts = await asyncio.gather(*(queue.apublish({"n": n}) for n in range(100)))
        after = client.info("stats")["total_reads_processed"]
        await queue.aclose()
        return receipts, after - before

    receipts, reads = asyncio.run(publish_all())

    assert [one.status for one in receipts] == ["published"] * 100
    assert reads < 10


def test_cancelled_publish_does_not_cancel_others_of_its_round_trip(queue):
    async def publish_all():
        await queue.ashards()
        tasks = [asyncio.create_task(queue.apublish({"n": n})) for n in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await queue.apublish({"n": 10})
        await queue.aclose()
        return outcomes

    outcomes = asyncio.run(publish_all())

    assert isinstance(outcomes.pop(3), asyncio.CancelledError)
    assert [one.status for one in outcomes] == ["published"] * 9
    assert queue.counts().ready == 11


def test_publish_many_with_max_backlog_waits_for_consumers(queue, call):
    backlogs = []

    def consume():
        while queue.counts().totals.get("acked", 0) < 60:
            backlogs.append(queue.counts().ready)
            with queue.receive(limit=7):
                pass

    with ThreadPoolExecutor() as pool:
        consumed = pool.submit(consume)
        result = call(queue, "publish_many", ({"n": n} for n in range(60)), chunk=10, max_backlog=20)

    assert (consumed.result(), result.published) == (None, 60)
    assert max(backlogs) < 30


def test_queue_without_a_url_reads_the_environment_when_it_is_first_needed(url, monkeypatch, call):
    monkeypatch.setenv("RELIQ_URL", f"{url[:-1]}1")
    queue = Queue("q")
    monkeypatch.setenv("RELIQ_URL", url)
    assert call(queue, "publish", {}).status == "published"

    monkeypatch.setenv("RELIQ_URL", f"{url[:-1]}1")

    assert call(queue, "counts").ready == 1
    assert Queue("q", url=url).counts().ready == 1


def test_publish_in_a_new_loop_while_another_thread_drops_a_closed_loop(make_queue):
    queue = make_queue()
    batchers = queue._sender._batchers

    class Closed:
        def is_closed(self):
            batchers.pop(self, None)  # as the other thread
            return True

    closed = [Closed() for _ in range(3)]
    batchers.update(dict.fromkeys(closed))

    assert asyncio.run(queue.apublish({}))
    assert not set(batchers) & set(closed)
