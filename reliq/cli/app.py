"""The root of the command `reliq`: its options, its subcommands, and its error messages."""

import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from reliq import distribution
from reliq.cli.lazy import SHARED, CommandInfo, LazyGroup
from reliq.cli.output import EXIT_INTERRUPTED, EXIT_USAGE, complain, say
from reliq.cli.settings import FOUND, URL, settings_found
from reliq.errors import EXIT_CONFIG, BodyError, ConfigurationError, RedisUnavailableError, ReliqError

#: Exit codes of commands: 0 done, 1 failed, 2 wrong usage, 3 nothing was published or work is left, 78 the set-up cannot work, 130
#: interrupted.
EXIT_FAILED = 1

#: Typer raises this for an unknown option or a missing argument, and gives it no public name.
UsageError: Any = typer.BadParameter.__base__

#: Heading -> command -> the first paragraph of its help.
SUMMARIES = {
    "Run": {
        "init": "Write a small application that works: a queue, a handler, a publisher, a test and a compose file.",
        "worker": "Run the handlers of a Consumer until SIGTERM or Ctrl-C.",
        "demo": "Run thousands of jobs in two processes, kill one while it runs jobs, and show that none is lost.",
        "relay": "Move the messages of `publish_in` from a database to Redis until SIGTERM or Ctrl-C.",
        "exporter": "Serve the states, ages and totals of queues for Prometheus until SIGTERM or Ctrl-C.",
        "health": "Ask a worker on its metrics port; exit 0 when all is well, else 1 with the reason.",
    },
    "See": {
        "queues": "Show every queue: its messages by state, the age of the oldest, its rates of the last minute, its "
        "workers.",
        "workers": "Show every worker process that is alive: its host, queues and busy slots.",
        "keys": "Show which keys have messages that wait or run, those with most first, and why they wait.",
        "list": "List the messages of one state, the next to come first; of dead letters and ended messages the newest.",
        "show": "Show the state, body, errors and worker of a message; or how it ended.",
        "watch": "Watch queues live until Ctrl-C: backlog, lateness, rates, workers and their handlers, failures.",
        "web": "Serve a page of queues, messages, dead letters and workers until SIGTERM or Ctrl-C.",
    },
    "Act": {
        "publish": "Publish a message, or each line of a file, and print the status.",
        "cancel": "Cancel messages: they do not start; a running message is not retried, and its handler gets the cancellation.",
        "move": "Move messages of one state to another queue, with ids, due times, retries left and headers.",
        "redrive": "Publish dead letters again, oldest first, with fresh retries.",
        "purge": "Delete the messages of one state, or dead letters, for good; try --dry-run first.",
        "pause": "Have consumers stop claiming within a second; running handlers finish, and publishing goes on.",
        "resume": "Have consumers claim a paused queue again.",
        "limits": "Show the limits of a queue, or change them while it is in use: order, places, rates and weights of keys.",
        "shards": "Show the shards of a queue, or change how many there are while it is in use.",
        "delete": "Delete queues with nothing in them: their names from the registry, their totals and ends.",
        "outbox": "The tables of `publish_in` and `job.once`: print their SQL, list and retry refused rows, delete old rows.",
        "cron": "Periodic entries: list them, run one.",
    },
    "Check": {
        "check": "Check every message of a queue for contradictions to the model, while others use it.",
        "doctor": "Check whether a Redis is fit for queues: print each finding, its consequence, and the remedy.",
        "acl": "Print the least Redis ACL rule for a role; it leaves passwords, and whether the user is on, as they are.",
    },
    "Measure": {
        "bench": "Measure reliq on your Redis: publishing, draining by one and two worker processes, pickup by an idle worker.",
    },
}
#: Module of this package -> the commands in it, where it is not the module of the command's own name.
MODULES = {
    "checks": "check doctor acl",
    "init": "init demo",
    "messages": "list show cancel purge move redrive publish",
    "queues": "queues pause resume delete limits keys shards cron workers",
    "serve": "relay outbox exporter health web",
}
#: Commands with a function of another name.
FUNCTIONS = {"list": "list_messages"}
HOMES = {command: module for module, commands in MODULES.items() for command in commands.split()}


#: The environment and pyproject.toml may have options of this command.
WORKER = "worker"


class Commands(LazyGroup):
    """The commands of `reliq`."""

    places = {  # noqa: RUF012  of the class
        name: CommandInfo(panel, summary, HOMES.get(name, name), FUNCTIONS.get(name, name))
        for panel, commands in SUMMARIES.items()
        for name, summary in commands.items()
    }


app = typer.Typer(
    cls=Commands,
    help="reliq: a reliable, at-least-once job queue on the Redis you already run.",
    epilog="Most commands take:\n\n" + "\n\n".join(f"{option}  {text}" for option, text in SHARED.values()),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """reliq: a reliable, at-least-once job queue on the Redis you already run."""
    if version:
        say(f"reliq {distribution.VERSION}")
        raise typer.Exit
    if ctx.invoked_subcommand == WORKER:
        settings = ctx.meta[FOUND] = settings_found(Commands.load(WORKER))
        ctx.default_map = {WORKER: {name: setting.value for name, setting in settings.items() if name != URL}}


def _describe_wrong_usage(error: Any) -> str:
    """Return a usage error as text: the wrong word, and where its value came from or where to read the help."""
    what = " ".join(error.format_message().split()).rstrip(".")
    name = getattr(getattr(error, "param", None), "name", "")
    setting = error.ctx.meta.get(FOUND, {}).get(name) if error.ctx else None
    if setting and error.ctx.get_parameter_source(name).name == "DEFAULT_MAP":
        return f"{what}; it comes from {setting.origin}"
    return f"{what}; see {error.ctx.command_path if error.ctx else 'reliq'} --help"


def main() -> None:
    """Run the command; print an error as a line with its remedy."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal that cannot show every character
    if wrong := distribution.replacement():
        complain(wrong)
        sys.exit(EXIT_CONFIG)
    try:
        sys.exit(app(sys.argv[1:], prog_name="reliq", standalone_mode=False))
    except UsageError as error:
        if "NoArgs" in type(error).__name__:
            error.show()
        else:
            complain(_describe_wrong_usage(error))
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
