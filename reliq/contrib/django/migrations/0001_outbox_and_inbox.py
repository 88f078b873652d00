"""Create the tables of the outbox and the inbox."""

from typing import Any, ClassVar

from django.db import migrations

from reliq.outbox.tables import Tables, check_dialect, ddl
from reliq.settings import OUTBOX_PREFIX


def make(_apps: Any, editor: Any) -> None:
    """Create the tables and their indexes."""
    for statement in ddl(check_dialect(editor.connection.vendor)):
        editor.execute(statement)


def drop(_apps: Any, editor: Any) -> None:
    """Drop the tables and their rows."""
    tables = Tables.of(OUTBOX_PREFIX)
    for name in (tables.outbox, tables.calls, tables.inbox):
        editor.execute(f"DROP TABLE {name}")


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no type hints
    """The first migration."""

    operations: ClassVar = [migrations.RunPython(make, drop)]
