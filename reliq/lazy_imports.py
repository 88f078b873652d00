"""Public names of a package that are imported when they are first used: who uses few of them waits for few modules."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Return what `__getattr__`, `__dir__` and `__all__` are of a package.

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
