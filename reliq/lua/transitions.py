"""
Build script calls: calls of Lua scripts in Redis.

For each script, this module has a function with the script's name, which returns a `Call`. Tests can set the time
with the argument `clock`, in unix microseconds. With None, the script uses Redis' own clock.

A receipt proves that this process has the lease of a message; it is an object of the class `Claimed`. With an invalid
receipt, for example after the lease expired, a script does not change the message.
"""

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from math import inf
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import msgspec

from reliq import events
from reliq.errors import ProtocolError
from reliq.events import Event
from reliq.keys import Keys, limit_key, token
from reliq.limits import Limit
from reliq.lua import script
from reliq.message import COST_MARK, CancelStatus, Claimed, Counts, Delivery, PublishStatus, RescheduleStatus
from reliq.redis.commands import Arg, Call, id_text, no_events, read_bytes
from reliq.settings import BATCH_LIMIT, INLINE_BYTES, check_int
from reliq.text import LAST_SECOND, clamp_time, clean_text, whole_number
from reliq.wire_format import (
    ENVELOPE_START,
    HEADER_LIMIT,
    FailureNote,
    claim_nonce,
    open_envelope,
    parse_status,
    receipt_nonce,
)

T = TypeVar("T")

AskStatus = Literal["free", "duplicate", "tombstoned", "stale"]
ArriveStatus = Literal["arrived", "alive", "late"]
LeavingState = Literal["pending", "ready", "retry", "unack", "dead"]
RedriveStatus = Literal["redriven", "alive", "not_found", "stale"]
ReplaceMode = Literal["follow", "replace", "debounce", "throttle"]
TickStatus = Literal["published", "paused", "overlap", "missed", "done", "superseded", "unknown"]
PlanStatus = Literal["written", "deleted", "paused", "resumed", "unchanged", "unknown", "sharded", "superseded"]
PlanTickStatus = Literal["published", "missed", "superseded"]
KeyState = Literal["in turn", "asleep", "paused", "saturated", "standing", "empty"]

#: The longest duration that a call accepts, for example for a lease: a hundred years, in ms.
LONGEST_SPAN_MS = 100 * 366 * 86_400_000
#: The earliest due time that a message can have: September 2001, in unix ms. An earlier due time is replaced by this
#: time. So every stored due time has 13 digits, and a script can overwrite the due time in a message's header.
EARLIEST_MS = 10**12
#: For how many ms Redis stores the number and the reply of a script call, to recognize a repeated call (`CallNumber`).
REMEMBER_MS = 600_000
#: A message becomes a dead letter after its lease has expired in this many deliveries in a row. After the first of
#: these deliveries, the message is a suspect, because it may have killed its worker process. To limit the damage, few
#: suspects run at the same time in a process: after one expired lease, suspects may use half of the slots of the
#: process; after two, a quarter. After more, a suspect runs without other suspects.
LEASE_DEATHS = 5
#: The value of `ClaimAnswer.promote_in_ms` or `ClaimAnswer.reclaim_in_ms` if nothing will have to be promoted, or
#: reclaimed.
NOTHING_DUE = -1
#: The value of `ClaimAnswer.promote_in_ms` and `ClaimAnswer.reclaim_in_ms` if another process promotes and reclaims.
NOT_WATCHING = -2
#: The names of the totals in `Counts.totals`. The Redis hash `totals` may have other fields, which are ignored.
TOTAL_KINDS = (
    *("published", "redriven", "acked", "dead", "expired", "cancelled", "purged", "promoted", "claimed", "nacked"),
    *("retried_lease", "retried_nack", "released", "snoozed", "letters_dropped", "arrived", "left", "limited"),
    *("results_dropped", "replaced"),
)
#: The reply of `remap` if it refuses a shard map, because a queue with keys or limits cannot have several shards.
REMAP_KEYED = b"keyed"
#: The number of values in a reply of the script `key_queues` that describe the whole queue. They come first.
_LINES_HEAD = 6
#: The number of values in a reply of the script `key_queues` that describe one key.
_LINES_WIDTH = 7


# ---- arguments and replies


def clock_arg(clock: int | None) -> Arg:
    """Return the script argument for the time: unix microseconds, or an empty text to use Redis' own clock."""
    return "" if clock is None else clock


def bare_arg(keys: Keys) -> Arg:
    """Return the script argument that is `1` if the queue stores bare bodies, without a header, and otherwise empty."""
    return "1" if keys.bare else ""


def bounded(name: str, items: Sequence[T]) -> Sequence[T]:
    """Return `items`; raise ConfigurationError if there are more items than one script call accepts."""
    if len(items) > BATCH_LIMIT:
        check_int(f"number of {name}", len(items), most=BATCH_LIMIT)
    return items


def once(ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids without duplicates, because a script would treat each duplicate as another message."""
    return tuple(dict.fromkeys(ids))


def limit_arg(limit: int, *, least: int = 0) -> int:
    """Return `limit`, the largest number of messages in a script call; raise ConfigurationError if it is invalid."""
    if type(limit) is int and least <= limit <= BATCH_LIMIT:
        return limit
    return check_int("limit", limit, least=least, most=BATCH_LIMIT)


def span(name: str, ms: int) -> int:
    """Return the duration `ms`; raise ConfigurationError if it is below 1 ms or above a hundred years."""
    if type(ms) is int and 0 < ms <= LONGEST_SPAN_MS:
        return ms
    return check_int(name, ms, least=1, most=LONGEST_SPAN_MS)


def texts(reply: Iterable[bytes]) -> tuple[str, ...]:
    """Decode the message ids in a reply of Redis."""
    return tuple(map(id_text, reply))


def words(reply: Sequence[bytes], asked: Sequence[Any], known: Sequence[str]) -> list[Any]:
    """
    Decode a reply of Redis that has a status, such as `cancelled`, for each item of a script call.

    Args:
        asked: the items of the script call.
        known: all valid statuses.

    Raises:
        ValueError: the reply has the wrong number of statuses, or an invalid status.
    """
    answers = [word.decode() for word in reply]
    if len(answers) != len(asked) or not set(answers) <= set(known):
        raise ValueError
    return answers


def words_of(asked: Sequence[str], ids: Sequence[str], reply: Sequence[bytes], known: Sequence[str]) -> list[Any]:
    """
    Return a status, such as `cancelled`, for each id in `asked`.

    Args:
        asked: the ids from the caller, which may contain an id more than once.
        ids: the ids of the script call, each once.
        reply: the reply of Redis, with a status for each of `ids`.
        known: all valid statuses.
    """
    by_id = dict(zip(ids, words(reply, ids, known), strict=True))
    return [by_id[id] for id in asked]


def _call(
    name: str,
    keys: Keys,
    clock: int | None,
    args: Iterable[Arg],
    read: Callable[[Any], T],
    happened: Callable[[T], Iterable[Event]] = no_events,
    *,
    ids: Iterable[str] = (),
    chosen_ids: Iterable[str] = (),
) -> Call[T]:
    """
    Build a script call for a queue.

    Its KEYS are the queue's keys from the script's header, the body key of each of `ids`, and the deduplication key of
    each of `chosen_ids`.
    """
    lua = script(name)
    named = (*lua.lead(keys), *keys.msgs(ids), *map(keys.dedup, chosen_ids))
    return Call(lua, named, (clock_arg(clock), *args), read, happened)


# ---- publish, cancel, reschedule


@dataclass(frozen=True, slots=True)
class CallNumber:
    """
    The number of a script call, by which Redis recognizes a repeated call.

    A client repeats a call with the same number if the reply of the first call did not arrive. If Redis has already
    run the call, the script does not publish or claim again: it returns the stored reply of the first call.

    Attributes:
        lane: the name of a sequence of calls. A client makes the calls of a lane one after another. Redis stores only
            the number and the reply of the last call of a lane.
        number: higher than the number of the lane's last call; or the same number, to repeat that call.
    """

    lane: str
    number: int

    def next(self) -> "CallNumber":
        """Return the call number for the next script call of the same lane."""
        return CallNumber(self.lane, self.number + 1)


@dataclass(frozen=True, slots=True)
class PublishAnswer:
    """
    The result of the script call `publish` or `replace`.

    Attributes:
        due_ms: the due time of the messages, in unix ms.
        refused: the statuses of the messages that were not published as new messages, by their index in the call. For
            example, `{2: "duplicate"}`.
        is_stale: whether the shard refused all messages, because the publisher has an old shard map, or because the
            shard is closed during a resize.
        dues_ms: the due times of the accepted messages in unix ms, by their index in the call. Only `replace` sets
            this, because its messages can have different due times.
    """

    due_ms: int
    refused: dict[int, PublishStatus]
    is_stale: bool = False
    dues_ms: Mapping[int, int] = field(default_factory=dict)


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
    Publish messages: add their ids to `ready`, or to `pending` if they are due later.

    Args:
        items: the id and the value of each message. The value is the message as Redis stores it, but without the
            first characters of its header: the script adds these, because they contain the due time. In a queue with
            bare bodies, the value is the body.
        call_number: if Redis already has the reply of a call with this number, the script publishes nothing and
            returns that reply.
        window_ms: for how many ms after the end of its message a chosen id is blocked; None for generated ids.
        replace: whether to publish a message even if its chosen id is blocked after the end of an earlier message.
        fence: the version of the shard map with which the publisher selected the shard.
        message_keys: the message key of each message, or an empty text for a message without a key; None if no message
            has a key. A queue with several shards refuses messages with keys: `PublishAnswer.is_stale` is then True.
        remember_ms: for how many ms Redis stores the number and the reply of the call.
    """
    if len(items) > BATCH_LIMIT:
        bounded("items", items)
    ids = [id for id, _ in items]
    lua = script("publish")
    at: Arg = "" if at_ms is None else max(at_ms, EARLIEST_MS)
    start = "" if bare else ENVELOPE_START
    window: Arg = "" if window_ms is None else window_ms
    args: list[Arg] = ["" if clock is None else clock, call_number.number, at, delay_ms, ttl_ms, retries]
    args += [start, window, "1" if replace else "", remember_ms]
    args.append(fence if (keys.shard or window_ms is not None) and not bare else "")
    args.append("" if message_keys is None else "1")
    if message_keys is None:
        args += chain.from_iterable(items)
    else:
        args += [part for (id, value), key in zip(items, message_keys, strict=True) for part in (id, value, key)]
    marks = () if window_ms is None else map(keys.dedup, ids)
    named = (keys.lane(call_number.lane), *lua.lead(keys), *keys.msgs(ids), *marks)
    return Call(lua, named, args, _publish_answer, partial(_published, keys, ids))


def replace(
    keys: Keys,
    items: Sequence[tuple[str, bytes]],
    call_number: CallNumber,
    *,
    mode: ReplaceMode,
    ttl_ms: int,
    retries: int,
    span_ms: int = 0,
    most_ms: int = 0,
    delay_ms: int = 0,
    at_ms: int | None = None,
    fence: str = "0",
    message_keys: Sequence[str] | None = None,
    remember_ms: int = REMEMBER_MS,
    clock: int | None = None,
) -> Call[PublishAnswer]:
    """
    Publish messages with chosen ids, even if waiting or running messages already have these ids.

    If a message with the same id waits, it gets the body, retries and due time of the new message. If a message with
    the same id runs, the new message becomes its successor: it is published when the running message ends.

    Args:
        mode: with `replace`, new messages replace waiting messages and follow running messages. With `follow`, they
            only follow running messages. `debounce` and `throttle` also compute the due time of the new messages.
        span_ms: with `debounce`, how long a message waits after it was last published. With `throttle`, the time
            between the starts of two messages with the same id.
        most_ms: with `debounce`, the longest time that a message waits after it was first published.
        items, call_number, ttl_ms, retries, delay_ms, at_ms, fence, message_keys, remember_ms: see `publish`.
    """
    ids = [id for id, _ in bounded("items", items)]
    at: Arg = "" if at_ms is None else max(at_ms, EARLIEST_MS)
    args: list[Arg] = [call_number.number, at, delay_ms, ttl_ms, retries, ENVELOPE_START, mode, span_ms, most_ms]
    args += [remember_ms, fence, "" if message_keys is None else "1"]
    for number, (id, value) in enumerate(items):
        args += (id, value) if message_keys is None else (id, value, message_keys[number])
    lua = script("replace")
    named = (keys.lane(call_number.lane), *lua.lead(keys), *keys.msgs(ids), *map(keys.dedup, ids))
    return Call(lua, named, (clock_arg(clock), *args), _publish_answer, partial(_published, keys, ids))


def _published(keys: Keys, ids: Sequence[str], answer: PublishAnswer) -> Iterable[Event]:
    if answer.is_stale:
        return []
    return [events.Published(keys.name, tuple(id for i, id in enumerate(ids) if i not in answer.refused))]


def _publish_answer(reply: bytes) -> PublishAnswer:
    if b" " not in reply:
        return PublishAnswer(int(reply), {})
    due, *refused = reply.decode().split(" ")
    if due == "epoch":
        return PublishAnswer(0, {}, is_stale=True)
    parts = [refusal.split(":") for refusal in refused]
    if not {part[1] for part in parts} <= set(get_args(PublishStatus)):
        raise ValueError
    statuses = {int(part[0]) - 1: cast("PublishStatus", part[1]) for part in parts if part[1] != "published"}
    return PublishAnswer(int(due), statuses, dues_ms={int(part[0]) - 1: int(part[2]) for part in parts if part[2:]})


def cancel(
    keys: Keys,
    ids: Sequence[str],
    *,
    tombstone_ms: int | None = None,
    kind: Literal["cancelled", "purged"] = "cancelled",
    clock: int | None = None,
) -> Call[list[CancelStatus]]:
    """
    Cancel messages. If a message runs, its worker detects the cancel when it next renews the lease.

    Args:
        tombstone_ms: for how many ms a cancelled id cannot be published again; None to allow it immediately.
        kind: whether the totals count the messages as `cancelled` or as `purged`. Running messages always count as
            `cancelled`.
    """
    unique = once(bounded("ids", ids))
    tombstone: Arg = "" if tombstone_ms is None else span("tombstone_ms", tombstone_ms)

    def happened(answer: list[CancelStatus]) -> list[Event]:
        cancelled = tuple(id for id, word in zip(ids, answer, strict=True) if word == "cancelled")
        if kind == "purged":
            return [events.Purged(keys.name, len(cancelled))] if cancelled else []
        return [events.Cancelled(keys.name, cancelled)]

    read = partial(words_of, ids, unique, known=get_args(CancelStatus))
    args = (bare_arg(keys), tombstone, kind, *unique)
    return _call("cancel", keys, clock, args, read, happened, ids=unique, chosen_ids=unique)


def reschedule(
    keys: Keys, ids: Sequence[str], *, at_ms: int | None = None, delay_ms: int = 0, clock: int | None = None
) -> Call[list[RescheduleStatus]]:
    """Change the due time of waiting messages: to `at_ms` (unix ms), or to `delay_ms` from now if `at_ms` is None."""
    unique = once(bounded("ids", ids))
    args = (bare_arg(keys), "" if at_ms is None else at_ms, delay_ms, *unique)

    read = partial(words_of, ids, unique, known=get_args(RescheduleStatus))
    return _call("reschedule", keys, clock, args, read, ids=unique)


# ---- promote, claim, reclaim


@dataclass(frozen=True, slots=True)
class Suspects:
    """
    The suspects of a queue in this process before a claim. The script leases only suspects that may run beside them.

    A suspect is a message whose last delivery ended with an expired lease, so it may have killed its worker process.

    Attributes:
        slots: how many messages of the queue may run at the same time in this process.
        held: how many suspects are prefetched or run in this process.
        narrowest: how many suspects may run at the same time in this process: the lowest `room` of its suspects.
    """

    slots: int
    held: int
    narrowest: int

    @staticmethod
    def room(one: Claimed, slots: int) -> int:
        """Return how many suspects may run at the same time in a process with `slots` slots if `one` is among them."""
        return 1 if one.deaths > 2 or one.left <= 0 else max(1, slots >> one.deaths)  # noqa: PLR2004  see LEASE_DEATHS


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """
    The result of the script call `claim`.

    Attributes:
        promote_in_ms: after how many ms this process must call `promote`; or NOTHING_DUE or NOT_WATCHING.
        reclaim_in_ms: after how many ms this process must call `reclaim`; or NOTHING_DUE or NOT_WATCHING.
        behind: how much is left to claim: the number of ids in `ready` and `retry`, plus the number of keys with
            messages that may start.
        claimed: the leased messages.
        keyed: whether the queue has keys or limits. The queue's limits then count the leased messages as started.
    """

    promote_in_ms: int
    reclaim_in_ms: int
    behind: int
    claimed: list[Claimed]
    keyed: bool = False


class Oversized(NamedTuple):
    """A stored message that is too large to read: its size, and its first bytes, which contain the header."""

    size: int
    start: bytes


#: The result of the script call `bodies` for a message. Bytes are the stored message (header and body). None means that
#: Redis does not have it. An int is its size: `commands.bodies` then reads it with another command. `Oversized` means
#: that it is too large to read.
FoundBody = bytes | int | Oversized | None


@dataclass(frozen=True, slots=True)
class ReclaimAnswer:
    """
    The result of the script call `reclaim`.

    Attributes:
        next_in_ms: the ms until the deadline of the next message in `unack`, or NOTHING_DUE.
        overdue: the ids of messages to redeliver because their leases expired.
        again: the ids of messages to redeliver because their backoff ended.
        buried: the ids of messages that moved to `garbage`.
        cancelled: the ids of messages that ended as cancelled.
        inconsistent: the ids of messages whose stored number of retries was missing or invalid.
    """

    next_in_ms: int
    overdue: tuple[str, ...]
    again: tuple[str, ...]
    buried: tuple[str, ...]
    cancelled: tuple[str, ...]
    inconsistent: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of messages that `reclaim` redelivered, moved to `garbage`, or ended as cancelled."""
        return len(self.overdue) + len(self.again) + len(self.buried) + len(self.cancelled)


def promote(keys: Keys, *, limit: int = 500, clock: int | None = None) -> Call[tuple[int, int]]:
    """
    Move due messages from `pending` to `ready`. In a queue with keys, messages with a key move to their key queues.

    In a queue with keys, this also allows claims from keys whose throttling has ended.

    Returns:
        The number of moved messages, and the ms until the next `promote`: until the next message is due or, in a queue
        with keys, until a throttling ends or the queue's rate allows a start, if this is earlier.
    """

    def happened(answer: tuple[int, int]) -> Iterable[Event]:
        return [events.Promoted(keys.name, answer[0])] if answer[0] else ()

    return _call(
        "promote", keys, clock, [limit_arg(limit, least=1)], lambda reply: (int(reply[0]), int(reply[1])), happened
    )


def claim(
    keys: Keys,
    call_number: CallNumber,
    *,
    limit: int,
    lease_ms: int,
    keyed_limit: int | None = None,
    first: Literal["ready", "retry"] = "ready",
    direct: int | None = None,
    suspects: Suspects | None = None,
    watcher: str = "",
    spread: int | None = None,
    clock: int | None = None,
) -> Call[ClaimAnswer]:
    """
    Lease up to `limit` messages from the lists `ready` and `retry`, first from the list `first`.

    In a queue with keys, the script leases messages from these lists and from key queues in turns, within the queue's
    limits.

    Args:
        call_number: if Redis already has the reply of a call with this number, the script claims nothing new and
            returns the messages of that call that are still leased.
        lease_ms: how long the leases last, in ms.
        limit: the largest number of messages, at most 500.
        keyed_limit: the largest number of messages in a queue with keys or limits, where each claimed message counts
            as started. None to use `limit`.
        first: the list to claim from first.
        direct: the largest number of messages that must start immediately and must not be prefetched: suspects and
            messages without retries left. None for no limit.
        suspects: the suspects that this process already has. None for a process without suspects and with `limit`
            slots.
        watcher: the name of this process if it can call `promote` and `reclaim` when they are due; otherwise empty.
            Only one process at a time does this: the watcher.
        spread: in a queue with keys, the largest number of keys to claim from. All messages without a key count as one
            key. None for no limit.

    Raises:
        ConfigurationError: `limit` or `lease_ms` is out of range.
    """
    limit_arg(limit)
    span("lease_ms", lease_ms)
    suspects = suspects or Suspects(limit, 0, limit)
    lua = script("claim")
    nonce = claim_nonce(call_number.lane, call_number.number, lease_ms)
    args: list[Arg] = ["" if clock is None else clock, call_number.number, nonce, lease_ms, limit, first]
    args += [limit if direct is None else direct, suspects.slots, suspects.held, suspects.narrowest, watcher]
    args += [limit if keyed_limit is None else keyed_limit, BATCH_LIMIT if spread is None else spread]
    return Call(
        lua,
        (keys.lane(call_number.lane), *lua.lead(keys)),
        args,
        lambda reply: _claim_answer(reply, nonce),
        lambda answer: [events.Claimed(keys.name, tuple(one.id for one in answer.claimed))] if answer.claimed else (),
    )


def reclaim(
    keys: Keys, *, limit: int = 500, spare_leases: bool = False, clock: int | None = None
) -> Call[ReclaimAnswer]:
    """
    Redeliver messages whose lease has expired or whose backoff has ended.

    Messages without a key move to `retry`, and messages with a key to the heads of their key queues. Messages without
    retries left, or after LEASE_DEATHS expired leases in a row, move to `garbage`.

    Args:
        limit: the largest number of messages.
        spare_leases: whether to leave messages with expired leases in `unack`, because their workers may renew the
            leases after an outage. Messages of dead processes are redelivered in any case.
    """
    args = (limit_arg(limit, least=1), "1" if spare_leases else "", LEASE_DEATHS)

    def read(reply: Sequence[Any]) -> ReclaimAnswer:
        return ReclaimAnswer(int(reply[0]), *(texts(ids) for ids in reply[1:6]))

    def happened(answer: ReclaimAnswer) -> Iterable[Event]:
        if answer.overdue or answer.again or answer.buried:
            yield events.Reclaimed(keys.name, answer.overdue, answer.again, answer.buried)
        if answer.cancelled:
            yield events.Cancelled(keys.name, answer.cancelled)
        if answer.inconsistent:
            yield events.Inconsistent(keys.name, answer.inconsistent)

    return _call("reclaim", keys, clock, args, read, happened)


def bodies(keys: Keys, ids: Sequence[str], *, max_body: int, clock: int | None = None) -> Call[list[FoundBody]]:
    """
    Read stored messages (header and body) by their ids.

    If the messages are large together, the script returns only their sizes. For a message with a body above `max_body`
    bytes, it then returns the size and the header.
    """
    return Call(
        script("bodies"),
        keys.msgs(ids),
        (0 if clock is None else clock, max_body + HEADER_LIMIT, INLINE_BYTES),
        lambda reply: [one if type(one) is bytes else _found(one) for one in reply],
    )


def delivery(claimed: Claimed, found: bytes | Oversized, *, max_body: int, bare: bool) -> Delivery:
    """
    Decode a claimed message into a `Delivery`.

    If the body is larger than `max_body` bytes, the `refusal` of the delivery is an error text, so that no handler
    gets the message.

    Args:
        found: the stored message, as the script call `bodies` returned it.
        bare: whether the stored message is only a body without a header, as in queues that Go clients also use.
    """
    if isinstance(found, bytes):
        header, payload = open_envelope(found, bare=bare)
        refusal = "" if len(payload) <= max_body else _too_large(len(payload), max_body)
        return Delivery(claimed, found, header, payload, refusal)
    header, start = open_envelope(found.start, bare=bare)
    return Delivery(claimed, b"", header, b"", _too_large(found.size - len(found.start) + len(start), max_body))


def _too_large(size: int, max_body: int) -> str:
    return f"body must be at most {max_body} bytes (max_body), not {size}"


def _found(one: Any) -> FoundBody:
    if one is None or type(one) is int:
        return one
    size, start = one
    return Oversized(int(size), read_bytes(start))


def _claim_answer(reply: list[Any], nonce: str) -> ClaimAnswer:
    promote_in, reclaim_in, behind, token, lines, *rows = reply
    keys = repeat(None) if lines is None else map(id_text, lines)
    claimed = [
        Claimed(id_text(id), receipt_nonce(nonce, deaths), left, deaths, token, key)
        for id, left, deaths, key in zip(rows[::3], rows[1::3], rows[2::3], keys, strict=False)
    ]
    return ClaimAnswer(int(promote_in), int(reclaim_in), int(behind), claimed, lines is not None)


# ---- ack, nack, extend, release, snooze


@dataclass(frozen=True, slots=True)
class Settled:
    """
    The result of a script call that settles messages, such as `ack` or `nack`: the messages that it did not settle.

    Attributes:
        lost: the ids of messages with an invalid receipt.
        cancelled: the ids of messages that were cancelled while this process had their leases.
        followed: the ids of messages that another script must settle. Messages with a successor must be settled by
            `succeed`, so all other scripts return them here. `succeed` returns the messages whose successors were
            cancelled.
    """

    lost: tuple[str, ...]
    cancelled: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()


def ack(
    keys: Keys,
    receipts: Sequence[tuple[Claimed, int | None]],
    *,
    kind: Literal["acked", "expired"] = "acked",
    history: int = 0,
    took_ms: Sequence[int] = (),
    results: Sequence[str] = (),
    keep_ms: int = 0,
    clock: int | None = None,
) -> Call[Settled]:
    """
    Ack messages, or end messages without a body as expired.

    Args:
        receipts: for each message its receipt, and for how many ms its chosen id stays blocked after the message has
            ended (None for a generated id).
        kind: `acked`, or `expired` for messages whose body did not exist when they were claimed.
        history: how many of the last acked messages Redis keeps in the queue's history.
        took_ms: for the history, how many ms each message ran.
        results: the encoded result of each message, to store it in Redis; empty to store no results.
        keep_ms: for how many ms Redis keeps the results.
    """
    claims = [claimed for claimed, _ in bounded("receipts", receipts)]
    ids = [claimed.id for claimed in claims]
    windows: list[Arg] = [window or "" for _, window in receipts]
    # The script needs the deduplication keys of chosen ids. The header of a message shows whether its id is chosen. If
    # the message has no header (`bare`, `expired`), pass the deduplication keys of all ids.
    chosen_ids = ids if keys.bare or kind == "expired" or any(windows) else ()
    times: Iterable[Arg] = took_ms or repeat("")
    if kind == "expired":
        times = [claimed.token for claimed in claims]
    kept: Arg = msgspec.msgpack.encode([str(keep_ms), *results]) if results else ""
    args = _settle_args((kind, history, kept), claims, zip(windows, times, strict=False))
    settled = partial(_settled, keys, ids, "ack", events.Acked if kind == "acked" else events.Expired)
    return _call("ack", keys, clock, args, partial(_unsettled, ids), settled, ids=ids, chosen_ids=chosen_ids)


def nack(keys: Keys, failures: Sequence[tuple[Claimed, int, str, bytes]], *, clock: int | None = None) -> Call[Settled]:
    """
    Report failed messages: redeliver them later, or let them fail for good.

    Args:
        failures: for each message its receipt, a number of ms, the text of its `FailureNote`, and its stored value
            (header and body). If the value is empty, the message is redelivered after this number of ms. If the value
            is given, the message fails for good and moves to `garbage`; this is required if no retry is left.
            To let a message fail for good without its value, pass -1 ms if its body is empty, or -2 ms if Redis
            must keep the body that it has. `failure` builds such an item.
    """
    ids = [failure[0].id for failure in bounded("failures", failures)]
    claims = [failure[0] for failure in failures]
    args = _settle_args((bare_arg(keys),), claims, [failure[1:] for failure in failures])
    settled = partial(_settled, keys, ids, "nack", events.Nacked)
    return _call("nack", keys, clock, args, partial(_lost_cancelled, ids), settled, ids=ids)


def failure(
    delivery: Delivery,
    reason: str,
    error: object,
    delay_ms: int,
    *,
    final: bool = False,
    raised: str = "",
    by: str = "",
    took_ms: int | None = None,
) -> tuple[Claimed, int, str, bytes]:
    """
    Build an item for the argument `failures` of `nack`: a message that is redelivered, or fails for good.

    Args:
        delivery: the failed message.
        delay_ms: after how many ms the message is redelivered if it does not fail for good.
        final: whether the message fails for good even if retries are left.
        reason, error, raised, by, took_ms: the fields of the message's `FailureNote`; `error` is its field `text`.
    """
    last = final or delivery.claimed.left <= 0
    if last and not delivery.value:
        delay_ms = -2 if delivery.refusal else -1
    note = FailureNote(reason, delivery.attempt, clean_text(error), raised, by, took_ms)
    return delivery.claimed, delay_ms, str(note), delivery.value if last else b""


def extend(keys: Keys, receipts: Sequence[Claimed], *, lease_ms: int, clock: int | None = None) -> Call[Settled]:
    """
    Renew leases: they expire `lease_ms` from now. The result also contains the messages that were cancelled.

    With 0, the leases of a dead process expire now. `reclaim` then redelivers its messages even with `spare_leases`.
    """
    ids = [claimed.id for claimed in bounded("receipts", receipts)]
    args: list[Arg] = [clock_arg(clock), check_int("lease_ms", lease_ms, most=LONGEST_SPAN_MS)]
    for claimed in receipts:
        args += (claimed.id, claimed.nonce)
    return Call(script("extend"), (keys.unack, keys.lease), args, partial(_lost_cancelled, ids))


def checkpoint(
    keys: Keys, checkpoints: Sequence[tuple[Claimed, int, str]], *, clock: int | None = None
) -> Call[Settled]:
    """
    Store checkpoints of running messages in their headers, where each replaces the message's last checkpoint.

    Args:
        checkpoints: for each message its receipt, the number of the checkpoint, and the checkpoint as JSON text for
            the header.
    """
    ids = [claimed.id for claimed, *_ in bounded("checkpoints", checkpoints)]
    args: list[Arg] = [clock_arg(clock)]
    for claimed, number, saved in checkpoints:
        args += (claimed.id, claimed.nonce, number, saved)
    return Call(script("checkpoint"), (keys.unack, keys.lease, *keys.msgs(ids)), args, partial(_lost_cancelled, ids))


def release(
    keys: Keys, receipts: Sequence[Claimed], *, sleep_ms: int | None = None, clock: int | None = None
) -> Call[Settled]:
    """
    Return claimed messages to the head of `ready` or of their key queue, without spending a retry.

    Args:
        receipts: the receipts of the messages. The first of these messages will be claimed first.
        sleep_ms: for how many ms to throttle the keys of these messages, in queues with keys. A message without a key
            throttles the whole queue. None to throttle nothing.
    """
    ids = [claimed.id for claimed in bounded("receipts", receipts)]
    sleep: Arg = "" if sleep_ms is None else span("sleep_ms", sleep_ms)
    args = _settle_args((sleep,), receipts, [()] * len(receipts))

    def happened(name: str, released: tuple[str, ...]) -> Event:
        if sleep_ms is None:
            return events.Released(name, released)
        throttled = dict.fromkeys(claimed.key or "" for claimed in receipts if claimed.id in released)
        return events.Throttled(name, released, tuple(throttled), sleep_ms / 1000)

    settled = partial(_settled, keys, ids, "release", happened)
    return _call("release", keys, clock, args, partial(_unsettled, ids), settled)


def snooze(keys: Keys, receipts: Sequence[tuple[Claimed, int]], *, clock: int | None = None) -> Call[Settled]:
    """Redeliver each message after its number of ms in `receipts`, without spending a retry."""
    ids = [claimed.id for claimed, _ in bounded("receipts", receipts)]
    claims = [claimed for claimed, _ in receipts]
    args = _settle_args((bare_arg(keys),), claims, [(delay_ms,) for _, delay_ms in receipts])
    settled = partial(_settled, keys, ids, "snooze", events.Snoozed)
    return _call("snooze", keys, clock, args, partial(_lost_cancelled, ids), settled, ids=ids)


def succeed(
    keys: Keys,
    receipts: Sequence[Claimed],
    *,
    kind: str,
    history: int = 0,
    took_ms: Sequence[int] = (),
    clock: int | None = None,
) -> Call[Settled]:
    """
    End running messages that have successors, and publish the successors under the same ids.

    Args:
        kind: `acked` if the running messages succeeded. Any other word means that they failed: they are then not
            redelivered and do not become dead letters, because their successors replace them.
        history, took_ms: see `ack`.
    """
    ids = [claimed.id for claimed in bounded("receipts", receipts)]
    rows: list[tuple[Arg]] = [(one,) for one in took_ms] or [("",)] * len(ids)
    args = _settle_args((kind, history), receipts, rows)

    def happened(answer: Settled) -> Iterable[Event]:
        if kind == "acked":
            yield from _settled(keys, ids, "ack", events.Acked, answer)
        elif answer.lost:
            yield events.LeaseLost(keys.name, answer.lost, "nack")

    return _call("succeed", keys, clock, args, partial(_unsettled, ids), happened, ids=ids)


def _settle_args(head: Sequence[Arg], receipts: Sequence[Claimed], rows: Iterable[Sequence[Arg]]) -> list[Arg]:
    """
    Return the script arguments of a call that settles messages.

    The arguments begin with `head`. Then come the arguments of each message: its id, the nonce of its claim, and its
    item of `rows`. If any message of the call has a message key or a reported cost, each message also has the argument
    `key`: its message key, followed by the cost and the fencing token if the job has reported its real cost.
    """
    keyed = any(one.key or (one.spent is not None and one.key is not None) for one in receipts)
    args: list[Arg] = [*head, "1" if keyed else ""]
    for claimed, row in zip(receipts, rows, strict=True):
        args += (claimed.id, claimed.nonce, *row)
        if keyed:
            key = claimed.key or ""
            args.append(key if claimed.spent is None else f"{key}{COST_MARK}{claimed.spent} {claimed.token}")
    return args


def _unsettled(ids: Sequence[str], lost: Sequence[Any], cancelled: Sequence[bytes] = ()) -> Settled:
    """
    Decode a reply of Redis into a `Settled`.

    Args:
        ids: the message ids of the script call.
        lost: ids with an invalid receipt. An id in its own list is the id of a message for another script.
        cancelled: the ids of cancelled messages.

    Raises:
        ValueError: the reply contains an id that was not in the call.
    """
    if not lost and not cancelled:
        return Settled(())
    stopped, followed = texts(cancelled), texts(chain.from_iterable(one for one in lost if isinstance(one, list)))
    gone = texts(one for one in lost if not isinstance(one, list))
    if not {*gone, *followed, *stopped} <= set(ids):
        raise ValueError
    return Settled(gone, stopped, followed)


def _lost_cancelled(ids: Sequence[str], reply: Sequence[Any]) -> Settled:
    return _unsettled(ids, reply[0], reply[1])


def _settled(
    keys: Keys, ids: Sequence[str], verb: str, happened: Callable[[str, tuple[str, ...]], Event], answer: Settled
) -> Iterable[Event]:
    done: Sequence[str] = ids
    # An id can be in the call twice, with a valid and an invalid receipt. So count the ids instead of using a set.
    if answer != Settled(()):
        gone = Counter((*answer.lost, *answer.cancelled, *answer.followed))
        done = list((Counter(ids) - gone).elements())
    if done:
        yield happened(keys.name, tuple(done))
    if answer.lost:
        yield events.LeaseLost(keys.name, answer.lost, verb)
    if answer.cancelled:
        yield events.Cancelled(keys.name, answer.cancelled)


# ---- dead letters, purges and counts


def collect(
    keys: Keys, ids: Sequence[str], *, dead_letter_limit: int, letters_ms: int, clock: int | None = None
) -> Call[tuple[tuple[str, ...], tuple[str, ...]]]:
    """
    Turn messages in `garbage` into dead letters, at most 8 MiB in a call. Messages without a body end as expired.

    Args:
        dead_letter_limit: how many dead letters the queue keeps.
        letters_ms: for how many ms the queue keeps a dead letter.

    Returns:
        The ids of the messages that became dead letters, and the ids of the messages that ended as expired.
    """
    bounded("ids", ids)
    args: list[Arg] = [dead_letter_limit, letters_ms, *ids]

    def happened(answer: tuple[tuple[str, ...], tuple[str, ...]]) -> Iterable[Event]:
        collected, expired = answer
        if collected:
            yield events.DeadLettered(keys.name, collected)
        if expired:
            yield events.Expired(keys.name, expired)

    def read(reply: Sequence[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return texts(reply[0]), texts(reply[1])

    return _call("collect", keys, clock, args, read, happened, ids=ids, chosen_ids=ids)


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
    Redrive dead letters: publish their messages again.

    Args:
        letters: for each dead letter its letter id, its message id, and the number of retries that the message gets.
        fence: the version of the caller's shard map. If the shard has a newer map or is closed during a resize, it
            publishes nothing and returns `stale` for all dead letters.
    """
    ids = [id for _, id, _ in bounded("letters", letters)]
    args: list[Arg] = [bare_arg(keys), delay_ms, ttl_ms, "" if keys.bare else fence]
    args += chain.from_iterable(letters)

    def happened(answer: list[RedriveStatus]) -> list[Event]:
        redriven = tuple(id for id, word in zip(ids, answer, strict=True) if word == "redriven")
        return [events.Redriven(keys.name, redriven)]

    read = partial(words, asked=letters, known=get_args(RedriveStatus))
    return _call("redrive", keys, clock, args, read, happened, ids=ids)


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
    Delete messages that wait or have failed, and return how many were deleted.

    Args:
        ids: the ids of the messages. From `ready`, `retry` or a key queue, only the oldest messages can be deleted, so
            `ids` must be in the order of the list, the oldest first.
        state: where the messages are. `line` means the key queue of the message key in the argument `line`.
        free_ids: whether chosen ids can be published again immediately. False: they stay blocked for the time that
            their publish set with `dedup`.
    """
    ids = once(bounded("ids", ids))

    def happened(count: int) -> Iterable[Event]:
        return [events.Purged(keys.name, count)] if count else ()

    chosen_ids = () if free_ids else ids
    return _call("purge", keys, clock, (state, line, *ids), int, happened, ids=ids, chosen_ids=chosen_ids)


def forget(keys: Keys, *, letters: bool, look: bool = False, clock: int | None = None) -> Call[tuple[int, int]]:
    """
    Remove a queue if it has no messages, and return how many messages and dead letters it has or had.

    Args:
        letters: whether to remove the queue even if it has dead letters.
        look: whether to only count the messages and dead letters, and remove nothing.
    """
    return _call("forget", keys, clock, (int(letters), int(look)), lambda reply: (int(reply[0]), int(reply[1])))


def counts(keys: Keys, *, clock: int | None = None) -> Call[Counts]:
    """Count the queue's messages in each state, and read all its totals, such as `published`, at the same moment."""
    return _call("counts", keys, clock, TOTAL_KINDS, _counts)


def _counts(reply: list[Any]) -> Counts:
    pending, ready, unack, retry, garbage, dead, paused, waiting = (int(size) for size in reply[:8])
    totals: dict[str, int] = {}
    for kind, text in zip(TOTAL_KINDS, reply[8:], strict=True):
        if text is not None:
            number = whole_number(text)
            if number is None:
                raise ProtocolError(f"the total {kind} is not a number; run `reliq check`")
            if number < 0:
                raise ProtocolError(f"the total {kind} is negative: {number}; run `reliq check`")
            totals[kind] = number
    states = (pending, ready, unack, retry, garbage, dead)
    return Counts(*states, bool(paused), totals, waiting=max(0, waiting), keyed=waiting >= 0)


def status(keys: Keys, id: str, *, life: int | None = None, clock: int | None = None) -> Call[list[Any]]:
    """
    Return the status of a message in this shard, or `not_found`, as a list with one item.

    Args:
        life: the publish time in the header of the message, to ignore other messages with the same id. None for the
            last message with this id.
    """

    def read(reply: list[bytes]) -> list[Any]:
        return ["not_found"] if reply[0] == b"not_found" else [parse_status(life, *reply)]

    return _call("status", keys, clock, [id], read, ids=[id])


def tidy(
    keys: Keys, *, cursor: int = 0, lease_cursor: int = 0, clock: int | None = None
) -> Call[tuple[int, int, int, int]]:
    """
    Repair errors in a part of the queue's data, for example after Redis' clock was set back.

    A lease with more time left than it was given is shortened. The state of a message in the hash `lease` is removed
    if the message no longer exists.

    Args:
        cursor, lease_cursor: the scan cursors of the Redis keys `unack` and `lease`; 0 to begin.

    Returns:
        The next cursor of `unack`, the next cursor of `lease`, the number of shortened leases, and the number of
        removed states.
    """

    def read(reply: Sequence[Any]) -> tuple[int, int, int, int]:
        return int(reply[0]), int(reply[1]), int(reply[2]), int(reply[3])

    return _call("tidy", keys, clock, (cursor, lease_cursor), read)


# ---- limits and key queues


def limit(keys: Keys, fields: Mapping[str, str], *, declared: str = "", clock: int | None = None) -> Call[bool]:
    """
    Set the limits of a queue, and return whether Redis has written them.

    Args:
        fields: the limits by their field names, as in `reliq.settings`. An empty value removes a limit.
        declared: for limits that a worker declares in its code, their fingerprint. `fields` then replaces all limits of
            the queue, but nothing is written if the last declared limits had the same fingerprint. If it is empty, only
            the limits in `fields` change.
    """
    return _call("limit", keys, clock, (declared, *chain.from_iterable(fields.items())), bool)


def sleep(keys: Keys, key: str, *, for_ms: int | None, clock: int | None = None) -> Call[bool]:
    """
    Throttle or pause a message key, and return whether it was throttled or paused before.

    Args:
        for_ms: for how many ms the key is throttled. None to pause it until it is resumed; 0 to resume it.
    """
    return _call("sleep", keys, clock, (key, "" if for_ms is None else for_ms), bool)


class Booking(NamedTuple):
    """
    The result of the script call `book`: when this process may start messages under a shared limit.

    Attributes:
        wait_us: after how many microseconds the booked messages may start. If nothing was booked, after how many
            microseconds this process may try again.
        starts: how many messages may start; 0 if nothing was booked.
        at_us: the booked start time in unix microseconds, by the clock of the Redis that stores the limit.
        next_us: after a booking, how many microseconds this process must wait before it books again, so that other
            processes can book first.
        before: the earlier rate and burst of the limit as text, if this call has declared other values; otherwise
            empty.
    """

    wait_us: int
    starts: int
    at_us: int
    next_us: int
    before: str


def book(
    limit: Limit,
    starts: int,
    cost: int = 0,
    *,
    after_us: int = 0,
    queue: str = "",
    backlog: int = 10**9,
    clock: int | None = None,
) -> Call[Booking]:
    """
    Book starts of messages under a limit that several queues share.

    The arguments `starts` and `cost` select what the script does:

    - `starts` above 0 and no cost: book up to `starts` starts.
    - `starts` above 0 and a cost: book all starts together.
    - `starts` below 0: give back unused starts and their cost, both as negative numbers. `after_us` is the start time
      of this booking.
    - 0 starts and a cost: correct the cost of an earlier booking. `cost` is the real cost minus the booked cost.
    - 0 starts and no cost: only declare the rates and bursts of the limit.

    Never repeat a call that gives back starts or corrects a cost, because the limit would count it twice.

    Args:
        cost: the cost of the messages together, for a limit with a rate by cost.
        after_us: the earliest start, in microseconds from now.
        queue: the name of the shard whose messages start.
        backlog: how many messages wait in this shard. All processes together book at most this many starts for it.
    """
    args = (clock_arg(clock), starts, cost, after_us, *limit.declared, f"of {queue}", backlog)

    def read(reply: Sequence[Any]) -> Booking:
        wait_us, booked, at_us, next_us, before = reply
        return Booking(int(wait_us), int(booked), int(at_us), int(next_us), before.decode())

    return Call(script("book"), (limit_key(limit.name),), args, read)


@dataclass(frozen=True, slots=True)
class KeyQueue:
    """
    The state of a key queue: the due messages of one message key.

    Attributes:
        key: the message key. Messages with a priority have a key queue with a reserved name.
        waiting: how many due messages wait in the key queue.
        in_flight: how many messages count against the concurrency limit of the key. These are the running messages
            and, in an ordered queue, a message that waits for its redelivery.
        weight: the share of the key: how many of its messages start for each message of a key with the weight 1.
        state: why messages wait. `in turn`: for a worker. `asleep`: the key is throttled until `asleep_until`.
            `paused`: until an operator resumes the key. `saturated`: until a running message of the key ends.
            `standing`: because of an error in the stored data, which `reliq check --repair` corrects.
            `empty`: no message waits.
        asleep_until: when the throttling ends, in unix seconds by Redis' clock; None if the key is not throttled, or
            paused without an end.
    """

    key: str
    waiting: int
    in_flight: int
    weight: float
    state: KeyState
    asleep_until: float | None = None


@dataclass(frozen=True, slots=True)
class KeyQueues:
    """
    The key queues of a queue: the result of the script call `key_queues`.

    Attributes:
        largest: the key queues with the most waiting messages, the longest first; or the requested key queues.
        in_turn: how many keys have messages that wait for a worker.
        asleep: how many keys are throttled or paused.
        running: how many messages of the queue run in all processes.
        is_full: whether no message of the queue may start now, because the queue's rate or concurrency limit is used
            up, or because the whole queue is throttled.
        asleep_until: when the throttling of the whole queue ends, in unix seconds by Redis' clock; None if the whole
            queue is not throttled.
        next: the id of the message with a key that will start next; empty if no key has messages that wait for a
            worker.
        waiting: how many messages wait in all key queues. Only `Admin.keys` sets this number.
    """

    largest: Sequence[KeyQueue]
    in_turn: int
    asleep: int
    running: int
    is_full: bool = False
    asleep_until: float | None = None
    next: str = ""
    waiting: int = 0


def key_queues(keys: Keys, *, most: int = 10, of: Sequence[str] = (), clock: int | None = None) -> Call[KeyQueues]:
    """
    Read the state of the key queues of the message keys `of`. Without `of`, read the `most` largest key queues.

    To find the largest key queues, the script reads a random sample: 100 keys with messages that wait for a worker, 100
    throttled keys, the keys of 100 running messages, and the keys of 200 living messages. If a queue has few keys, the
    sample contains all of them. If it has many, the sample contains keys with a large share of the waiting messages.
    """
    return _call("key_queues", keys, clock, (most, *bounded("keys", of)), _key_queues)


def _key_queues(reply: list[Any]) -> KeyQueues:
    in_turn, asleep, running, is_full, until, first = reply[:_LINES_HEAD]
    starts = range(_LINES_HEAD, len(reply), _LINES_WIDTH)
    return KeyQueues(
        [_key_queue(*reply[at : at + _LINES_WIDTH]) for at in starts],
        int(in_turn),
        int(asleep),
        max(0, int(running)),
        bool(is_full),
        _until(until),
        id_text(first),
    )


def _key_queue(
    name: bytes, waiting: int, in_flight: int, most: int, until: bytes, weight: bytes, in_turn: int
) -> KeyQueue:
    state: KeyState = "standing"
    if until:
        state = "asleep" if _until(until) else "paused"
    elif not waiting:
        state = "empty"
    elif in_turn:
        state = "in turn"
    elif 0 < most <= in_flight:
        state = "saturated"
    return KeyQueue(id_text(name), int(waiting), int(in_flight), float(weight), state, _until(until))


def _until(text: bytes) -> float | None:
    """Decode the end of a throttling, in unix seconds; None if the key is not throttled, or without an end."""
    at = float(text) if text else inf
    return None if at == inf else clamp_time(at)


def held_up(keys: Keys, *, most: int, of: Sequence[str] = (), clock: int | None = None) -> Call[dict[str, str]]:
    """
    Find message keys whose messages cannot start now, and return the first waiting message id of each such key.

    Such a key is throttled, paused, or at its concurrency limit. The script checks the keys `of`, the `most` keys
    whose throttling ends last, and the keys of `most` random running messages.
    """

    def read(reply: list[bytes]) -> dict[str, str]:
        return dict(zip(texts(reply[::2]), texts(reply[1::2]), strict=True))

    return _call("held_up", keys, clock, (most, *bounded("keys", of)), read)


# ---- periodic jobs


@dataclass(frozen=True, slots=True)
class InForce:
    """
    The state of a periodic job in Redis. A tick is a due time of the job's schedule.

    Attributes:
        last: the last settled tick, in unix seconds. This tick and all earlier ticks were published, skipped or missed.
        asked: when a user requested an immediate run of the job, in unix ms; None without a request.
    """

    last: int
    asked: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """
    A tick (due time) of a periodic job, or an immediate run of the job that a user requested.

    Attributes:
        entry: the name of the periodic job.
        schedule: the schedule of the job as text.
        at: the time of the tick, in unix seconds.
        since: the last settled tick before `at`, in unix seconds.
        missed: how many ticks after `since` were missed, for example because no worker ran. They are only counted.
        message: the id and the value of the message, as for `publish`. None if the tick `at` was missed too; `missed`
            then includes this tick.
        due_ms: when the message is due, in unix ms. A time in the past means now.
        asked: when the user requested the run, in unix ms; None for a tick.
        overlap: with `skip`, the message is not published if the job's last message has not ended.
    """

    entry: str
    schedule: str
    at: int
    since: int
    missed: int = 0
    message: tuple[str, bytes] | None = None
    due_ms: int = 0
    asked: int | None = None
    overlap: Literal["allow", "skip"] = "allow"


def register(
    keys: Keys, entries: Sequence[tuple[str, str]], *, newest: bool = False, clock: int | None = None
) -> Call[tuple[int, list[InForce | None]]]:
    """
    Store periodic jobs with their schedules in Redis, and return Redis' clock in ms and the state of each job.

    The state of a job is None if Redis keeps a different schedule for it.

    Args:
        entries: the name and the schedule of each periodic job.
        newest: whether to replace a different stored schedule, as a process does when it starts. False: replace it only
            if no process has registered the stored schedule for half a minute.
    """
    args = ("1" if newest else "", *chain.from_iterable(bounded("entries", entries)))

    def read(reply: list[Any]) -> tuple[int, list[InForce | None]]:
        in_force: list[InForce | None] = []
        for at in range(1, 1 + 2 * len(entries), 2):
            last, asked = reply[at : at + 2]
            moment = whole_number(asked)  # None if another program has written an invalid time
            asked_ms = moment if moment and 0 < moment < LAST_SECOND * 1000 else None
            in_force.append(InForce(int(last), asked_ms) if last else None)
        return int(reply[0]), in_force

    return _call("register", keys, clock, args, read)


def tick(keys: Keys, tick: Tick, *, ttl_ms: int, retries: int, clock: int | None = None) -> Call[TickStatus]:
    """
    Publish the message of a periodic job's tick, and mark the tick as settled.

    If several processes call this for the same tick, Redis publishes only one message.

    Returns:
        `published`, or the reason why no message was published. `paused`: the job is paused, so this tick and the
        missed ticks before it are skipped. `overlap`: the tick is skipped, because the job's last message has not
        ended. `missed`: `tick.message` is None. `done`: another process has settled the tick. `superseded`: Redis has
        another schedule for the job. `unknown`: Redis has no schedule for the job.
    """
    asked: Arg = "" if tick.asked is None else tick.asked
    args: list[Arg] = [tick.entry, tick.schedule, tick.since, tick.at, asked, tick.overlap]
    args += [tick.missed, tick.due_ms, span("ttl_ms", ttl_ms), retries, "" if keys.bare else ENVELOPE_START]
    args += tick.message or ()

    def read(reply: bytes) -> TickStatus:
        [word] = words([reply], [tick], get_args(TickStatus))
        return cast("TickStatus", word)

    def happened(answer: TickStatus) -> Iterable[Event]:
        if answer == "published" and tick.message:
            yield events.Published(keys.name, (tick.message[0],))
        if answer in get_args(events.TickOutcome):
            missed = 0 if answer == "paused" else tick.missed
            yield events.Ticked(keys.name, tick.entry, tick.at, cast("events.TickOutcome", answer), missed)

    return _call("tick", keys, clock, args, read, happened, ids=tick.message[:1] if tick.message else ())


# ---- stored schedules, which programs create at run time


class DuePlan(NamedTuple):
    """
    A stored schedule whose next tick (due time) has come.

    Attributes:
        name: the name of the schedule.
        since: the tick in unix seconds, as the text that Redis returned.
        row: the value of the schedule in the Redis hash `plans`: its revision, its pause and its definition; empty if
            the hash does not have it.
    """

    name: str
    since: str
    row: bytes


class DuePlans(NamedTuple):
    """
    The result of the script call `plan_due`.

    Attributes:
        now_ms: the time of Redis' clock, in unix ms.
        wait_ms: the ms until the next tick of any stored schedule; -1 if no tick follows.
        due: how many stored schedules are due.
        found: the due schedules, after the first `skip` and up to `limit` schedules.
    """

    now_ms: int
    wait_ms: int
    due: int
    found: list[DuePlan]


class PlanTick(NamedTuple):
    """
    A tick (due time) of a stored schedule, and the message to publish.

    Attributes:
        id: the id of the message.
        name: the name of the schedule.
        revision: the hash of the schedule's definition. If it has changed in Redis, the message is not published.
        since: this tick in unix seconds. Redis publishes the message only if this is still the schedule's next tick.
        next: the tick after this tick, in unix seconds; empty if there is none.
        ttl_ms: for how many ms Redis keeps the body of the message.
        retries: the number of retries of the message.
        value: the value of the message, as for `publish`. If it is empty, the tick counts as missed and nothing is
            published.
        line: the message key and the cost of the message, as one text.
    """

    id: str
    name: str
    revision: str
    since: str
    next: Arg
    ttl_ms: int = 1
    retries: int = 0
    value: bytes = b""
    line: str = ""


def plan(
    keys: Keys,
    verb: Literal["write", "delete", "pause", "resume"],
    name: str,
    *,
    revision: str = "",
    next: int | None = None,
    line: str = "",
    value: bytes = b"",
    clock: int | None = None,
) -> Call[PlanStatus]:
    """
    Create, change, delete, pause or resume a stored schedule.

    Args:
        verb: what to do. `write` creates a schedule or changes it.
        name: the name of the schedule.
        revision: to write or resume, the hash of the schedule's definition.
        next: to write or resume, the next tick in unix seconds; None if no tick follows.
        line: to write, the message key and the cost of the schedule's messages, as one text; otherwise empty.
        value: to write, the definition of the schedule (options and message). To pause, JSON with the user who pauses
            it and the reason.
    """
    args: list[Arg] = [verb, name, revision, "" if next is None else next, line, value]
    return _call("plan", keys, clock, args, lambda reply: words([reply], [verb], get_args(PlanStatus))[0])


def plan_due(keys: Keys, *, skip: int = 0, limit: int = 0, clock: int | None = None) -> Call[DuePlans]:
    """Read which stored schedules are due: leave out the first `skip` due schedules, and read at most `limit`."""

    def read(reply: list[Any]) -> DuePlans:
        rows = zip(reply[3::3], reply[4::3], reply[5::3], strict=True)
        found = [DuePlan(id_text(name), since.decode(), row) for name, since, row in rows]
        return DuePlans(reply[0], reply[1], reply[2], found)

    return _call("plan_due", keys, clock, [skip, limit_arg(limit)], read)


def plan_tick(keys: Keys, ticks: Sequence[PlanTick], *, clock: int | None = None) -> Call[list[PlanTickStatus]]:
    """Publish the messages of stored schedules that are due, and store the next ticks of the schedules."""
    has_keys = any(tick.line for tick in ticks)
    rows = chain.from_iterable(tick if has_keys else tick[:-1] for tick in bounded("ticks", ticks))
    ids = [tick.id for tick in ticks]

    def happened(answers: list[PlanTickStatus]) -> Iterable[Event]:
        if published := tuple(id for id, answer in zip(ids, answers, strict=True) if answer == "published"):
            yield events.Published(keys.name, published)

    args = (ENVELOPE_START, "1" if has_keys else "", *rows)
    return _call(
        "plan_tick", keys, clock, args, lambda reply: words(reply, ids, get_args(PlanTickStatus)), happened, ids=ids
    )


# ---- the shards of a queue


@dataclass(frozen=True, slots=True)
class MigrationBatch:
    """
    A batch of messages or dead letters that moves from one shard to other shards during a resize.

    Attributes:
        number: the number of the batch, which is higher than the numbers of all earlier batches of the same shard.
        records: the data of each message or dead letter, by its name. The name of a message is its id. The name of a
            dead letter is its letter id, a space, and its message id.
        letters: whether the batch contains dead letters; otherwise it contains messages.
    """

    number: int
    records: dict[str, bytes]
    letters: bool

    def id_of(self, name: str) -> str:
        """Return the message id that the name of a message or dead letter in `records` contains."""
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
    During a resize, ask the old shard of chosen ids whether their new shard may publish messages with these ids.

    After this call, the old shard refuses chosen ids from publishers with an older shard map, so that no id is
    published in both shards.

    Args:
        ids: the chosen ids. Without ids, the call only stores `fence` in the old shard.
        fence: the version of the caller's shard map.
        closing: whether the old shard must refuse all messages from now on.
        replace: whether an id may be published even if it is blocked after the end of an earlier message.
    """
    args = (fence, "1" if closing else "", "1" if replace else "", *bounded("ids", ids))

    read = partial(words, asked=ids, known=get_args(AskStatus))
    return _call("ask", keys, clock, args, read, chosen_ids=ids)


def remap(keys: Keys, before: bytes, after: bytes, *, clock: int | None = None) -> Call[bytes]:
    """
    Change the shard map of a queue from `before` to `after`, and return the map that Redis has after the call.

    If Redis has another map than `before`, the script changes nothing. It returns REMAP_KEYED and changes nothing if
    the queue has keys or limits and `after` has several shards.
    """
    return _call("remap", keys.of_shard(0), clock, (before, after), read_bytes)


def depart(keys: Keys, ids: Sequence[str], *, state: LeavingState, clock: int | None = None) -> Call[MigrationBatch]:
    """
    Begin to move messages or dead letters to other shards: reserve them as a batch, and return the batch.

    A shard has at most one such batch. Until `leave` has finished its move, further calls return the same batch.

    Args:
        ids: the ids of the messages, or the letter ids of the dead letters. From `ready` and `retry`, only the oldest
            messages can move, so `ids` must be in the order of the list, the oldest first.
        state: the state of the messages, or `dead` for dead letters.
    """
    ids = once(bounded("ids", ids))
    return _call("depart", keys, clock, (state, *ids), _departure, ids=ids)


def _departure(reply: Sequence[Any]) -> MigrationBatch:
    pairs = dict(zip(reply[::2], reply[1::2], strict=True))
    number, state = pairs.pop(b"").split()
    records = {id_text(name): read_bytes(record) for name, record in pairs.items()}
    return MigrationBatch(int(number), records, letters=state == b"dead")


def arrive(
    keys: Keys, departure: MigrationBatch, names: Sequence[str], *, origin: int, clock: int | None = None
) -> Call[list[ArriveStatus]]:
    """
    Add messages or dead letters of a batch to their new shard. A repeated call changes nothing and returns the same.

    Args:
        keys: the Redis keys of the new shard.
        departure: the batch.
        names: the names of the messages or dead letters of the batch that move to this shard.
        origin: the number of the shard from which the batch comes.
    """
    args: list[Arg] = [origin, departure.number]
    for name in names:
        args += (name, departure.records[name])

    read = partial(words, asked=names, known=get_args(ArriveStatus))
    return _call("arrive", keys, clock, args, read, ids=names)


def leave(
    keys: Keys, departure: MigrationBatch, staying: Collection[str] = (), *, clock: int | None = None
) -> Call[tuple[str, ...]]:
    """
    Finish the move of a batch in its old shard: delete the messages that have moved.

    Args:
        departure: the batch.
        staying: the names of messages in the batch that have not moved. They return to their earlier states.

    Returns:
        The ids of moved messages that were cancelled during the move. Also cancel these messages in the new shard.
    """
    args: list[Arg] = [departure.number]
    for name in departure.records:
        args += (name, "1" if name in staying else "")
    return _call("leave", keys, clock, args, texts, ids=departure.records)


# ---- call numbers


#: At most this many call numbers are kept to repeat a publish. A call number is kept if the reply of the call did not
#: arrive, because Redis may or may not have run the call.
PARKED_LIMIT = 1000
#: For how many seconds such a call number is kept. This is half of REMEMBER_MS, so that Redis still has the reply of
#: the first call when a client repeats it.
PARKED_SECONDS = 300.0


class Message(NamedTuple):
    """Identifies a message, to recognize that it is published again: its id, and a hash of its body and options."""

    id: str
    rest: int


Messages = tuple[Message, ...]


class CallSequences:
    """
    Give out the call numbers of a client, so that Redis recognizes a repeated script call. See `CallNumber`.

    A forked process starts new lanes (sequences of calls), because two processes must not use the same lane.

    Attributes:
        parked: for each publish whose reply did not arrive, its call number and the time of the call. While this is
            empty, the client need not compute the hashes for `Message`.
    """

    def __init__(self) -> None:
        self._start_over()

    def take(self, messages: Messages = ()) -> CallNumber:
        """
        Return the call number for a publish of `messages`.

        If the reply of an earlier publish of exactly these messages did not arrive, this returns the call number of
        that publish, so that Redis does not publish twice. If the reply of another publish with some of these ids did
        not arrive, its call number is dropped, because these messages are new. Without `messages`, this always returns
        a new call number.
        """
        if self._pid != os.getpid():
            self._start_over()
        with self._lock:
            if messages in self.parked:
                call_number, since = self.parked[messages]
                self._forget(messages)
                if time.monotonic() - since < PARKED_SECONDS:
                    return call_number
            if messages:
                self._end(message.id for message in messages)
            if self._free:
                return self._free.pop().next()
            self._made += 1
            return CallNumber(f"{self._client}{self._made}", 1)

    def give_back(self, call_number: CallNumber) -> None:
        """Make the lane of a call available for a new call, after the reply of the call has arrived."""
        with self._lock:
            self._free.append(call_number)

    def park(self, call_number: CallNumber, messages: Messages) -> None:
        """Keep the number of a publish whose reply did not arrive: the next publish of `messages` repeats the call."""
        with self._lock:
            self._end(message.id for message in messages)
            self.parked[messages] = call_number, time.monotonic()
            self._by_id.update((message.id, messages) for message in messages)
            if len(self.parked) > PARKED_LIMIT:
                self._forget(next(iter(self.parked)))

    def end(self, id: str) -> None:
        """After a cancel of `id`, drop its kept call number, because the next publish of this id is a new message."""
        if self.parked:
            with self._lock:
                self._end([id])

    def _end(self, ids: Iterable[str]) -> None:
        if self.parked:
            for id in ids:
                if messages := self._by_id.get(id):
                    self._forget(messages)

    def _forget(self, messages: Messages) -> None:
        del self.parked[messages]
        for message in messages:
            self._by_id.pop(message.id, None)

    def _start_over(self) -> None:
        # A thread of the parent process may have held the old lock during the fork. Then nothing would release it here.
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._client = token()
        self._made = 0
        self._free: list[CallNumber] = []
        self.parked: OrderedDict[Messages, tuple[CallNumber, float]] = OrderedDict()
        self._by_id: dict[str, Messages] = {}
