"""Periodic jobs in a Cluster: their state is on the queue's node; for a sharded queue it is in shard 0."""

from reliq import Admin, Consumer, Queue
from reliq.keys import Keys
from reliq.redis.client import Client
from reliq.redis.server import Connection
from reliq.redis.shards import ShardMap
from reliq.worker.upkeep import Ticker

#: Queues in different slots, on three nodes.
NAMES = ("a", "b", "c", "d", "e", "f")
SIX = 1_800_000_000 // 86_400 * 86_400 + 6 * 3600


def tick(url, consumer):
    """Run the periodic jobs' check a minute before 06:00, and at 06:00."""
    now = [SIX - 60]
    ticker = Ticker(Client(Connection.to(url).wire(), (), lambda: int(now[0] * 1e6)), consumer.periodic)
    ticker.step()
    now[0] = SIX
    ticker.step()


def test_the_entries_of_queues_on_many_nodes_tick_in_one_look(cluster):
    consumer = Consumer()
    for name in NAMES:
        consumer.cron("0 6 * * *", queue=Queue(name, dict, url=cluster.url), body={}, name=f"at-six-{name}")

    tick(cluster.url, consumer)

    counts = {name: Queue(name, dict, url=cluster.url).counts().ready for name in NAMES}
    assert counts == dict.fromkeys(NAMES, 1)
    assert [(one.queue, one.last_id) for one in Admin(cluster.url).crons()] == [
        (name, f"cron.at-six-{name}.{SIX}") for name in NAMES
    ]


def test_the_messages_of_a_sharded_queue_are_found_where_its_entries_are(url, client):
    client.set(Keys("q").map, ShardMap(1, 8, 8, "steady").text)
    consumer, queue = Consumer(), Queue("q", dict, url=url)
    consumer.cron("0 6 * * *", queue=queue, body={}, name="daily")

    tick(url, consumer)

    id = f"cron.daily.{SIX}"
    assert Admin(url).show("q", id).id == id
    assert not queue.publish({}, id=id)
    assert queue.cancel(id) == "cancelled"
