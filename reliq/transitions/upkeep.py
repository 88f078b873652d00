"""Workers and operators keep a queue in order: dead letters, emptying, counting and looking."""

from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from reliq import events
from reliq.call import Arg, Call
from reliq.errors import ProtocolError
from reliq.foreign import whole_number
from reliq.keys import Keys
from reliq.lua import script
from reliq.message import Counts
from reliq.transitions.protocol import bare_arg, bounded, clock_arg, once, texts, words

RedriveStatus = Literal["redriven", "alive", "not_found", "stale"]
#: The kinds of `Counts.totals`; other fields of the hash are nobody's, and may be many.
TOTAL_KINDS = (
    *("published", "redriven", "acked", "dead", "expired", "cancelled", "purged", "promoted", "claimed", "nacked"),
    *("retried_lease", "retried_nack", "released", "snoozed", "letters_dropped", "arrived", "left", "limited"),
)


def collect(
    keys: Keys, ids: Sequence[str], *, letters_max: int, letters_ms: int, clock: int | None = None
) -> Call[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Turn garbage into dead letters; return their ids, and those whose body was gone. One call takes 8 MiB."""
    bounded("ids", ids)
    one = script("collect")
    return Call(
        one,
        (*one.lead(keys), *keys.msgs(ids), *map(keys.dedup, ids)),
        (clock_arg(clock), letters_max, letters_ms, *ids),
        lambda reply: (texts(reply[0]), texts(reply[1])),
        lambda answer: [
            kind(keys.name, some) for kind, some in zip((events.Collected, events.Expired), answer, strict=True) if some
        ],
    )


def redrive(
    keys: Keys,
    letters: Sequence[tuple[str, str, int]],
    *,
    ttl_ms: int,
    delay_ms: int = 0,
    fence: str = "0",
    clock: int | None = None,
) -> Call[list[RedriveStatus]]:
    """
    Publish dead letters again, each by the name of its letter, its id and its retries.

    All are `stale` when the shard knows a later map than that of `fence`, or is closed.
    """
    bounded("letters", letters)
    one = script("redrive")
    args: list[Arg] = [clock_arg(clock), bare_arg(keys), delay_ms, ttl_ms, "" if keys.bare else fence]
    args += [part for letter in letters for part in letter]
    return Call(
        one,
        (*one.lead(keys), *(keys.msg(id) for _, id, _ in letters)),
        args,
        lambda reply: cast("list[RedriveStatus]", words(reply, letters, get_args(RedriveStatus))),
        lambda answer: [
            events.Redriven(
                keys.name, tuple(row[1] for row, word in zip(letters, answer, strict=True) if word == "redriven")
            )
        ],
    )


def purge(
    keys: Keys,
    ids: Sequence[str],
    *,
    state: Literal["pending", "ready", "retry", "line", "garbage"],
    line: str = "",
    free_ids: bool = False,
    clock: int | None = None,
) -> Call[int]:
    """
    Delete messages; from a list, or the line of the key `line`, only its oldest, given in order. Return how many.

    A chosen id stays taken for its `dedup`, as after any end, unless `free_ids`.
    """
    ids, one = once(bounded("ids", ids)), script("purge")
    return Call(
        one,
        (*one.lead(keys), *keys.msgs(ids), *map(keys.dedup, () if free_ids else ids)),
        (clock_arg(clock), state, line, *ids),
        int,
        lambda count: [events.Purged(keys.name, count)] if count else (),
    )


def forget(keys: Keys, *, letters: bool, look: bool = False, clock: int | None = None) -> Call[tuple[int, int]]:
    """
    Remove an empty queue, its dead letters too with `letters`; return how many messages and letters there are.

    With `look` it is not removed.
    """
    one = script("forget")
    return Call(
        one,
        one.lead(keys),
        (clock_arg(clock), int(letters), int(look)),
        lambda reply: (int(reply[0]), int(reply[1])),
    )


def counts(keys: Keys, *, clock: int | None = None) -> Call[Counts]:
    """Count the queue's messages by place, and every total, at one moment."""
    one = script("counts")
    return Call(one, one.lead(keys), (clock_arg(clock), *TOTAL_KINDS), _counts)


def tidy(
    keys: Keys, *, cursor: int = 0, lease_cursor: int = 0, clock: int | None = None
) -> Call[tuple[int, int, int, int]]:
    """Look through a piece of unack and lease; return the next cursors, deadlines pulled back, words removed."""
    one = script("tidy")
    return Call(
        one,
        one.lead(keys),
        (clock_arg(clock), cursor, lease_cursor),
        lambda reply: (int(reply[0]), int(reply[1]), int(reply[2]), int(reply[3])),
    )


def _counts(reply: list[Any]) -> Counts:
    pending, ready, unack, retry, garbage, dead, paused, waiting = (int(size) for size in reply[:8])
    totals = {kind: _total(kind, text) for kind, text in zip(TOTAL_KINDS, reply[8:], strict=True) if text is not None}
    return Counts(
        *(pending, ready, unack, retry, garbage, dead),
        bool(paused),
        totals,
        waiting=max(0, waiting),
        keyed=waiting >= 0,
    )


def _total(kind: str, text: bytes) -> int:
    number = whole_number(text)
    if number is None:
        raise ProtocolError(f"the total {kind} is not a number; `reliq check` says more")
    if number < 0:
        raise ProtocolError(f"the total {kind} is spoilt: {number}; `reliq check` says more")
    return number
