"""Messages come to a worker, and back from one that has fallen silent: promote, claim, reclaim."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from reliq import events
from reliq.call import Arg, Call, id_text
from reliq.events import Event
from reliq.keys import Keys
from reliq.lua import script
from reliq.message import Claimed, Delivery
from reliq.replies import read_bytes
from reliq.settings import BATCH_LIMIT, INLINE_BYTES
from reliq.transitions.protocol import CallNumber, clock_arg, limit_arg, span, texts
from reliq.wireformat import HEADER_LIMIT, claim_nonce, open_envelope, receipt_nonce

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
