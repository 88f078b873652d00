"""The options of commands on an outbox, and what they say when its database fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from reliq.cli.output import complain

if TYPE_CHECKING:
    from reliq.outbox.database import Database as DatabaseConnection

#: The environment's names of what the options say.
DATABASE_VARIABLE = "RELIQ_DATABASE"

Database = Annotated[
    str,
    typer.Option(
        envvar=DATABASE_VARIABLE,
        help="The URL of PostgreSQL or SQLite. Others see a command line: set the variable.",
    ),
]
Prefix = Annotated[str, typer.Option(help="The beginning of the tables' names; SCHEMA.PREFIX names a schema too.")]


@contextmanager
def asking(database: "DatabaseConnection") -> Iterator[None]:
    """End the command with exit code 1 when the database is away or refuses."""
    try:
        yield
    except database.away as error:
        complain(
            f"the database failed: {error}; see that it runs, that --database or {DATABASE_VARIABLE} names it, and that "
            "this role may change the tables"
        )
        raise typer.Exit(1) from None
