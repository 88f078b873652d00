"""A module imports only from its own layer and those below it; the outside world is reached from few places."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "reliq"

#: From the bottom up. A line holds modules that may import each other.
LAYERS = (
    ("errors", "extras", "keys", "message", "text", "foreign", "wireformat", "error_text"),
    ("events", "lua", "retry"),
    ("call", "codec", "settings"),
    ("transitions", "commands", "replies", "roster"),
    # ---- I/O from here on
    ("transport", "embedded", "ids"),
    ("client", "settlement"),
    ("publish", "receive", "requests"),
    ("control",),
    ("queue",),
    ("snapshot", "logs", "health", "metrics"),
    ("consumer", "worker"),
    ("tracing", "admin"),
    ("process",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FIRST_WITH_IO = LEVEL["transport"]
OUTSIDE = {"redis", "time", "threading", "random", "logging", "socket", "asyncio", "os", "subprocess", "secrets"}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path):
    """The name that the table has for a module: of itself, or of the folder it is in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path, *, at_run_time=False):
    """The dotted names that a module imports, `from x import y` as `x.y`."""
    tree = ast.parse(path.read_text("utf-8"))
    only_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    left_out = {id(inner) for block in only_types for inner in ast.walk(block)} if at_run_time else set()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def users_of(module):
    return {part_of(path) for path in modules() if any(name.split(".")[0] == module for name in imports(path))}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_own_layer_and_below(path):
    here = part_of(path)
    ours = {name.split(".")[1] for name in imports(path, at_run_time=True) if name.startswith("reliq.")}

    above = sorted(name for name in ours if name in LEVEL and LEVEL[name] > LEVEL[here])

    assert here in LEVEL, f"{here} has no place in the table of layers"
    assert above == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_of_our_own_hides_in_a_function(path):
    tree = ast.parse(path.read_text("utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    hidden = [
        node.module
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reliq")
    ]

    assert hidden == []


@pytest.mark.parametrize(
    "path", [path for path in modules() if LEVEL.get(part_of(path), 0) < FIRST_WITH_IO], ids=lambda path: path.name
)
def test_below_the_line_there_is_no_redis_clock_thread_chance_or_log(path):
    reached = {name.split(".")[0] for name in imports(path)} & OUTSIDE

    assert reached == set()


def test_redis_py_is_known_to_the_transport_and_the_clients_alone():
    assert users_of("redis") <= {"transport", "embedded", "client", "publish", "receive"}


def test_the_client_of_prometheus_is_known_to_the_metrics_alone():
    assert users_of("prometheus_client") <= {"metrics"}


def test_opentelemetry_is_known_to_the_tracing_alone():
    assert users_of("opentelemetry") <= {"tracing"}


def test_the_environment_is_read_in_one_place_and_by_the_commands_which_hand_it_to_their_children():
    readers = {part_of(path) for path in modules() if "environ" in path.read_text() or "getenv" in path.read_text()}

    assert "transport" in readers
    assert readers <= {"transport", "cli", "process"}


def test_nothing_is_ever_unpickled_or_evaluated():
    calls = {
        node.func.id
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }

    assert users_of("pickle") | users_of("marshal") | users_of("shelve") == set()
    assert calls & {"eval", "exec", "compile"} == set()


def test_importing_the_package_reads_no_url_and_opens_nothing():
    names = {name.split(".")[1] for name in imports(PACKAGE / "__init__.py") if name.startswith("reliq.")}

    assert names & {"cli", "process", "metrics", "embedded"} == set()
