"""The holder of a receipt answers: ack, nack, extend, release, snooze."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from reliq import events
from reliq.call import Arg, Call
from reliq.events import Event
from reliq.failure_note import FailureNote
from reliq.keys import Keys
from reliq.lua import Script, script
from reliq.message import Claimed, Delivery
from reliq.text import clean_text
from reliq.transitions.protocol import bare_arg, bounded, clock_arg, span, texts


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
