"""`reliq relay`: messages of `publish_in` from a database to Redis."""

from importlib import import_module
from typing import Annotated

import typer

from reliq.admin.filters import duration
from reliq.cli.databases import Database, Prefix
from reliq.cli.options import Url
from reliq.health import DEFAULT_HOST
from reliq.logs.setup import configure_logging
from reliq.outbox.tables import DEFAULT_PREFIX


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
    import_module("reliq.cli.relaying").move(
        database,
        prefix=prefix,
        batch=batch,
        keep=duration(keep),
        url=url,
        once=once,
        again_ms=round(duration(again_since) * 1000) if again_since else 0,
        page=None if metrics_port is None else (metrics_port, metrics_host),
    )
