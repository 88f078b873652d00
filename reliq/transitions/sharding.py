"""The number of a queue's shards changes: ask at an old home, raise a fence, write the next map, move to another shard."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from reliq.call import Call, id_text
from reliq.keys import Keys
from reliq.lua import script
from reliq.replies import read_bytes
from reliq.transitions.protocol import bounded, clock_arg, once, texts, words

AskStatus = Literal["free", "duplicate", "tombstoned", "stale"]
ArriveStatus = Literal["arrived", "alive", "late"]
LeavingState = Literal["pending", "ready", "retry", "unack", "dead"]


#: The answer of `remap` for a queue that has keys or limits, and is to have several shards.
REMAP_KEYED = b"keyed"


@dataclass(frozen=True, slots=True)
class Departure:
    """
    Messages or letters on their way from one shard to others.

    Attributes:
        number: of this departure; each has a higher one than those of its shard before it.
        records: the name of each -> all that the other shard needs.
        letters: whether they are dead letters, no messages.
    """

    number: int
    records: dict[str, bytes]
    letters: bool

    def id_of(self, name: str) -> str:
        """Return the id of a message: its name, or behind that of the letter."""
        return name.partition(" ")[2] if self.letters else name


def ask(
    keys: Keys,
    ids: Sequence[str],
    *,
    fence: str,
    closing: bool = False,
    replace: bool = False,
    clock: int | None = None,
) -> Call[list[AskStatus]]:
    """
    Ask the shard that had been the home of chosen ids whether they may be published at their new one.

    From then on the shard takes no chosen id by an earlier map than that of `fence`.

    Args:
        ids: none raises the fence alone.
        closing: whether the shard takes no message at all from now on.
        replace: whether an id is free that is still taken after its end.
    """
    one = script("ask")
    return Call(
        one,
        (*one.lead(keys), *map(keys.dedup, bounded("ids", ids))),
        (clock_arg(clock), fence, "1" if closing else "", "1" if replace else "", *ids),
        lambda reply: cast("list[AskStatus]", words(reply, ids, get_args(AskStatus))),
    )


def remap(keys: Keys, before: bytes, after: bytes, *, clock: int | None = None) -> Call[bytes]:
    """
    Write the next map of a queue's shards over the map `before`; return the map that is there then.

    It is REMAP_KEYED, and nothing is written, when a queue with keys or limits would have several shards.
    """
    first = keys.of_shard(0)
    return Call(script("remap"), (first.map, first.limits), (clock_arg(clock), before, after), read_bytes)


def depart(keys: Keys, ids: Sequence[str], *, state: LeavingState, clock: int | None = None) -> Call[Departure]:
    """
    Hold messages of a state, or letters, that are to be in other shards; return those of the departure that is under way.

    While one is, nothing else is held: first it must be over. From a list only the oldest ids go, in order.
    """
    ids, one = once(bounded("ids", ids)), script("depart")
    return Call(
        one,
        (*one.lead(keys), *keys.msgs(ids)),
        (clock_arg(clock), state, *ids),
        _departure,
    )


def arrive(
    keys: Keys, departure: Departure, names: Sequence[str], *, origin: int, clock: int | None = None
) -> Call[list[ArriveStatus]]:
    """Have those of a departure from the shard `origin` in this one; made again, it answers the same."""
    one = script("arrive")
    return Call(
        one,
        (*one.lead(keys), *keys.msgs(names)),
        (
            clock_arg(clock),
            origin,
            departure.number,
            *(part for name in names for part in (name, departure.records[name])),
        ),
        lambda reply: cast("list[ArriveStatus]", words(reply, names, get_args(ArriveStatus))),
    )


def leave(
    keys: Keys, departure: Departure, staying: Collection[str] = (), *, clock: int | None = None
) -> Call[tuple[str, ...]]:
    """
    Remove what has arrived elsewhere, and put back what is `staying`; the departure is over.

    Returns:
        The ids that were cancelled meanwhile: the other shard has them.
    """
    one = script("leave")
    return Call(
        one,
        (*one.lead(keys), *keys.msgs(departure.records)),
        (
            clock_arg(clock),
            departure.number,
            *(part for name in departure.records for part in (name, "1" if name in staying else "")),
        ),
        texts,
    )


def _departure(reply: Sequence[Any]) -> Departure:
    pairs = dict(zip(reply[::2], reply[1::2], strict=True))
    number, state = pairs.pop(b"").split()
    return Departure(
        int(number), {id_text(name): read_bytes(record) for name, record in pairs.items()}, letters=state == b"dead"
    )
