"""The distribution that the package comes in: its name, its version, its extras, and others that write into its folder."""

import os
import sys

#: The name by which it is installed; the package is imported as `reliq`.
NAME = "reliq-queue"
VERSION = "0.2.0"

#: pip removes a file with each distribution that brought it: taking one of two away breaks the other.
_REMEDY = (
    f"run `pip uninstall reliq {NAME}`, then `pip install {NAME}`; what needs the other one goes into a venv of its own"
)


def missing(who: str, what: str, extra: str) -> str:
    """Return that `who` needs `what`, and how to install it."""
    return f"{who} needs {what}: pip install '{NAME}[{extra}]' brings it"


def collision(folder: str) -> str:
    """
    Return what is wrong when a distribution named `reliq` is installed beside the package in `folder`, else an empty text.

    Its package has the same name: whichever is installed or removed last has overwritten or deleted files of the other.
    """
    parent = os.path.dirname(folder)  # noqa: PTH120  pathlib costs an import more than the rest of this
    try:
        found = [name for name in os.listdir(parent) if name.startswith("reliq-") and name.endswith("-info")]  # noqa: PTH208
    except OSError:  # the package is in an archive, or its folder may not be listed
        return ""
    if not found:
        return ""
    other = found[0].rpartition(".")[0].replace("-", " ")
    return (
        f"{other} is installed into the same folder as {NAME} {VERSION}, {folder}: each overwrites the other; {_REMEDY}"
    )


def replacement() -> str:
    """Return what is wrong when the modules of this distribution run, but the package `reliq` itself is not its own."""
    package = sys.modules["reliq"]
    if "Queue" in getattr(package, "__all__", ()):
        return ""
    where = getattr(package, "__file__", None)
    told = f"{where} is not that of {NAME}" if where else "the package reliq has lost its __init__.py"
    return f"{told}: another distribution named reliq has overwritten or removed it; {_REMEDY}"
