"""
The installed package: its name, version, extras and lazy imports, and conflicts with another package named reliq.

Every import of reliq runs this module, so this module itself imports only small modules.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

#: The name of the package for pip. Programs import it as `reliq`.
NAME = "reliq-queue"
VERSION = "0.2.0"

#: The folder that contains the package.
_FOLDER = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  importing pathlib would cost more than this module
#: Whether `_FOLDER` is probably a checkout of the source code that is not installed with pip. This is computed at the
#: import, because `sys.path` may change later.
_IS_CHECKOUT = sys.path[:1] == [_FOLDER]

#: How to end the conflict. If two installed packages contain the same file, removing one of them with pip deletes the
#: file and breaks the other package.
_REMEDY = f"run `pip uninstall reliq {NAME}`, then install {NAME} again; programs that need the other reliq go into a venv of their own"


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Return `__getattr__`, `__dir__` and `__all__` for a package that imports its public names at their first use.

    Args:
        package: the name of the package.
        homes: a dict from each module to its public names, separated by spaces.
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
    """Return an error text which says that `who` needs the package `what`, and how to install the package."""
    return f"{who} needs {what}: {install(extra)} brings it"


def install(*extras: str) -> str:
    """
    Return the pip command that installs the packages of some extras of reliq.

    The command does not contain the name of reliq itself. The package index may not have reliq, and pip would replace a
    checkout of the source code by the version in the index.
    """
    import shlex  # noqa: PLC0415  publishers never call this function
    from importlib import metadata  # noqa: PLC0415

    try:
        requirements = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:  # reliq runs from a checkout of its source code and is not installed
        return f"in its checkout, pip install '.[{','.join(extras)}]'"
    matches = [re.fullmatch(r"""([^;]+?)\s*;\s*extra == ['"]([\w-]+)['"]""", line) for line in requirements]
    packages = dict.fromkeys(match[1] for match in matches if match and match[2] in extras)
    return f"pip install {shlex.join(packages)}"


def source() -> str:
    """Return the source from which pip installed reliq: a folder, a URL, or the name in the package index."""
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
    """Return the command and the environment variables for a new process that runs a module of this package."""
    environment = dict(os.environ)
    if _IS_CHECKOUT:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _FOLDER]))
    # With -P, Python does not import files in the current folder instead of modules of Python or of this package.
    return [sys.executable, "-P", "-m", module], environment


def collision(folder: str) -> str:
    """
    Describe the conflict with the other pip package named `reliq`, or return an empty text if it is not installed.

    Both pip packages contain an import package `reliq`. So installing or removing one of them overwrites or deletes
    files of the other.

    Args:
        folder: the folder of this package. The other package would be in the same folder.
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
    """Describe how another pip package has overwritten or removed the package `reliq`; empty if it has not."""
    package = sys.modules["reliq"]
    if "Queue" in getattr(package, "__all__", ()):
        return ""
    where = getattr(package, "__file__", None)
    fault = f"{where} does not belong to {NAME}" if where else "the package reliq has lost its __init__.py"
    return f"{fault}: another distribution named reliq has overwritten or removed it; {_REMEDY}"
