"""Values of sharded queues: keys, hash tags, ids, shards of ids, and the map."""

from collections import Counter

import pytest

from reliq.errors import ConfigurationError
from reliq.keys import SHARDS_LIMIT, Keys, Layout, check_id, end_of_tag, home, made_at, new_id, run_id, slot_of, tick_id
from reliq.redis.shards import UNSHARDED, ShardMap


def test_shard_0_has_the_keys_of_an_unsharded_queue():
    keys, shard = Keys("orders"), Keys("orders", shard=0)

    assert vars(shard) == vars(keys)
    assert (shard.ready, shard.msg("a"), shard.map) == (
        "{reliq:orders}:ready",
        "{reliq:orders}:msg:a",
        "{reliq:orders}:map",
    )


def test_keys_of_a_shard_are_spelled_as_stored():
    assert [Keys("orders", shard=k).ready for k in (1, 3, 15, 255)] == [
        "{reliq:orders#1.176}:ready",
        "{reliq:orders#3.52}:ready",
        "{reliq:orders#15.53}:ready",
        "{reliq:orders#255.232}:ready",
    ]
    assert Keys("orders", shard=3).msg("a") == "{reliq:orders#3.52}:msg:a"
    assert Keys("orders", shard=3).of_shard(0).entry == "orders"


@pytest.mark.parametrize(
    ("shards", "nodes"), [(8, 8), (16, 16), (64, 16), (256, 64)], ids=["8 on 8", "16 on 16", "64 on 16", "256 on 64"]
)
def test_every_node_of_a_cluster_has_the_same_number_of_shards(shards, nodes):
    for queue in ("orders", "mail", "a", "billing.eu", "x-1"):
        tags = [f"reliq:{queue}{end_of_tag(f'reliq:{queue}', k)}" for k in range(shards)]

        assert Counter(slot_of(tag) * nodes // 16_384 for tag in tags) == dict.fromkeys(range(nodes), shards // nodes)


def test_bad_shard_number_is_refused():
    for shard in (-1, SHARDS_LIMIT, 1.0, True, "1", None):
        with pytest.raises(ConfigurationError, match=f"0 to 255, not {shard!r}"):
            Keys("orders", shard=shard)
    with pytest.raises(ConfigurationError, match="the Go library does not support more"):
        Keys("orders", Layout.hdt3213(), shard=1)
    for number in (0, -8, 3, 12, 512, 16.0, True, "16", None):
        with pytest.raises(ConfigurationError, match=r"power of two from 1 to 256, not"):
            ShardMap.wanted(number, Layout.RELIQ)


def test_generated_id_contains_its_shard_and_time():
    id = new_id(3)

    assert id.endswith("~3")
    assert made_at(id) == made_at(id[:22])
    assert check_id(id) == id
    assert [home(id, n) for n in (1, 2, 4, 8, 256)] == [0, 1, 3, 3, 3]
    assert {home(new_id(), n) for n in (1, 16, 256)} == {0}


def test_id_with_a_bad_shard_is_refused():
    for id in [begin + end for begin in ("a", "", new_id()) for end in ("~0", "~256", "~1~2", "~01")]:
        with pytest.raises(ConfigurationError, match=r"id must be 1 to 128"):
            check_id(id)


def test_home_of_an_id_is_stable():
    homes = {"order-1": [0, 4, 12], "order-2": [0, 3, 3], "0123456789ABCDEFGHIJKL": [0, 7, 15], "a": [0, 2, 10]}

    assert {id: [home(id, n) for n in (1, 8, 16)] for id in homes} == homes
    assert {home(id, 16) for id in (tick_id("daily", 1_800_000_000), run_id("daily", 1_800_000_000_000))} == {0}


def test_chosen_ids_spread_evenly_and_move_to_new_shards_only():
    ids = [f"order-{number}" for number in range(8000)]

    assert min(Counter(home(id, 8) for id in ids).values()) > 850
    moved = [id for id in ids if home(id, 16) != home(id, 8)]
    assert 3700 < len(moved) < 4300
    assert all(home(id, 16) == home(id, 8) + 8 for id in moved)


def test_map_is_json_and_unknown_fields_are_ignored():
    map = ShardMap(3, 16, 8, "growing")

    assert map.text == b'{"epoch":3,"n":16,"was":8,"state":"growing","most":1}'
    assert ShardMap.parse(map.text) == map
    assert ShardMap.parse(b'{"epoch":1,"n":2,"was":2,"state":"steady","more":1}') == ShardMap(1, 2, 2, "steady")
    assert ShardMap.parse(b"") == UNSHARDED == ShardMap(0, 1, 1, "steady")
    assert (map.served, ShardMap(4, 8, 16, "shrinking").served) == (16, 16)


def test_corrupt_map_is_refused():
    for text in (b"16", b"[]", b'{"n":0}', b'{"n":257}', b'{"n":"8"}', b'{"epoch":-1}', b'{"state":"half"}', b"\xff"):
        with pytest.raises(ValueError):
            ShardMap.parse(text)
