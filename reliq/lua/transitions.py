"""Every move a message can make, as a `Call` that has not happened yet.

One function for each script, by the same name. `clock` is Redis' own unless a test gives unix
microseconds. A receipt is a `Claimed`; one that no longer holds changes nothing.
"""

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

from reliq import events
from reliq.errors import ProtocolError
from reliq.events import Event
from reliq.keys import Keys, token
from reliq.lua import Script, script
from reliq.message import CancelStatus, Claimed, Counts, Delivery, PublishStatus, RescheduleStatus
from reliq.redis.commands import Arg, Call, id_text, read_bytes
from reliq.settings import BATCH_LIMIT, INLINE_BYTES, check_int
from reliq.text import LAST_SECOND, clamp_time, clean_text, whole_number
from reliq.wire_format import ENVELOPE_START, HEADER_LIMIT, FailureNote, claim_nonce, open_envelope, receipt_nonce

#: A lease, a tombstone or any other span in ms: a hundred years.
LONGEST_SPAN_MS = 100 * 366 * 86_400_000

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class CallNumber:
    """
    One call of a lane: made again under its number, it gets its first answer and changes nothing.

    Attributes:
        lane: names whoever makes one call at a time; Redis keeps the last number and answer of each.
        number: above that of the lane's last call, or the same to make that call again.
    """

    lane: str
    number: int


def clock_arg(clock: int | None) -> Arg:
    """Return the unix microseconds that a script takes for the time; empty text has it ask Redis."""
    return "" if clock is None else clock


def bare_arg(keys: Keys) -> Arg:
    """Return whether a queue's values are bare bodies, without an envelope."""
    return "1" if keys.bare else ""


def bounded(name: str, some: Sequence[S]) -> Sequence[S]:
    """Return the items of a call; raise ConfigurationError for more than one call takes."""
    if len(some) > BATCH_LIMIT:
        check_int(f"number of {name}", len(some), most=BATCH_LIMIT)
    return some


def once(ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids without those that were there before: a script takes each for another message."""
    return tuple(dict.fromkeys(ids))


def limit_arg(limit: int, *, least: int = 0) -> int:
    """Return how many messages a call is for at most; raise ConfigurationError when it is more than one call takes."""
    if type(limit) is int and least <= limit <= BATCH_LIMIT:
        return limit
    return check_int("limit", limit, least=least, most=BATCH_LIMIT)


def span(name: str, ms: int) -> int:
    """Return a time in ms; raise ConfigurationError for one below 1 or over a hundred years."""
    if type(ms) is int and 0 < ms <= LONGEST_SPAN_MS:
        return ms
    return check_int(name, ms, least=1, most=LONGEST_SPAN_MS)


def texts(reply: Iterable[bytes]) -> tuple[str, ...]:
    """Return the ids of a reply."""
    return tuple(id_text(one) for one in reply)


def answers(reply: Sequence[bytes], ids: Sequence[str], asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the word for each id that was `asked` for, where the script was given `ids`, each of them once."""
    told = dict(zip(ids, words(reply, ids, known), strict=True))
    return [told[id] for id in asked]


def words(reply: Sequence[bytes], asked: Sequence[Any], known: Sequence[str]) -> list[str]:
    """Return one word for each that was asked for; raise ValueError when there are more, fewer, or others."""
    found = [word.decode() for word in reply]
    if len(found) != len(asked) or not set(found) <= set(known):
        raise ValueError
    return found


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


#: A message that has not survived this many deliveries in a row is a dead letter: one beside others, one in half of a
#: process's slots, one in a quarter, two with no other suspect beside it.
LEASE_DEATHS = 5

#: A claim's wait: nothing is due, or another process watches for it.
NOTHING_DUE, NOT_WATCHING = -1, -2


@dataclass(frozen=True, slots=True)
class Suspects:
    """
    The suspects of a queue that one process holds when it claims.

    Attributes:
        slots: messages of the queue that may run at once there.
        held: suspects that are held or run there.
        narrowest: the least number of suspects that one of those may run among.
    """

    slots: int
    held: int
    narrowest: int

    @staticmethod
    def room(one: Claimed, slots: int) -> int:
        """Return among how many suspects one may run, itself included, where `slots` run at once; as in claim.lua."""
        return 1 if one.deaths > 2 or one.left <= 0 else max(1, slots >> one.deaths)  # noqa: PLR2004  see LEASE_DEATHS


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """
    The answer of a claim.

    Attributes:
        promote_in_ms, reclaim_in_ms: until there is something to promote or reclaim; NOTHING_DUE or NOT_WATCHING.
        behind: how many ids are left in ready and retry.
    """

    promote_in_ms: int
    reclaim_in_ms: int
    behind: int
    claimed: list[Claimed]


class Oversized(NamedTuple):
    """The size of a value that is too large to be read, and its first bytes, which hold its header."""

    size: int
    start: bytes


#: A message's value; None when it has none; its size when it is to be read by `commands.bodies`.
FoundBody = bytes | int | Oversized | None


@dataclass(frozen=True, slots=True)
class ReclaimAnswer:
    """Ids by what became of them, and the ms until the next deadline (NOTHING_DUE: none)."""

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


def promote(keys: Keys, *, limit: int = 500, keyed: bool = False, clock: int | None = None) -> Call[tuple[int, int]]:
    """
    Move what is due from pending to ready; return how many moved and the ms until the next is due.

    In a `keyed` queue messages with a key move to their lines, keys that slept are served again, and the wait is that
    for the next message that is due, key that wakes or start that the queue's rate permits.
    """
    one = script("promote", keyed=keyed)
    return Call(
        one,
        one.lead(keys),
        (clock_arg(clock), limit_arg(limit, least=1)),
        lambda reply: (int(reply[0]), int(reply[1])),
        lambda answer: [events.Promoted(keys.name, answer[0])] if answer[0] else (),
    )


def claim(
    keys: Keys,
    call_number: CallNumber,
    *,
    limit: int,
    lease_ms: int,
    first: Literal["ready", "retry"] = "ready",
    direct: int | None = None,
    suspects: Suspects | None = None,
    watcher: str = "",
    keyed: bool = False,
    spread: int | None = None,
    clock: int | None = None,
) -> Call[ClaimAnswer]:
    """
    Lease up to `limit` messages from ready and retry for `lease_ms`, beginning with `first`.

    In a `keyed` queue the lines of keys take turns with those, nothing starts above the queue's limits, and
    `promote_in_ms` is the wait for the next key that wakes or start that a rate permits, if that is sooner.

    Args:
        call_number: a call that is made again under its number gets its first answer.
        limit: at most 500.
        direct: how many of them may be suspects or messages with no retry left, which wait in no buffer; None: all.
        suspects: how many suspects this process holds; None: none, and `limit` messages run at once.
        watcher: the process that waits for the next due time when no other does; empty: none.
        spread: how many keys the messages may be of, where none counts as one; None: any number.

    Raises:
        ConfigurationError: `limit` or `lease_ms` is out of range.
    """
    limit_arg(limit)
    span("lease_ms", lease_ms)
    suspects, one = suspects or Suspects(limit, 0, limit), script("claim", keyed=keyed)
    nonce = claim_nonce(call_number.lane, call_number.number, lease_ms)
    args: list[Arg] = ["" if clock is None else clock, call_number.number, nonce, lease_ms, limit, first]
    args += [limit if direct is None else direct, suspects.slots, suspects.held, suspects.narrowest, watcher]
    args += [limit_arg(BATCH_LIMIT if spread is None else spread, least=1)] if keyed else []
    return Call(
        one,
        (keys.lane(call_number.lane), *one.lead(keys)),
        args,
        lambda reply: _claim_answer(reply, nonce, keyed=keyed),
        lambda answer: [events.Claimed(keys.name, tuple(one.id for one in answer.claimed))] if answer.claimed else (),
    )


def reclaim(
    keys: Keys, *, limit: int = 500, spare_leases: bool = False, keyed: bool = False, clock: int | None = None
) -> Call[ReclaimAnswer]:
    """
    Take back up to `limit` messages that are over their deadline: to retry while retries are left, else to garbage.

    In a `keyed` queue those with a key come to the heads of their lines; else they are left where they are.
    With `spare_leases` it takes only nacked and cancelled messages: a worker may be about to renew the others.
    """
    one = script("reclaim", keyed=keyed)

    def happened(answer: ReclaimAnswer) -> Iterable[Event]:
        if answer.overdue or answer.again or answer.buried:
            yield events.Reclaimed(keys.name, answer.overdue, answer.again, answer.buried)
        if answer.cancelled:
            yield events.Cancelled(keys.name, answer.cancelled)
        if answer.inconsistent:
            yield events.Inconsistent(keys.name, answer.inconsistent)

    return Call(
        one,
        one.lead(keys),
        (clock_arg(clock), limit_arg(limit, least=1), "1" if spare_leases else "", LEASE_DEATHS),
        lambda reply: ReclaimAnswer(int(reply[0]), *(texts(ids) for ids in reply[1:6])),
        happened,
    )


def bodies(keys: Keys, ids: Sequence[str], *, max_body: int, clock: int | None = None) -> Call[list[FoundBody]]:
    """Read the values of messages: small ones at once, of others their sizes; none that no body of `max_body` bytes has."""
    return Call(
        script("bodies"),
        keys.msgs(ids),
        (0 if clock is None else clock, max_body + HEADER_LIMIT, INLINE_BYTES),
        lambda reply: [one if type(one) is bytes else _found(one) for one in reply],
    )


def delivery(claimed: Claimed, found: bytes | Oversized, *, max_body: int, bare: bool) -> Delivery:
    """Return the delivery of a message by what was found of its value; no handler gets a body of more than `max_body` bytes."""
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


def _claim_answer(reply: list[Any], nonce: str, *, keyed: bool) -> ClaimAnswer:
    promote_in, reclaim_in, behind, token, *rows = reply
    size = 4 if keyed else 3
    claimed = [_claimed(id_text(rows[at]), nonce, token, *rows[at + 1 : at + size]) for at in range(0, len(rows), size)]
    return ClaimAnswer(int(promote_in), int(reclaim_in), int(behind), claimed)


def _claimed(id: str, nonce: str, token: int, left: int, deaths: int, key: bytes | None = None) -> Claimed:
    """Return a message as it was claimed."""
    return Claimed(id, receipt_nonce(nonce, deaths), left, deaths, token, key if key is None else id_text(key))


@dataclass(frozen=True, slots=True)
class Settled:
    """Ids whose receipt no longer held, and ids whose message was cancelled meanwhile."""

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
        receipts: each with the ms for which its chosen id stays taken, or None.
        kind: `expired` ends messages whose bodies were gone at their claim.
        history: how many of the last acked messages Redis keeps.
        took_ms: for how long each ran, as the history tells it.
    """
    tail_keys = [keys.msg(claimed.id) for claimed, _ in bounded("receipts", receipts)]
    # Nothing says here whether the id of a bare body, or of one that is gone, was chosen: Redis knows.
    windows = [window for _, window in receipts]
    if keys.bare or kind == "expired" or any(windows):
        tail_keys += [keys.dedup(claimed.id) for claimed, _ in receipts]
    args: list[Arg] = [clock_arg(clock), kind, history]
    times: Sequence[Arg] = took_ms or [""] * len(receipts)
    if kind == "expired":
        times = [claimed.token for claimed, _ in receipts]
    for (claimed, window), took in zip(receipts, times, strict=True):
        args += (claimed.id, claimed.nonce, window or "", took)
    one = _variant("ack", args, [claimed for claimed, _ in receipts])
    happened = events.Acked if kind == "acked" else events.Expired
    ids = [claimed.id for claimed, _ in receipts]
    return Call(
        one,
        (*one.lead(keys), *tail_keys),
        args,
        lambda reply: Settled(_of(ids, reply)),
        lambda answer: _settled(keys, ids, answer, "ack", happened),
    )


def nack(keys: Keys, failures: Sequence[tuple[Claimed, int, str, bytes]], *, clock: int | None = None) -> Call[Settled]:
    """
    Answer that messages failed.

    Args:
        failures: of each the receipt, the ms until its redelivery, the text of its `FailureNote`, and its value. With a
            value the message becomes garbage: it must be given when no retry is left, and else be empty. Without one a
            wait of -1 makes garbage of an empty body, and -2 of one that stays as Redis has it.
    """
    ids = [failure[0].id for failure in bounded("failures", failures)]
    args: list[Arg] = [clock_arg(clock), bare_arg(keys)]
    for claimed, delay_ms, why, value in failures:
        args += (claimed.id, claimed.nonce, delay_ms, why, value)
    one = _variant("nack", args, [failure[0] for failure in failures])
    return Call(
        one,
        (*one.lead(keys), *keys.msgs(ids)),
        args,
        lambda reply: Settled(_of(ids, reply[0]), _of(ids, reply[1])),
        lambda answer: _settled(keys, ids, answer, "nack", events.Nacked),
    )


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
    Return what `nack` takes: with the value when the message must not run again, by its retries or as `final`.

    Args:
        reason, error, raised, by, took_ms: as a `FailureNote` has them; of `error` its text.
    """
    last = final or delivery.claimed.left <= 0
    if last and not delivery.value:
        delay_ms = -2 if delivery.refusal else -1
    note = FailureNote(reason, delivery.attempt, clean_text(error), raised, by, took_ms)
    return delivery.claimed, delay_ms, str(note), delivery.value if last else b""


def extend(keys: Keys, receipts: Sequence[Claimed], *, lease_ms: int, clock: int | None = None) -> Call[Settled]:
    """Move deadlines to `lease_ms` from now; tell the ids whose message was cancelled meanwhile."""
    ids = [claimed.id for claimed in bounded("receipts", receipts)]
    return Call(
        script("extend"),
        (keys.unack, keys.lease),
        (clock_arg(clock), span("lease_ms", lease_ms), *(part for one in receipts for part in (one.id, one.nonce))),
        lambda reply: Settled(_of(ids, reply[0]), _of(ids, reply[1])),
    )


def release(
    keys: Keys, receipts: Sequence[Claimed], *, sleep_ms: int | None = None, clock: int | None = None
) -> Call[Settled]:
    """
    Give unstarted messages back to the head of ready, or of their line, the first of `receipts` foremost; spend nothing.

    With `sleep_ms` no message of their keys is claimed in that time; of one without a key, none of the queue. It is
    for what was claimed from a queue with keys.
    """
    ids = [claimed.id for claimed in bounded("receipts", receipts)]
    args: list[Arg] = [clock_arg(clock)]
    for claimed in receipts:
        args += (claimed.id, claimed.nonce)
    one = _variant("release", args, receipts)
    if one.keyed_keys:
        args.insert(1, "" if sleep_ms is None else span("sleep_ms", sleep_ms))

    def went_back(name: str, released: tuple[str, ...]) -> Event:
        if sleep_ms is None:
            return events.Released(name, released)
        slept = dict.fromkeys(one.key or "" for one in receipts if one.id in released)
        return events.Throttled(name, released, tuple(slept), sleep_ms / 1000)

    return Call(
        one,
        one.lead(keys),
        args,
        lambda reply: Settled(_of(ids, reply)),
        lambda answer: _settled(keys, ids, answer, "release", went_back),
    )


def snooze(keys: Keys, receipts: Sequence[tuple[Claimed, int]], *, clock: int | None = None) -> Call[Settled]:
    """Put each message off by its ms; spend no retry."""
    ids = [claimed.id for claimed, _ in bounded("receipts", receipts)]
    args: list[Arg] = [clock_arg(clock), bare_arg(keys)]
    for claimed, delay_ms in receipts:
        args += (claimed.id, claimed.nonce, delay_ms)
    one = _variant("snooze", args, [claimed for claimed, _ in receipts])
    return Call(
        one,
        (*one.lead(keys), *keys.msgs(ids)),
        args,
        lambda reply: Settled(_of(ids, reply[0]), _of(ids, reply[1])),
        lambda answer: _settled(keys, ids, answer, "snooze", events.Snoozed),
    )


def _variant(name: str, args: list[Arg], receipts: Sequence[Claimed]) -> Script:
    """
    Return the script by which these receipts are settled.

    Where one was claimed from such a queue, the key of each is put behind its other arguments.
    """
    for one in receipts:
        if one.key is not None:
            break
    else:
        return script(name)
    keyed = script(name, keyed=True)
    width = len(keyed.tail_args) - 1
    head = len(args) - width * len(receipts)
    ends = range(head + width, len(args) + 1, width)
    args[head:] = [
        part for one, end in zip(receipts, ends, strict=True) for part in (*args[end - width : end], one.key or "")
    ]
    return keyed


def _of(ids: Sequence[str], reply: Sequence[bytes]) -> tuple[str, ...]:
    """Return the ids of a reply; raise ValueError for one that was not in the call."""
    if reply == []:
        return ()
    told = texts(reply)
    if not set(told) <= set(ids):
        raise ValueError
    return told


def _settled(
    keys: Keys, ids: Sequence[str], answer: Settled, verb: str, happened: Callable[[str, tuple[str, ...]], Event]
) -> Iterable[Event]:
    done: Sequence[str] = ids
    if answer.lost or answer.cancelled:  # one for one: a late receipt and the valid one of a message can be in one call
        gone = Counter((*answer.lost, *answer.cancelled))
        done = list((Counter(ids) - gone).elements())
    if done:
        yield happened(keys.name, tuple(done))
    if answer.lost:
        yield events.Lost(keys.name, answer.lost, verb)
    if answer.cancelled:
        yield events.Cancelled(keys.name, answer.cancelled)


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


def limit(keys: Keys, fields: Mapping[str, str], *, declared: str = "", clock: int | None = None) -> Call[bool]:
    """
    Write limits, and have the keys served again that may be by them; say whether they were written.

    Args:
        fields: as `reliq.settings` names them; an empty value removes one.
        declared: the text of a declaration: its fields take the place of all others, unless the declaration that was
            written last is the same. Empty: the fields alone are written.
    """
    one = script("limit")
    return Call(
        one,
        one.lead(keys),
        (clock_arg(clock), declared, *(part for field in fields.items() for part in field)),
        bool,
    )


KeyState = Literal["in turn", "asleep", "paused", "saturated", "standing", "empty"]

#: Values of a reply before those of keys, and of each key.
_HEAD, _FIELDS = 6, 7


@dataclass(frozen=True, slots=True)
class KeyQueue:
    """
    The messages of one key that are due, or run.

    Attributes:
        key: of a priority the line that stands for it.
        waiting: how many are due and wait in the line.
        in_flight: how many hold a place of the key: they run, or an ordered one waits for its redelivery.
        weight: how many have their turn when others have one.
        state: why they wait. `in turn`: for a worker; `asleep`: for `asleep_until`; `paused`: for a resume; `saturated`:
            until one that has a place ends; `standing`: nobody knows, and `reliq check --repair` mends it; `empty`: none
            waits.
        asleep_until: unix seconds by Redis' clock; None when the key does not sleep, or is paused without an end.
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
    The lines of a queue.

    Attributes:
        largest: the most that were asked for, those with most waiting messages first; or those that were named.
        in_turn: how many keys wait for a worker.
        asleep: how many keys sleep, or are paused.
        running: how many messages run, over all processes.
        is_full: whether none may start now: the queue's rate or concurrency is used up, or it sleeps.
        asleep_until: until when the whole queue sleeps, in unix seconds by Redis' clock; None when it does not.
        next: the id of the message whose turn comes next; empty when none waits for a worker.
    """

    largest: Sequence[KeyQueue]
    in_turn: int
    asleep: int
    running: int
    is_full: bool = False
    asleep_until: float | None = None
    next: str = ""


def lines(keys: Keys, *, most: int = 10, of: Sequence[str] = (), clock: int | None = None) -> Call[KeyQueues]:
    """
    Look at the lines of the keys `of`, or at the largest ones.

    The largest are found among up to a hundred keys in turn, a hundred asleep, those of a hundred messages that hold a
    place, and those of 200 messages that are alive, drawn at random: all keys of a queue that has few, and of one that
    has many those with a share of what waits.
    """
    bounded("keys", of)
    one = script("lines")
    return Call(one, one.lead(keys), (clock_arg(clock), most, *of), _lines)


def held_up(keys: Keys, *, most: int, of: Sequence[str] = (), clock: int | None = None) -> Call[dict[str, str]]:
    """
    Return the first message of each key that waits and has no turn: of the keys `of`, and of some others.

    Those are the `most` that sleep longest, and the keys of `most` places that are taken, drawn at random.
    """
    bounded("keys", of)
    one = script("held_up")
    return Call(one, one.lead(keys), (clock_arg(clock), most, *of), _first_of)


def _first_of(reply: list[bytes]) -> dict[str, str]:
    texts = map(id_text, reply)
    return dict(zip(texts, texts, strict=True))


def sleep(keys: Keys, key: str, *, for_ms: int | None, clock: int | None = None) -> Call[bool]:
    """Have one key not served for so many ms, None until it is woken; 0 wakes it. Return whether it slept before."""
    one = script("sleep")
    return Call(one, one.lead(keys), (clock_arg(clock), key, "" if for_ms is None else for_ms), bool)


def _lines(reply: list[Any]) -> KeyQueues:
    in_turn, asleep, running, is_full, until, first = reply[:_HEAD]
    found = [_line(*reply[at : at + _FIELDS]) for at in range(_HEAD, len(reply), _FIELDS)]
    return KeyQueues(
        found, int(in_turn), int(asleep), max(0, int(running)), bool(is_full), _until(until), id_text(first)
    )


def _line(name: bytes, waiting: int, in_flight: int, most: int, until: bytes, weight: bytes, in_turn: int) -> KeyQueue:
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
    """Return until when something sleeps; None when it does not, or has no end."""
    at = float(text) if text else inf
    return None if at == inf else clamp_time(at)


TickStatus = Literal["published", "paused", "overlap", "missed", "done", "superseded", "unknown"]


@dataclass(frozen=True, slots=True)
class InForce:
    """
    A periodic entry whose schedule is in force.

    Attributes:
        last: the tick up to which all is done, in unix seconds.
        asked: when somebody asked for a run at once, in unix ms; None when nobody did.
    """

    last: int
    asked: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """
    A tick of a periodic entry, or a run that somebody asked for.

    Attributes:
        entry, schedule: its name, and its schedule as text.
        at: the tick, in unix seconds.
        since: the tick up to which all was done before it.
        missed: how many ticks between the two are counted as missed.
        message: id and value, as `publish` takes them; None for a tick that is missed itself and among `missed`.
        due_ms: when the message is due; what is past is due now.
        asked: which run was asked for, in unix ms; None for a tick.
        overlap: whether a tick is published while the entry's last message is alive.
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
    Put periodic entries in force, each by its name and schedule; return Redis' clock in ms, and how far each is.

    Args:
        newest: whether they take the place of other schedules, as those of a process that starts do; else only that of
            one which no process has registered for half a minute. The schedule of an entry that is None is another.
    """
    bounded("entries", entries)
    return Call(
        script("register"),
        (keys.cron,),
        (clock_arg(clock), "1" if newest else "", *(part for entry in entries for part in entry)),
        lambda reply: (int(reply[0]), [_in_force(*reply[at : at + 2]) for at in range(1, 1 + 2 * len(entries), 2)]),
    )


def tick(keys: Keys, one: Tick, *, ttl_ms: int, retries: int, clock: int | None = None) -> Call[TickStatus]:
    """
    Publish the message of a tick and go on to the next, unless that was done.

    Returns:
        `published`; `paused`, also for the missed ones before it, or `overlap` for one that is skipped; `missed` for one without a message; `done` when
        another process was first; `superseded` when another schedule is in force, `unknown` when none is.
    """
    asked: Arg = "" if one.asked is None else one.asked
    args: list[Arg] = [clock_arg(clock), one.entry, one.schedule, one.since, one.at, asked, one.overlap, one.missed]
    args += [one.due_ms, span("ttl_ms", ttl_ms), retries, "" if keys.bare else ENVELOPE_START, *(one.message or ())]
    of_script = script("tick")
    tail = [keys.msg(one.message[0])] if one.message else []

    def happened(answer: TickStatus) -> Iterable[events.Event]:
        if answer == "published" and one.message:
            yield events.Published(keys.name, (one.message[0],))
        if answer in get_args(events.TickOutcome):
            missed = 0 if answer == "paused" else one.missed
            yield events.Ticked(keys.name, one.entry, one.at, cast("events.TickOutcome", answer), missed)

    return Call(of_script, (*of_script.lead(keys), *tail), args, _status, happened)


def _in_force(last: bytes, asked: bytes) -> InForce | None:
    """Return how far an entry is; a wish that is no moment is none of ours."""
    wish = whole_number(asked)
    return InForce(int(last), wish if wish and 0 < wish < LAST_SECOND * 1000 else None) if last else None


def _status(reply: bytes) -> TickStatus:
    word = reply.decode()
    if word not in get_args(TickStatus):
        raise ValueError
    return cast("TickStatus", word)


AskStatus = Literal["free", "duplicate", "tombstoned", "stale"]
ArriveStatus = Literal["arrived", "alive", "late"]
LeavingState = Literal["pending", "ready", "retry", "unack", "dead"]


#: The answer of `remap` for a queue that has keys or limits, and is to have several shards.
REMAP_KEYED = b"keyed"


@dataclass(frozen=True, slots=True)
class MigrationBatch:
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


def depart(keys: Keys, ids: Sequence[str], *, state: LeavingState, clock: int | None = None) -> Call[MigrationBatch]:
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
    keys: Keys, departure: MigrationBatch, names: Sequence[str], *, origin: int, clock: int | None = None
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
    keys: Keys, departure: MigrationBatch, staying: Collection[str] = (), *, clock: int | None = None
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


def _departure(reply: Sequence[Any]) -> MigrationBatch:
    pairs = dict(zip(reply[::2], reply[1::2], strict=True))
    number, state = pairs.pop(b"").split()
    return MigrationBatch(
        int(number), {id_text(name): read_bytes(record) for name, record in pairs.items()}, letters=state == b"dead"
    )


#: The lanes of at most this many calls with an unknown outcome are kept: publishing the same ids again is safe.
PARKED_LIMIT = 1000
#: A lane is kept for half of the time for which Redis remembers it, so that Redis still knows a call made again.
PARKED_SECONDS = 300.0


class Message(NamedTuple):
    """A message as it is known when it is published again: its id, and a hash of its body and all its terms."""

    id: str
    rest: int


Messages = tuple[Message, ...]


@dataclass(slots=True)
class CallSequence:
    """A name and the number of its last call."""

    name: str
    number: int = 0

    def next(self) -> CallNumber:
        """Return the number of a new call."""
        self.number += 1
        return CallNumber(self.name, self.number)

    def same(self) -> CallNumber:
        """Return the number of the last call, to make it again."""
        return CallNumber(self.name, self.number)


class CallSequences:
    """
    The lanes of one client in this process; a fork starts with none.

    Attributes:
        parked: the calls whose outcome is unknown; while there is none, nobody need say what is published.
    """

    def __init__(self) -> None:
        self._start_over()

    def take(self, messages: Messages = ()) -> tuple[CallSequence, CallNumber]:
        """
        Return a lane and the call number for publishing `messages`: the old one if that call's outcome is unknown.

        Any other call with one of their ids ends the old one: what is published from now on is something else.
        """
        if self._pid != os.getpid():
            self._start_over()
        with self._lock:
            if messages in self.parked:
                lane, since = self.parked[messages]
                self._forget(messages)
                if time.monotonic() - since < PARKED_SECONDS:
                    return lane, lane.same()
            if messages:
                self._end(message.id for message in messages)
            lane = self._free.pop() if self._free else self._new()
            return lane, lane.next()

    def give_back(self, lane: CallSequence) -> None:
        """Note that the call has its answer: the lane is free."""
        with self._lock:
            self._free.append(lane)

    def park(self, lane: CallSequence, messages: Messages) -> None:
        """Note that the call's outcome is unknown: its number is kept for when `messages` are published again."""
        with self._lock:
            self._end(message.id for message in messages)
            self.parked[messages] = lane, time.monotonic()
            self._by_id.update((message.id, messages) for message in messages)
            if len(self.parked) > PARKED_LIMIT:
                self._forget(next(iter(self.parked)))

    def end(self, id: str) -> None:
        """Note that a publish of `id` from now on is a new one: the message was cancelled."""
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

    def _new(self) -> CallSequence:
        self._made += 1
        return CallSequence(f"{self._client}{self._made}")

    def _start_over(self) -> None:
        self._lock = threading.Lock()  # the parent may have held the old one at the fork
        self._pid = os.getpid()
        self._client = token()
        self._made = 0
        self._free: list[CallSequence] = []
        self.parked: OrderedDict[Messages, tuple[CallSequence, float]] = OrderedDict()
        self._by_id: dict[str, Messages] = {}
