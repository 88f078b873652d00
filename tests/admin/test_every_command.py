"""What holds for every command: its help has an example, and it takes --json and --url where that is due."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reliq import __version__
from reliq.cli.app import Commands, app, main

ROOT = Path(__file__).parents[2]
#: Commands that print no answer a script would read: they run, or answer by their exit code alone.
NO_JSON = {"init", "worker", "demo", "relay", "exporter", "health", "web", "outbox sql"}
#: Commands whose queues say their layouts themselves, in the code.
NO_LAYOUT = {"worker", "bench"}
#: Commands that ask no Redis.
NO_URL = {"init", "health", "config", "outbox sql", "outbox clean", "outbox refused", "outbox retry"}


LOADED = {name: Commands.load(name) for name in Commands.places}
COMMANDS = {
    " ".join([name, *below]): command
    for name, group in LOADED.items()
    for below, command in (
        {(word,): one for word, one in getattr(group, "commands", {}).items()} or {(): group}
    ).items()
}
every_command = pytest.mark.parametrize("name", COMMANDS)


def options(name):
    return {word for parameter in COMMANDS[name].params for word in parameter.opts}


@every_command
def test_the_help_of_a_command_has_an_example_of_itself(name):
    assert f"Example: reliq {name}" in " ".join((COMMANDS[name].help or "").split())


def test_the_list_of_commands_shows_the_first_paragraph_of_each_help():
    shown = {name: place.summary for name, place in Commands.places.items()}

    assert shown == {name: command.help.split("\n\n")[0] for name, command in LOADED.items()}


def test_the_list_of_commands_and_their_names_for_a_shell_need_no_redis_client():
    code = "import sys, reliq.cli.app as app\ntry: app.app(['--help'])\nexcept SystemExit: print(*sys.modules)"

    done = run("-c", code)

    assert not {"redis", "msgspec", "tenacity"} & set(done.stdout.split())
    assert "Publish a message" in done.stdout


def test_the_root_of_the_commands_imports_what_typer_does_and_little_of_its_own():
    """A shell that completes a word waits for it."""
    code = "import sys, typer; before = set(sys.modules); import reliq.cli.app; print(*set(sys.modules) - before)"

    more = set(run("-c", code).stdout.split())

    assert not {"rich", "rich.console"} & more
    assert len(more) <= 25, more


def test_the_help_and_the_options_of_a_command_need_no_redis_client():
    """Counted are modules, for times depend on the machine: the client alone takes longer than all the others."""
    code = """
import sys
from reliq.cli.app import Commands
for name in sorted(Commands.places):
    Commands.load(name)
    assert not {"redis", "asyncio"} & sys.modules.keys(), name
assert len(sys.modules) < 500, len(sys.modules)  # of all of them together
"""

    done = run("-c", code)

    assert (done.returncode, done.stderr) == (0, "")


@every_command
def test_a_command_takes_json_and_url_where_they_are_due(name):
    assert ("--json" in options(name)) == (name not in NO_JSON)
    assert ("--url" in options(name)) == (name not in NO_URL)


@every_command
def test_a_command_on_a_queue_takes_its_layout(name):
    on_a_queue = {parameter.name for parameter in COMMANDS[name].params} & {"queue", "queues"}

    assert ("--layout" in options(name)) == (bool(on_a_queue) and name not in NO_LAYOUT)


@every_command
def test_the_options_of_a_command_are_told(name):
    untold = [one.name for one in COMMANDS[name].params if one.param_type_name == "option" and not one.help]

    assert untold == []


def ragged(text, columns):
    """The lines of prose that end although the next word would still fit."""
    prose = [line.strip() for line in text.splitlines() if not line.startswith(("╭", "│", "╰"))]
    return [
        line
        for line, following in pairwise(prose)
        if line and following and len(line) + 1 + len(following.split()[0]) <= columns - 2
    ]


@pytest.mark.parametrize("columns", [80, 60])
def test_a_help_fits_the_terminal_and_is_wrapped_once(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    helps = {
        name: CliRunner().invoke(app, [*name.split(), "--help"], prog_name="reliq").output for name in ["", *COMMANDS]
    }

    assert {name: text for name, text in helps.items() if max(map(len, text.splitlines())) > columns} == {}
    assert {name: lines for name, text in helps.items() if (lines := ragged(text, columns))} == {}
    assert [name for name, text in helps.items() if "Usage: reliq" not in text or "…" in text] == []
    assert [name for name, text in helps.items() if "bool" in text] == []  # a flag takes no value


def run(*words, **environment):
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_version_is_told_by_the_module():
    done = run("-m", "reliq", "--version")

    assert (done.returncode, done.stdout) == (0, f"reliq {__version__}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "reliq: No such command 'nope'; see "),
        (["list"], "reliq: Missing argument 'QUEUE'; see "),
        (["list", "orders", "--statee", "x"], "reliq: No such option: --statee"),
        (["health"], "reliq: Missing argument 'check"),  # Typer may say more of it
        (["health", "live", "--port", "x"], "reliq: Invalid value for '--port'"),
        (["queues", "--json=3"], "reliq: Option '--json' does not take a value; see "),
    ],
)
def test_a_command_that_was_typed_wrongly_is_one_line_and_exit_2(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reliq", *words])

    with pytest.raises(SystemExit) as ended:
        main()

    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert captured.err.casefold().startswith(said.casefold())
    assert captured.err.count("\n") == 1
    assert captured.err.endswith(" --help\n")
