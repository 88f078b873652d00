"""The core imports no optional part, and there are no circular imports."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import reliq

PACKAGE = Path(reliq.__file__).parent
#: Optional parts: functions of the core may import them on request, but no module of the core does on its import.
SATELLITES = {"admin", "cli", "contrib", "metrics", "outbox", "sharding", "supervisor", "testing", "tracing", "web"}
#: Modules that import the whole package: the public names and the command.
FRONT = {"reliq", "reliq.__main__"}
#: Functions that import a module by name.
IMPORTERS = {"import_module", "__import__"}


def run_at_import(body):
    """Yield the statements that run on a module's import: not in functions, not for type checkers."""
    for one in body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test):
            continue
        yield one
        for part in ("body", "orelse", "handlers", "finalbody"):
            yield from run_at_import(getattr(one, part, []))


def imports_of(path, modules):
    """Return the modules that a module imports on its import."""
    found = set()
    for one in run_at_import(ast.parse(path.read_text("utf-8")).body):
        if isinstance(one, ast.Import):
            found |= {alias.name for alias in one.names}
        elif isinstance(one, ast.ImportFrom):
            named = [f"{one.module}.{alias.name}" for alias in one.names]
            found |= {name if name in modules else one.module for name in named}
        elif isinstance(one, ast.Expr | ast.Assign):
            calls = (node for node in ast.walk(one) if isinstance(node, ast.Call))
            named = (call.args[0].value for call in calls if ast.unparse(call.func).split(".")[-1] in IMPORTERS)
            found |= set(named)
    return found & modules.keys()


def test_core_imports_no_satellite_and_no_import_is_a_cycle():
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    imported = {name: imports_of(path, modules) for name, path in modules.items() if name not in FRONT}
    core = {name for name in imported if name.split(".")[1] not in SATELLITES}

    assert len(core) > 30
    assert {name: found for name in core if (found := imported[name] - core)} == {}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' -> '.join(error.args[1])}")
