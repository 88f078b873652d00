"""
The package as installed (its name, version, extras, and conflicts with the other reliq), and its lazy public names.

Every import of reliq runs this module, so it imports nothing heavy.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

#: The name by which it is installed; the package is imported as `reliq`.
NAME = "reliq-queue"
VERSION = "0.2.0"

#: The folder that the package is in.
_FOLDER = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  pathlib costs an import more than the rest of this
#: Whether that folder may be a checkout that is not installed. An application may change the search path later.
_IS_CHECKOUT = sys.path[:1] == [_FOLDER]

#: pip removes a file with each distribution that brought it: taking one of two away breaks the other.
_REMEDY = f"run `pip uninstall reliq {NAME}`, then install {NAME} again; programs that need the other reliq go into a venv of their own"


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Return `__getattr__`, `__dir__` and `__all__` of a package that imports a public name when it is first used.

    Args:
        homes: module -> the public names in it, with spaces between them.
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
    """Return the text that `who` needs `what`, and a command that installs it wherever reliq itself came from."""
    return f"{who} needs {what}: {install(extra)} brings it"


def install(*extras: str) -> str:
    """
    Return the command that installs the packages of `extras`.

    It names the packages, not this distribution: pip may not find the distribution on an index, and would
    exchange a checkout for it if it did.
    """
    import shlex  # noqa: PLC0415  publishers import this module and never call this
    from importlib import metadata  # noqa: PLC0415

    try:
        requirements = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:  # the package runs from its folder
        return f"in its checkout, pip install '.[{','.join(extras)}]'"
    matches = [re.fullmatch(r"""([^;]+?)\s*;\s*extra == ['"]([\w-]+)['"]""", line) for line in requirements]
    packages = dict.fromkeys(match[1] for match in matches if match and match[2] in extras)
    return f"pip install {shlex.join(packages)}"


def source() -> str:
    """Return where pip installed this distribution from: a checkout's folder, a wheel, or its name on an index."""
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
    """Return the command that runs a module of this package in a process of its own, and the environment for it."""
    environment = dict(os.environ)
    if _IS_CHECKOUT:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _FOLDER]))
    # With -P no module of the current folder hides one of Python's or of this package.
    return [sys.executable, "-P", "-m", module], environment


def collision(folder: str) -> str:
    """
    Return what is wrong when a distribution named `reliq` is installed beside the package in `folder`, else an empty text.

    Its package has the same name: whichever is installed or removed last has overwritten or deleted files of the other.
    """
    parent = os.path.dirname(folder)  # noqa: PTH120  pathlib costs an import more than the rest of this
    try:
        others = [name for name in os.listdir(parent) if name.startswith("reliq-") and name.endswith("-info")]  # noqa: PTH208
    except OSError:  # the package is in an archive, or its folder may not be listed
        return ""
    if not others:
        return ""
    other = others[0].rpartition(".")[0].replace("-", " ")
    return (
        f"{other} is installed into the same folder as {NAME} {VERSION}, {folder}: each overwrites the other; {_REMEDY}"
    )


def replacement() -> str:
    """Return what is wrong when the modules of this distribution run, but the package `reliq` itself is not its own."""
    package = sys.modules["reliq"]
    if "Queue" in getattr(package, "__all__", ()):
        return ""
    where = getattr(package, "__file__", None)
    fault = f"{where} is not that of {NAME}" if where else "the package reliq has lost its __init__.py"
    return f"{fault}: another distribution named reliq has overwritten or removed it; {_REMEDY}"
