"""`reliq relay`: messages of `publish_in` from a database to Redis."""

from enum import StrEnum
from importlib import import_module
from typing import Annotated

import typer

from reliq.admin.filters import duration
from reliq.cli.options import Database, Json, Prefix, Url, asking
from reliq.cli.output import print_json, say
from reliq.cli.tables import print_table
from reliq.logs import configure_logging
from reliq.outbox.store import Store, database as opened
from reliq.outbox.tables import ddl
from reliq.settings import OUTBOX_PREFIX
from reliq.text import format_duration, pluralize
from reliq.worker.health import DEFAULT_HOST


def relay(
    database: Database,
    prefix: Prefix = OUTBOX_PREFIX,
    batch: Annotated[int, typer.Option(help="The most rows of one round.")] = 500,
    keep: Annotated[str, typer.Option(metavar="TIME", help="How long sent rows stay: 0s, 10m, 1h.")] = "1h",
    once: Annotated[bool, typer.Option("--once", help="Move what is there, then end.")] = False,
    again_since: Annotated[
        str, typer.Option(metavar="TIME", help="First have what was sent within that time sent again: 10m.")
    ] = "",
    metrics_port: Annotated[int | None, typer.Option(help="Serve /metrics, /live and /ready on this port.")] = None,
    metrics_host: Annotated[str, typer.Option(help="The address to serve them on.")] = DEFAULT_HOST,
    url: Url = None,
) -> None:
    """
    Move the messages of `publish_in` from a database to Redis until SIGTERM or Ctrl-C.

    It needs none of the application's code; several may work on one outbox. A row is sent once, however often a relay is
    killed. For a Redis that lost its last writes, --again-since sends again what it had: handlers that call `job.once`
    do nothing twice. Rows of a message that Redis refuses stay, and the log says why.

    Exit codes: 0 done, 1 Redis or the database is away or refuses, 2 wrong usage, 3 with --once rows
    remain.

    Example: reliq relay --database postgresql://shop@127.0.0.1/shop
    """
    configure_logging("info")
    import_module("reliq.outbox.process").move(
        database,
        prefix=prefix,
        batch=batch,
        keep=duration(keep),
        url=url,
        once=once,
        again_ms=round(duration(again_since) * 1000) if again_since else 0,
        page=None if metrics_port is None else (metrics_port, metrics_host),
    )


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
    prefix: Prefix = OUTBOX_PREFIX,
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
    prefix: Prefix = OUTBOX_PREFIX,
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
        rows = [(row.seq, row.queue, row.id, format_duration(row.age_ms / 1000), row.note) for row in found]
        print_table(("row", "queue", "id", "age", "why"), rows, long=("why",))


@outbox.command()
def retry(database: Database, prefix: Prefix = OUTBOX_PREFIX, json: Json = False) -> None:
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
    say(f"{pluralize(count, 'row is', 'rows are')} tried again by the next round of a relay")


@outbox.command()
def clean(
    database: Database,
    prefix: Prefix = OUTBOX_PREFIX,
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
    say(f"deleted {pluralize(sent, 'row')} of the outbox, {over} of the inbox")
