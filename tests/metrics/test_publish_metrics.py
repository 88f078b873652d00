"""PublishMetrics measures each publish and counts its messages by outcome."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from reliq import Queue
from reliq.errors import ConfigurationError, PublishFailed
from reliq.metrics import PublishMetrics


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def told(registry):
    """Return the number of measured calls of a queue, and its messages by outcome."""

    def read(queue):
        samples = [one for family in registry.collect() for one in family.samples if one.labels.get("queue") == queue]
        outcomes = {one.labels["outcome"]: one.value for one in samples if one.name == "reliq_publish_messages_total"}
        return registry.get_sample_value("reliq_publish_seconds_count", {"queue": queue}), outcomes

    return read


def test_publishes_are_measured_and_messages_counted_by_outcome(url, registry, told):
    queue = Queue("q", int, url=url, observers=[PublishMetrics(registry)])

    async def publish():
        await queue.apublish(1)
        await queue.apublish_many([2, 3], chunk=1)
        await queue.aclose()

    queue.publish(1, id="a")
    queue.publish(1, id="a")
    queue.cancel("b", tombstone=60)
    queue.publish(1, id="b")
    queue.publish_many(range(10), chunk=4)
    asyncio.run(publish())
    queue.close()

    assert told("q") == (3 + 3 + 1 + 2, {"published": 14, "duplicate": 1, "tombstoned": 1})
    assert 0 < registry.get_sample_value("reliq_publish_seconds_sum", {"queue": "q"}) < 60


@pytest.mark.usefixtures("impatient")
def test_failed_publish_is_measured_and_its_messages_are_refused_or_unknown(client, url, registry, told):
    metrics = PublishMetrics(registry)
    away = Queue("away", int, url="redis://127.0.0.1:1/0", observers=[metrics])
    wrong = Queue("wrong", int, url=url, observers=[metrics])
    client.set(wrong.keys.ready, "not a list")

    with pytest.raises(PublishFailed) as failed:
        away.publish(1)
    with pytest.raises(PublishFailed):
        wrong.publish(1)
    with pytest.raises(ConfigurationError):
        wrong.publish(1, delay=-1)
    wrong.close()

    assert told("away") == (1, {failed.value.outcome: 1})
    assert told("wrong") == (1, {"refused": 1})
    with pytest.raises(ValueError, match="Duplicated"):
        PublishMetrics(registry)
