"""The import of the user's module: the consumer in it, or one line that says why there is none and what to do."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from traceback import StackSummary, TracebackException, extract_tb
from typing import TYPE_CHECKING, TypeVar

from reliq.errors import ConfigurationError
from reliq.text import some

if TYPE_CHECKING:
    from types import ModuleType

T = TypeVar("T")

_OURS = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(importlib.__file__).parent}{os.sep}", "<frozen importlib")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def imported(name: str, place: str) -> ModuleType:
    """
    Return the module `name`, which a person wrote as `place`.

    Raises:
        ConfigurationError: it is no module's name, there is none, or an import in it fails.
    """
    if _MODULE.fullmatch(name) is None:
        as_module = ".".join(re.findall(r"[^\W\d]\w*", name.removesuffix(".py")))
        hint = f"; write {place.replace(name, as_module, 1)}" if as_module else ""
        raise ConfigurationError(f"a module is named like shop.jobs, not {name!r}{hint}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"cannot import {name!r}: {_why(name, error)}") from error


def found(place: str, kind: type[T]) -> T:
    """
    Return the instance of `kind` at `module:name`, or the only one in `module`.

    Raises:
        ConfigurationError: the module cannot be imported or has no such instance.
    """
    module_name, _, attribute = place.partition(":")
    module = imported(module_name, place)
    instances = {name: value for name, value in vars(module).items() if isinstance(value, kind)}
    chosen = [value for name, value in instances.items() if attribute in ("", name)]
    if len(set(map(id, chosen))) != 1:
        wanted = f"a {kind.__name__} named {attribute!r}" if attribute else f"exactly one {kind.__name__}"
        names = list(instances)
        has = f": {some(names)} (write {module_name}:{names[0]})" if names else " none"
        raise ConfigurationError(f"module {module_name!r} must have {wanted}; it has{has}")
    return chosen[0]


def traceback_of_module(error: BaseException) -> list[str]:
    """Return the traceback of an exception from the import of a module, from that module's first line on."""
    told = TracebackException.from_exception(error)
    told.stack = StackSummary.from_list([frame for frame in told.stack if not frame.filename.startswith(_OURS)])
    return "".join(told.format()).splitlines()


def _why(name: str, error: ImportError) -> str:
    """Return the name that is missing, the line that imports it, and what to do."""
    missing = error.name or ""
    if isinstance(error, ModuleNotFoundError) and (name == missing or name.startswith(f"{missing}.")):
        return f"{error.msg} in this folder, on PYTHONPATH or installed"
    where = _importing_line(error)
    if "partially initialized module" in str(error.msg):
        return f"a circular import at {where}: {error.msg}; move what both modules need into a third one"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.msg}, which {where} imports; install it for {sys.executable}"
    return f"{error.msg}, at {where}"


def _importing_line(error: ImportError) -> str:
    """Return file and line of the import that failed."""
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "its first line"
