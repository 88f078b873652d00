"""An outbox row keeps the key of its message, whichever relay sends it, and however often."""

import pytest
from databases import all_of

from reliq import BodyError, Tasks
from reliq.distribution import VERSION
from reliq.keys import first_published
from reliq.redis.shards import ShardMap
from reliq.wire_format import open_envelope


def lines(client, queue):
    start = queue.keys.line("")
    return {
        key.decode().removeprefix(start): [id.decode() for id in reversed(client.lrange(key, 0, -1))]
        for key in client.scan_iter(f"{start}*")
    }


def test_rows_of_many_keys_share_a_call_and_wait_in_their_key_queues(database, tx, orders, mover, client):
    ids = [orders.publish_in(tx, {"n": n}, key=f"k{n % 2}") for n in range(4)]
    high = orders.publish_in(tx, {}, priority="high")
    plain = orders.publish_in(tx, {})
    tx.commit()
    one = mover()
    one._take()
    assert sorted(len(sending.seqs) for sending in one.redis.calls) == [1, 5]

    assert one.move_all() == 6

    assert lines(client, orders) == {"k0": ids[::2], "k1": ids[1::2], "\x01high": [high]}
    assert client.lrange(orders.keys.ready, 0, -1) == [plain.encode()]
    header, body = open_envelope(client.get(orders.keys.msg(ids[1])))
    assert (header.key, body) == ("k1", b'{"n":1}')


def test_row_sent_again_keeps_its_key_and_incarnation(database, tx, orders, mover, client):
    orders.publish_in(tx, {}, id="chosen", key="tenant-7", publication_id=7)
    id = orders.publish_in(tx, {}, key="tenant-8")
    tx.commit()
    one = mover()
    one.move_all()
    before, _ = open_envelope(client.get(orders.keys.msg(id)))
    client.flushall()

    assert one.store.again(60_000) == 2
    one.move_all()

    assert lines(client, orders) == {"tenant-7": ["chosen"], "tenant-8": [id]}
    chosen, after = (open_envelope(client.get(orders.keys.msg(one)))[0] for one in ("chosen", id))
    assert (chosen.key, chosen.window_ms, chosen.publication_id) == ("tenant-7", 600_000, 7)
    assert (after.key, first_published("q", id, after)) == ("tenant-8", first_published("q", id, before))


def test_row_with_a_key_for_a_sharded_queue_is_refused(database, tx, orders, mover, client):
    client.set(orders.keys.map, ShardMap(1, 2, 2).text)
    orders.publish_in(tx, {}, key="a")
    orders.publish_in(tx, {"n": 1})
    tx.commit()
    one = mover()
    orders.shards()

    assert one.move_all() == 1

    [(note,)] = all_of(database, "SELECT note FROM reliq_outbox WHERE sent_ms IS NULL")
    assert note.startswith(
        f"refused by reliq {VERSION}: queue 'orders' has 2 shards: keys, priorities, costs and limits need a queue of one shard"
    )


def test_tasks_are_published_in_a_transaction(tx, database, mover, url):
    app = Tasks("tasks", url=url)
    ran = []

    @app.task
    def send(to: str) -> None:
        ran.append(to)

    assert send.options(id="mail-7", key="k").publish_in(tx, "a") == "mail-7"
    with pytest.raises(BodyError, match="task 'send'"):
        send.publish_in(tx)
    tx.commit()

    mover().move_all()
    app.drain()

    assert ran == ["a"]
