"""The key of a message goes with its row: whichever relay sends it, and however often."""

import msgspec
import pytest
from databases import all_of, unsent

from reliq import ConfigurationError
from reliq.commands import remove_worker, write_worker
from reliq.outbox.rows import RowTerms
from reliq.roster import Worker
from reliq.shardmap import ShardMap
from reliq.wireformat import open_envelope


def lines(client, queue):
    start = queue.keys.line("")
    return {
        key.decode().removeprefix(start): [id.decode() for id in reversed(client.lrange(key, 0, -1))]
        for key in client.scan_iter(f"{start}*")
    }


def test_rows_of_many_keys_share_a_call_and_wait_in_the_lines_of_their_keys(database, tx, orders, mover, client):
    ids = [orders.publish_in(tx, {"n": n}, key=f"k{n % 2}") for n in range(4)]
    high = orders.publish_in(tx, {}, priority="high")
    plain = orders.publish_in(tx, {})
    tx.commit()
    one = mover()
    one._take(10.0)
    assert sorted(len(sending.rows) for sending in one.redis.unanswered) == [1, 5]

    assert one.move_all() == 6

    assert lines(client, orders) == {"k0": ids[::2], "k1": ids[1::2], "\x01high": [high]}
    assert client.lrange(orders.keys.ready, 0, -1) == [plain.encode()]
    header, body = open_envelope(client.get(orders.keys.msg(ids[1])))
    assert (header.key, body) == ("k1", b'{"n":1}')


def test_a_row_that_is_sent_again_keeps_its_key(database, tx, orders, mover, client):
    id = orders.publish_in(tx, {}, key="tenant-7")
    tx.commit()
    one = mover()
    one.move_all()
    client.flushall()

    assert one.store.again(60_000) == 1
    one.move_all()

    assert lines(client, orders) == {"tenant-7": [id]}
    header, _ = open_envelope(client.get(orders.keys.msg(id)))
    assert (header.key, header.window_ms) == ("tenant-7", 600_000)


def test_a_relay_of_an_older_version_refuses_a_row_with_a_key_and_takes_one_without(orders):
    earlier = [field for field in msgspec.structs.fields(RowTerms) if field.name != "keyed"]
    older = msgspec.defstruct(
        "RowTerms",
        [(one.name, one.type, one.default) for one in earlier[2:]],
        forbid_unknown_fields=True,
    )
    keyed = orders._row(orders._writer.order({}, {"key": "a"}), None).terms
    plain = orders._row(orders._writer.order({}, {}), None).terms

    assert b"keyed" not in msgspec.json.encode(plain)
    with pytest.raises(msgspec.ValidationError, match="unknown field `keyed`"):
        msgspec.json.decode(_without_required(keyed), type=older)
    assert msgspec.json.decode(_without_required(plain), type=older)


def _without_required(terms):
    said = msgspec.json.decode(terms.text())
    return msgspec.json.encode({name: value for name, value in said.items() if name not in ("ttl_ms", "retries")})


def test_a_relay_keeps_rows_with_keys_while_a_worker_does_not_know_keys(database, tx, orders, mover, client, caplog):
    old = Worker("w1", "web-1", 7, "0.1.0", ("orders",), 16, 0, 1.0, 1.0, 2e9)
    for one in write_worker(old):
        client.execute_command(*one.command)
    orders.publish_in(tx, {}, key="a")
    tx.commit()
    one = mover()

    assert one.move_all() == 0

    assert "worker w1 of queue 'orders' (reliq 0.1.0, pid 7 on web-1) does not know keys" in caplog.text
    assert (unsent(database), lines(client, orders)) == (1, {})

    for gone in remove_worker("w1"):
        client.execute_command(*gone.command)
    assert mover().move_all() == 1
    assert list(lines(client, orders)) == ["a"]


def test_a_row_with_a_key_that_is_not_allowed_is_never_written(tx, orders):
    with pytest.raises(ConfigurationError, match="key must be 1 to 128 bytes"):
        orders.publish_in(tx, {}, key="")


def test_a_row_with_a_key_for_a_queue_of_several_shards_is_refused_and_holds_up_no_other(
    database, tx, orders, mover, client
):
    client.set(orders.keys.map, ShardMap(1, 2, 2).text)
    orders.publish_in(tx, {}, key="a")
    orders.publish_in(tx, {"n": 1})
    tx.commit()
    one = mover()
    orders.shards()

    assert one.move_all() == 1

    [(note,)] = all_of(database, "SELECT note FROM reliq_outbox WHERE sent_ms IS NULL")
    assert note.startswith(
        "refused: queue 'orders' has 2 shards: keys, priorities and limits need a queue of one shard"
    )
