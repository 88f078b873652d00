"""
The database's side of publishing in a transaction: tables, rows, and the transactions of others that they go into.

`reliq.relay` moves the rows to Redis. No library of a database is imported before it is used.
"""

from reliq.outbox.metadata import metadata

__all__ = ["metadata"]
