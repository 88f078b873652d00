"""
What every command does besides its work: options, a table or JSON, a question, a bar, Ctrl-C, exit codes.

A command is a function that returns its answer. `@command` adds --json; `@bulk_command` adds --dry-run and --yes too.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, NamedTuple

import typer

from reliq.cli.lazy import with_options
from reliq.cli.options import DryRun, Json, Yes
from reliq.cli.output import EXIT_USAGE, complain, confirm, print_json, print_table, say, show_progress
from reliq.errors import ConfigurationError


class Table(NamedTuple):
    """
    Rows for a person.

    Attributes:
        long: columns that take several lines of a narrow terminal.
    """

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    long: Collection[str] = ()


class Answer(NamedTuple):
    """
    The answer of a command.

    Attributes:
        value: its JSON.
        lines: lines and tables for a person, in place of the text of the value.
        code: the exit code.
        complaints: problems, each printed as a line on standard error.
    """

    value: Any
    lines: Iterable[object] | None = None
    code: int = 0
    complaints: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bulk:
    """
    Work on many messages, in steps.

    Attributes:
        run: does the work and returns its sum, or an `Answer`; it gets `on_step`, as `count` does.
        done: how a message ends, such as `deleted`.
        count: returns how many are meant; None where --dry-run makes no sense.
        total: how many there are to look at, if that is known.
        asks: the question before the work; empty for none.
        most: at most this many are meant.
        complaints: about ids that the work does not find; they end it with exit code 2.
    """

    run: Callable[..., Any]
    done: str
    count: Callable[..., int] | None = None
    total: int | None = None
    asks: str = ""
    most: int | None = None
    complaints: Sequence[str] = ()


def command(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a command that prints the answer of a function, with --json as JSON."""
    return _framed(function, {"json": Json})


def bulk_command(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a command that does the `Bulk` of a function; it takes --dry-run, --yes and --json."""
    return _framed(function, {"dry_run": DryRun, "yes": Yes, "json": Json})


def _framed(function: Callable[..., Any], flags: dict[str, Any]) -> Callable[..., None]:
    work = with_options(function)

    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in flags}
        answer = work(**given)
        if isinstance(answer, Bulk):
            answer = _work(answer, dry_run=chosen.get("dry_run", False), yes=chosen.get("yes", True))
        _print(answer if isinstance(answer, Answer) else Answer(answer), json=chosen["json"])

    own = list(signature(work, eval_str=True).parameters.values())
    own += [Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=False) for name, kind in flags.items()]
    run.__doc__ = function.__doc__
    run.__name__ = function.__name__
    run.__annotations__ = {option.name: option.annotation for option in own}
    run.__signature__ = signature(run).replace(  # type: ignore[attr-defined]
        parameters=[option.replace(kind=Parameter.KEYWORD_ONLY) for option in own]
    )
    return run


def _work(bulk: Bulk, *, dry_run: bool, yes: bool) -> Answer:
    if dry_run:
        if bulk.count is None:
            raise ConfigurationError("--dry-run counts the messages of a state: leave it out, or give --state")
        with show_progress(bulk.total, bulk.done) as step:
            found = bulk.count(on_step=lambda looked, _found: step(looked))
        found = found if bulk.most is None else min(found, bulk.most)
        return Answer({"found": found}, [f"{found} would be {bulk.done}"])
    if bulk.asks:
        confirm(bulk.asks, yes=yes)
    with show_progress(bulk.total, bulk.done) as step:
        done = bulk.run(on_step=step)
    return (
        done
        if isinstance(done, Answer)
        else Answer(done, code=EXIT_USAGE if bulk.complaints else 0, complaints=bulk.complaints)
    )


def _print(answer: Answer, *, json: bool) -> None:
    if json:
        print_json(answer.value)
    else:
        for line in [answer.value] if answer.lines is None else answer.lines:
            print_table(*line) if isinstance(line, Table) else say(line)
    for problem in answer.complaints:
        complain(problem)
    if answer.code:
        raise typer.Exit(answer.code)
