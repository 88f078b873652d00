"""Tells whether an error of a database means that reliq's tables are not there, and says how they are made."""

from __future__ import annotations

from reliq.errors import ConfigurationError

#: PostgreSQL's codes for: no such table, column, schema; no such unique key.
_CODES = {"42P01", "42703", "3F000", "42P10"}
_WORDS = ("no such table", "has no column named", "no such column", "ON CONFLICT clause does not match")


def missing(error: BaseException, table: str) -> ConfigurationError | None:
    """Return what to raise when `error`, of whichever library, says that `table` is not there, or is another."""
    seen: BaseException | None = error
    while seen is not None:
        both = (seen, getattr(seen, "orig", None))  # SQLAlchemy wraps the error of the driver
        if any(getattr(one, "sqlstate", None) in _CODES for one in both) or any(word in str(seen) for word in _WORDS):
            return ConfigurationError(
                f"the database has no table {table} as reliq makes it: make it by a migration, or by what `reliq outbox "
                "sql --dialect postgresql` prints; another beginning of its name is given as prefix"
            )
        seen = seen.__cause__
    return None
