"""The account of a queue: everything that came in has ended in one way, or is alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reliq.message import Counts


@dataclass(frozen=True, slots=True)
class Account:
    """
    published + redriven = acked + dead + expired + cancelled + purged + alive, or not.

    Attributes:
        missing: how many came in and have neither ended nor are alive; below zero, how many ended too many.
        balanced: whether that is none.
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
    missing: int
    balanced: bool


def account_of(queue: str, counts: Counts) -> Account:
    """Return the account that `counts` give."""
    kinds = ("published", "redriven", "acked", "dead", "expired", "cancelled", "purged")
    numbers = {kind: counts.totals.get(kind, 0) for kind in kinds}
    return Account(queue, **numbers, alive=counts.alive, missing=counts.missing, balanced=counts.missing == 0)
