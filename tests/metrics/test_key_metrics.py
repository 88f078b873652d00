"""The figures of queues with keys: how many, which are largest; bounded in series, length and commands."""

import pytest
from patience import figures, value
from prometheus_client import CollectorRegistry, generate_latest

from reliq import Outgoing, Queue, transitions
from reliq.client.client import Client
from reliq.metrics.names import KEY_LENGTH, REST
from reliq.metrics.serving import queue_collector
from reliq.snapshot.snapshot import SnapshotReader
from reliq.transport.connection import Connection


@pytest.fixture
def connection(url, patient_looks):
    yield Connection.to(url)
    Connection.to(url).close()


@pytest.fixture
def page(connection):
    """The figures of queues as they are scraped."""

    def look(*queues):
        registry = CollectorRegistry()
        registry.register(queue_collector(connection, [queue.keys for queue in queues]))
        return figures(generate_latest(registry).decode())

    return look


@pytest.fixture
def queue(url):
    return Queue("q", int, url=url)


def series(found, name):
    """The values of a metric by the label `key`, of the queue q."""
    return {dict(labels)["key"]: number for (one, labels), number in found.items() if one == name}


def test_the_largest_keys_have_their_own_series_and_all_others_one(queue, page):
    queue.publish_many(Outgoing(body=1, key=f"k{at:02}") for at in range(15) for _ in range(at + 1))

    found = page(queue)

    told = series(found, "reliq_key_waiting")
    assert told == {f"k{at:02}": at + 1 for at in range(5, 15)} | {REST: 1 + 2 + 3 + 4 + 5}
    assert value(found, "reliq_messages", queue="q", state="waiting") == 120
    assert value(found, "reliq_keys", queue="q", state="in_turn") == 15
    assert value(found, "reliq_keys", queue="q", state="asleep") == 0
    assert value(found, "reliq_backlog", queue="q") == 120
    assert value(found, "reliq_account_missing", queue="q") == 0


def test_a_key_on_the_page_is_bounded_and_printable(queue, page):
    queue.publish(1, key='say "\\" ' + "x" * 100)
    queue.publish(1, key="right\u202eto left")

    told = series(page(queue), "reliq_key_waiting")

    assert all(len(key) <= KEY_LENGTH and key.isprintable() for key in told)
    assert told[('say "\\" ' + "x" * 100)[:KEY_LENGTH]] == 1
    assert told["right\\u202eto left"] == 1


def test_the_oldest_that_waits_is_that_of_the_key_whose_turn_is_next(queue, client, connection):
    id = queue.publish(1, key="a").id
    seconds, _ = client.time()
    client.setrange(queue.keys.msg(id), 13, str((seconds - 9000) * 1000))

    [seen] = SnapshotReader(Client(connection.wire(5.0)), lambda: [queue.keys]).look().queues

    assert seen.oldest["waiting"] == pytest.approx(9000, abs=100)


def test_claims_that_a_rate_held_back_are_counted(queue, page, client, connection):
    queue.publish_many(Outgoing(body=1, key="a") for _ in range(3))
    client.hset(queue.keys.limits, mapping={"rate_us": 10**9, "burst": 1})
    claim = transitions.claim(queue.keys, transitions.CallNumber("w", 1), limit=3, lease_ms=9000, keyed=True)

    assert len(Client(connection.wire(5.0)).run(claim).claimed) == 1

    assert value(page(queue), "reliq_limited_claims_total", queue="q") == 1


def test_a_queue_without_keys_has_no_such_series_and_costs_no_command_more(queue, url, client, page, connection):
    plain = Queue("plain", int, url=url)
    plain.publish(1)
    queue.publish(1, key="a")
    reader = SnapshotReader(Client(connection.wire(5.0)), lambda: [plain.keys])
    reader.look()

    def calls(*queues):
        reader = SnapshotReader(Client(connection.wire(5.0)), lambda: [one.keys for one in queues])
        reader.look()
        client.config_resetstat()
        reader.look()
        stats = client.info("commandstats")
        return {name: stats[f"cmdstat_{name}"]["calls"] for name in ("evalsha", "getrange")}

    assert calls(plain) == {"evalsha": 1, "getrange": 1}
    assert calls(queue) == {"evalsha": 2, "getrange": 1}
    found = page(plain)
    assert not {name for name, _ in found} & {"reliq_keys", "reliq_key_waiting", "reliq_limited_claims_total"}
    assert not [labels for name, labels in found if name == "reliq_messages" and ("state", "waiting") in labels]
