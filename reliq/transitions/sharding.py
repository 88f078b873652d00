"""The number of a queue's shards changes: ask at an old home, raise a fence, write the next map."""

from collections.abc import Sequence
from typing import Literal, cast, get_args

from reliq.call import Call
from reliq.keys import Keys
from reliq.lua import script
from reliq.replies import read_bytes
from reliq.transitions.protocol import bounded, clock_arg, words

AskStatus = Literal["free", "duplicate", "tombstoned", "stale"]


def ask(
    keys: Keys,
    ids: Sequence[str],
    *,
    epoch: int,
    closing: bool = False,
    replace: bool = False,
    clock: int | None = None,
) -> Call[list[AskStatus]]:
    """
    Ask the shard that had been the home of chosen ids whether they may be published at their new one.

    From then on the shard takes no chosen id by an earlier map than that of `epoch`.

    Args:
        ids: none raises the epoch alone.
        closing: whether the shard takes no message at all from now on.
        replace: whether an id is free that is still taken after its end.
    """
    return Call(
        script("ask"),
        (keys.epoch, keys.unack, keys.retries_left, keys.lease, keys.garbage, *map(keys.dedup, bounded("ids", ids))),
        (clock_arg(clock), epoch, "1" if closing else "", "1" if replace else "", *ids),
        lambda reply: cast("list[AskStatus]", words(reply, ids, get_args(AskStatus))),
    )


def remap(keys: Keys, before: bytes, after: bytes, *, clock: int | None = None) -> Call[bytes]:
    """Write the next map of a queue's shards over the map `before`; return the map that is there then."""
    return Call(script("remap"), (keys.of_shard(0).map,), (clock_arg(clock), before, after), read_bytes)
