"""`reliq outbox`: the tables of `publish_in` and `job.once`."""

from enum import StrEnum
from typing import Annotated

import typer

from reliq.admin.filters import duration
from reliq.cli.databases import Database, Prefix, asking
from reliq.cli.options import Json
from reliq.cli.output import print_json, say
from reliq.outbox.database import database as opened
from reliq.outbox.store import Store
from reliq.outbox.tables import DEFAULT_PREFIX, ddl
from reliq.text import count_of

outbox = typer.Typer(
    help="The tables of `publish_in` and `job.once`: print their SQL, clean them.",
    no_args_is_help=True,
    add_completion=False,
)


class DialectName(StrEnum):
    """The database that the SQL is for."""

    postgresql = "postgresql"
    sqlite = "sqlite"


@outbox.command()
def sql(
    dialect: Annotated[DialectName, typer.Option(help="Of which database.")],
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """
    Print the statements that make the tables, where they are not there yet.

    Example: reliq outbox sql --dialect postgresql | psql shop
    """
    for statement in ddl(dialect.value, prefix):
        say(*f"{statement};".split("\n"))


@outbox.command()
def clean(
    database: Database,
    prefix: Prefix = DEFAULT_PREFIX,
    keep: Annotated[str, typer.Option(metavar="TIME", help="Delete rows that were sent longer ago: 10m, 1h.")] = "1h",
    json: Json = False,
) -> None:
    """
    Delete rows that were sent long ago, and those of the inbox whose messages can come no more, as a relay does.

    Example: reliq outbox clean --database postgresql://shop@127.0.0.1/shop
    """
    connection = opened(database)
    with asking(connection):
        sent, over = Store(connection, prefix).clean(round(duration(keep) * 1000))
    connection.close()
    if json:
        print_json({"outbox": sent, "inbox": over})
        return
    say(f"deleted {count_of(sent, 'row')} of the outbox, {over} of the inbox")
