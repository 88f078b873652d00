"""Write a page's programs into a folder and run Python there in this process, which is faster than new processes."""

import ast
import asyncio
import contextlib
import importlib
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import BLOCK

from reliq.cli.app import Commands

#: pytest plugins of the pages' tests; other plugins belong to the surrounding test suite.
PLUGINS = ("pytest_asyncio.plugin", "reliq.testing.plugin")


def write_down(page: Path, folder: Path) -> None:
    """Write the programs of `page` into `folder`, each under the name in its first line."""
    for language, text in BLOCK.findall(page.read_text("utf-8")):
        name = text.partition("\n")[0].removeprefix("# ")
        if language == "python" and name.endswith(".py"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


@contextlib.contextmanager
def imported_from(folder: Path) -> Iterator[None]:
    """Import from `folder`; at the end remove its modules from `sys.modules`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        try:
            yield
        finally:
            for name, module in list(sys.modules.items()):
                places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
                if any(Path(place).is_relative_to(folder) for place in places):
                    del sys.modules[name]


def attribute(place: str) -> Any:
    """Return the object `module:name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def parse(words):
    """Parse the arguments of a command without running it."""
    command = Commands.load(words.pop(0))
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


def run_module(name: str) -> None:
    """Run a module as `python -m` does."""
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_tests(*words: str, server: str) -> int:
    """Run pytest as `python -m pytest` does, on an empty database of the server under test; return its exit code."""
    plugins = [part for name in PLUGINS for part in ("-p", name)]
    settings = [f"reliq_server={server}", "asyncio_default_fixture_loop_scope=function"]
    options = [part for one in settings for part in ("-o", one)]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        own = ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
        return int(pytest.main([*own, *plugins, *options, *words]))


async def run_cells(cells: list[tuple[str, str | None]], times: int) -> list[list[str]]:
    """Run the cells of a notebook `times` times; return the last values of the cells that are marked as shown."""
    names: dict[str, Any] = {"__name__": "__main__"}
    runs = []
    for _ in range(times):
        values = [(await _cell(text, names), is_shown) for text, is_shown in cells]
        runs.append([repr(value) for value, is_shown in values if is_shown])
    return runs


async def _cell(text: str, names: dict[str, Any]) -> Any:
    """Run a cell in the running event loop, as a notebook does; return the value of its last expression."""
    tree, value = ast.parse(text), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    await _run(compile(tree, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if isinstance(last, ast.Expr):
        expression = ast.Expression(last.value)
        value = await _run(compile(expression, "<cell>", "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    return value


async def _run(code: Any, names: dict[str, Any]) -> Any:
    value = eval(code, names)
    return await value if asyncio.iscoroutine(value) else value
