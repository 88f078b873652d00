"""Transactions of Django: a connection of `django.db`, within `transaction.atomic()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq.outbox.tables import check_dialect, percent
from reliq.outbox.transactions import autocommit, wrong_kind

if TYPE_CHECKING:
    from reliq.outbox.tables import Statement


def write(tx: Any, statement: Statement) -> int:
    """Run `statement` on the connection `tx`; return how many rows it wrote."""
    if not hasattr(tx, "in_atomic_block"):
        raise wrong_kind(tx, "a connection of Django, such as django.db.connection or connections['default']")
    dialect = check_dialect(tx.vendor)
    # The block that a TestCase opens around each test does not exist in production.
    own_blocks = [block for block in tx.atomic_blocks if not block._from_testcase]  # noqa: SLF001  as durable=True
    if not own_blocks and (tx.in_atomic_block or tx.get_autocommit()):
        raise autocommit("write `with transaction.atomic():` around it")
    with tx.cursor() as cursor:
        cursor.execute(percent(statement.sql(dialect)), dict(statement.values))
        rows: int = cursor.rowcount
    return rows


async def awrite(tx: Any, _statement: Statement) -> int:
    """Refuse: Django has no transactions in async code."""
    raise wrong_kind(tx, "one of async code; Django has none there: call the method without `a` in sync_to_async")
