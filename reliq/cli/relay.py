"""The work of `reliq relay`, once its options are read."""

from contextlib import nullcontext
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any

import typer

from reliq.admin.messages import duration
from reliq.cli.options import Database, Json, Prefix, Url, asking
from reliq.cli.output import EXIT_UNFINISHED, complain, print_json, print_table, say
from reliq.consumer import STOPS, SignalNotes, take
from reliq.logs import configure_logging
from reliq.logs.observer import LogObserver
from reliq.metrics.serving import of_relay
from reliq.outbox.relay import OutboxMover, Relay
from reliq.outbox.store import Store, database as opened
from reliq.outbox.tables import DEFAULT_PREFIX, ddl
from reliq.redis.client import Clients
from reliq.supervisor.child import STOP_MARGIN_SECONDS
from reliq.supervisor.supervisor import ServiceManager
from reliq.text import count_of, spoken
from reliq.worker import health
from reliq.worker.health import DEFAULT_HOST, PATIENT_SECONDS, Pulse
from reliq.worker.loop import Loop

#: Port and address of the page of figures.
Page = tuple[int, str]

#: How often the main thread looks whether a service manager is to be told something.
TELL_SECONDS = 0.5


def move(database: str, *, once: bool, again_ms: int, page: Page | None, **settings: Any) -> None:
    """Move the rows that there are, or all that come until a signal; `settings` are those of a `Relay`."""
    observers: list[Any] = [LogObserver()]
    relay = Relay(database, **settings)
    clients = Clients(relay.url, observers)
    mover = OutboxMover(relay, clients)
    with asking(mover.store.database):
        mover.check()
        if again_ms:
            say(f"{count_of(mover.store.again(again_ms), 'row is', 'rows are')} sent again")
        if once:
            say(f"moved {count_of(mover.move_all(), 'row')}")
            left = mover.store.look().waiting
            mover.close()
            if left:
                complain(
                    f"{count_of(left, 'row remains', 'rows remain')}: `reliq outbox refused` lists refused rows; for others, see "
                    "the errors of their queues above"
                )
                raise typer.Exit(EXIT_UNFINISHED)
    if not once:
        # A round may wait for the confirmation of each of its calls: only one of minutes hangs.
        pulse = Pulse(rounds="round", seconds=PATIENT_SECONDS)
        serving = (
            of_relay(*page, observers, pulse=pulse, connection=clients.connection(), complaint=mover.complaint)
            if page
            else nullcontext()
        )
        with serving:
            _run(mover, observers, pulse)


def _run(mover: OutboxMover, observers: list[Any], pulse: Pulse) -> None:
    """Move rows until a signal comes."""
    signals = SignalNotes()
    for number in STOPS:
        take(number, signals.note)

    def step() -> float:
        try:
            return mover.step()
        finally:  # also one that found Redis away: a restart would not help
            pulse.beat()

    loop = Loop("relay", step, observers)
    manager = ServiceManager()
    loop.start()
    while not signals.wait(TELL_SECONDS):
        tell(manager, pulse)
    manager.stop(STOP_MARGIN_SECONDS)
    loop.stop()
    mover.poke()
    loop.join()
    mover.close()


def tell(manager: ServiceManager, pulse: Pulse) -> None:
    """Tell a service manager what is due; one that watches hears nothing of a relay whose round does not end."""
    if not health.live([pulse]):
        manager.look([pulse])


def relay(
    database: Database,
    prefix: Prefix = DEFAULT_PREFIX,
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
    import_module("reliq.cli.relay").move(
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
