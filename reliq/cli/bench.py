"""`reliq bench`: how fast reliq is on your Redis, beside what that Redis can do."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from reliq.bench import PARTS
from reliq.cli.options import Json, Url, Yes
from reliq.cli.output import confirm, console, print_json, print_table

if TYPE_CHECKING:
    from reliq.bench.bench import Bench, Figure, Report

#: Smaller figures are shown with decimals.
_WHOLE_FROM = 100


def bench(
    url: Url = None,
    only: Annotated[str | None, typer.Option(help=f"Only these parts: {', '.join(PARTS)}.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Send less through: rougher figures, sooner.")] = False,
    json: Json = False,
    yes: Yes = False,
) -> None:
    """
    Measure reliq on your Redis: drain, publish, lateness, pickup, idle cost, memory.

    It works on a queue of its own and removes every key of it, also after Ctrl-C.

    Example: reliq bench --url redis://127.0.0.1:6379/0 --quick
    """
    measure, parts = import_module("reliq.bench.bench"), [part.strip() for part in only.split(",")] if only else []
    plan: Bench = measure.Bench(url, only=parts, scale=measure.QUICK if quick else measure.FULL)
    if others := plan.in_use():
        confirm(
            f"This Redis is in use ({others}). The benchmark loads it fully for "
            f"{'half a minute' if quick else 'three minutes'}, and needs about "
            f"{plan.bytes_needed // 1_048_576} MiB there. Go on?",
            yes=yes,
        )
    report = _run(plan)
    if json:
        print_json(_plain(report, quick=quick))
    else:
        _print(report, quick=quick)


def _run(plan: "Bench") -> "Report":
    """Run with a progress bar, on the error output, if that is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting", total=None)
        return plan.run(lambda name, done, of: bar.update(task, description=name, completed=done, total=of))


def _plain(report: "Report", *, quick: bool) -> dict[str, object]:
    """Return the report as JSON has it, with each figure's share beside it."""
    figures = [
        {"part": one.part, "name": one.name, "value": one.value, "unit": one.unit, "bare": one.bare, "share": one.share}
        for one in report.figures
    ]
    return {"redis": report.redis, "place": report.place, "quick": quick, "figures": figures}


def _print(report: "Report", *, quick: bool) -> None:
    rows = [(one.part, one.name, _number(one.value), one.unit, *_beside(one)) for one in report.figures]
    title = f"reliq on Redis {report.redis}, {report.place}" + (" (quick: rough figures)" if quick else "")
    print_table(("part", "what", "figure", "unit", "bare Redis", "share"), rows, title=title)


def _beside(figure: "Figure") -> tuple[str, str]:
    if figure.bare is None or figure.share is None:
        return "", ""
    if figure.unit == "ms":
        return _number(figure.bare), f"{figure.share:.1f} \N{MULTIPLICATION SIGN} what this Redis takes"
    return _number(figure.bare), f"{figure.share:.0%} of what this Redis can do"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE_FROM else f"{value:.2f}"
