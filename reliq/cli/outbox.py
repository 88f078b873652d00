"""`reliq outbox`: the tables of `publish_in` and `job.once`."""

from enum import StrEnum
from typing import Annotated

import typer

from reliq.admin.filters import duration
from reliq.cli.databases import Database, Prefix, asking
from reliq.cli.options import Json
from reliq.cli.output import print_json, say
from reliq.cli.tables import print_table
from reliq.outbox.database import database as opened
from reliq.outbox.store import Store
from reliq.outbox.tables import DEFAULT_PREFIX, ddl
from reliq.readable import spoken
from reliq.text import count_of

outbox = typer.Typer(
    help="The tables of `publish_in` and `job.once`: print their SQL, clean them, retry refused rows.",
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
def refused(
    database: Database,
    prefix: Prefix = DEFAULT_PREFIX,
    limit: Annotated[int, typer.Option(help="The most to show.")] = 100,
    json: Json = False,
) -> None:
    """
    List the rows that relays have refused, oldest first, each with the version of reliq that refused it and why.

    Exit codes: 0 done (also when there is none), 1 the database is away or refuses, 2 wrong usage.

    Example: reliq outbox refused --database postgresql://shop@127.0.0.1/shop
    """
    connection = opened(database)
    with asking(connection):
        found = Store(connection, prefix).refused(limit)
    connection.close()
    if json:
        print_json(found)
    elif not found:
        say("no row is refused")
    else:
        rows = [(row.seq, row.queue, row.id, spoken(row.age_ms / 1000), row.note) for row in found]
        print_table(("row", "queue", "id", "age", "why"), rows, long=("why",))


@outbox.command()
def retry(database: Database, prefix: Prefix = DEFAULT_PREFIX, json: Json = False) -> None:
    """
    Have relays try all refused rows again, after you have removed the reason.

    A relay of a newer version tries rows that an older version refused by itself. Exit codes: 0 done, 1 the database is
    away or refuses, 2 wrong usage.

    Example: reliq outbox retry --database postgresql://shop@127.0.0.1/shop
    """
    connection = opened(database)
    with asking(connection):
        count = Store(connection, prefix).retry()
        connection.commit()
    connection.close()
    if json:
        print_json({"retried": count})
        return
    say(f"{count_of(count, 'row is', 'rows are')} tried again by the next round of a relay")


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
