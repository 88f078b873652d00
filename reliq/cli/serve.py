"""
The commands that serve until they are stopped: `relay`, `exporter` and `web`; besides them `outbox` and `health`.

The modules that do the work are imported within functions: a probe runs `reliq health` often, and completion waits for
every import.
"""

import http.client
import secrets
from contextlib import closing, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from reliq.cli.frame import Answer, Table, command
from reliq.cli.options import DEFAULT_LAYOUT, LayoutText, MetricsHost, MetricsPort, Url, open_admin, time_span
from reliq.cli.output import EXIT_UNFINISHED, complain, say
from reliq.errors import ConfigurationError
from reliq.keys import Keys, Layout
from reliq.logs import configure_logging
from reliq.settings import OUTBOX_PREFIX
from reliq.text import format_duration, pluralize
from reliq.worker.health import DEFAULT_HOST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.outbox.store import Database as DatabaseConnection, Store

#: `reliq health` gives up after this many seconds.
HEALTH_SECONDS = 5.0
#: `reliq health` reads at most this many bytes: any program may listen on the port.
HEALTH_BYTES = 65_536
HOUR = 3600.0

Database = Annotated[
    str, typer.Option(envvar="RELIQ_DATABASE", help="URL of PostgreSQL or SQLite; ps shows options, not variables.")
]
Prefix = Annotated[str, typer.Option(help="Prefix of the tables, or SCHEMA.PREFIX.")]
Keep = Annotated[float, time_span("Keep sent rows for this time, for example 10m.", show_default="1h")]


def relay(
    database: Database,
    prefix: Prefix = OUTBOX_PREFIX,
    batch: Annotated[int, typer.Option(help="At most this many rows in a round.")] = 500,
    keep: Keep = HOUR,
    once: Annotated[bool, typer.Option("--once", help="Move the rows that are there, then end.")] = False,
    resend_since: Annotated[float | None, time_span("First send rows again that were sent within this time.")] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = DEFAULT_HOST,
    url: Url = None,
) -> None:
    """
    Move the messages of `publish_in` from a database to Redis until SIGTERM or Ctrl-C.

    It needs none of the application's code; several may work on one outbox. A row is sent once, however often a relay is
    killed. For a Redis that lost its last writes, --resend-since sends these rows again: handlers that call `job.once`
    do nothing twice. Rows of a message that Redis refuses stay, and the log has the reason.

    Exit codes: 0 done, 1 Redis or the database is away or refuses, 2 wrong usage, 3 with --once rows
    remain.

    Example: reliq relay --database postgresql://shop@127.0.0.1/shop
    """
    from reliq.logs import LogObserver  # noqa: PLC0415
    from reliq.outbox.relay import OutboxMover, Relay, run_until_signal  # noqa: PLC0415
    from reliq.outbox.tables import Tables, explaining_missing_table  # noqa: PLC0415

    configure_logging("info")
    settings = Relay(database, prefix=prefix, batch=batch, keep=keep, url=url)
    observers: list[Any] = [LogObserver()]
    mover = OutboxMover(settings, settings.url, observers)
    with _report_database_errors(mover.store.database):
        with explaining_missing_table(Tables.of(prefix).outbox):
            mover.store.look()
        if resend_since:
            say(f"{pluralize(mover.store.again(round(resend_since * 1000)), 'row is', 'rows are')} sent again")
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


@outbox.command()
def sql(
    dialect: Annotated[Literal["postgresql", "sqlite"], typer.Option(help="The kind of database.")],
    prefix: Prefix = OUTBOX_PREFIX,
) -> None:
    """
    Print the statements that create the missing tables.

    Example: reliq outbox sql --dialect postgresql | psql shop
    """
    from reliq.outbox.tables import ddl  # noqa: PLC0415

    for statement in ddl(dialect, prefix):
        say(*f"{statement};".split("\n"))


@outbox.command()
@command
def retry(
    database: Database,
    prefix: Prefix = OUTBOX_PREFIX,
    every: Annotated[bool, typer.Option("--all", help="Have relays retry all refused rows.")] = False,
    limit: Annotated[int, typer.Option(help="At most this many rows.")] = 100,
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
    keep: Keep = HOUR,
) -> Answer:
    """
    Delete rows that were sent long ago, and rows of the inbox whose messages cannot come again, as a relay does.

    Example: reliq outbox clean --database postgresql://shop@127.0.0.1/shop
    """
    with _open_outbox(database, prefix) as store:
        sent, expired = store.clean(round(keep * 1000))
    said = f"deleted {pluralize(sent, 'row')} of the outbox, {expired} of the inbox"
    return Answer({"outbox": sent, "inbox": expired}, [said])


@contextmanager
def _open_outbox(database: str, prefix: str) -> "Iterator[Store]":
    """Open the outbox in a database; end the command when the database is unreachable or refuses a statement."""
    from reliq.outbox.store import Store, database as open_database  # noqa: PLC0415

    connection = open_database(database)
    with _report_database_errors(connection), closing(connection):
        yield Store(connection, prefix)


@contextmanager
def _report_database_errors(database: "DatabaseConnection") -> "Iterator[None]":
    """End the command with exit code 1 when the database is unreachable or refuses a statement."""
    try:
        yield
    except database.away as error:
        complain(
            f"the database failed: {error}; see that it runs, that --database or RELIQ_DATABASE names it, and that "
            "this role may change the tables"
        )
        raise typer.Exit(1) from None


def exporter(
    url: Url = None,
    queue: Annotated[list[str] | None, typer.Option(help="Only this queue; may be given again.")] = None,
    port: Annotated[int, typer.Option(help="Serve /metrics, /live and /ready on this port.")] = 9465,
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


def health(
    check: Annotated[
        Literal["live", "ready"], typer.Argument(help="live: need not be restarted; ready: works, and Redis answers.")
    ],
    port: Annotated[int, typer.Option(help="The worker's --metrics-port.")],
    host: Annotated[str, typer.Option(help="The worker's --metrics-host.")] = DEFAULT_HOST,
) -> None:
    """
    Ask a worker on its metrics port; exit 0 when all is well, else 1 with the reason.

    Example: reliq health live --port 9464
    """
    try:
        with closing(http.client.HTTPConnection(host, port, timeout=HEALTH_SECONDS)) as connection:
            connection.request("GET", f"/{check}")
            response = connection.getresponse()
            is_well = response.status == http.HTTPStatus.OK
            text = response.read(HEALTH_BYTES).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        is_well, text = False, f"no answer from {host}:{port}: {error}"
    say(*text.splitlines(), stderr=not is_well)
    raise typer.Exit(0 if is_well else 1)


def web(
    port: Annotated[int, typer.Option(help="Serve the page on this port; 0 for any that is free.")] = 9470,
    host: Annotated[str, typer.Option(help="The address to serve it on.")] = "127.0.0.1",
    write: Annotated[bool, typer.Option("--write", help="Visitors may pause, cancel, redrive and delete.")] = False,
    bodies: Annotated[bool, typer.Option("--bodies", help="Visitors may see bodies, headers and errors.")] = False,
    token: Annotated[
        str | None, typer.Option(envvar="RELIQ_WEB_TOKEN", help="Opens the page too; ps shows options, not variables.")
    ] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="A host name of the page: ops.example.com.")] = None,
    proxy: Annotated[
        str | None, typer.Option(metavar="ADDRESSES", help="Trust X-Forwarded-For and -Proto of these: 127.0.0.1,::1.")
    ] = None,
    title: Annotated[str, typer.Option(help="Stands in the browser's tab.")] = "reliq",
    url: Url = None,
) -> None:
    """
    Serve a page of queues, messages, dead letters and workers until SIGTERM or Ctrl-C.

    It prints an address that lets one browser in. Programs and other browsers need the token; beyond this machine the
    page is served only with a token, and its connections are not encrypted: put a proxy with TLS before it.

    Example: reliq web --write

    Exit codes: 0 it was stopped, 2 a wrong option, a port that is taken, or the extra `web` is missing.
    """
    from reliq.redis.url import is_near  # noqa: PLC0415

    if not token and not is_near(host):
        raise ConfigurationError(f"--host {host} is reached from other machines: give a token, in RELIQ_WEB_TOKEN")
    try:
        from reliq.queue import user_at_host  # noqa: PLC0415
        from reliq.web import Access, app, serve  # noqa: PLC0415
    except ModuleNotFoundError as error:  # the extra `web` is not installed
        raise ConfigurationError(str(error)) from None
    grants = Access.READ | (Access.BODIES if bodies else Access(0)) | (Access.WRITE if write else Access(0))
    allowed = "see bodies, headers and errors" if bodies else "look, without bodies, headers and errors"
    allowed += ", and change things" if write else "; --write lets them change things"
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
