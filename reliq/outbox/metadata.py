"""The tables for SQLAlchemy, whose migrations Alembic writes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reliq import distribution
from reliq.errors import ConfigurationError
from reliq.outbox.tables import Tables
from reliq.settings import OUTBOX_PREFIX

if TYPE_CHECKING:
    from sqlalchemy import MetaData


def metadata(prefix: str = OUTBOX_PREFIX) -> MetaData:
    """
    Return the tables as SQLAlchemy's MetaData, for `create_all` or for Alembic's `target_metadata`.

    Args:
        prefix: what the names of the tables begin with; `schema.prefix` names a schema too.

    Raises:
        ConfigurationError: the prefix is not allowed, or SQLAlchemy is not installed.

    Example: `target_metadata = [Base.metadata, reliq.outbox.metadata()]`
    """
    tables = Tables.of(prefix)
    try:
        sa: Any = import_module("sqlalchemy")
    except ImportError:
        raise ConfigurationError(distribution.missing("reliq.outbox.metadata", "SQLAlchemy 2", "sqlalchemy")) from None
    made: MetaData = sa.MetaData(schema=tables.schema or None)
    _outbox(sa, made, tables.start)
    numbers = sa.Text().with_variant(sa.ARRAY(sa.BigInteger), "postgresql")
    sa.Table(
        f"{tables.start}outbox_calls",
        made,
        sa.Column("call_number", sa.Text, primary_key=True),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("again_ms", sa.BigInteger, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
        sa.Column("seqs", numbers, nullable=False),
    )
    inbox = sa.Table(
        f"{tables.start}inbox",
        made,
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("queue", "id")),
        sa.Column("incarnation", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("keep_until_ms", sa.BigInteger, nullable=False),
    )
    sa.Index(f"{tables.start}inbox_keep_until", inbox.c.keep_until_ms)
    return made


def _outbox(sa: Any, made: MetaData, start: str) -> None:
    """Add the table of messages that are to be published."""
    seq = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite counts in a column of this type alone
    outbox = sa.Table(
        f"{start}outbox",
        made,
        sa.Column("seq", seq, sa.Identity(always=False), primary_key=True, autoincrement=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("queue", "id")),
        sa.Column("value", sa.LargeBinary, nullable=False),
        sa.Column("terms", sa.Text, nullable=False),
        sa.Column("made_ms", sa.BigInteger, nullable=False),
        sa.Column("sent_ms", sa.BigInteger),
        sa.Column("note", sa.Text, nullable=False, server_default=""),
        sqlite_autoincrement=True,
    )
    unsent = outbox.c.sent_ms.is_(None)
    sa.Index(f"{start}outbox_unsent", outbox.c.seq, postgresql_where=unsent, sqlite_where=unsent)
