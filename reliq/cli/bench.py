"""`reliq bench`: how fast reliq is on your Redis."""

import sys
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from reliq.cli.options import Json, Url, Yes
from reliq.cli.output import confirm, console, print_json, print_table

if TYPE_CHECKING:
    from reliq.admin.bench import Bench


def bench(
    url: Url = None,
    only: Annotated[
        str | None, typer.Option(help="Only these parts, of drain, publish, lateness, pickup and idle.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Send fewer messages: rougher figures, sooner.")] = False,
    json: Json = False,
    yes: Yes = False,
) -> None:
    """
    Measure reliq on your Redis: drain, publish, lateness, pickup, idle cost.

    It works on a queue of its own and removes every key of it, also after Ctrl-C.

    Example: reliq bench --url redis://127.0.0.1:6379/0 --quick
    """
    measures = import_module("reliq.admin.bench")
    parts = [part.strip() for part in only.split(",")] if only else []
    benchmark: Bench = measures.Bench(url, only=parts, messages=measures.QUICK if quick else measures.FULL)
    if others := benchmark.in_use():
        confirm(
            f"This Redis is in use ({others}). The benchmark loads it fully for about "
            f"{'half a minute' if quick else 'a minute'}, and needs about {benchmark.mebibytes} MiB there. Go on?",
            yes=yes,
        )
    measures.exit_on_signals()
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bars, console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting", total=None)
        figures = benchmark.run(lambda part, done, of: bar.update(task, description=part, completed=done, total=of))
    version = benchmark.redis_version()
    if json:
        rows = [asdict(figure) for figure in figures]
        print_json({"redis": version, "place": benchmark.place, "quick": quick, "figures": rows})
        return
    title = f"reliq on Redis {version}, {benchmark.place}" + (" (quick: rough figures)" if quick else "")
    columns = ("part", "what", "figure", "unit")
    print_table(
        columns, [(figure.part, figure.name, f"{figure.value:,.2f}", figure.unit) for figure in figures], title=title
    )
