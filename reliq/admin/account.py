"""The account of a queue: everything that came in has ended in one way, or is alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq import transitions
from reliq.admin.parts import ask_each
from reliq.call import answered
from reliq.errors import ReliqError
from reliq.message import Counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.session import QueueSession, Session
    from reliq.keys import Keys
    from reliq.snapshot.shard_maps import ShardMaps


@dataclass(frozen=True, slots=True)
class Account:
    """
    published + redriven = acked + dead + expired + cancelled + purged + alive, or not.

    In a layout of the Go original it is what reliq itself did: a program in Go counts nothing.

    Attributes:
        missing: how many came in and have neither ended nor are alive; below zero, how many ended too many; None
            where nobody can know, for programs in Go may share the queue.
        balanced: whether that is none; None where nobody can know.
        away: the shards whose Redis is away, which are not counted.
    """

    queue: str
    published: int
    redriven: int
    acked: int
    dead: int
    expired: int
    cancelled: int
    purged: int
    alive: int
    missing: int | None
    balanced: bool | None
    away: tuple[int, ...] = ()
    layout: str = "reliq"


def account_of(queue: QueueSession) -> Account:
    """Return the account of a queue at one moment; of a sharded one, each shard at its own."""
    answers = queue.try_all([transitions.counts(keys) for keys in queue.counted])
    return _account(queue.keys, Counts.sum(*answered(answers)))


def accounts_of(session: Session, queues: Sequence[Keys], maps: ShardMaps) -> tuple[list[Account], Mapping[str, str]]:
    """Return the account of each queue, in one round trip, and which cannot be read, with the reason."""
    answers, _ = ask_each(session, queues, transitions.counts, maps)
    accounts, unreadable = list[Account](), dict[str, str]()
    for keys, parts in zip(queues, answers, strict=True):
        try:
            accounts.append(_account(keys, Counts.sum(*answered(parts))))
        except ReliqError as error:
            unreadable[keys.entry] = str(error)
    return accounts, unreadable


def _account(keys: Keys, counts: Counts) -> Account:
    kinds = ("published", "redriven", "acked", "dead", "expired", "cancelled", "purged")
    numbers = {kind: counts.totals.get(kind, 0) for kind in kinds}
    missing = None if keys.bare else counts.missing
    balanced = None if missing is None else missing == 0
    return Account(
        keys.name,
        **numbers,
        alive=counts.alive,
        missing=missing,
        balanced=balanced,
        away=counts.away,
        layout=str(keys.layout),
    )
