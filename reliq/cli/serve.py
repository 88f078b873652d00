"""
The commands that serve until they are stopped: `relay`, `exporter` and `web`; besides them `outbox` and `health`.

The modules that do the work are imported within functions: a probe runs `reliq health` often, and completion waits for
every import.
"""

import http.client
import secrets
from contextlib import contextmanager
from enum import StrEnum
from http import HTTPStatus
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reliq.admin.filters import duration
from reliq.cli.frame import Answer, Table, command
from reliq.cli.options import (
    DEFAULT_LAYOUT,
    Database,
    LayoutText,
    MetricsHost,
    MetricsPort,
    Prefix,
    Url,
    open_admin,
    report_database_errors,
)
from reliq.cli.output import EXIT_UNFINISHED, complain, say
from reliq.errors import ConfigurationError
from reliq.keys import Keys, Layout
from reliq.logs import configure_logging
from reliq.settings import OUTBOX_PREFIX
from reliq.text import format_duration, pluralize
from reliq.worker.health import DEFAULT_HOST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.outbox.store import Store

DEFAULT_EXPORTER_PORT = 9465
DEFAULT_WEB_PORT = 9470
DEFAULT_WEB_HOST = "127.0.0.1"
TOKEN_VARIABLE = "RELIQ_WEB_TOKEN"  # noqa: S105  the name of the variable
#: `reliq health` gives up after this many seconds.
HEALTH_SECONDS = 5.0
#: At most this many bytes of an answer are read: whatever listens there may send anything.
HEALTH_BYTES = 65_536


def relay(
    database: Database,
    prefix: Prefix = OUTBOX_PREFIX,
    batch: Annotated[int, typer.Option(help="The most rows of one round.")] = 500,
    keep: Annotated[str, typer.Option(metavar="TIME", help="How long sent rows stay: 0s, 10m, 1h.")] = "1h",
    once: Annotated[bool, typer.Option("--once", help="Move what is there, then end.")] = False,
    again_since: Annotated[
        str, typer.Option(metavar="TIME", help="First have what was sent within that time sent again: 10m.")
    ] = "",
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = DEFAULT_HOST,
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
    from reliq.logs import LogObserver  # noqa: PLC0415
    from reliq.outbox.relay import OutboxMover, Relay, run_until_signal  # noqa: PLC0415
    from reliq.outbox.tables import Tables, explaining_missing_table  # noqa: PLC0415

    configure_logging("info")
    keep_seconds = duration(keep)
    again_ms = round(duration(again_since) * 1000) if again_since else 0
    settings = Relay(database, prefix=prefix, batch=batch, keep=keep_seconds, url=url)
    observers: list[Any] = [LogObserver()]
    mover = OutboxMover(settings, settings.url, observers)
    with report_database_errors(mover.store.database):
        with explaining_missing_table(Tables.of(prefix).outbox):
            mover.store.look()
        if again_ms:
            say(f"{pluralize(mover.store.again(again_ms), 'row is', 'rows are')} sent again")
        if once:
            say(f"moved {pluralize(mover.move_all(), 'row')}")
            left = mover.store.look().waiting
            mover.close()
            if left:
                complain(
                    f"{pluralize(left, 'row remains', 'rows remain')}: `reliq outbox retry` lists refused rows; for others, see "
                    "the errors of their queues above"
                )
                raise typer.Exit(EXIT_UNFINISHED)
            return
    run_until_signal(mover, observers, None if metrics_port is None else (metrics_port, metrics_host))


outbox = typer.Typer(
    help="The tables of `publish_in` and `job.once`: print their SQL, list and retry refused rows, delete old rows.",
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
    from reliq.outbox.tables import ddl  # noqa: PLC0415

    for statement in ddl(dialect.value, prefix):
        say(*f"{statement};".split("\n"))


@outbox.command()
@command
def retry(
    database: Database,
    prefix: Prefix = OUTBOX_PREFIX,
    every: Annotated[bool, typer.Option("--all", help="Have relays try all refused rows again.")] = False,
    limit: Annotated[int, typer.Option(help="The most rows to list.")] = 100,
) -> Answer:
    """
    List the rows that relays have refused, oldest first, with the reason; with --all have relays try all of them again.

    Remove the reason first. A relay of a newer version by itself tries rows again that an older version refused. Exit
    codes: 0 done (also when there is none), 1 the database is away or refuses, 2 wrong usage.

    Example: reliq outbox retry --database postgresql://shop@127.0.0.1/shop --all
    """
    with _open_outbox(database, prefix) as store:
        if every:
            count = store.retry()
            store.database.commit()
            said = f"{pluralize(count, 'row is', 'rows are')} tried again by the next round of a relay"
            return Answer({"retried": count}, [said])
        rows = store.refused(limit)
    cells = [(row.seq, row.queue, row.id, format_duration(row.age_ms / 1000), row.note) for row in rows]
    return Answer(rows, [Table(("row", "queue", "id", "age", "why"), cells, ("why",)) if rows else "no row is refused"])


@outbox.command()
@command
def clean(
    database: Database,
    prefix: Prefix = OUTBOX_PREFIX,
    keep: Annotated[str, typer.Option(metavar="TIME", help="Delete rows that were sent longer ago: 10m, 1h.")] = "1h",
) -> Answer:
    """
    Delete rows that were sent long ago, and rows of the inbox whose messages cannot come again, as a relay does.

    Example: reliq outbox clean --database postgresql://shop@127.0.0.1/shop
    """
    with _open_outbox(database, prefix) as store:
        sent, expired = store.clean(round(duration(keep) * 1000))
    said = f"deleted {pluralize(sent, 'row')} of the outbox, {expired} of the inbox"
    return Answer({"outbox": sent, "inbox": expired}, [said])


@contextmanager
def _open_outbox(database: str, prefix: str) -> "Iterator[Store]":
    """Open the outbox in a database; end the command when the database is unreachable or refuses a statement."""
    from reliq.outbox.store import Store, database as open_database  # noqa: PLC0415

    connection = open_database(database)
    with report_database_errors(connection):
        yield Store(connection, prefix)
    connection.close()


def exporter(
    url: Url = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Only this queue; may be given again. Else all that workers have served.")
    ] = None,
    port: Annotated[int, typer.Option(help="Serve /metrics, /live and /ready on this port.")] = DEFAULT_EXPORTER_PORT,
    host: MetricsHost = DEFAULT_HOST,
    layout: LayoutText = DEFAULT_LAYOUT,
) -> None:
    """
    Serve the states, ages and totals of queues for Prometheus until SIGTERM or Ctrl-C.

    Example: reliq exporter --url redis://127.0.0.1:6379/0 --port 9465
    """
    configure_logging("info")
    queues = [Keys(name, Layout.parse(layout)) for name in queue or ()]
    import_module("reliq.metrics.serving").export(url, queues, port, host)


class Check(StrEnum):
    """The question to a worker."""

    live = "live"
    ready = "ready"


def health(
    check: Annotated[Check, typer.Argument(help="live: need not be restarted; ready: works, and Redis answers.")],
    port: Annotated[int, typer.Option(help="The worker's --metrics-port.")],
    host: Annotated[str, typer.Option(help="The worker's --metrics-host.")] = DEFAULT_HOST,
) -> None:
    """
    Ask a worker on its metrics port; exit 0 when all is well, else 1 with the reason.

    Example: reliq health live --port 9464
    """
    connection = http.client.HTTPConnection(host, port, timeout=HEALTH_SECONDS)
    try:
        connection.request("GET", f"/{check}")
        response = connection.getresponse()
        status = response.status
        text = response.read(HEALTH_BYTES).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        status = HTTPStatus.SERVICE_UNAVAILABLE
        text = f"no answer from {host}:{port}: {error}"
    finally:
        connection.close()
    say(*text.splitlines(), stderr=status != HTTPStatus.OK)
    raise typer.Exit(0 if status == HTTPStatus.OK else 1)


def web(
    port: Annotated[int, typer.Option(help="Serve the page on this port; 0 for any that is free.")] = DEFAULT_WEB_PORT,
    host: Annotated[str, typer.Option(help="The address to serve it on.")] = DEFAULT_WEB_HOST,
    write: Annotated[
        bool, typer.Option("--write", help="Visitors may pause, cancel, redrive and delete; else they only look.")
    ] = False,
    bodies: Annotated[
        bool, typer.Option("--bodies", help="Visitors may see bodies, headers and errors, when they ask for them.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(envvar=TOKEN_VARIABLE, help="Opens the page too. Others see a command line: set the variable."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A host name under which visitors reach the page, for example ops.example.com."),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESSES", help="Believe X-Forwarded-For and -Proto of these proxies, for example 127.0.0.1,::1."
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="Stands in the browser's tab.")] = "reliq",
    url: Url = None,
) -> None:
    """
    Serve a page of queues, messages, dead letters and workers until SIGTERM or Ctrl-C.

    It prints an address that lets one browser in. Programs and other browsers need the token; beyond this machine the
    page is served only with one, and its connections are not encrypted: put a proxy with TLS before it.

    Example: reliq web --write

    Exit codes: 0 it was stopped, 2 a wrong option, a port that is taken, or the extra `web` is missing.
    """
    from reliq.redis.url import is_near  # noqa: PLC0415

    if not token and not is_near(host):
        raise ConfigurationError(f"--host {host} is reached from other machines: give a token, in {TOKEN_VARIABLE}")
    try:
        from reliq.queue import user_at_host  # noqa: PLC0415
        from reliq.web import Access, app, serve  # noqa: PLC0415
    except ModuleNotFoundError as error:  # the extra `web` is not installed
        raise ConfigurationError(str(error)) from None
    grants = Access.READ
    allowed = "look, without bodies, headers and errors"
    if bodies:
        grants |= Access.BODIES
        allowed = "see bodies, headers and errors"
    if write:
        grants |= Access.WRITE
        allowed += ", and change things"
    else:
        allowed += "; --write lets them change things"
    page = app(
        open_admin(url),
        token=token or secrets.token_urlsafe(),
        grants=grants.by(user_at_host()),
        hosts=[host, *(allowed_host or ())],
        title=title,
    )
    with serve.listen(host, port) as listener:
        configure_logging("info")
        address = f"[{host}]" if ":" in host else host
        say(
            f"http://{address}:{listener.getsockname()[1]}{page.enter_path()}",
            f"This address works once. Visitors may {allowed}.",
        )
        serve.serve(page, listener, proxy)
