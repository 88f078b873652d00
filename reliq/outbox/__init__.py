"""
The transactional outbox and inbox: their tables, the SQL that runs in the application's transaction, and the relay.

Database libraries are imported only when they are used.
"""

from reliq.outbox.tables import metadata

__all__ = ["metadata"]
