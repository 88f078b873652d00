"""The settings of `reliq worker` that its command line leaves out: the environment has them, else pyproject.toml."""

import os
import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from reliq.errors import ConfigurationError

#: The environment of this process as it began, before a command changes it.
ENVIRONMENT = dict(os.environ)
FILE, TABLE = "pyproject.toml", "reliq"
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


def settings_found(options: Mapping[str, bool]) -> dict[str, Setting]:
    """
    Return the settings that the environment has, else the nearest pyproject.toml that has a [tool.reliq].

    Args:
        options: the names of all there are, each with whether it is a list; in a text its items have spaces between them.

    Raises:
        ConfigurationError: the file cannot be read, or its table has something else.
    """
    path, table = _table()
    given = {name.replace("-", "_"): value for name, value in table.items()}
    if strange := sorted(given.keys() - options):
        raise ConfigurationError(
            f"[tool.{TABLE}] of {path} has no setting {spelled(strange[0])!r}{_hint(strange[0], options)}"
        )
    found = {name: Setting(value, str(path)) for name, value in given.items()}
    found |= {name: Setting(os.environ[variable(name)], variable(name)) for name in options if _is_set(name)}
    texts = {name: one for name, one in found.items() if options[name] and isinstance(one.value, str)}
    return found | {name: one._replace(value=one.value.split()) for name, one in texts.items()}


def take_url() -> None:
    """Have this process and those that it starts find the URL of the file, unless the environment has one."""
    if _is_set(URL):
        return
    path, table = _table()
    url = table.get(URL)
    if url is not None and not isinstance(url, str):
        raise ConfigurationError(f"{URL} in [tool.{TABLE}] of {path} must be a text such as redis://127.0.0.1:6379/0")
    if url:
        os.environ[variable(URL)] = url


def servers_of(url: str | None) -> str | tuple[str, ...] | None:
    """Return the Redis that an operator's command is given, or the environment names, when that is several servers."""
    named = tuple((url or os.environ.get(variable(URL)) or "").split())
    return named if len(named) > 1 else url


def misspelled(names: Collection[str]) -> dict[str, str]:
    """Return the variables of the environment that are no setting, but nearly one: name -> the one that is meant."""
    known = [variable(name) for name in names]
    strange = [name for name in os.environ if name.startswith(VARIABLE_PREFIX) and name not in known]
    near = {name: get_close_matches(name, known, 1, cutoff=0.85) for name in strange}
    return {name: found[0] for name, found in near.items() if found}


def _is_set(name: str) -> bool:
    """Say whether the environment has a setting; a text without a letter is none, as what Compose fills in."""
    text = os.environ.get(variable(name), "").strip()
    return bool(text) and not text.startswith(_SERVICE_LINK)


def _table() -> tuple[Path, Mapping[str, Any]]:
    """Return the nearest pyproject.toml that has a [tool.reliq], from this folder upwards, and the table; or none."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        path = folder / FILE
        try:
            text = path.read_text("utf-8")
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        try:
            table = tomllib.loads(text).get("tool", {}).get(TABLE)
        except (ValueError, AttributeError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        if isinstance(table, dict):
            return path, table
    return here / FILE, {}


def _hint(name: str, names: Collection[str]) -> str:
    near = get_close_matches(name, names, 1)
    return f"; is it {spelled(near[0])!r}?" if near else "; `reliq config` lists those that there are"
