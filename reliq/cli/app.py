"""The command `reliq`: its options, its list of subcommands, and the handling of errors."""

import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from reliq import distribution
from reliq.cli.lazy import SHARED, CommandInfo, LazyGroup
from reliq.cli.output import EXIT_INTERRUPTED, EXIT_USAGE, complain, say
from reliq.cli.settings import FOUND, URL, settings_found
from reliq.errors import EXIT_CONFIG, BodyError, ConfigurationError, RedisUnavailableError, ReliqError

#: The exit code of a command that failed, for example because Redis is unavailable. docs/reference/cli.md lists all
#: exit codes.
EXIT_FAILED = 1

#: The exception that Typer raises for an unknown option or a missing argument. Typer has no public name for this class.
UsageError: Any = typer.BadParameter.__base__

#: For each heading of `reliq --help`, the commands below it, each with the first paragraph of its help text.
SUMMARIES = {
    "Run": {
        "init": "Create a small working application: a task, a publisher, a test and a compose file.",
        "worker": "Run the handlers of a Consumer until SIGTERM or Ctrl-C.",
        "demo": "Run thousands of jobs in two worker processes, kill one process, and show that no job is lost.",
        "relay": "Move messages that `publish_in` stored in your database to Redis, until SIGTERM or Ctrl-C.",
        "exporter": "Serve the metrics of queues for Prometheus until SIGTERM or Ctrl-C.",
        "health": "Check a worker on its metrics port; exit with 0 if it is healthy, else with 1 and the reason.",
    },
    "See": {
        "queues": "Show each queue: messages by state, age of the oldest, rates of the last minute, and workers.",
        "workers": "Show each live worker process: its host, queues and busy slots.",
        "keys": "Show message keys with waiting or running messages, the largest first, and why they wait.",
        "list": "List messages of one state in order of delivery; dead letters and ended messages newest first.",
        "show": "Show the state, body, errors and worker of a message, or how it ended.",
        "watch": "Watch queues live until Ctrl-C: backlog, lateness, rates, workers, running handlers, failures.",
        "web": "Serve web pages of queues, messages, dead letters and workers until SIGTERM or Ctrl-C.",
    },
    "Act": {
        "publish": "Publish a message, or each line of a file as a message, and print the result.",
        "cancel": "Cancel messages: waiting messages never start; running messages are not retried.",
        "move": "Move messages of one state to another queue, with their ids, due times, retries left and headers.",
        "redrive": "Publish dead letters again, oldest first; each message gets all its retries again.",
        "purge": "Delete messages of one state, or dead letters, permanently; try --dry-run first.",
        "pause": "Pause a queue, a message key or a periodic job; running handlers finish.",
        "resume": "Resume a paused queue, message key or periodic job.",
        "limits": "Show the limits of a queue, or change them while workers run: order, concurrency, rates, weights.",
        "shards": "Show the shards of a queue, or change their number while the queue is in use.",
        "delete": "Delete empty queues with their totals and their list of ended messages.",
        "outbox": "Manage the tables of `publish_in` and `job.once`: print SQL, retry refused rows, delete old rows.",
        "cron": "List periodic jobs, or run a periodic job now.",
        "schedules": "List the schedules of a queue that were made at run time: the next tick of each, and its pause.",
    },
    "Check": {
        "check": "Check every message of a queue for inconsistent data in Redis, while workers run.",
        "doctor": "Check whether a Redis server is fit for queues: print each finding, its consequence and remedy.",
        "acl": "Print the smallest Redis ACL rule for a role; passwords stay unchanged.",
    },
    "Measure": {
        "bench": "Measure reliq on your Redis: rates of publishing and processing, and pickup time of an idle worker.",
    },
}
#: For each module of `reliq.cli`, the commands that it contains. A command that is not listed is in a module of the
#: same name.
MODULES = {
    "checks": "check doctor acl bench",
    "init": "init demo",
    "messages": "list show cancel purge move redrive publish",
    "queues": "queues pause resume delete limits keys shards cron schedules workers",
    "serve": "relay outbox exporter health web",
}
#: The commands whose function has a different name than the command, with the name of the function.
FUNCTIONS = {"list": "list_messages"}
HOMES = {command: module for module, commands in MODULES.items() for command in commands.split()}


#: The command whose options can also be set by environment variables and in pyproject.toml.
WORKER = "worker"


class Commands(LazyGroup):
    """The group of all commands of `reliq`, which are imported when they run."""

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
    """
    Return the error message for a wrong option or argument.

    If the value comes from an environment variable or from pyproject.toml, the message names this source. Otherwise, it
    refers to the --help of the command.
    """
    what = " ".join(error.format_message().split()).rstrip(".")
    name = getattr(getattr(error, "param", None), "name", "")
    setting = error.ctx.meta.get(FOUND, {}).get(name) if error.ctx else None
    if setting and error.ctx.get_parameter_source(name).name == "DEFAULT_MAP":
        return f"{what}; it comes from {setting.origin}"
    return f"{what}; see {error.ctx.command_path if error.ctx else 'reliq'} --help"


def main() -> None:
    """Run the command of the command line, print any error as a single line, and exit with an exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        # print an escape for a character that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
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
    except ReliqError as error:
        is_away = isinstance(error, RedisUnavailableError)
        complain(f"{error}; see that Redis runs and that --url or RELIQ_URL names it" if is_away else error)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigurationError | BodyError) else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
