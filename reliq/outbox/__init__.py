"""
The transactional outbox and inbox: tables, statements for the application's transaction, and the relay.

Database libraries are imported only when they are used.
"""

from reliq.outbox.tables import metadata

__all__ = ["metadata"]
