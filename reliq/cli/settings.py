"""The settings of `reliq worker` that its command line leaves out: the environment has them, else pyproject.toml."""

import os
import stat
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import typer

from reliq.cli.output import complain
from reliq.errors import ConfigurationError

#: The environment of this process as it began, before a command changes it.
ENVIRONMENT = dict(os.environ)
FILE = "pyproject.toml"
TABLE = "reliq"
VARIABLE_PREFIX = "RELIQ_"
#: Kubernetes puts the address of a Service named `reliq-metrics` into RELIQ_METRICS_PORT, as text of this form.
_SERVICE_LINK = "tcp://"
#: Where the context of a command keeps the settings that were found.
FOUND = "reliq.settings"
#: The name of the setting that every command and every program reads from the environment.
URL = "url"


class Setting(NamedTuple):
    """
    A value that was found.

    Attributes:
        origin: the variable that has it, or the file.
    """

    value: Any
    origin: str


def variable(name: str) -> str:
    """Return how the environment spells the setting `name`: RELIQ_MAX_JOBS."""
    return VARIABLE_PREFIX + name.upper()


def spelled(name: str) -> str:
    """Return how the command line and the file spell the setting `name`: max-jobs."""
    return name.replace("_", "-")


def settings_of(worker: Any) -> dict[str, bool]:
    """Return the names of the options of `reliq worker` that are settings, each with whether it may be given again."""
    own = [option for option in worker.params if option.name not in ("json", "show_settings")]
    return {option.name: getattr(option, "multiple", False) for option in own}


def settings_found(worker: Any) -> dict[str, Setting]:
    """
    Return the settings that the environment has, else the nearest pyproject.toml that has a [tool.reliq].

    The items of a list in the environment have spaces between them.

    Raises:
        ConfigurationError: the file cannot be read, or its table has something else.
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
    Return the value of --url. Without it, put the URL of the file into RELIQ_URL, unless that is set, and print its origin.

    Processes that this command starts read RELIQ_URL, too. Completion reads no file.
    """
    if url is not None or ctx.resilient_parsing or _is_set(URL):
        return url
    path, table = _table()
    if table.get(URL):
        os.environ[variable(URL)] = table[URL]
        complain(f"using the Redis URL of [tool.{TABLE}] in {path}")
    return None


def misspelled(worker: Any) -> dict[str, str]:
    """Return the misspelled variables of the environment: name -> the variable that is meant."""
    variables = [variable(name) for name in settings_of(worker)]
    unknown = [name for name in os.environ if name.startswith(VARIABLE_PREFIX) and name not in variables]
    near = {name: get_close_matches(name, variables, 1, cutoff=0.85) for name in unknown}
    return {name: matches[0] for name, matches in near.items() if matches}


def _is_set(name: str) -> bool:
    """Return whether the environment has a setting; Compose sets an empty text for a missing variable."""
    text = os.environ.get(variable(name), "").strip()
    return bool(text) and not text.startswith(_SERVICE_LINK)


def _table() -> tuple[Path, Mapping[str, Any]]:
    """
    Return the nearest pyproject.toml that has a [tool.reliq], and that table; an empty table when there is none.

    The search goes from the working folder upwards. It ends at the root of a repository, and below a folder that every
    user can write to, such as /tmp.

    Raises:
        ConfigurationError: the file cannot be read, another user could have written it, or the working folder is gone.
    """
    import tomllib  # noqa: PLC0415  only `reliq worker` reads the file

    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        raise ConfigurationError("the working folder was deleted: change to another one") from error
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
                raise ConfigurationError(f"{path} cannot be read: {error}; mend or rename it") from error
            table = None  # this user may not look into the folder: no file of it counts
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}; mend or rename it") from error
        if isinstance(table, dict):
            _check_owner(path, status)
            _check_owner(folder, folder.stat())
            if not isinstance(table.get(URL, ""), str):
                raise ConfigurationError(
                    f"{URL} in [tool.{TABLE}] of {path} must be a text, such as redis://127.0.0.1:6379/0"
                )
            return path, table
        if os.access(folder / ".git", os.F_OK):  # Path.exists raises where this user may not look
            break
    return here / FILE, {}


def _opened(path: str, flags: int) -> int:
    """Open a regular file. Refuse a FIFO, which may have no writer, a device and a folder."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return descriptor


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raise ConfigurationError when a user other than root and the current user could have written a file."""
    if status.st_uid not in (0, os.geteuid()):
        why = f"{path} belongs to user {status.st_uid}"
        remedy = "change the owner"
    elif status.st_mode & stat.S_IWOTH:
        why = f"every user can write to {path}"
        remedy = "chmod o-w"
    else:
        return
    raise ConfigurationError(
        f"[tool.{TABLE}] is not used, as {why}: {remedy}, or set RELIQ_ variables and delete the table"
    )
