"""The command `reliq bench`."""

import signal
import sys
from importlib import import_module
from typing import Annotated

import typer

from reliq.cli.frame import Answer, Table, command
from reliq.cli.options import Url, Yes
from reliq.cli.output import confirm, console
from reliq.settings import check_int
from reliq.text import pluralize


@command
def bench(
    url: Url = None,
    messages: Annotated[
        int, typer.Option(help="How many messages to publish and drain; fewer give rougher figures.")
    ] = 20_000,
    yes: Yes = False,
) -> Answer:
    """
    Measure reliq on your Redis: publishing, draining by one and two worker processes, pickup by an idle worker.

    It works in a new queue and deletes all keys of that queue at the end, also after Ctrl-C.

    Example: reliq bench --url redis://127.0.0.1:6379/0 --messages 100000
    """
    check_int("--messages", messages, least=1000, most=10_000_000)
    measures = import_module("reliq.admin.bench")
    address = url or import_module("reliq.redis.server").default_url()
    version, keys = measures.server_in_use(address, messages)
    if keys:
        confirm(f"This Redis is in use ({pluralize(keys, 'key')}), and the benchmark loads it fully. Go on?", yes=yes)
    exit_on_signals()
    with console(stderr=True).status("measuring"):
        figures = measures.measure(address, messages)
    table = Table(("measurement", "figure"), [(name, f"{value:,.2f}") for name, value in figures.items()])
    value = {"redis": version, "messages": messages, "figures": figures}
    return Answer(value, [f"reliq on Redis {version}, {messages:,} messages", table])


def exit_on_signals() -> None:
    """End the command by an exception at a signal; further signals do not interrupt its cleanup."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _frame: object) -> None:
        for stop in stops:
            signal.signal(stop, signal.SIG_IGN)
        sys.exit(128 + number)

    for stop in stops:
        import_module("reliq.consumer").handle_signal(stop, end)
