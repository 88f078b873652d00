"""A publisher asks: publish, and later cancel or give another due time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import cast, get_args

from reliq import events
from reliq.call import Arg, Call
from reliq.keys import Keys
from reliq.lua import script
from reliq.message import CancelStatus, PublishStatus, RescheduleStatus
from reliq.settings import BATCH_LIMIT
from reliq.transitions.protocol import (
    CallNumber,
    answers,
    bare_arg,
    bounded,
    clock_arg,
    once,
    span,
)
from reliq.wireformat import ENVELOPE_START

#: September 2001: a due time has 13 digits, so that another can be written over it. What is due earlier is due now too.
EARLIEST_MS = 10**12
#: For how long Redis remembers the last call of a publisher's lane.
REMEMBER_MS = 600_000


@dataclass(frozen=True, slots=True)
class PublishAnswer:
    """
    The due time in ms, and the index of each message that was not published, with why.

    Attributes:
        is_stale: nothing was published, for the shard knows a later map, or is closed.
    """

    due_ms: int
    refused: dict[int, PublishStatus]
    is_stale: bool = False


def publish(
    keys: Keys,
    items: Sequence[tuple[str, bytes]],
    call_number: CallNumber,
    *,
    ttl_ms: int,
    retries: int,
    delay_ms: int = 0,
    at_ms: int | None = None,
    window_ms: int | None = None,
    replace: bool = False,
    bare: bool = False,
    fence: str = "0",
    message_keys: Sequence[str] | None = None,
    remember_ms: int = REMEMBER_MS,
    clock: int | None = None,
) -> Call[PublishAnswer]:
    """
    Put messages into ready, or into pending when they are due later.

    Args:
        items: ids and values; a value is the envelope from its due time on, or a bare body.
        call_number: a call that is made again under its number gets its first answer.
        window_ms: for how long each id stays taken after its end, when the caller chose the ids; else None.
        replace: whether an id may be published that is still taken after its end.
        fence: of the map by which the publisher has found the shard.
        message_keys: the key of each message, empty for none; None when no message has one.
        remember_ms: for how long Redis remembers number and answer of the call.
    """
    if len(items) > BATCH_LIMIT:
        bounded("items", items)
    ids, one = [id for id, _ in items], script("publish", keyed=message_keys is not None)
    at: Arg = "" if at_ms is None else max(at_ms, EARLIEST_MS)
    args: list[Arg] = ["" if clock is None else clock, call_number.number, at, delay_ms, ttl_ms, retries]
    args += [
        "" if bare else ENVELOPE_START,
        "" if window_ms is None else window_ms,
        "1" if replace else "",
        remember_ms,
    ]
    args.append(fence if (keys.shard or window_ms is not None) and not bare else "")
    args += chain.from_iterable(items if message_keys is None else _with_keys(items, message_keys))
    marks = () if window_ms is None else map(keys.dedup, ids)
    named = (keys.lane(call_number.lane), *one.lead(keys), *keys.msgs(ids), *marks)
    return Call(one, named, args, _publish_answer, partial(_published, keys, ids))


def cancel(
    keys: Keys, ids: Sequence[str], *, tombstone_ms: int | None = None, clock: int | None = None
) -> Call[list[CancelStatus]]:
    """
    Cancel messages; the worker of a running one hears of it at the next renewal.

    A cancelled id is free at once; with `tombstone_ms` a publish of it is refused for that time.
    """
    ids, asked, one = once(bounded("ids", ids)), ids, script("cancel")
    return Call(
        one,
        (*one.lead(keys), *keys.msgs(ids), *map(keys.dedup, ids)),
        (clock_arg(clock), bare_arg(keys), "" if tombstone_ms is None else span("tombstone_ms", tombstone_ms), *ids),
        lambda reply: cast("list[CancelStatus]", answers(reply, ids, asked, get_args(CancelStatus))),
        lambda answer: [
            events.Cancelled(
                keys.name, tuple(id for id, word in zip(asked, answer, strict=True) if word == "cancelled")
            )
        ],
    )


def reschedule(
    keys: Keys, ids: Sequence[str], *, at_ms: int | None = None, delay_ms: int = 0, clock: int | None = None
) -> Call[list[RescheduleStatus]]:
    """Give waiting messages another due time: `at_ms`, or `delay_ms` from now."""
    ids, asked, one = once(bounded("ids", ids)), ids, script("reschedule")
    return Call(
        one,
        (*one.lead(keys), *keys.msgs(ids)),
        (clock_arg(clock), bare_arg(keys), "" if at_ms is None else at_ms, delay_ms, *ids),
        lambda reply: cast("list[RescheduleStatus]", answers(reply, ids, asked, get_args(RescheduleStatus))),
    )


def _with_keys(items: Sequence[tuple[str, bytes]], message_keys: Sequence[str]) -> list[tuple[Arg, ...]]:
    return [(id, value, key) for (id, value), key in zip(items, message_keys, strict=True)]


def _published(keys: Keys, ids: Sequence[str], answer: PublishAnswer) -> Iterable[events.Event]:
    if answer.is_stale:
        return []
    return [events.Published(keys.name, tuple(id for i, id in enumerate(ids) if i not in answer.refused))]


def _publish_answer(reply: bytes) -> PublishAnswer:
    if b" " not in reply:
        return PublishAnswer(int(reply), {})
    due, *refused = reply.decode().split(" ")
    if due == "epoch":
        return PublishAnswer(0, {}, is_stale=True)
    parts = [one.split(":") for one in refused]
    if not {why for _, why in parts} <= set(get_args(PublishStatus)):
        raise ValueError
    return PublishAnswer(int(due), {int(index) - 1: cast("PublishStatus", why) for index, why in parts})
