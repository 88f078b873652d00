"""The script `check`: it reads the state of ids at one moment, and repairs those that are still as they were seen."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from reliq.call import Arg, Call
from reliq.keys import Keys
from reliq.lua import script
from reliq.transitions.protocol import bounded, clock_arg

CHECK = script("check", __package__)
_NO_WISH = ("",) * 7


def check_ids(
    keys: Keys,
    ids: Sequence[str],
    *,
    part: Literal["", "ready", "retry", "both"] = "",
    piece: tuple[int, int] = (1, 0),
    wishes: Mapping[str, Sequence[Arg]] | None = None,
    clock: int | None = None,
) -> Call[tuple[int, list[Any]]]:
    """
    Tell the state of each id, read at one moment, and set right those that have a wish.

    Args:
        part: the list that is looked through in its `piece`, from one index to another; `both` is all of both.
        wishes: the fields after the id in the script's ARGV, by id.

    Returns:
        The time in ms, and a row for each id: its state, or for a wish `mended`, or `changed` where the state is no
        longer the one that was seen.
    """
    bounded("ids", ids)
    lead = (keys.pending, keys.ready, keys.unack, keys.retry, keys.garbage, keys.retries_left, keys.lease, keys.errors)
    args: list[Arg] = [clock_arg(clock), part, *piece]
    for id in ids:
        args += (id, *(wishes[id] if wishes else _NO_WISH))
    return Call(
        CHECK,
        (
            *(*lead, keys.dead, keys.ends, keys.totals, keys.wake, keys.watch, keys.windows),
            *map(keys.msg, ids),
            *map(keys.dedup, ids),
        ),
        args,
        lambda reply: (int(reply[0]), reply[1:]),
    )
