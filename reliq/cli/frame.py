"""
The code that all commands share: output as text or JSON, confirmation, progress bar and exit code.

A command is a function that returns its result. The decorator `@command` adds the option --json. `@bulk_command` adds
the options --json, --dry-run and --yes.
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
        columns: the headings of the columns.
        long: the headings of columns with long texts. On a narrow terminal, these texts are wrapped first.
    """

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    long: Collection[str] = ()


class Answer(NamedTuple):
    """
    The result of a command, with the lines to print.

    Attributes:
        value: the value that --json prints.
        lines: the texts and tables to print without --json. None prints `value` as text.
        code: the exit code of the command.
        complaints: problems to print on standard error, each as a line.
    """

    value: Any
    lines: Iterable[object] | None = None
    code: int = 0
    complaints: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bulk:
    """
    The work of a command that reads or changes many messages, in steps.

    Attributes:
        run: a function that does the work and returns an `Answer`, or the value to print. Its argument `on_step` is a
            function that it calls after each step, to move the progress bar.
        done: the word for the effect on a message, such as `deleted`.
        count: a function that returns the number of matching messages, for --dry-run. It also gets `on_step`. None if
            the command does not support --dry-run.
        total: the number of messages that the command reads, or the size of its file in bytes, for the progress bar;
            None if unknown.
        asks: the question that the user must confirm before the work; empty for no question.
        most: the value of --limit: the maximum number of messages to change; None without a limit.
        complaints: a line for message ids that do not exist. With such a line, the exit code is 2.
    """

    run: Callable[..., Any]
    done: str
    count: Callable[..., int] | None = None
    total: int | None = None
    asks: str = ""
    most: int | None = None
    complaints: Sequence[str] = ()


def command(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a command that calls a function and prints the result. The command has the option --json."""
    return framed(function, {"json": Json})


def bulk_command(function: Callable[..., Any]) -> Callable[..., None]:
    """
    Return a command with the options --dry-run, --yes and --json.

    The command calls a function, does the work in the returned `Bulk`, and prints the result.
    """
    return framed(function, {"dry_run": DryRun, "yes": Yes, "json": Json})


def framed(function: Callable[..., Any], flags: dict[str, Any]) -> Callable[..., None]:
    """
    Return a command that calls a function, and prints the result.

    The command has an option for each parameter of the function, and the options in `flags`. A parameter with the
    annotation `OptionsOf(make)` stands for several options: the parameters of the function `make`. The command calls
    `make` with them, and passes the return value to the function.
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
