"""The root of the command `reliq`: its options, its subcommands, and what it prints of an error."""

import sys
from inspect import getdoc
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from reliq.cli.account import account
from reliq.cli.acl import acl
from reliq.cli.bench import bench
from reliq.cli.cancel import cancel
from reliq.cli.check import check
from reliq.cli.dead import dead
from reliq.cli.demo import demo
from reliq.cli.doctor import doctor
from reliq.cli.ends import ends
from reliq.cli.exporter import exporter
from reliq.cli.forget import forget
from reliq.cli.health import health
from reliq.cli.list import list_messages
from reliq.cli.move import move
from reliq.cli.output import EXIT_INTERRUPTED, EXIT_USAGE, complain, say
from reliq.cli.pause import pause, resume
from reliq.cli.publish import publish
from reliq.cli.purge import purge
from reliq.cli.queues import queues
from reliq.cli.running import running
from reliq.cli.scripts import scripts
from reliq.cli.show import show
from reliq.cli.watch import watch
from reliq.cli.web import web
from reliq.cli.worker import worker
from reliq.cli.workers import workers
from reliq.errors import BodyError, ConfigurationError, RedisUnavailableError, ReliqError

#: Exit codes of commands: 0 done, 1 failed, 2 wrong usage, 3 nothing was published, 78 the set-up cannot work, 130
#: interrupted.
EXIT_FAILED = 1

#: Typer raises this for an unknown option or a missing argument, and gives it no public name.
UsageError: Any = typer.BadParameter.__base__


def in_paragraphs(text: str) -> str:
    """Return a text with each paragraph in one line: the terminal's width wraps it, not the source's."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


app = typer.Typer(
    help="reliq: a reliable, at-least-once job queue on the Redis you already run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for title, commands in (
    ("Run", (worker, demo, exporter, health)),
    ("See", (queues, workers, running, list_messages, show, ends, watch, web)),
    ("Act", (publish, cancel, move, purge, pause, resume, forget)),
    ("Check", (account, check, doctor, acl)),
    ("Measure", (bench,)),
):
    for command in commands:
        app.command("list" if command is list_messages else None, rich_help_panel=title)(command)
app.add_typer(dead, name="dead", rich_help_panel="Act")
app.add_typer(scripts, name="scripts", rich_help_panel="Check")
for group in (app, dead, scripts):
    for registered in group.registered_commands:
        registered.help = in_paragraphs(getdoc(registered.callback) or "")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """reliq: a reliable, at-least-once job queue on the Redis you already run."""
    if version:
        from importlib.metadata import version as installed  # noqa: PLC0415  only asked here

        say(f"reliq {installed('reliq')}")
        raise typer.Exit


def _without_value(argument: str) -> str:
    """Return --burst=delayed as an option of its own: Typer knows no option with a value that may be left out."""
    name, given, value = argument.partition("=")
    if name != "--burst" or not given:
        return argument
    if value != "delayed":
        raise ConfigurationError(f"write --burst or --burst=delayed, not {argument[:80]!r}")
    return "--burst-delayed"


def main() -> None:
    """Run the command; an error is one line that says what to do."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal that cannot show every character
    try:
        sys.exit(app([_without_value(one) for one in sys.argv[1:]], standalone_mode=False))
    except UsageError as error:
        if "NoArgs" in type(error).__name__:
            error.show()
        else:
            what, path = " ".join(error.format_message().split()), error.ctx.command_path if error.ctx else "reliq"
            complain(f"{what.rstrip('.')}; see {path} --help")
        sys.exit(EXIT_USAGE)
    except typer.Abort:
        sys.exit(EXIT_FAILED)
    except (ConfigurationError, BodyError) as error:
        complain(error)
        sys.exit(EXIT_USAGE)
    except RedisUnavailableError as error:
        complain(f"{error}; see that Redis runs and that --url or RELIQ_URL names it")
        sys.exit(EXIT_FAILED)
    except ReliqError as error:
        complain(error)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
