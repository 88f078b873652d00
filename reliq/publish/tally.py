"""The sum of a `publish_many`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq.keywords import check_keywords
from reliq.message import BulkResult
from reliq.publish.orders import PUBLISH_KEYWORDS
from reliq.settings import whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reliq.message import Counts, Receipt

#: The keyword arguments of `Queue.publish_many`.
_KEYWORDS = frozenset({"items", "chunk", "max_backlog", "durability"})


class BulkTally:
    """The sum of the calls of a `publish_many`, and whether the next must wait for the backlog."""

    def __init__(self, max_backlog: int | None) -> None:
        self._most = None if max_backlog is None else whole("max_backlog", max_backlog, least=1, most=10**9)
        self.confirmed = 0
        self._duplicates: list[str] = []
        self._tombstoned: list[str] = []
        self._unconfirmed: list[str] = []
        self._durable: bool | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether there is a backlog to watch."""
        return self._most is not None

    def is_full(self, counts: Counts) -> bool:
        """Say whether `max_backlog` messages wait, so that the next call must wait too."""
        return self._most is not None and counts.pending + counts.due >= self._most

    def add(self, done: list[Receipt]) -> None:
        """Add the receipts of one call."""
        self._duplicates += [one.id for one in done if one.status == "duplicate"]
        self._tombstoned += [one.id for one in done if one.status == "tombstoned"]
        self.confirmed += sum(one.status == "published" for one in done)
        self._unconfirmed += [one.id for one in done if one.durable is False]
        if done and done[0].durable is not None:
            self._durable = not self._unconfirmed

    def result(self) -> BulkResult:
        """Return the sum."""
        duplicates, tombstoned = tuple(self._duplicates), tuple(self._tombstoned)
        return BulkResult(self.confirmed, duplicates, tombstoned, self._durable, tuple(self._unconfirmed))


def check_bulk(call: str, others: Mapping[str, Any]) -> None:
    """Raise TypeError when a `publish_many` was given any other keyword argument than its own."""
    of_messages = sorted(PUBLISH_KEYWORDS & others.keys())
    advice = f"It is for each message: Outgoing(body=…, {of_messages[0]}=…)" if of_messages else ""
    check_keywords(call, of_messages or others, () if of_messages else _KEYWORDS, advice)
