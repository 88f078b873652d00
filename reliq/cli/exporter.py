"""`reliq exporter`: the figures of queues for Prometheus, with no worker alive."""

from importlib import import_module
from typing import Annotated

import typer

from reliq.cli.options import DEFAULT_LAYOUT, LayoutText, Url
from reliq.health import DEFAULT_HOST
from reliq.keys import Keys, Layout
from reliq.logs.setup import configure_logging

DEFAULT_PORT = 9465


def exporter(
    url: Url = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Only this queue; may be given again. Else all that workers have served.")
    ] = None,
    port: Annotated[int, typer.Option(help="Serve /metrics, /live and /ready on this port.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="The address to serve them on.")] = DEFAULT_HOST,
    layout: LayoutText = DEFAULT_LAYOUT,
) -> None:
    """
    Serve the states, ages and totals of queues for Prometheus until SIGTERM or Ctrl-C.

    Example: reliq exporter --url redis://127.0.0.1:6379/0 --port 9465
    """
    configure_logging("info")
    queues = [Keys(name, Layout.parse(layout)) for name in queue or ()]
    import_module("reliq.cli.exporting").export(url, queues, port, host)
