"""Publishing, blocking and async: what a receipt says, what an id is worth, what many cost."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from reliq import Durability, Layout, Outgoing, Queue
from reliq.errors import ConfigurationError
from reliq.events import Published, PublishEnded


def redis_now(client):
    seconds, micros = client.time()
    return seconds + micros / 1_000_000


def test_a_publish_is_ready_at_once(queue, call, client):
    before = redis_now(client)

    receipt = call(queue, "publish", {"a": 1})

    assert (receipt.status, len(receipt.id)) == ("published", 22)
    assert before - 0.001 <= receipt.due <= redis_now(client)
    assert queue.counts().ready == 1


@pytest.mark.parametrize("delay", [60, 60.0, timedelta(minutes=1)])
def test_a_delayed_publish_waits_in_pending_and_is_never_early(queue, call, client, delay):
    before = redis_now(client)

    receipt = call(queue, "publish", {"a": 1}, delay=delay)

    assert before + 60 <= receipt.due <= redis_now(client) + 60.001
    assert queue.counts().pending == 1
    assert round(client.zscore(queue.keys.pending, receipt.id), 3) == receipt.due


@pytest.mark.parametrize("zone", [UTC, None], ids=["utc", "elsewhere"])
def test_a_publish_at_a_moment_is_due_at_that_moment(queue, call, zone):
    at = datetime.now(UTC).astimezone(zone) + timedelta(hours=1)

    receipt = call(queue, "publish", {}, at=at)

    assert 0 <= receipt.due - at.timestamp() < 0.0011


def test_a_moment_that_has_passed_is_now(queue, call):
    call(queue, "publish", {}, at=datetime(2020, 1, 1, tzinfo=UTC))

    assert queue.counts().ready == 1


def test_a_chosen_id_is_not_published_again_while_it_lives(queue, call):
    first = call(queue, "publish", {"n": 1}, id="order-1")
    second = call(queue, "publish", {"n": 2}, id="order-1")

    assert (first.status, second.status) == ("published", "duplicate")
    with queue.receive(limit=5) as jobs:
        assert [job.body for job in jobs] == [{"n": 1}]


def test_a_chosen_id_is_not_published_again_for_a_while_after_its_end(queue, call):
    call(queue, "publish", {}, id="order-1")
    with queue.receive():
        pass

    assert call(queue, "publish", {}, id="order-1").status == "duplicate"
    assert call(queue, "publish", {}, id="order-1", replace=True).status == "published"


def test_without_a_window_a_chosen_id_is_free_after_its_end(queue, call):
    call(queue, "publish", {}, id="order-1", dedup=0)
    with queue.receive():
        pass

    assert call(queue, "publish", {}, id="order-1").status == "published"


def test_schedule_cancel_schedule_publishes_the_second(queue, call):
    assert call(queue, "publish", {"n": 1}, id="order-1", delay=60).status == "published"
    assert call(queue, "cancel", "order-1") == "cancelled"
    assert call(queue, "publish", {"n": 2}, id="order-1", delay=60).status == "published"

    assert (queue.counts().pending, queue.counts().missing) == (1, 0)


@pytest.mark.parametrize("tombstone", [0, -1, "60"])
def test_a_tombstone_is_a_time(tombstone, queue, call):
    with pytest.raises(ConfigurationError, match="tombstone"):
        call(queue, "cancel", "order-1", tombstone=tombstone)


def test_a_publish_that_comes_after_its_cancel_is_tombstoned_where_that_is_asked_for(queue, call):
    assert call(queue, "cancel", "order-1", tombstone=60) == "not_found"

    assert call(queue, "publish", {}, id="order-1").status == "tombstoned"
    assert call(queue, "publish", {}, id="order-1", replace=True).status == "published"


def test_a_message_whose_body_is_gone_keeps_its_chosen_id_taken(queue, client, call):
    receipt = call(queue, "publish", {}, id="order-1")
    client.delete(queue.keys.msg(receipt.id))
    with queue.receive() as jobs:
        assert jobs == []

    assert queue.counts().totals["expired"] == 1
    assert call(queue, "publish", {}, id="order-1").status == "duplicate"


def test_headers_retries_and_ttl_travel_with_the_message(queue, call, client):
    receipt = call(queue, "publish", {}, headers={"trace": "abc"}, retries=2, ttl=300, delay=100)

    assert 300_001 < client.pttl(queue.keys.msg(receipt.id)) <= 400_001
    call(queue, "reschedule", receipt.id)
    with queue.receive(wait=30) as [job]:
        assert (job.headers, job.retries_left, job.attempt) == ({"trace": "abc"}, 2, 1)


def test_a_stored_message_is_a_line_of_headers_and_the_body(queue, call, client):
    receipt = call(queue, "publish", {"a": 1})

    value = client.get(queue.keys.msg(receipt.id))

    assert value == b'RELIQ/1 {"d":%d,"r":12}\n{"a":1}' % round(receipt.due * 1000)


def test_on_the_go_layout_the_body_is_bare(url, call, client):
    bare = Queue("q", bytes, url=url, layout=Layout.hdt3213())

    receipt = call(bare, "publish", b"hello")

    assert client.get(f"dp:q:msg:{receipt.id}") == b"hello"
    bare.close()


def test_many_are_published_and_the_others_named(queue, call):
    call(queue, "publish", {}, id="old")
    call(queue, "cancel", "gone", tombstone=60)

    result = call(
        queue,
        "publish_many",
        [{"n": 1}, Outgoing(body={"n": 2}, delay=60), Outgoing(body={}, id="old"), Outgoing(body={}, id="gone")],
    )

    assert (result.published, result.duplicates, result.tombstoned) == (2, ("old",), ("gone",))
    assert (queue.counts().ready, queue.counts().pending) == (2, 1)


def test_five_hundred_are_one_round_trip(queue, call, commands):
    result = call(queue, "publish_many", ({"n": n} for n in range(1500)))

    ran = commands()
    assert result.published == 1500
    assert ran["evalsha"] == 3
    assert ran.get("eval", 0) <= 1  # the script's text, when the server does not know it yet


def test_nothing_is_published_by_an_empty_call(queue, call, commands):
    assert call(queue, "publish_many", []).published == 0
    assert commands() == {}


def test_many_are_read_as_they_are_sent(queue, call):
    most_ahead, taken = 0, 0

    def items():
        nonlocal most_ahead, taken
        for n in range(50):
            taken += 1
            most_ahead = max(most_ahead, taken - queue.counts().ready)
            yield {"n": n}

    call(queue, "publish_many", items(), chunk=10)

    assert 10 <= most_ahead <= 20  # a call under way, and the next one


def test_many_keep_their_order(queue, call):
    call(queue, "publish_many", ({"n": n} for n in range(25)), chunk=10)

    with queue.receive(limit=25) as jobs:
        assert [job.body["n"] for job in jobs] == list(range(25))


def test_publishers_of_one_event_loop_share_round_trips(queue, client):
    async def publish_all():
        await queue.apublish({"n": -1})
        before = client.info("stats")["total_reads_processed"]
        receipts = await asyncio.gather(*(queue.apublish({"n": n}) for n in range(100)))
        after = client.info("stats")["total_reads_processed"]
        await queue.aclose()
        return receipts, after - before

    receipts, reads = asyncio.run(publish_all())

    assert [one.status for one in receipts] == ["published"] * 100
    assert queue.counts().ready == 101
    assert reads < 10


def test_a_publisher_that_is_cancelled_takes_none_of_the_others_along(queue):
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


def test_large_bodies_go_in_calls_of_bounded_size(url, call, commands):
    large = Queue("q", bytes, url=url)

    result = call(large, "publish_many", (b"x" * 2**20 for _ in range(20)))

    assert result.published == 20
    assert commands()["evalsha"] >= 3
    large.close()


def test_with_a_backlog_limit_publishing_waits_for_the_consumers(queue, call):
    most = 0
    over = threading.Event()

    def consume():
        nonlocal most
        while not over.is_set() or queue.counts().alive:
            most = max(most, queue.counts().ready)
            with queue.receive(limit=7):
                pass

    consumer = threading.Thread(target=consume)
    consumer.start()
    result = call(queue, "publish_many", ({"n": n} for n in range(60)), chunk=10, max_backlog=20)
    over.set()
    consumer.join()

    assert result.published == 60
    assert most < 30


def test_a_queue_that_names_no_redis_goes_where_the_environment_says_now(url, monkeypatch, call):
    """As a module's queue does whose tests have a Redis each."""
    queue = Queue("q")
    monkeypatch.setenv("RELIQ_URL", url)
    assert call(queue, "publish", {}).status == "published"

    monkeypatch.setenv("RELIQ_URL", f"{url[:-1]}1")

    assert call(queue, "counts").ready == 0
    assert call(queue, "publish", {}).status == "published"
    assert call(queue, "counts").ready == 1
    queue.close()


def test_a_url_from_the_environment_is_used_when_none_is_given(monkeypatch, url, call):
    queue = Queue("q")
    monkeypatch.setenv("RELIQ_URL", url)

    assert call(queue, "publish", {}).status == "published"
    queue.close()


def test_a_queues_own_url_wins_over_the_environment(monkeypatch, queue, call):
    monkeypatch.setenv("RELIQ_URL", "redis://127.0.0.1:1/0")

    assert call(queue, "publish", {}).status == "published"


def test_an_observer_sees_what_was_published(url, call):
    seen = []
    queue = Queue("q", url=url, observers=[seen.append])

    receipt = call(queue, "publish", {})

    assert [event.ids for event in seen if isinstance(event, Published)] == [(receipt.id,)]
    assert [event.outcomes for event in seen if isinstance(event, PublishEnded)] == [{"published": 1}]
    queue.close()


def test_a_uuid_is_an_id(queue, call):
    id = uuid4()

    assert call(queue, "publish", {}, id=id).id == str(id)
    assert call(queue, "publish", {}, id=str(id)).status == "duplicate"
    assert call(queue, "cancel", id) == "cancelled"


def test_a_receipt_is_true_when_the_message_was_published_alone(queue, call):
    queue.cancel("cancelled", tombstone=60)

    receipts = [call(queue, "publish", {}, id=id) for id in ("a", "a", "cancelled")]

    assert [(bool(one), one.status) for one in receipts] == [
        (True, "published"),
        (False, "duplicate"),
        (False, "tombstoned"),
    ]
    assert call(queue, "publish", {}, durability=Durability.replicas(1, timeout=0.05))
