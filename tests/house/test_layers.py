"""Modules import only from lower layers, and never in a cycle."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "reliq"
#: Functions that import a module by its name.
IMPORTERS = {"import_module", "__import__", "find_spec", "resolve_name"}


def imported_by(path):
    """The dotted names that a module imports, `from x import y` as `x.y`; also for types, and by a text."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS:
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))


def test_modules_import_only_lower_layers_and_never_in_a_cycle():
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    modules = {}
    for name, path in paths.items():
        prefixes = [[one.rsplit(".", cut)[0] for cut in range(one.count(".") + 1)] for one in imported_by(path)]
        modules[name] = {next((one for one in names if one in paths), name) for names in prefixes} - {name}
    layers = {}
    for name, used in modules.items():
        if name != "reliq":
            layers.setdefault(name.split(".")[1], set()).update(one.split(".")[1] for one in used - {"reliq"})
    table = re.findall(r"^\| (`.+) \| .+ \|$", (PACKAGE / "README.md").read_text("utf-8"), re.MULTILINE)
    rank = {part: at for at, row in enumerate(table) for part in re.findall(r"`(\w+)(?:/|\.py)`", row)}

    upwards = {
        f"{part} imports {used}"
        for part, all_used in layers.items()
        for used in all_used - {part}
        if part in rank and used in rank and rank[used] >= rank[part]
    }

    assert len(rank) > 30
    assert upwards == set(), "see the table of layers in reliq/README.md"
    for graph in (modules, {part: used - {part} for part, used in layers.items()}):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"a cycle of imports: {' -> '.join(error.args[1])}")
