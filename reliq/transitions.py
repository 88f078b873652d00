"""
Every move a message can make, as a `Call` that has not happened yet.

One function for each script, by the same name. `clock` is Redis' own unless a test gives unix
microseconds. A receipt is a `Claimed`; one that no longer holds changes nothing.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from reliq import events
from reliq.call import Arg, Call, id_text
from reliq.codec import ENVELOPE_START
from reliq.events import Event
from reliq.keys import Keys
from reliq.lua import script
from reliq.message import CancelStatus, Claimed, Counts, Delivery, PublishStatus, RescheduleStatus

#: A claim's wait: nothing is due, or another process watches for it.
NOTHING_DUE, NOT_WATCHING = -1, -2

RedriveStatus = Literal["redriven", "alive", "not_found"]
_NO_WISH = ("",) * 7
_GLOB = re.compile(r"[*?\[\]\\^]")


@dataclass(frozen=True, slots=True)
class Turn:
    """One numbered call in a lane: repeated, it gets its first answer."""

    lane: str
    number: int


@dataclass(frozen=True, slots=True)
class PublishAnswer:
    """The due time in ms, and the index of each message that was not published, with why."""

    due_ms: int
    refused: dict[int, PublishStatus]


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """
    What a claim took.

    Attributes:
        promote_in_ms, reclaim_in_ms: until there is something to promote or reclaim; NOTHING_DUE or NOT_WATCHING.
        behind: how many ids are left in ready and retry.
    """

    promote_in_ms: int
    reclaim_in_ms: int
    behind: int
    claimed: list[Claimed]


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


@dataclass(frozen=True, slots=True)
class Settled:
    """Ids whose receipt no longer held, and ids whose message was cancelled meanwhile."""

    lost: tuple[str, ...]
    cancelled: tuple[str, ...] = ()


def publish(
    keys: Keys,
    items: Sequence[tuple[str, bytes]],
    turn: Turn,
    *,
    ttl_ms: int,
    retries: int,
    delay_ms: int = 0,
    at_ms: int | None = None,
    window_ms: int | None = None,
    replace: bool = False,
    bare: bool = False,
    clock: int | None = None,
) -> Call[PublishAnswer]:
    """
    Put messages into ready, or into pending when they are due later.

    `items` are ids and values: what follows the due time in the envelope, or a bare body. `window_ms` says that
    the ids were chosen by the caller and for how long each stays taken after its end.
    """
    ids = [id for id, _ in items]
    tail_keys = [keys.msg(id) for id in ids]
    if window_ms is not None:
        tail_keys += [keys.dd(id) for id in ids]
    args: list[Arg] = [_clock(clock), turn.number, "" if at_ms is None else at_ms, delay_ms, ttl_ms, retries]
    args += ["" if bare else ENVELOPE_START, "" if window_ms is None else window_ms, "1" if replace else ""]
    for item in items:
        args += item
    lead = (keys.lane(turn.lane), keys.pending, keys.ready, keys.unack, keys.counts, keys.lease, keys.garbage)
    rest = (keys.totals, keys.ends, keys.wake, keys.watch)
    happened: Callable[[PublishAnswer], Iterable[Event]] = lambda answer: [  # noqa: E731
        events.Published(keys.name, tuple(id for i, id in enumerate(ids) if i not in answer.refused))
    ]
    return Call(script("publish"), (*lead, *rest, *tail_keys), args, _publish_answer, happened)


def promote(keys: Keys, *, limit: int = 500, clock: int | None = None) -> Call[tuple[int, int]]:
    """Move what is due from pending to ready; return how many moved and the ms until the next is due."""
    return Call(
        script("promote"),
        (keys.pending, keys.ready, keys.totals, keys.wake),
        (_clock(clock), limit),
        lambda reply: (int(reply[0]), int(reply[1])),
        lambda answer: [events.Promoted(keys.name, answer[0])] if answer[0] else (),
    )


def claim(
    keys: Keys,
    turn: Turn,
    *,
    limit: int,
    lease_ms: int,
    first: Literal["ready", "retry"] = "ready",
    direct: int | None = None,
    suspects: int = 1,
    watcher: str = "",
    clock: int | None = None,
) -> Call[ClaimAnswer]:
    """
    Lease up to `limit` messages from ready and retry, beginning with `first`.

    `direct` is how many of them may be such that must not wait in a buffer: suspects and messages with no retry
    left (None: all). `watcher` names the process that would wait for the next due time; empty: none.
    """
    nonce = f"{turn.lane}.{turn.number}:{lease_ms}"
    lead = (keys.lane(turn.lane), keys.ready, keys.retry, keys.unack, keys.pending, keys.counts, keys.lease)
    return Call(
        script("claim"),
        (*lead, keys.errors, keys.totals, keys.ends, keys.wake, keys.watch, keys.paused),
        (
            _clock(clock),
            turn.number,
            nonce,
            lease_ms,
            limit,
            first,
            limit if direct is None else direct,
            suspects,
            watcher,
        ),
        lambda reply: _claim_answer(reply, nonce),
        lambda answer: [events.Claimed(keys.name, tuple(one.id for one in answer.claimed))] if answer.claimed else (),
    )


def reclaim(
    keys: Keys, *, limit: int = 500, spare_leases: bool = False, clock: int | None = None
) -> Call[ReclaimAnswer]:
    """
    Take back what is over its deadline: to retry while retries are left, else to garbage.

    With `spare_leases` only nacked and cancelled messages: a worker may be about to renew the others.
    """

    def happened(answer: ReclaimAnswer) -> Iterable[Event]:
        if answer.overdue or answer.again or answer.buried:
            yield events.Reclaimed(keys.name, answer.overdue, answer.again, answer.buried)
        if answer.cancelled:
            yield events.Cancelled(keys.name, answer.cancelled)
        if answer.inconsistent:
            yield events.Inconsistent(keys.name, answer.inconsistent)

    return Call(
        script("reclaim"),
        (keys.unack, keys.retry, keys.garbage, keys.counts, keys.lease, keys.errors, keys.totals, keys.ends, keys.wake),
        (_clock(clock), limit, "1" if spare_leases else ""),
        lambda reply: ReclaimAnswer(int(reply[0]), *(_texts(ids) for ids in reply[1:6])),
        happened,
    )


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
    End messages; each receipt comes with the ms for which its chosen id stays taken, or None.

    With `history` the last so many acked ones are remembered, each with how long it ran if `took_ms` says it.
    """
    tail_keys = [keys.msg(claimed.id) for claimed, _ in receipts]
    if any(window for _, window in receipts):
        tail_keys += [keys.dd(claimed.id) for claimed, _ in receipts]
    args: list[Arg] = [_clock(clock), kind, history or "", ",".join(map(str, took_ms))]
    for claimed, window in receipts:
        args += (claimed.id, claimed.nonce, claimed.left, window or "")
    happened = events.Acked if kind == "acked" else events.Expired
    ids = [claimed.id for claimed, _ in receipts]
    return Call(
        script("ack"),
        (keys.unack, keys.counts, keys.lease, keys.errors, keys.totals, keys.ends, keys.history, *tail_keys),
        args,
        lambda reply: Settled(_at(ids, reply)),
        lambda answer: _settled(keys, ids, answer, "ack", happened),
    )


def nack(keys: Keys, failures: Sequence[tuple[Claimed, int, str, bytes]], *, clock: int | None = None) -> Call[Settled]:
    """
    Answer that messages failed: receipt, ms until the redelivery, note (see `note`), and value.

    A value sends the message to its end; it must be given when no retry is left, and else be empty.
    """
    ids = [failure[0].id for failure in failures]
    args: list[Arg] = [_clock(clock), _bare(keys)]
    for claimed, delay_ms, why, value in failures:
        args += (claimed.id, claimed.nonce, claimed.left, delay_ms, why, value)
    lead = (keys.unack, keys.garbage, keys.counts, keys.lease, keys.errors, keys.totals, keys.ends)
    return Call(
        script("nack"),
        (*lead, keys.wake, keys.watch, *(keys.msg(id) for id in ids)),
        args,
        lambda reply: Settled(_at(ids, reply[0]), _at(ids, reply[1])),
        lambda answer: _settled(keys, ids, answer, "nack", events.Nacked),
    )


def note(reason: str, attempt: int | None, error: str) -> str:
    """Return how the last error of a message is kept: reason, attempt or `-`, at most 500 characters of text."""
    return f"{reason} {'-' if attempt is None else attempt} {error[:500]}"


def failure(
    delivery: Delivery, reason: str, error: str, delay_ms: int, *, final: bool = False
) -> tuple[Claimed, int, str, bytes]:
    """Return what `nack` takes: with the value when the message must not run again, by its retries or as `final`."""
    last = final or delivery.claimed.left <= 0
    return delivery.claimed, delay_ms, note(reason, delivery.attempt, error), delivery.value if last else b""


def extend(keys: Keys, receipts: Sequence[Claimed], *, lease_ms: int, clock: int | None = None) -> Call[Settled]:
    """Move deadlines to now + lease."""
    ids = [claimed.id for claimed in receipts]
    return Call(
        script("extend"),
        (keys.unack, keys.counts, keys.lease),
        (_clock(clock), lease_ms, *(part for one in receipts for part in (one.id, one.nonce, one.left))),
        lambda reply: Settled(_at(ids, reply[0]), _at(ids, reply[1])),
    )


def release(keys: Keys, receipts: Sequence[Claimed], *, clock: int | None = None) -> Call[Settled]:
    """Give unstarted messages back to the head of ready, the first of `receipts` foremost; spend nothing."""
    ids = [claimed.id for claimed in receipts]
    args: list[Arg] = [_clock(clock)]
    for one in receipts:
        args += (one.id, one.nonce, one.left, "suspect" if one.suspect else "")
    return Call(
        script("release"),
        (keys.unack, keys.ready, keys.counts, keys.lease, keys.errors, keys.totals, keys.ends, keys.wake),
        args,
        lambda reply: Settled(_at(ids, reply)),
        lambda answer: _settled(keys, ids, answer, "release", events.Released),
    )


def snooze(keys: Keys, receipts: Sequence[tuple[Claimed, int]], *, clock: int | None = None) -> Call[Settled]:
    """Put messages off by so many ms; spend no retry."""
    ids = [claimed.id for claimed, _ in receipts]
    args: list[Arg] = [_clock(clock), _bare(keys)]
    for claimed, delay_ms in receipts:
        args += (claimed.id, claimed.nonce, claimed.left, delay_ms)
    lead = (keys.unack, keys.pending, keys.counts, keys.lease, keys.errors, keys.totals, keys.ends)
    return Call(
        script("snooze"),
        (*lead, keys.wake, keys.watch, *(keys.msg(id) for id in ids)),
        args,
        lambda reply: Settled(_at(ids, reply[0]), _at(ids, reply[1])),
        lambda answer: _settled(keys, ids, answer, "snooze", events.Snoozed),
    )


def cancel(
    keys: Keys, ids: Sequence[str], *, tombstone_ms: int = 60_000, clock: int | None = None
) -> Call[list[CancelStatus]]:
    """Cancel messages; a running one is told at its next renewal."""
    return Call(
        script("cancel"),
        (
            *(keys.pending, keys.unack, keys.counts, keys.lease, keys.errors, keys.totals, keys.ends),
            *map(keys.msg, ids),
            *map(keys.dd, ids),
        ),
        (_clock(clock), tombstone_ms, *ids),
        lambda reply: cast("list[CancelStatus]", _words(reply, ids, get_args(CancelStatus))),
        lambda answer: [
            events.Cancelled(keys.name, tuple(id for id, word in zip(ids, answer, strict=True) if word == "cancelled"))
        ],
    )


def reschedule(
    keys: Keys, ids: Sequence[str], *, at_ms: int | None = None, delay_ms: int = 0, clock: int | None = None
) -> Call[list[RescheduleStatus]]:
    """Give waiting messages another due time."""
    return Call(
        script("reschedule"),
        (keys.pending, keys.unack, keys.counts, keys.lease, keys.wake, keys.watch, *map(keys.msg, ids)),
        (_clock(clock), _bare(keys), "" if at_ms is None else at_ms, delay_ms, *ids),
        lambda reply: cast("list[RescheduleStatus]", _words(reply, ids, get_args(RescheduleStatus))),
    )


def collect(
    keys: Keys, ids: Sequence[str], *, letters_max: int, letters_ms: int, clock: int | None = None
) -> Call[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Turn garbage into dead letters; return their ids, and those whose body was gone."""
    return Call(
        script("collect"),
        (keys.garbage, keys.errors, keys.dead, keys.totals, keys.ends, *map(keys.msg, ids), *map(keys.dd, ids)),
        (_clock(clock), letters_max, letters_ms, *ids),
        lambda reply: (_texts(reply[0]), _texts(reply[1])),
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
    clock: int | None = None,
) -> Call[list[RedriveStatus]]:
    """Publish dead letters again: name of the letter, id, retries."""
    lead = (keys.dead, keys.pending, keys.ready, keys.counts, keys.garbage, keys.lease, keys.totals)
    return Call(
        script("redrive"),
        (*lead, keys.wake, keys.watch, *(keys.msg(id) for _, id, _ in letters)),
        (_clock(clock), _bare(keys), delay_ms, ttl_ms, *(part for letter in letters for part in letter)),
        lambda reply: cast("list[RedriveStatus]", _words(reply, letters, get_args(RedriveStatus))),
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
    state: Literal["pending", "ready", "retry", "garbage"],
    clock: int | None = None,
) -> Call[int]:
    """Delete messages; from a list only its oldest, given in order. Return how many."""
    lead = (keys.pending, keys.ready, keys.retry, keys.garbage, keys.counts, keys.lease, keys.errors, keys.totals)
    return Call(
        script("purge"),
        (*lead, keys.ends, *map(keys.msg, ids)),
        (_clock(clock), state, *ids),
        int,
        lambda count: [events.Purged(keys.name, count)] if count else (),
    )


def resume(keys: Keys, *, clock: int | None = None) -> Call[bool]:
    """Let a paused queue be claimed again; return whether it was paused."""
    return Call(script("resume"), (keys.paused, keys.wake), (_clock(clock),), bool)


def counts(keys: Keys, *, clock: int | None = None) -> Call[Counts]:
    """Count the queue's messages by place, and every total, at one moment."""
    places = (keys.pending, keys.ready, keys.unack, keys.retry, keys.garbage, keys.dead, keys.totals, keys.paused)
    return Call(script("counts"), places, (_clock(clock),), _counts)


def tidy(
    keys: Keys, *, cursor: int = 0, lease_cursor: int = 0, clock: int | None = None
) -> Call[tuple[int, int, int, int]]:
    """Look through a piece of unack and lease; return the next cursors, deadlines pulled back, words removed."""
    return Call(
        script("tidy"),
        (keys.unack, keys.counts, keys.garbage, keys.lease, keys.errors),
        (_clock(clock), cursor, lease_cursor),
        lambda reply: (int(reply[0]), int(reply[1]), int(reply[2]), int(reply[3])),
    )


def check(
    keys: Keys,
    ids: Sequence[str],
    *,
    part: Literal["", "ready", "retry", "both"] = "",
    piece: tuple[int, int] = (1, 0),
    wishes: Mapping[str, Sequence[Arg]] | None = None,
    clock: int | None = None,
) -> Call[tuple[int, list[Any]]]:
    """
    Tell the state of each id, read at one moment; set right those that have a wish. Return the time in ms and rows.

    Which of the lists is looked through is `part`: all of both, or the `piece` of one. A wish is what follows the id
    in the script's ARGV; its row is then `mended`, or `changed`: the state is no longer the one that was seen.
    """
    lead = (keys.pending, keys.ready, keys.unack, keys.retry, keys.garbage, keys.counts, keys.lease, keys.errors)
    args: list[Arg] = [_clock(clock), part, *piece]
    for id in ids:
        args += (id, *(wishes[id] if wishes else _NO_WISH))
    return Call(
        script("check"),
        (*lead, keys.dead, keys.ends, keys.totals, keys.wake, keys.watch, *map(keys.msg, ids)),
        args,
        lambda reply: (int(reply[0]), reply[1:]),
    )


def find(keys: Keys, *, cursor: int = 0, clock: int | None = None) -> Call[tuple[int, tuple[str, ...]]]:
    """Look through a piece of the key space; return the next cursor and the ids of bodies without a retry count."""
    prefix = keys.msg("")
    return Call(
        script("find"),
        (keys.counts, keys.garbage),
        (_clock(clock), cursor, _GLOB.sub(r"\\\g<0>", prefix) + "*", prefix),
        lambda reply: (int(reply[0]), _texts(reply[1:])),
    )


def _clock(clock: int | None) -> Arg:
    return "" if clock is None else clock


def _bare(keys: Keys) -> Arg:
    return "1" if keys.bare else ""


def _texts(reply: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(id_text(one) for one in reply)


def _words(reply: Sequence[bytes], asked: Sequence[Any], known: Sequence[str]) -> list[str]:
    """Return one word for each that was asked for; raise ValueError when there are more, fewer, or others."""
    words = [word.decode() for word in reply]
    if len(words) != len(asked) or not set(words) <= set(known):
        raise ValueError
    return words


def _at(ids: Sequence[str], indexes: Sequence[int]) -> tuple[str, ...]:
    """Return the ids at Lua's `indexes`, which begin with 1; raise IndexError for one that is none."""
    if not all(0 < index <= len(ids) for index in indexes):
        raise IndexError
    return tuple(ids[index - 1] for index in indexes)


def _settled(
    keys: Keys, ids: Sequence[str], answer: Settled, verb: str, happened: Callable[[str, tuple[str, ...]], Event]
) -> Iterable[Event]:
    gone = {*answer.lost, *answer.cancelled}
    done = tuple(id for id in ids if id not in gone)
    if done:
        yield happened(keys.name, done)
    if answer.lost:
        yield events.Lost(keys.name, answer.lost, verb)
    if answer.cancelled:
        yield events.Cancelled(keys.name, answer.cancelled)


def _publish_answer(reply: bytes) -> PublishAnswer:
    if b" " not in reply:
        return PublishAnswer(int(reply), {})
    due, *refused = reply.decode().split(" ")
    parts = [one.split(":") for one in refused]
    if not {why for _, why in parts} <= set(get_args(PublishStatus)):
        raise ValueError
    return PublishAnswer(int(due), {int(index) - 1: cast("PublishStatus", why) for index, why in parts})


def _claim_answer(reply: list[Any], nonce: str) -> ClaimAnswer:
    promote_in, reclaim_in, behind, *rows = reply
    claimed = [
        Claimed(id_text(rows[at]), nonce, int(rows[at + 1]), rows[at + 2] == b"suspect")
        for at in range(0, len(rows), 3)
    ]
    return ClaimAnswer(int(promote_in), int(reclaim_in), int(behind), claimed)


def _counts(reply: list[Any]) -> Counts:
    pending, ready, unack, retry, garbage, dead, paused = (int(size) for size in reply[:7])
    totals = {reply[at].decode(): int(reply[at + 1]) for at in range(7, len(reply), 2)}
    return Counts(pending, ready, unack, retry, garbage, dead, bool(paused), totals)
