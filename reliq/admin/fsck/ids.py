"""The script `check`: it reads the state of ids at one moment, and repairs those that are still as they were seen."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

from reliq.admin.fsck.state import FaultName
from reliq.call import Arg, Call
from reliq.keys import Keys
from reliq.lua import script
from reliq.transitions.protocol import bounded, clock_arg

Part = Literal["", "ready", "retry", "line", "both"]

CHECK = script("check", __package__)
CHECK_KEYS = script("check_keys", __package__)
_NO_WISH = ("",) * 7
NOWHERE: Mapping[str, str] = {}


def check_ids(
    keys: Keys,
    ids: Sequence[str],
    *,
    part: Part = "",
    piece: tuple[int, int] = (1, 0),
    lines: Mapping[str, str] = NOWHERE,
    wishes: Mapping[str, Sequence[Arg]] | None = None,
    clock: int | None = None,
) -> Call[tuple[int, list[Any]]]:
    """
    Tell the state of each id, read at one moment, and set right those that have a wish.

    Args:
        part: the list that is looked through in its `piece`, from one index to another; `line` is that in which an id
            was met, `both` is all of each.
        lines: the message key of the line in which an id was met, by id.
        wishes: the fields after the id in the script's ARGV, by id.

    Returns:
        The time in ms, and a row for each id: its state, or for a wish `mended`, or `changed` where the state is no
        longer the one that was seen.
    """
    bounded("ids", ids)
    args: list[Arg] = [clock_arg(clock), part, *piece]
    for id in ids:
        args += (id, lines.get(id, ""), *(wishes[id] if wishes else _NO_WISH))
    return Call(
        CHECK,
        (*CHECK.lead(keys), *keys.msgs(ids), *map(keys.dedup, ids)),
        args,
        lambda reply: (int(reply[0]), reply[1:]),
    )


def check_keys(
    keys: Keys, items: Sequence[tuple[str, str]], *, repair: bool, clock: int | None = None
) -> Call[list[FaultName | None]]:
    """
    Tell what is wrong with message keys, and with places of keys, and set it right with `repair`.

    Args:
        items: a key and an empty text, or a key and the id of a message that holds a place of it, or should.
    """
    bounded("items", items)
    args: list[Arg] = [clock_arg(clock), "1" if repair else "", *(part for item in items for part in item)]
    return Call(CHECK_KEYS, CHECK_KEYS.lead(keys), args, lambda reply: [_fault(one) for one in reply])


def _fault(reply: bytes) -> FaultName | None:
    word = reply.decode()
    if word and word not in get_args(FaultName):
        raise ValueError
    return cast("FaultName", word) if word else None
