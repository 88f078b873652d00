"""
The common frame of commands: shared options, output as table or JSON, confirmation, progress bar, exit codes.

A command is a function that returns its answer. `@command` adds --json. `@bulk_command` adds --json, --dry-run and
--yes.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple

import typer

from reliq.cli.options import DryRun, Json, OptionsOf, Yes
from reliq.cli.output import EXIT_USAGE, complain, confirm, print_json, print_table, say, show_progress
from reliq.errors import ConfigurationError


class Table(NamedTuple):
    """
    A table in the text output of a command.

    Attributes:
        columns: the headings.
        long: the headings of columns with long texts. On a narrow terminal, these texts are wrapped first.
    """

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    long: Collection[str] = ()


class Answer(NamedTuple):
    """
    The result of a command.

    Attributes:
        value: the value that --json prints.
        lines: lines and tables that are printed without --json; None prints `value` as text.
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
    A command on many messages, which works in steps.

    Attributes:
        run: a function that does the work; returns an `Answer`, or the value to print. `run` and `count` get a function
            `on_step` and call it after each step.
        done: the effect on each message, such as `deleted`.
        count: returns how many messages match, for --dry-run; None if the command does not support --dry-run.
        total: how many messages the command reads, for the progress bar; None if unknown.
        asks: the question to confirm before the work; empty for no question.
        most: the --limit of the command; None without a limit.
        complaints: lines about message ids that do not exist. If there is such a line, the exit code is 2.
    """

    run: Callable[..., Any]
    done: str
    count: Callable[..., int] | None = None
    total: int | None = None
    asks: str = ""
    most: int | None = None
    complaints: Sequence[str] = ()


def command(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a command that calls a function and prints its answer; adds --json."""
    return framed(function, {"json": Json})


def bulk_command(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a command that calls a function and runs the `Bulk` it returns; adds --dry-run, --yes and --json."""
    return framed(function, {"dry_run": DryRun, "yes": Yes, "json": Json})


def framed(function: Callable[..., Any], flags: dict[str, Any]) -> Callable[..., None]:
    """
    Return a command that calls a function and prints its answer.

    The command has an option for each parameter of the function, and the options in `flags`. For a parameter with the
    annotation `OptionsOf(make)`, the command has the options of `make`, and passes the result of `make` to the function.
    """
    makers: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    options: list[Parameter] = []
    for parameter in signature(function, eval_str=True).parameters.values():
        marks = [mark for mark in getattr(parameter.annotation, "__metadata__", ()) if isinstance(mark, OptionsOf)]
        own = signature(marks[0].make).parameters if marks else {parameter.name: parameter}
        options += own.values()
        if marks:
            makers[parameter.name] = (marks[0].make, list(own))
    options += [Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=False) for name, kind in flags.items()]

    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in flags}
        made = {name: make(**{option: given.pop(option) for option in own}) for name, (make, own) in makers.items()}
        answer = function(**given, **made)
        if isinstance(answer, Bulk):
            answer = _work(answer, dry_run=chosen.get("dry_run", False), yes=chosen.get("yes", True))
        _print(answer if isinstance(answer, Answer) else Answer(answer), json=chosen.get("json", False))

    run.__doc__ = function.__doc__
    run.__name__ = function.__name__
    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = Signature([option.replace(kind=Parameter.KEYWORD_ONLY) for option in options])  # type: ignore[attr-defined]
    return run


def _work(bulk: Bulk, *, dry_run: bool, yes: bool) -> Answer:
    if dry_run:
        if bulk.count is None:
            raise ConfigurationError("--dry-run needs --state; with ids, leave --dry-run out")
        with show_progress(bulk.total, bulk.done) as step:
            found = bulk.count(on_step=lambda looked, _found: step(looked))
        found = found if bulk.most is None else min(found, bulk.most)
        return Answer({"found": found}, [f"{found} would be {bulk.done}"])
    if bulk.asks:
        confirm(bulk.asks, yes=yes)
    with show_progress(bulk.total, bulk.done) as step:
        done = bulk.run(on_step=step)
    if isinstance(done, Answer):
        return done
    return Answer(done, code=EXIT_USAGE if bulk.complaints else 0, complaints=bulk.complaints)


def _print(answer: Answer, *, json: bool) -> None:
    if json:
        print_json(answer.value)
    else:
        for line in [answer.value] if answer.lines is None else answer.lines:
            print_table(*line) if isinstance(line, Table) else say(line)
    for problem in answer.complaints:
        complain(problem)
    if answer.code:
        raise typer.Exit(code=answer.code)
