"""Keys, limits and priorities in the test kit."""

from typing import Any

from tenacity import wait_fixed

from reliq import Admin, Consumer, Job, Nack, OutgoingMessage, Queue, RateLimited


def test_published_message_has_its_key_and_priority(reliq):
    mail = Queue("mail")
    first = mail.publish({"n": 1}, key="a")
    mail.publish({"n": 2}, key="b", delay=60)
    mail.publish({"n": 3}, priority="high")
    mail.publish({"n": 4})

    found = {(one.body["n"], one.key, one.priority, one.state) for one in reliq.published(mail)}

    assert found == {
        (1, "a", "normal", "waiting"),
        (2, "b", "normal", "pending"),
        (3, None, "high", "waiting"),
        (4, None, "normal", "ready"),
    }
    assert reliq.assert_published(mail, key="a").id == first.id
    assert [one.body["n"] for one in reliq.published(mail, priority="high")] == [3]
    reliq.refute_published(mail, key="c")


def consumer_of(queue, *, fail=(), too_fast=()):
    """Return a consumer of one queue, and the list of key and number of each message that its handler got."""
    consumer, seen = Consumer(), []

    @consumer.handler(queue, backoff=wait_fixed(60))
    def work(body: dict[str, Any], job: Job[dict[str, Any]]) -> None:
        seen.append((job.key, body["n"]))
        if job.attempt == 1 and body["n"] in fail:
            raise Nack(reason="once")
        if body["n"] in too_fast and seen.count((job.key, body["n"])) == 1:
            raise RateLimited(delay=30)

    return consumer, seen


def publish(queue, *rows):
    queue.publish_many(OutgoingMessage(body={"n": number}, key=key) for key, number in rows)


def test_drain_of_an_ordered_queue_blocks_the_key_of_a_failure(reliq):
    mail = Queue("mail", ordered=True)
    consumer, seen = consumer_of(mail, fail={1})
    publish(mail, ("a", 1), ("a", 2), ("b", 3), ("b", 4))

    first = reliq.drain(consumer)
    assert (len(first.nacked), len(first.acked)) == (1, 2)
    assert seen == [("a", 1), ("b", 3), ("b", 4)]

    assert len(reliq.drain(consumer, scheduled=True).acked) == 2
    assert seen[3:] == [("a", 1), ("a", 2)]


def test_drain_ends_at_the_rate_limit_unless_it_travels(reliq):
    mail = Queue("mail", rate="1/s")
    consumer, _ = consumer_of(mail)
    publish(mail, *((f"k{n % 3}", n) for n in range(50)))
    reliq.hold()
    began = reliq.now

    assert len(reliq.drain(consumer).acked) == 1
    assert reliq.now == began
    assert len(reliq.drain(consumer, scheduled=True).acked) == 49
    assert 49 <= reliq.now - began <= 50


def test_drain_throttles_a_rate_limited_key_and_continues_others(reliq):
    mail = Queue("mail")
    consumer, seen = consumer_of(mail, too_fast={1})
    publish(mail, ("a", 1), ("a", 2), ("b", 3))
    reliq.hold()
    began = reliq.now

    done = reliq.drain(consumer)
    assert (len(done.acked), len(done.snoozed)) == (1, 1)
    assert seen == [("a", 1), ("b", 3)]

    assert len(reliq.drain(consumer, scheduled=True).acked) == 2
    assert 30 <= reliq.now - began <= 31


def test_drain_keeps_batches_to_a_single_key(reliq):
    mail, consumer, seen = Queue("mail"), Consumer(), []

    @consumer.handler(mail, batch=10, batch_by_key=True)
    def work(_bodies: list[dict[str, Any]], jobs: list[Job[dict[str, Any]]]) -> None:
        seen.append({job.key for job in jobs})

    publish(mail, ("a", 1), ("b", 2), ("a", 3), ("b", 4))
    reliq.drain(consumer)

    assert sorted(map(sorted, seen)) == [["a"], ["b"]]


def test_perform_passes_the_key_and_drain_writes_the_declared_limits(reliq):
    mail = Queue("mail", per_key=2, key_weights={"vip": 4})
    consumer, seen = consumer_of(mail)

    reliq.perform(consumer, mail, {"n": 1}, key="tenant-7")
    mail.publish({"n": 2})
    reliq.drain(consumer)

    assert seen == [("tenant-7", 1), (None, 2)]
    found = Admin(reliq.url).limits("mail")
    assert (found.per_key, found.key_weights) == (2, {"vip": 4})
