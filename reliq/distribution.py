"""
The installed package: its name, version and extras, conflicts with the other package named reliq, and lazy imports.

Every import of reliq runs this module, so it imports only small modules.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

#: The distribution's name for pip; the package is imported as `reliq`.
NAME = "reliq-queue"
VERSION = "0.2.0"

#: The folder that contains the package.
_FOLDER = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  pathlib costs an import more than the rest of this
#: Whether that folder may be a checkout that is not installed; evaluated now, because `sys.path` may change later.
_IS_CHECKOUT = sys.path[:1] == [_FOLDER]

#: If two distributions brought the same file, pip removes it with either of them, which breaks the other.
_REMEDY = f"run `pip uninstall reliq {NAME}`, then install {NAME} again; programs that need the other reliq go into a venv of their own"


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Return `__getattr__`, `__dir__` and `__all__` for a package that imports its public names at their first use.

    Args:
        homes: module -> its public names, separated by spaces.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    namespace = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = getattr(import_module(home_of[name]), name)
        return namespace[name]

    return find, lambda: sorted({*namespace, *home_of}), sorted(home_of)


def missing(who: str, what: str, extra: str) -> str:
    """Return the message about a missing package `what`, with the command that installs it."""
    return f"{who} needs {what}: {install(extra)} brings it"


def install(*extras: str) -> str:
    """
    Return the command that installs the packages of `extras`.

    The command names these packages and not reliq itself: reliq may be missing in the index, and pip would replace a
    checkout by the version in the index.
    """
    import shlex  # noqa: PLC0415  publishers never call this
    from importlib import metadata  # noqa: PLC0415

    try:
        requirements = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:  # the package runs from its folder
        return f"in its checkout, pip install '.[{','.join(extras)}]'"
    matches = [re.fullmatch(r"""([^;]+?)\s*;\s*extra == ['"]([\w-]+)['"]""", line) for line in requirements]
    packages = dict.fromkeys(match[1] for match in matches if match and match[2] in extras)
    return f"pip install {shlex.join(packages)}"


def source() -> str:
    """Return the source of this installation: a checkout's folder, a wheel, or the name in an index."""
    import json  # noqa: PLC0415
    from importlib import metadata  # noqa: PLC0415
    from urllib.parse import unquote, urlsplit  # noqa: PLC0415

    try:
        recorded = metadata.distribution(NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        recorded = None
    url = urlsplit(json.loads(recorded)["url"] if recorded else "")
    return unquote(url.path) if url.scheme == "file" else url.geturl() or NAME


def command_of(module: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs a module of this package in a new process, and its environment."""
    environment = dict(os.environ)
    if _IS_CHECKOUT:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _FOLDER]))
    # With -P, files in the current folder cannot hide modules of Python or of this package.
    return [sys.executable, "-P", "-m", module], environment


def collision(folder: str) -> str:
    """
    Describe the conflict with an installed distribution named `reliq` beside the package in `folder`; empty if none.

    Its package has the same name, so installing or removing either distribution overwrites or deletes files of the
    other.
    """
    parent = os.path.dirname(folder)  # noqa: PTH120  pathlib costs an import more than the rest of this
    try:
        others = [name for name in os.listdir(parent) if name.startswith("reliq-") and name.endswith("-info")]  # noqa: PTH208
    except OSError:  # the package is in an archive, or its folder cannot be listed
        return ""
    if not others:
        return ""
    other = others[0].rpartition(".")[0].replace("-", " ")
    return (
        f"{other} is installed into the same folder as {NAME} {VERSION}, {folder}: each overwrites the other; {_REMEDY}"
    )


def replacement() -> str:
    """Describe the problem if this distribution's modules run, but the package `reliq` is from another distribution."""
    package = sys.modules["reliq"]
    if "Queue" in getattr(package, "__all__", ()):
        return ""
    where = getattr(package, "__file__", None)
    fault = f"{where} is not that of {NAME}" if where else "the package reliq has lost its __init__.py"
    return f"{fault}: another distribution named reliq has overwritten or removed it; {_REMEDY}"
