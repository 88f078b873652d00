"""The SQL statements that go into the transactions of applications, in both dialects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from reliq.outbox.tables import DEFAULT_PREFIX, Tables, now_ms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reliq.outbox.rows import OutboxRow
    from reliq.outbox.tables import Dialect

#: A named parameter; a cast has two colons.
_NAMED = re.compile(r"(?<![:\w]):([a-z_]+)")


@dataclass(frozen=True, slots=True)
class Statement:
    """
    One SQL statement for the transaction of somebody else.

    Attributes:
        kind: `publish` writes a row of the outbox, `once` one of the inbox unless it is there, `prolong` keeps that longer.
        values: of its parameters.
    """

    kind: Literal["publish", "once", "prolong"]
    tables: Tables
    values: Mapping[str, Any]

    @property
    def table(self) -> str:
        """The table that it writes to."""
        return self.tables.outbox if self.kind == "publish" else self.tables.inbox

    def sql(self, dialect: Dialect, *, two_phase: bool = False) -> str:
        """Return its text, with parameters as `:name`; PostgreSQL prepares no `two_phase` transaction that has notified."""
        now = now_ms(dialect)
        if self.kind == "once":
            return (
                f"INSERT INTO {self.table} (queue, id, incarnation, keep_until_ms) "
                f"VALUES (:queue, :id, :incarnation, {now} + :keep_ms) ON CONFLICT (queue, id, incarnation) DO NOTHING"
            )
        if self.kind == "prolong":
            return (
                f"UPDATE {self.table} SET keep_until_ms = {now} + :keep_ms WHERE queue = :queue AND id = :id "
                f"AND incarnation = :incarnation AND keep_until_ms < {now} + :keep_ms"
            )
        insert = (
            f"INSERT INTO {self.table} (queue, id, value, terms, made_ms) VALUES (:queue, :id, :value, :terms, {now})"
        )
        if dialect == "sqlite" or two_phase:
            return insert
        # A relay that listens hears of it when the transaction is committed, and never of one that is rolled back.
        return f"WITH written AS ({insert}) SELECT pg_notify('{self.table}', '')"


def percent(sql: str) -> str:
    """Return a statement with its parameters as `%(name)s`."""
    return _NAMED.sub(r"%(\1)s", sql)


def publishing(row: OutboxRow, prefix: str = DEFAULT_PREFIX) -> Statement:
    """Return the statement that writes a message to the outbox."""
    values = {"queue": row.queue, "id": row.id, "value": row.value, "terms": row.terms.text()}
    return Statement("publish", Tables.of(prefix), values)


def taking_note(queue: str, id: str, incarnation: int, keep_ms: int, prefix: str = DEFAULT_PREFIX) -> Statement:
    """Return the statement that writes to the inbox that the effects of a message are being committed."""
    values = {"queue": queue, "id": id, "incarnation": incarnation, "keep_ms": keep_ms}
    return Statement("once", Tables.of(prefix), values)
