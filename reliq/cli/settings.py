"""Read settings of `reliq worker` from environment variables and pyproject.toml, for options that are not given."""

import os
import stat
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import typer

from reliq.cli.output import complain
from reliq.errors import ConfigurationError

#: A copy of the environment variables with which this process started, because a command may change `os.environ`.
ENVIRONMENT = dict(os.environ)
FILE = "pyproject.toml"
TABLE = "reliq"
VARIABLE_PREFIX = "RELIQ_"
#: Values that start with this text are ignored: for a Service named reliq-metrics, Kubernetes sets RELIQ_METRICS_PORT
#: to tcp://HOST:PORT.
_SERVICE_LINK = "tcp://"
#: The return value of `settings_found` is stored in `typer.Context.meta` under this key.
FOUND = "reliq.settings"
#: The name of the setting with the Redis URL. All commands and programs read this setting from the environment, not
#: only `reliq worker`.
URL = "url"


class Setting(NamedTuple):
    """
    The value of a setting, and its source.

    Attributes:
        origin: the source of the value: the name of an environment variable, or the path of a file.
    """

    value: Any
    origin: str


def variable(name: str) -> str:
    """Return the name of the environment variable for a setting: RELIQ_MAX_JOBS for `max_jobs`."""
    return VARIABLE_PREFIX + name.upper()


def spelled(name: str) -> str:
    """Return the name of a setting in pyproject.toml and on the command line: max-jobs for `max_jobs`."""
    return name.replace("_", "-")


def settings_of(worker: Any) -> dict[str, bool]:
    """Return the names of all settings of `reliq worker`, each with whether its value is a list."""
    own = [option for option in worker.params if option.name not in ("json", "show_settings")]
    return {option.name: getattr(option, "multiple", False) for option in own}


def settings_found(worker: Any) -> dict[str, Setting]:
    """
    Return the settings of `reliq worker` from environment variables and from pyproject.toml.

    Use the table [tool.reliq] of the nearest pyproject.toml that has this table.

    An environment variable overrides the file. In a variable, the items of a list are separated by spaces.

    Raises:
        ConfigurationError: pyproject.toml cannot be read, or its table has an unknown setting.
    """
    options = settings_of(worker)
    path, table = _table()
    settings = {name.replace("-", "_"): Setting(value, str(path)) for name, value in table.items()}
    if unknown := sorted(settings.keys() - options):
        near = get_close_matches(unknown[0], options, 1)
        hint = f"is it {spelled(near[0])!r}?" if near else "`reliq worker --show-settings` lists all settings"
        raise ConfigurationError(f"[tool.{TABLE}] of {path} has no setting {spelled(unknown[0])!r}; {hint}")
    settings |= {name: Setting(os.environ[variable(name)], variable(name)) for name in options if _is_set(name)}
    return {
        name: Setting(value.split() if options[name] and isinstance(value, str) else value, origin)
        for name, (value, origin) in settings.items()
    }


def take_url(ctx: typer.Context, url: str | None) -> str | None:
    """
    Return the value of the option --url; None if it is not given.

    If neither --url nor RELIQ_URL is set, set RELIQ_URL to the URL in pyproject.toml, and print the path of the file.
    So processes that the command starts use the same URL. During shell completion, pyproject.toml is not read.
    """
    if url is not None or ctx.resilient_parsing or _is_set(URL):
        return url
    path, table = _table()
    if table.get(URL):
        os.environ[variable(URL)] = table[URL]
        complain(f"using the Redis URL of [tool.{TABLE}] in {path}")
    return None


def misspelled(worker: Any) -> dict[str, str]:
    """Return the environment variables RELIQ_... that are probably misspelled, each with the correct variable."""
    variables = [variable(name) for name in settings_of(worker)]
    unknown = [name for name in os.environ if name.startswith(VARIABLE_PREFIX) and name not in variables]
    near = {name: get_close_matches(name, variables, 1, cutoff=0.85) for name in unknown}
    return {name: matches[0] for name, matches in near.items() if matches}


def _is_set(name: str) -> bool:
    """
    Return whether the environment variable of a setting has a value.

    An empty text is not a value, because Docker Compose sets missing variables to an empty text.
    """
    text = os.environ.get(variable(name), "").strip()
    return bool(text) and not text.startswith(_SERVICE_LINK)


def _table() -> tuple[Path, Mapping[str, Any]]:
    """
    Return the path of the nearest pyproject.toml with a table [tool.reliq], and this table.

    If there is no such file, return an empty table.

    The search starts in the working folder and goes up to the root of the repository. It stops before a folder that
    every user can write to, such as /tmp.

    Raises:
        ConfigurationError: the file cannot be read, another user could have written it, or the working folder was
            deleted.
    """
    import tomllib  # noqa: PLC0415  only `reliq worker` reads the file

    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        raise ConfigurationError("the working folder was deleted: change to another folder") from error
    for folder in (here, *here.parents):
        path = folder / FILE
        try:
            if folder != here and folder.stat().st_mode & stat.S_IWOTH:
                break
            with open(path, "rb", opener=_opened) as file:
                status = os.fstat(file.fileno())
                table = tomllib.load(file).get("tool", {}).get(TABLE)
        except (FileNotFoundError, NotADirectoryError):
            table = None
        except PermissionError as error:
            if os.access(folder, os.X_OK):
                raise ConfigurationError(f"{path} cannot be read: {error}; repair or rename it") from error
            table = None  # the current user has no access to this folder, so continue with its parent
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}; repair or rename it") from error
        if isinstance(table, dict):
            _check_owner(path, status)
            _check_owner(folder, folder.stat())
            if not isinstance(table.get(URL, ""), str):
                raise ConfigurationError(
                    f"{URL} in [tool.{TABLE}] of {path} must be a text, such as redis://127.0.0.1:6379/0"
                )
            return path, table
        if os.access(folder / ".git", os.F_OK):  # unlike Path.exists, os.access does not raise PermissionError
            break
    return here / FILE, {}


def _opened(path: str, flags: int) -> int:
    """Open a regular file. Raise ValueError for a FIFO, a device or a folder, because reading a FIFO could block."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is a FIFO, a device or a folder")
    return descriptor


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raise ConfigurationError if a user other than root and the current user could have written a file or folder."""
    if status.st_uid not in (0, os.geteuid()):
        why = f"{path} belongs to user {status.st_uid}"
        remedy = "change the owner"
    elif status.st_mode & stat.S_IWOTH:
        why = f"every user can write to {path}"
        remedy = "chmod o-w"
    else:
        return
    raise ConfigurationError(
        f"[tool.{TABLE}] is not used: {why}; {remedy}, or set RELIQ_ variables and delete the table"
    )
