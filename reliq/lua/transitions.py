"""
Every transition of a message, as a function that returns a `Call` to be made by a client.

There is one function for each script, with the same name. `clock` is unix microseconds for tests; None means Redis' own
clock. A receipt is a `Claimed`; an invalid receipt changes nothing.
"""

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from math import inf
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

from reliq import events
from reliq.errors import ProtocolError
from reliq.events import Event
from reliq.keys import Keys, token
from reliq.lua import script
from reliq.message import CancelStatus, Claimed, Counts, Delivery, PublishStatus, RescheduleStatus
from reliq.redis.commands import Arg, Call, id_text, no_events, read_bytes
from reliq.settings import BATCH_LIMIT, INLINE_BYTES, check_int
from reliq.text import LAST_SECOND, clamp_time, clean_text, whole_number
from reliq.wire_format import ENVELOPE_START, HEADER_LIMIT, FailureNote, claim_nonce, open_envelope, receipt_nonce

T = TypeVar("T")

AskStatus = Literal["free", "duplicate", "tombstoned", "stale"]
ArriveStatus = Literal["arrived", "alive", "late"]
LeavingState = Literal["pending", "ready", "retry", "unack", "dead"]
RedriveStatus = Literal["redriven", "alive", "not_found", "stale"]
TickStatus = Literal["published", "paused", "overlap", "missed", "done", "superseded", "unknown"]
KeyState = Literal["in turn", "asleep", "paused", "saturated", "standing", "empty"]

#: The longest lease, tombstone or other duration, in ms: a hundred years.
LONGEST_SPAN_MS = 100 * 366 * 86_400_000
#: September 2001: due times have 13 digits, so that a script can overwrite them. Earlier times are due now too.
EARLIEST_MS = 10**12
#: For how long Redis remembers the last call of a publisher's lane, in ms.
REMEMBER_MS = 600_000
#: A message that has not survived this many deliveries in a row becomes a dead letter. After each death it runs beside
#: fewer other suspects: in half of a process' slots, then in a quarter, then alone.
LEASE_DEATHS = 5
#: The wait in a claim's answer if no message is due.
NOTHING_DUE = -1
#: The wait in a claim's answer if another process watches for the next due time.
NOT_WATCHING = -2
#: The kinds of `Counts.totals`; other fields of the hash are ignored, and there may be many.
TOTAL_KINDS = (
    *("published", "redriven", "acked", "dead", "expired", "cancelled", "purged", "promoted", "claimed", "nacked"),
    *("retried_lease", "retried_nack", "released", "snoozed", "letters_dropped", "arrived", "left", "limited"),
)
#: The answer of `remap` if a queue with keys or limits would get several shards.
REMAP_KEYED = b"keyed"
#: Values in a reply of `key_queues` before the values of keys.
_LINES_HEAD = 6
#: Values of each key in a reply of `key_queues`.
_LINES_WIDTH = 7


# ---- arguments and replies


def clock_arg(clock: int | None) -> Arg:
    """Return the time for a script in unix microseconds; an empty text means Redis' own clock."""
    return "" if clock is None else clock


def bare_arg(keys: Keys) -> Arg:
    """Return whether a queue's values are bare bodies, without an envelope."""
    return "1" if keys.bare else ""


def bounded(name: str, items: Sequence[T]) -> Sequence[T]:
    """Return the items of a call; raise ConfigurationError if they are too many for one call."""
    if len(items) > BATCH_LIMIT:
        check_int(f"number of {name}", len(items), most=BATCH_LIMIT)
    return items


def once(ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids without repetitions, because a script would treat each as another message."""
    return tuple(dict.fromkeys(ids))


def limit_arg(limit: int, *, least: int = 0) -> int:
    """Return the largest number of messages for a call; raise ConfigurationError if one call cannot take so many."""
    if type(limit) is int and least <= limit <= BATCH_LIMIT:
        return limit
    return check_int("limit", limit, least=least, most=BATCH_LIMIT)


def span(name: str, ms: int) -> int:
    """Return a duration in ms; raise ConfigurationError if it is below 1 or above a hundred years."""
    if type(ms) is int and 0 < ms <= LONGEST_SPAN_MS:
        return ms
    return check_int(name, ms, least=1, most=LONGEST_SPAN_MS)


def texts(reply: Iterable[bytes]) -> tuple[str, ...]:
    """Return the ids in a reply."""
    return tuple(map(id_text, reply))


def words(reply: Sequence[bytes], asked: Sequence[Any], known: Sequence[str]) -> list[Any]:
    """Return one word for each item in `asked`; raise ValueError for a wrong number of words or an unknown word."""
    answers = [word.decode() for word in reply]
    if len(answers) != len(asked) or not set(answers) <= set(known):
        raise ValueError
    return answers


def words_of(asked: Sequence[str], ids: Sequence[str], reply: Sequence[bytes], known: Sequence[str]) -> list[Any]:
    """Return the word for each id in `asked`; the script got `ids`, in which each id appears once."""
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
    """Return the call of a script for a queue, with the bodies of `ids` and the marks of possibly chosen ids."""
    lua = script(name)
    named = (*lua.lead(keys), *keys.msgs(ids), *map(keys.dedup, chosen_ids))
    return Call(lua, named, (clock_arg(clock), *args), read, happened)


# ---- publish, cancel, reschedule


@dataclass(frozen=True, slots=True)
class CallNumber:
    """
    One call of a lane; if it is repeated with the same number, it gets its first answer and changes nothing.

    Attributes:
        lane: the name of a sequence of calls, one at a time; Redis stores the number and answer of its last call.
        number: higher than the number of the lane's last call, or the same number to repeat that call.
    """

    lane: str
    number: int

    def next(self) -> "CallNumber":
        """Return the number of the lane's next call."""
        return CallNumber(self.lane, self.number + 1)


@dataclass(frozen=True, slots=True)
class PublishAnswer:
    """
    The due time in ms, and the index and reason of each message that was not published.

    Attributes:
        is_stale: whether nothing was published because the shard has a later map or is closed.
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
    Add messages to ready, or to pending if they are due later.

    Args:
        items: ids and values; a value is the envelope from its due time on, or a bare body.
        call_number: a repeated call with this number gets its first answer.
        window_ms: for how long chosen ids are blocked after their end; None for generated ids.
        replace: whether to publish an id that is still blocked after its end.
        fence: the fence of the map by which the publisher selected the shard.
        message_keys: the key of each message, empty for none; None if no message has a key. A queue with several shards
            does not accept keys; the answer is then that the publisher's map is stale.
        remember_ms: for how long Redis stores number and answer of the call.
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
    if not {why for _, why in parts} <= set(get_args(PublishStatus)):
        raise ValueError
    return PublishAnswer(int(due), {int(index) - 1: cast("PublishStatus", why) for index, why in parts})


def cancel(
    keys: Keys, ids: Sequence[str], *, tombstone_ms: int | None = None, clock: int | None = None
) -> Call[list[CancelStatus]]:
    """
    Cancel messages; the worker of a running message gets the information with the next lease renewal.

    A cancelled id is free immediately; with `tombstone_ms` its publishes are refused for that time.
    """
    unique = once(bounded("ids", ids))
    tombstone: Arg = "" if tombstone_ms is None else span("tombstone_ms", tombstone_ms)

    def happened(answer: list[CancelStatus]) -> list[Event]:
        cancelled = tuple(id for id, word in zip(ids, answer, strict=True) if word == "cancelled")
        return [events.Cancelled(keys.name, cancelled)]

    read = partial(words_of, ids, unique, known=get_args(CancelStatus))
    args = (bare_arg(keys), tombstone, *unique)
    return _call("cancel", keys, clock, args, read, happened, ids=unique, chosen_ids=unique)


def reschedule(
    keys: Keys, ids: Sequence[str], *, at_ms: int | None = None, delay_ms: int = 0, clock: int | None = None
) -> Call[list[RescheduleStatus]]:
    """Change the due time of waiting messages: to `at_ms`, or to `delay_ms` from now."""
    unique = once(bounded("ids", ids))
    args = (bare_arg(keys), "" if at_ms is None else at_ms, delay_ms, *unique)

    read = partial(words_of, ids, unique, known=get_args(RescheduleStatus))
    return _call("reschedule", keys, clock, args, read, ids=unique)


# ---- promote, claim, reclaim


@dataclass(frozen=True, slots=True)
class Suspects:
    """
    The suspects of a queue that a process has when it claims.

    Attributes:
        slots: how many messages of the queue may run at the same time in the process.
        held: how many suspects are prefetched or running.
        narrowest: the lowest number of suspects allowed beside any of them, see `room`.
    """

    slots: int
    held: int
    narrowest: int

    @staticmethod
    def room(one: Claimed, slots: int) -> int:
        """Return how many suspects may run together with this suspect, itself included, in a process with `slots`."""
        return 1 if one.deaths > 2 or one.left <= 0 else max(1, slots >> one.deaths)  # noqa: PLR2004  see LEASE_DEATHS


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """
    The answer of a claim.

    Attributes:
        promote_in_ms, reclaim_in_ms: ms until the next promote or reclaim; or NOTHING_DUE or NOT_WATCHING.
        behind: how many ids are left in ready and retry.
        keyed: whether the queue has keys or limits, so that the claimed messages count as started.
    """

    promote_in_ms: int
    reclaim_in_ms: int
    behind: int
    claimed: list[Claimed]
    keyed: bool = False


class Oversized(NamedTuple):
    """The size of a value that is too large to read, and its first bytes with its header."""

    size: int
    start: bytes


#: A message's value; None if it has none; its size if `commands.bodies` must read it.
FoundBody = bytes | int | Oversized | None


@dataclass(frozen=True, slots=True)
class ReclaimAnswer:
    """Ids by their new state, and the ms until the next deadline (NOTHING_DUE: none)."""

    next_in_ms: int
    overdue: tuple[str, ...]
    again: tuple[str, ...]
    buried: tuple[str, ...]
    cancelled: tuple[str, ...]
    inconsistent: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many messages moved."""
        return len(self.overdue) + len(self.again) + len(self.buried) + len(self.cancelled)


def promote(keys: Keys, *, limit: int = 500, clock: int | None = None) -> Call[tuple[int, int]]:
    """
    Move due messages from pending to ready; return how many moved and the ms until the next is due.

    In a queue with keys, messages with a key move to their key queues, and keys wake up. The returned time is then the
    earliest of the next due message, the next key that wakes, and the next start that the queue's rate allows.
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
    Lease up to `limit` messages from ready and retry for `lease_ms`, beginning with `first`.

    In a queue with keys, key queues take turns with these lists, within the queue's limits. `promote_in_ms` then
    includes the next key that wakes and the next start that a rate allows.

    Args:
        call_number: a repeated call with this number gets its first answer.
        limit: at most 500.
        keyed_limit: the limit for a queue with keys, where claimed messages count as started; None: `limit`.
        direct: how many of the messages may be suspects or have no retry left, which must not be prefetched; None: all.
        suspects: the suspects of this process; None: none, and `limit` messages run at the same time.
        watcher: the process that waits for the next due time if no other process does; empty: none.
        spread: in a queue with keys, from how many keys to claim, where no key counts as one key; None: any number.

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
    Move up to `limit` messages with an expired deadline to retry, or to garbage if no retries are left.

    Messages with a key return to the heads of their key queues. With `spare_leases` it takes only nacked and cancelled
    messages, because a worker may be about to renew the leases of the others.
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
    """Read the values of messages: small values directly, of others the sizes; none larger than `max_body` allows."""
    return Call(
        script("bodies"),
        keys.msgs(ids),
        (0 if clock is None else clock, max_body + HEADER_LIMIT, INLINE_BYTES),
        lambda reply: [one if type(one) is bytes else _found(one) for one in reply],
    )


def delivery(claimed: Claimed, found: bytes | Oversized, *, max_body: int, bare: bool) -> Delivery:
    """Return a message's delivery from its value; no handler gets a body of more than `max_body` bytes."""
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
    """Ids with an invalid receipt, and ids of messages that were cancelled meanwhile."""

    lost: tuple[str, ...]
    cancelled: tuple[str, ...] = ()


def ack(
    keys: Keys,
    receipts: Sequence[tuple[Claimed, int | None]],
    *,
    kind: Literal["acked", "expired"] = "acked",
    history: int = 0,
    took_ms: Sequence[int] = (),
    clock: int | None = None,
) -> Call[Settled]:
    """
    End messages.

    Args:
        receipts: receipts, each with the ms for which its chosen id is blocked after the end, or None.
        kind: `acked`, or `expired` for messages without a body at the claim.
        history: how many of the last acked messages Redis keeps.
        took_ms: how long each message ran, in ms, for that history.
    """
    claims = [claimed for claimed, _ in bounded("receipts", receipts)]
    ids = [claimed.id for claimed in claims]
    windows: list[Arg] = [window or "" for _, window in receipts]
    tail_keys = [*keys.msgs(ids)]
    # For a bare or missing body, only Redis has stored whether the id was chosen.
    if keys.bare or kind == "expired" or any(windows):
        tail_keys += map(keys.dedup, ids)
    times: Iterable[Arg] = took_ms or repeat("")
    if kind == "expired":
        times = [claimed.token for claimed in claims]
    args = _settle_args((clock_arg(clock), kind, history), claims, zip(windows, times, strict=False))
    lua = script("ack")
    happened = events.Acked if kind == "acked" else events.Expired
    named = (*lua.lead(keys), *tail_keys)
    return Call(lua, named, args, lambda reply: Settled(_of(ids, reply)), partial(_settled, keys, ids, "ack", happened))


def nack(keys: Keys, failures: Sequence[tuple[Claimed, int, str, bytes]], *, clock: int | None = None) -> Call[Settled]:
    """
    Report failed messages.

    Args:
        failures: for each message its receipt, the ms until its redelivery, the text of its `FailureNote`, and its
            value. A value makes the message garbage: it is required if no retry is left, and otherwise empty. Without a
            value, a wait of -1 makes garbage of an empty body, and -2 of a body that stays in Redis unchanged.
    """
    ids = [failure[0].id for failure in bounded("failures", failures)]
    claims = [failure[0] for failure in failures]
    args = _settle_args((clock_arg(clock), bare_arg(keys)), claims, [failure[1:] for failure in failures])
    lua = script("nack")
    named = (*lua.lead(keys), *keys.msgs(ids))
    return Call(lua, named, args, partial(_lost_cancelled, ids), partial(_settled, keys, ids, "nack", events.Nacked))


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
    Return an item for `nack`, with the value if the message must not run again: without retries, or if `final`.

    Args:
        reason, error, raised, by, took_ms: the fields of a `FailureNote`; for `error` its text.
    """
    last = final or delivery.claimed.left <= 0
    if last and not delivery.value:
        delay_ms = -2 if delivery.refusal else -1
    note = FailureNote(reason, delivery.attempt, clean_text(error), raised, by, took_ms)
    return delivery.claimed, delay_ms, str(note), delivery.value if last else b""


def extend(keys: Keys, receipts: Sequence[Claimed], *, lease_ms: int, clock: int | None = None) -> Call[Settled]:
    """Move deadlines to `lease_ms` from now; the answer includes the ids of messages that were cancelled meanwhile."""
    ids = [claimed.id for claimed in bounded("receipts", receipts)]
    args: list[Arg] = [clock_arg(clock), span("lease_ms", lease_ms)]
    for claimed in receipts:
        args += (claimed.id, claimed.nonce)
    return Call(script("extend"), (keys.unack, keys.lease), args, partial(_lost_cancelled, ids))


def release(
    keys: Keys, receipts: Sequence[Claimed], *, sleep_ms: int | None = None, clock: int | None = None
) -> Call[Settled]:
    """
    Return unstarted messages to the head of ready, or of their key queue, the first of `receipts` foremost.

    No retry is spent. With `sleep_ms`, their keys sleep for that time; for a message without a key the whole queue
    sleeps. Only for messages that were claimed from a queue with keys.
    """
    ids = [claimed.id for claimed in bounded("receipts", receipts)]
    sleep: Arg = "" if sleep_ms is None else span("sleep_ms", sleep_ms)
    args = _settle_args((clock_arg(clock), sleep), receipts, [()] * len(receipts))
    lua = script("release")

    def happened(name: str, released: tuple[str, ...]) -> Event:
        if sleep_ms is None:
            return events.Released(name, released)
        throttled = dict.fromkeys(claimed.key or "" for claimed in receipts if claimed.id in released)
        return events.Throttled(name, released, tuple(throttled), sleep_ms / 1000)

    settled = partial(_settled, keys, ids, "release", happened)
    return Call(lua, lua.lead(keys), args, lambda reply: Settled(_of(ids, reply)), settled)


def snooze(keys: Keys, receipts: Sequence[tuple[Claimed, int]], *, clock: int | None = None) -> Call[Settled]:
    """Postpone each message by its ms, without spending a retry."""
    ids = [claimed.id for claimed, _ in bounded("receipts", receipts)]
    claims = [claimed for claimed, _ in receipts]
    args = _settle_args((clock_arg(clock), bare_arg(keys)), claims, [(delay_ms,) for _, delay_ms in receipts])
    lua = script("snooze")
    named = (*lua.lead(keys), *keys.msgs(ids))
    settled = partial(_settled, keys, ids, "snooze", events.Snoozed)
    return Call(lua, named, args, partial(_lost_cancelled, ids), settled)


def _settle_args(head: Sequence[Arg], receipts: Sequence[Claimed], rows: Iterable[Sequence[Arg]]) -> list[Arg]:
    """Return the arguments `head`, then for each receipt its id, nonce, a row of `rows`, and its key if it has one."""
    keyed = any(map(attrgetter("key"), receipts))
    args: list[Arg] = [*head, "1" if keyed else ""]
    for claimed, row in zip(receipts, rows, strict=True):
        args += (claimed.id, claimed.nonce, *row)
        if keyed:
            args.append(claimed.key or "")
    return args


def _lost_cancelled(ids: Sequence[str], reply: Sequence[Any]) -> Settled:
    return Settled(_of(ids, reply[0]), _of(ids, reply[1]))


def _of(ids: Sequence[str], reply: Sequence[bytes]) -> tuple[str, ...]:
    """Return the ids in a reply; raise ValueError for an id that was not in the call."""
    if reply == []:
        return ()
    answered = texts(reply)
    if not set(answered) <= set(ids):
        raise ValueError
    return answered


def _settled(
    keys: Keys, ids: Sequence[str], verb: str, happened: Callable[[str, tuple[str, ...]], Event], answer: Settled
) -> Iterable[Event]:
    done: Sequence[str] = ids
    if answer.lost or answer.cancelled:  # a late and a valid receipt of a message can be in one call
        gone = Counter((*answer.lost, *answer.cancelled))
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
    """Turn garbage into dead letters, at most 8 MiB a call; return their ids, and the ids without a body."""
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
    Publish dead letters again; each is given by its letter id, message id and retries.

    All answers are `stale` if the shard has a later map than `fence`, or is closed.
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
    Delete messages, and return how many were deleted; from a list or the key queue `line` only its oldest, in order.

    A chosen id stays blocked for its `dedup`, as after any end, unless `free_ids`.
    """
    ids = once(bounded("ids", ids))

    def happened(count: int) -> Iterable[Event]:
        return [events.Purged(keys.name, count)] if count else ()

    chosen_ids = () if free_ids else ids
    return _call("purge", keys, clock, (state, line, *ids), int, happened, ids=ids, chosen_ids=chosen_ids)


def forget(keys: Keys, *, letters: bool, look: bool = False, clock: int | None = None) -> Call[tuple[int, int]]:
    """
    Remove an empty queue, with `letters` also its dead letters; return how many messages and letters it had.

    With `look` it is only counted and not removed.
    """
    return _call("forget", keys, clock, (int(letters), int(look)), lambda reply: (int(reply[0]), int(reply[1])))


def counts(keys: Keys, *, clock: int | None = None) -> Call[Counts]:
    """Count the queue's messages by state, and read every total, at one moment."""
    return _call("counts", keys, clock, TOTAL_KINDS, _counts)


def _counts(reply: list[Any]) -> Counts:
    pending, ready, unack, retry, garbage, dead, paused, waiting = (int(size) for size in reply[:8])
    totals: dict[str, int] = {}
    for kind, text in zip(TOTAL_KINDS, reply[8:], strict=True):
        if text is not None:
            number = whole_number(text)
            if number is None:
                raise ProtocolError(f"the total {kind} is not a number; `reliq check` says more")
            if number < 0:
                raise ProtocolError(f"the total {kind} is spoilt: {number}; `reliq check` says more")
            totals[kind] = number
    states = (pending, ready, unack, retry, garbage, dead)
    return Counts(*states, bool(paused), totals, waiting=max(0, waiting), keyed=waiting >= 0)


def tidy(
    keys: Keys, *, cursor: int = 0, lease_cursor: int = 0, clock: int | None = None
) -> Call[tuple[int, int, int, int]]:
    """Check a part of unack and lease; return the next cursors, shortened deadlines and removed state words."""

    def read(reply: Sequence[Any]) -> tuple[int, int, int, int]:
        return int(reply[0]), int(reply[1]), int(reply[2]), int(reply[3])

    return _call("tidy", keys, clock, (cursor, lease_cursor), read)


# ---- limits and key queues


def limit(keys: Keys, fields: Mapping[str, str], *, declared: str = "", clock: int | None = None) -> Call[bool]:
    """
    Write limits, and let keys be served again if the limits allow it; return whether the limits were written.

    Args:
        fields: the limits, with the field names of `reliq.settings`; an empty value removes a limit.
        declared: the fingerprint of a declaration. Its fields replace all others, unless the last declaration was the
            same. Empty: only the given fields are written.
    """
    return _call("limit", keys, clock, (declared, *chain.from_iterable(fields.items())), bool)


def sleep(keys: Keys, key: str, *, for_ms: int | None, clock: int | None = None) -> Call[bool]:
    """Put a key to sleep for `for_ms`, or without end for None; 0 wakes it. Return whether it was asleep before."""
    return _call("sleep", keys, clock, (key, "" if for_ms is None else for_ms), bool)


@dataclass(frozen=True, slots=True)
class KeyQueue:
    """
    The messages of one key that are due or run.

    Attributes:
        key: the key, or the name of a priority's key queue.
        waiting: how many messages are due and wait in the key queue.
        in_flight: how many places of the key are taken: by running messages, or by an ordered message before
            redelivery.
        weight: how many messages the key gets in each turn; other keys get 1.
        state: why the messages wait. `in turn`: for a worker; `asleep`: until `asleep_until`; `paused`: for a resume;
            `saturated`: until a message of the key ends; `standing`: for an unknown reason, which `reliq check
            --repair` fixes; `empty`: no message waits.
        asleep_until: in unix seconds by Redis' clock; None if the key does not sleep, or is paused without an end.
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
    The key queues of a queue.

    Attributes:
        largest: the requested number of key queues, those with most waiting messages first; or the named key queues.
        in_turn: how many keys wait for a worker.
        asleep: how many keys sleep or are paused.
        running: how many messages run, over all processes.
        is_full: whether no message may start now: the queue's rate or concurrency is used up, or the queue sleeps.
        asleep_until: until when the whole queue sleeps, in unix seconds by Redis' clock; None if it does not.
        next: the id of the message with the next turn; empty if no message waits for a worker.
        waiting: how many messages wait in all key queues, if `Admin.keys` has counted them.
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
    Read the key queues of the keys `of`, or the largest key queues.

    The largest are searched in a sample: a hundred keys in turn, a hundred sleeping keys, the keys of a hundred taken
    places, and the keys of 200 random living messages. For a queue with few keys that is all keys; for a queue with
    many keys, those with a large share of the waiting messages.
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
    """Return the end of a sleep; None for no sleep or no end."""
    at = float(text) if text else inf
    return None if at == inf else clamp_time(at)


def held_up(keys: Keys, *, most: int, of: Sequence[str] = (), clock: int | None = None) -> Call[dict[str, str]]:
    """
    Return the first message of each key that waits without a turn: of the keys `of`, and of a sample of other keys.

    The sample has the `most` keys that sleep longest, and the keys of `most` random taken places.
    """

    def read(reply: list[bytes]) -> dict[str, str]:
        return dict(zip(texts(reply[::2]), texts(reply[1::2]), strict=True))

    return _call("held_up", keys, clock, (most, *bounded("keys", of)), read)


# ---- periodic entries


@dataclass(frozen=True, slots=True)
class InForce:
    """
    A periodic entry with a schedule in force.

    Attributes:
        last: the tick up to which every tick is settled, in unix seconds.
        asked: when an immediate run was requested, in unix ms; None without a request.
    """

    last: int
    asked: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """
    A tick of a periodic entry, or a requested run.

    Attributes:
        entry, schedule: the entry's name, and its schedule as text.
        at: the tick, in unix seconds.
        since: the last tick that was settled before it.
        missed: how many ticks between the two are counted as missed.
        message: id and value, as for `publish`; None if this tick itself is missed, which `missed` includes.
        due_ms: when the message is due, in unix ms; a time in the past means now.
        asked: when the run was requested, in unix ms; None for a tick.
        overlap: whether to publish the tick while the entry's last message has not ended.
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
    Put periodic entries in force, each by name and schedule; return Redis' clock in ms and the progress of each.

    Args:
        newest: whether to replace other schedules, as a starting process does. Otherwise only a schedule is replaced
            that no process has registered for half a minute. The answer for an entry with another schedule in force is
            None.
    """
    args = ("1" if newest else "", *chain.from_iterable(bounded("entries", entries)))

    def read(reply: list[Any]) -> tuple[int, list[InForce | None]]:
        in_force: list[InForce | None] = []
        for at in range(1, 1 + 2 * len(entries), 2):
            last, asked = reply[at : at + 2]
            moment = whole_number(asked)  # another program wrote an invalid time
            asked_ms = moment if moment and 0 < moment < LAST_SECOND * 1000 else None
            in_force.append(InForce(int(last), asked_ms) if last else None)
        return int(reply[0]), in_force

    return _call("register", keys, clock, args, read)


def tick(keys: Keys, tick: Tick, *, ttl_ms: int, retries: int, clock: int | None = None) -> Call[TickStatus]:
    """
    Publish the message of a tick and continue with the next, unless another process has done so.

    Returns:
        `published`; `paused` or `overlap` if the tick is skipped (with `paused` also the missed ticks before it);
        `missed` without a message; `done` if another process was first; `superseded` if another schedule is in force,
        `unknown` if none is.
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


# ---- the shards of a queue


@dataclass(frozen=True, slots=True)
class MigrationBatch:
    """
    Messages or dead letters on their way from one shard to others.

    Attributes:
        number: the number of this departure, higher than all earlier numbers of its shard.
        records: name -> all data that the other shard needs.
        letters: whether these are dead letters instead of messages.
    """

    number: int
    records: dict[str, bytes]
    letters: bool

    def id_of(self, name: str) -> str:
        """Return the message id in a name: the name of a message, or the second part of a letter's name."""
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
    Ask the old home shard of chosen ids whether they may be published at their new home.

    From then on, the shard accepts no chosen id by a map older than `fence`.

    Args:
        ids: the ids; without ids the call only raises the fence.
        closing: whether the shard accepts no messages at all from now on.
        replace: whether an id counts as free if it is blocked after its end.
    """
    args = (fence, "1" if closing else "", "1" if replace else "", *bounded("ids", ids))

    read = partial(words, asked=ids, known=get_args(AskStatus))
    return _call("ask", keys, clock, args, read, chosen_ids=ids)


def remap(keys: Keys, before: bytes, after: bytes, *, clock: int | None = None) -> Call[bytes]:
    """
    Write the next map of a queue's shards if the map is `before`; return the map in Redis after that.

    If a queue with keys or limits would get several shards, the answer is REMAP_KEYED and nothing is written.
    """
    return _call("remap", keys.of_shard(0), clock, (before, after), read_bytes)


def depart(keys: Keys, ids: Sequence[str], *, state: LeavingState, clock: int | None = None) -> Call[MigrationBatch]:
    """
    Hold messages of a state, or dead letters, for a move to other shards; return the shard's current departure.

    While a departure is not over, no other messages are held. From a list only the oldest ids leave, in order.
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
    """Add the messages of a departure from the shard `origin` to this shard; a repeated call gets the same answer."""
    args: list[Arg] = [origin, departure.number]
    for name in names:
        args += (name, departure.records[name])

    read = partial(words, asked=names, known=get_args(ArriveStatus))
    return _call("arrive", keys, clock, args, read, ids=names)


def leave(
    keys: Keys, departure: MigrationBatch, staying: Collection[str] = (), *, clock: int | None = None
) -> Call[tuple[str, ...]]:
    """
    Remove the messages that have arrived elsewhere, put the `staying` messages back, and end the departure.

    Returns:
        The ids that were cancelled meanwhile; the other shard has them.
    """
    args: list[Arg] = [departure.number]
    for name in departure.records:
        args += (name, "1" if name in staying else "")
    return _call("leave", keys, clock, args, texts, ids=departure.records)


# ---- call numbers


#: Lanes are kept for at most this many calls with an unknown outcome: a repeated publish of their ids is safe.
PARKED_LIMIT = 1000
#: A lane is kept for half the time of Redis, so that Redis still remembers a call when it is repeated.
PARKED_SECONDS = 300.0


class Message(NamedTuple):
    """The identity of a message that is published again: its id, and a hash of its body and all options."""

    id: str
    rest: int


Messages = tuple[Message, ...]


class CallSequences:
    """
    The lanes of one client in this process; a fork starts without lanes.

    Attributes:
        parked: the calls with an unknown outcome; while there are none, the messages of a publish need not be hashed.
    """

    def __init__(self) -> None:
        self._start_over()

    def take(self, messages: Messages = ()) -> CallNumber:
        """
        Return the call number for publishing `messages`: the old number if that call's outcome is unknown.

        Any other call with one of the ids ends the old call: a later publish of the id is a new message.
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
        """Note that the call has its answer and its lane is free."""
        with self._lock:
            self._free.append(call_number)

    def park(self, call_number: CallNumber, messages: Messages) -> None:
        """Note that the call's outcome is unknown, and keep its number for another publish of `messages`."""
        with self._lock:
            self._end(message.id for message in messages)
            self.parked[messages] = call_number, time.monotonic()
            self._by_id.update((message.id, messages) for message in messages)
            if len(self.parked) > PARKED_LIMIT:
                self._forget(next(iter(self.parked)))

    def end(self, id: str) -> None:
        """Note that a later publish of `id` is a new message, because the old message was cancelled."""
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
        self._lock = threading.Lock()  # the parent may have held the old lock during the fork
        self._pid = os.getpid()
        self._client = token()
        self._made = 0
        self._free: list[CallNumber] = []
        self.parked: OrderedDict[Messages, tuple[CallNumber, float]] = OrderedDict()
        self._by_id: dict[str, Messages] = {}
