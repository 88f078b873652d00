"""
The commands that run until a signal: `relay`, `exporter` and `web`. Also `outbox` and `health`.

Other modules are imported inside functions, so that shell completion and `reliq health` probes start quickly.
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

#: `reliq health` waits at most this many seconds for the worker to respond.
HEALTH_SECONDS = 5.0
#: `reliq health` reads at most this many bytes of a response, because another program than a worker may listen on the
#: port.
HEALTH_BYTES = 65_536
HOUR = 3600.0

Database = Annotated[
    str,
    typer.Option(
        envvar="RELIQ_DATABASE",
        help="URL of the PostgreSQL or SQLite database; other users see it in `ps` unless you set RELIQ_DATABASE.",
    ),
]
Prefix = Annotated[str, typer.Option(help="Prefix of the table names, or SCHEMA.PREFIX.")]
Keep = Annotated[float, time_span("How long to keep rows after they were sent, for example 10m.", show_default="1h")]


def relay(
    database: Database,
    prefix: Prefix = OUTBOX_PREFIX,
    batch: Annotated[int, typer.Option(help="Move at most this many rows at a time.")] = 500,
    keep: Keep = HOUR,
    once: Annotated[bool, typer.Option("--once", help="Move the rows that are in the outbox now, then exit.")] = False,
    resend_since: Annotated[
        float | None, time_span("First send all rows again that were sent within this time, for example 10m.")
    ] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = DEFAULT_HOST,
    url: Url = None,
) -> None:
    """
    Move messages that `publish_in` stored in your database to Redis, until SIGTERM or Ctrl-C.

    A relay does not import your application, and several relays may share one outbox. Each row is published once, even
    if relays are killed. If Redis lost its last writes, --resend-since publishes recent rows again; handlers that use
    `job.once` do not repeat their effects. If Redis refuses a message, its row stays in the outbox, and the log has the
    reason.

    Exit codes: 0 done, 1 Redis or the database is unavailable or refuses, 2 wrong usage, 3 with --once, rows are left.

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
                raise typer.Exit(code=EXIT_UNFINISHED)
            return
    run_until_signal(mover, observers, None if metrics_port is None else (metrics_port, metrics_host))


outbox = typer.Typer(
    help="Manage the tables of `publish_in` and `job.once`: print SQL, retry refused rows, delete old rows.",
    no_args_is_help=True,
    add_completion=False,
)


@outbox.command()
def sql(
    dialect: Annotated[Literal["postgresql", "sqlite"], typer.Option(help="Database system: postgresql or sqlite.")],
    prefix: Prefix = OUTBOX_PREFIX,
) -> None:
    """
    Print the SQL statements that create the outbox tables, unless they exist.

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
    every: Annotated[bool, typer.Option("--all", help="Retry all refused rows instead of listing them.")] = False,
    limit: Annotated[int, typer.Option(help="List at most this many rows.")] = 100,
) -> Answer:
    """
    List outbox rows that a relay refused, oldest first, with the reason; with --all, retry all of them.

    Remove the cause before you use --all. After an update of reliq, a relay retries the rows that older versions
    refused. Exit codes: 0 done (also without any refused row), 1 the database is unavailable or refuses, 2 wrong usage.

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
def clean(database: Database, prefix: Prefix = OUTBOX_PREFIX, keep: Keep = HOUR) -> Answer:
    """
    Delete old rows of sent messages, and rows of `job.once` whose messages cannot be redelivered.

    A running relay also deletes these rows from time to time.

    Example: reliq outbox clean --database postgresql://shop@127.0.0.1/shop
    """
    with _open_outbox(database, prefix) as store:
        sent, expired = store.clean(round(keep * 1000))
    said = f"deleted {pluralize(sent, 'row')} of the outbox, {expired} of the inbox"
    return Answer({"outbox": sent, "inbox": expired}, [said])


@contextmanager
def _open_outbox(database: str, prefix: str) -> "Iterator[Store]":
    """
    Open the outbox tables in a database, and yield them as a `Store`.

    If the database is unreachable or refuses a statement, exit with code 1.
    """
    from reliq.outbox.store import Store, database as open_database  # noqa: PLC0415

    connection = open_database(database)
    with _report_database_errors(connection), closing(connection):
        yield Store(connection, prefix)


@contextmanager
def _report_database_errors(database: "DatabaseConnection") -> "Iterator[None]":
    """Exit with code 1 if, within the `with` block, the database is unreachable or refuses a statement."""
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
    queue: Annotated[list[str] | None, typer.Option(help="Export only this queue; may be given again.")] = None,
    port: Annotated[int, typer.Option(help="Serve /metrics, /live and /ready on this TCP port.")] = 9465,
    host: MetricsHost = DEFAULT_HOST,
    layout: LayoutText = DEFAULT_LAYOUT,
) -> None:
    """
    Serve the metrics of queues for Prometheus until SIGTERM or Ctrl-C.

    The metrics are the messages by state, the age of the oldest message, and the totals of each queue.

    Example: reliq exporter --url redis://127.0.0.1:6379/0 --port 9465
    """
    configure_logging("info")
    queues = [Keys(name, Layout.parse(layout)) for name in queue or ()]
    import_module("reliq.metrics.serving").export(url, queues, port, host)


def health(
    check: Annotated[
        Literal["live", "ready"],
        typer.Argument(help="live: the worker needs no restart; ready: the worker runs, and Redis answers."),
    ],
    port: Annotated[int, typer.Option(help="The --metrics-port of the worker to check.")],
    host: Annotated[str, typer.Option(help="The --metrics-host of the worker to check.")] = DEFAULT_HOST,
) -> None:
    """
    Check a worker on its metrics port; exit with 0 if it is healthy, else with 1 and the reason.

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
    raise typer.Exit(code=0 if is_well else 1)


def web(
    port: Annotated[int, typer.Option(help="Serve the web pages on this TCP port; 0 for any free port.")] = 9470,
    host: Annotated[
        str, typer.Option(help="Address to serve the web pages on; 0.0.0.0 lets other machines connect.")
    ] = "127.0.0.1",
    write: Annotated[bool, typer.Option("--write", help="Let visitors pause, cancel, redrive and delete.")] = False,
    bodies: Annotated[bool, typer.Option("--bodies", help="Let visitors see bodies, headers and errors.")] = False,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="RELIQ_WEB_TOKEN",
            help="Token with which browsers and programs log in. Set RELIQ_WEB_TOKEN instead, to hide it from `ps`.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name under which visitors reach the pages, for example ops.example.com; may be given again."
        ),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESSES", help="Trust X-Forwarded-For and -Proto headers of these proxies: 127.0.0.1,::1."
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the browser tab.")] = "reliq",
    url: Url = None,
) -> None:
    """
    Serve web pages of queues, messages, dead letters and workers until SIGTERM or Ctrl-C.

    The command prints an address that logs one browser in. Other browsers and programs need the token of --token. To
    serve other machines, you must set a token. Connections are not encrypted: put a proxy with TLS in front.

    Example: reliq web --write

    Exit codes: 0 stopped by a signal, 2 a wrong option, a port in use, or the extra `web` is not installed.
    """
    from reliq.redis.url import is_near  # noqa: PLC0415

    if not token and not is_near(host):
        raise ConfigurationError(f"other machines can reach --host {host}: set a token in RELIQ_WEB_TOKEN")
    try:
        from reliq.queue import user_at_host  # noqa: PLC0415
        from reliq.web import Access, app, serve  # noqa: PLC0415
    except ModuleNotFoundError as error:  # the extra `web` is not installed
        raise ConfigurationError(str(error)) from None
    grants = Access.READ | (Access.BODIES if bodies else Access(0)) | (Access.WRITE if write else Access(0))
    allowed = "see bodies, headers and errors" if bodies else "see everything except bodies, headers and errors"
    allowed += ", and change queues" if write else "; to let them change queues, add --write"
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
