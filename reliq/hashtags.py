"""Hash tags of Redis Cluster: which slot one lies in, and how those of a queue's shards are spread over the slots."""

from binascii import crc_hqx
from functools import cache
from itertools import count

CLUSTER_SLOTS = 16_384
#: A queue has at most this many shards: eight bits say where in a Cluster each of them lies.
SHARDS_LIMIT = 256
_BITS = 8
_SLOTS_OF_PLACE = CLUSTER_SLOTS // SHARDS_LIMIT


def slot_of(tag: str) -> int:
    """Return the slot in which the keys with a hash tag lie."""
    return crc_hqx(tag.encode(), 0) % CLUSTER_SLOTS


@cache
def end_of_tag(tag: str, shard: int) -> str:
    """
    Return what follows the hash tag of a queue in that of its shard: nothing for shard 0, `#3.52` for shard 3.

    The number after the dot is the first that has the shards lie evenly: of 2 ** n shards there is one in each 2 ** n-th
    of the slots, so that nodes with as many slots each have as many shards each.
    """
    if shard == 0:
        return ""
    # Shard 0 lies where it lies; the low bits of the others are the high bits of their distance from it.
    place = slot_of(tag) // _SLOTS_OF_PLACE ^ int(f"{shard:0{_BITS}b}"[::-1], 2)
    ends = (f"#{shard}.{number}" for number in count())
    return next(end for end in ends if slot_of(tag + end) // _SLOTS_OF_PLACE == place)
