"""Every command has an example in its help, and takes --json and --url where they apply."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reliq import __version__
from reliq.cli.app import Commands, app

ROOT = Path(__file__).parents[2]
#: Commands without output for scripts: they run until stopped, or answer by their exit code alone.
NO_JSON = {"init", "demo", "relay", "exporter", "health", "watch", "web", "outbox sql"}
#: Commands that read the layout of each queue from the application's code.
NO_LAYOUT = {"worker", "bench"}
#: Commands that need no Redis, or use a private Redis only.
NO_URL = {"init", "demo", "health", "outbox sql", "outbox clean", "outbox retry"}


LOADED = {name: Commands.load(name) for name in Commands.places}
COMMANDS = {
    f"{name} {word}".rstrip(): command
    for name, group in LOADED.items()
    for word, command in getattr(group, "commands", {"": group}).items()
}


def options(name):
    return {word for parameter in COMMANDS[name].params for word in parameter.opts}


def test_every_command_has_its_options_and_a_help_with_an_example():
    wrong = []
    for name, command in COMMANDS.items():
        help = " ".join((command.help or "").split())
        on_a_queue = {parameter.name for parameter in command.params} & {"queue", "queues"}
        rules = {
            "an example": f"Example: reliq {name}" in help,
            "--json": ("--json" in options(name)) == (name not in NO_JSON),
            "--url": ("--url" in options(name)) == (name not in NO_URL),
            "--layout": ("--layout" in options(name)) == (bool(on_a_queue) and name not in NO_LAYOUT),
            "help of options": all(one.help for one in command.params if one.param_type_name == "option"),
        }
        wrong += [(name, rule) for rule, holds in rules.items() if not holds]

    assert wrong == []


def test_list_of_commands_shows_the_summary_of_each_help():
    shown = {name: place.summary for name, place in Commands.places.items()}

    assert shown == {name: command.help.split("\n\n")[0] for name, command in LOADED.items()}


def test_help_imports_no_redis_client():
    """A shell waits for this import at each completion."""
    code = """
import sys
from reliq.cli.app import Commands, app
assert not {"redis", "msgspec", "tenacity", "rich", "rich.console"} & sys.modules.keys()
try:
    app(["--help"])
except SystemExit:
    assert not {"redis", "msgspec", "tenacity"} & sys.modules.keys()
for name in sorted(Commands.places):
    Commands.load(name)
    assert not {"redis", "asyncio"} & sys.modules.keys(), name
"""

    done = run("-c", code)

    assert (done.returncode, done.stderr, "Publish a message" in done.stdout) == (0, "", True)


@pytest.mark.parametrize("columns", [80, 60], ids="{} columns".format)
def test_help_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    helps = {
        name: CliRunner().invoke(app, [*name.split(), "--help"], prog_name="reliq").output for name in ["", *COMMANDS]
    }

    assert {name: text for name, text in helps.items() if max(map(len, text.splitlines())) > columns} == {}
    assert [name for name, text in helps.items() if "Usage: reliq" not in text or "…" in text] == []


def run(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_module_prints_the_version():
    done = run("-m", "reliq", "--version")

    assert (done.returncode, done.stdout) == (0, f"reliq {__version__}\n")


def test_mistyped_command_is_one_line_with_exit_code_2(command):
    for words, said in {
        "nope": "reliq: No such command 'nope'; see ",
        "list": "reliq: Missing argument 'QUEUE'; see ",
        "list orders --statee x": "reliq: No such option: --statee",
        "health": "reliq: Missing argument 'check",  # Typer may print more
        "health live --port x": "reliq: Invalid value for '--port'",
        "queues --json=3": "reliq: Option '--json' does not take a value; see ",
    }.items():
        done = command(*words.split())

        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), words
        assert done.err.casefold().startswith(said.casefold())
        assert done.err.endswith(" --help\n")
