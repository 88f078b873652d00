"""
The transactional outbox and inbox: their tables, the statements that go into an application's transaction, and the relay.

No library of a database is imported before it is used.
"""

from reliq.outbox.tables import metadata

__all__ = ["metadata"]
