"""A queue registry full of names: commands read a bounded part, show the used queues, and can remove names."""

import pytest

from reliq.keys import QUEUES_KEY
from reliq.metrics import snapshot as looks
from reliq.metrics.snapshot import QUEUES_LIMIT, SnapshotReader
from reliq.redis.client import Client
from reliq.redis.server import Connection


def name(client, count):
    for first in range(0, count, 1000):
        client.hset(QUEUES_KEY, mapping={f"name-{number}": "1" for number in range(first, first + 1000)})


def calls(client, command):
    return client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)


def test_scrape_of_100_000_names_reads_at_most_2_000_queues(url, client):
    name(client, 100_000)
    client.config_resetstat()

    look = SnapshotReader(Client(Connection.to(url).wire(30.0))).look()

    assert 0.5 * QUEUES_LIMIT < len(look.queues) <= 1.1 * QUEUES_LIMIT
    assert len(look.queues) + look.left_out == 100_000
    assert calls(client, "evalsha") + calls(client, "eval") == len(look.queues)
    assert (calls(client, "hkeys"), calls(client, "hscan")) == (0, 1)


@pytest.fixture
def few(monkeypatch):
    """Lower the limit so that a test reaches it quickly."""
    monkeypatch.setattr(looks, "QUEUES_LIMIT", 10)


def test_queues_shows_named_and_served_queues_and_counts_the_rest(few, command, queue, client, alive, admin):
    queue.publish({})
    name(client, 1000)
    named = command("queues", "q", "name-7", "--json").json
    assert ([view["queue"] for view in named["queues"]], named["left_out"]) == (["q", "name-7"], 0)

    alive(queues=("q", "no name!"))
    said = command("queues")
    seen = command("queues", "--json").json

    assert "q" in {view["queue"] for view in seen["queues"]}
    assert len(seen["queues"]) + seen["left_out"] == 1001
    assert seen["left_out"] > 900
    assert f"{seen['left_out']} more registered queues are not shown" in said.out
    assert admin.watch().look().overview.left_out > 900


def test_exporter_finds_every_queue_in_use_and_keeps_it(few, url, queue, client):
    name(client, 1000)
    snapshots = SnapshotReader(Client(Connection.to(url).wire(30.0)))
    queue.publish({})

    seen = [{keys.name for keys in snapshots.look().queues} for _ in range(400)]

    first = next(at for at, queues in enumerate(seen) if "q" in queues)
    assert all("q" in queues for queues in seen[first:])
    assert len(set().union(*seen)) == 1001
    assert max(map(len, seen)) < 50
