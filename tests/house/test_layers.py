"""Modules lie in layers, and import only from lower ones; the outside world is reached from few places."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "reliq"

#: From the bottom up. A part, which is a module or a folder, imports only from the lines above its own here.
LAYERS = {
    "words and values": {
        "distribution",
        "chunks",
        "errors",
        "events",
        "foreign",
        "keywords",
        "lazily",
        "message",
        "text",
        "lua",
        "hashtags",
    },
    "how they are spelled, in Redis and in logs": {"keys", "wireformat", "failure_note", "codec", "call", "retry"}
    | {
        "outgoing",
        "server_version",
        "roster",
        "logs",
        "health",
        "embedded",
        "error_text",
        "rights",
        "readable",
        "schedule",
    },
    "what a person may set, what a handler and Redis may answer": {"settings", "answers", "replies"},
    "what can be asked of Redis and of a database, and the connections": {
        "outbox",
        "transitions",
        "commands",
        "minutes",
        "crons",
        "shardmap",
        "stacks",
        "ids",
        "limits",
        "transport",
    },
    "who asks: tries again, and translates errors; how a delivery is settled": {"client", "settlement"},
    "messages in, messages out, and a look at all": {"publish", "redriving", "receive", "snapshot"},
    "metrics; a queue without its bodies; what moves messages out of a database": {
        "metrics",
        "control",
        "declared",
        "relay",
    },
    "the queue of the public interface": {"queue"},
    "handlers as they are registered, and operators": {"handlers", "admin"},
    "what runs handlers": {"worker"},
    "the consumer of the public interface": {"consumer"},
    "processes of workers, web pages, traces, benchmarks, tests of users": {"process", "web", "tracing", "bench"}
    | {"contrib", "testing"},
    "the command line": {"cli"},
    "python -m reliq": {"__main__"},
}
LEVEL = {name: level for level, names in enumerate(LAYERS.values()) for name in names}
LAYERS_LIMIT = 14
#: Parts that only compute: no Redis, clock, thread, chance or log.
PURE = {
    "chunks",
    "errors",
    "events",
    "foreign",
    "keywords",
    "message",
    "text",
    "lua",
    "keys",
    "wireformat",
    "codec",
    "call",
}
PURE |= {
    "failure_note",
    "minutes",
    "hashtags",
    "shardmap",
    "stacks",
    "crons",
    "schedule",
    "outgoing",
    "limits",
    "server_version",
}
PURE |= {"answers", "retry", "rights", "roster", "settings", "replies", "transitions", "commands"}
OUTSIDE = {"redis", "time", "threading", "random", "logging", "socket", "asyncio", "os", "subprocess", "secrets"}
#: `python -m reliq.x` begins another process, which imports for itself: a text behind `-m` is no import.
IMPORTERS = {"import_module", "__import__", "find_spec", "resolve_name"}


@cache
def modules():
    """Path -> tree of every module, but the package's own list of public names, which imports downwards alone."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
    return {path: ast.parse(path.read_text("utf-8")) for path in paths}


def part_of(path):
    """The name that the table has for a module: of itself, or of the folder it is in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree):
    """The dotted names that a module imports, `from x import y` as `x.y`; for types and by a text too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS:
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))


def dotted(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def graph():
    """Module -> our own modules that it imports."""
    names = {dotted(path) for path in modules()}

    def module_in(name):
        while name and name not in names:
            name = name.rpartition(".")[0]
        return name

    found = {dotted(path): {module_in(name) for name in imports(tree)} for path, tree in modules().items()}
    return {name: used - {name, ""} for name, used in found.items()}


def users_of(module):
    return {
        part_of(path) for path, tree in modules().items() if module in {name.split(".")[0] for name in imports(tree)}
    }


def test_every_part_has_one_place_in_the_layers():
    parts = {part_of(path) for path in modules()}

    assert parts == set(LEVEL)
    assert sum(map(len, LAYERS.values())) == len(LEVEL)
    assert len(LAYERS) <= LAYERS_LIMIT


def test_a_part_imports_only_from_layers_below_its_own():
    upwards = sorted(
        f"{name} imports {used}"
        for name, all_used in graph().items()
        for used in all_used
        if name.split(".")[1] != used.split(".")[1] and LEVEL[used.split(".")[1]] >= LEVEL[name.split(".")[1]]
    )

    assert upwards == []


def test_no_modules_import_each_other_in_a_circle_not_even_for_types_or_by_a_text():
    try:
        circle = []
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        circle = error.args[1]

    assert circle == []


def test_the_package_itself_is_imported_by_nothing_in_it_but_an_example():
    users = {dotted(path) for path, tree in modules().items() for name in imports(tree) if _is_public_name(name)}

    assert users <= {"reliq.cli.demo_jobs"}


def _is_public_name(name):
    return name.startswith("reliq.") and name.count(".") == 1 and name.split(".")[1] not in LEVEL


def test_a_circle_by_a_text_or_for_types_is_seen():
    text = "import importlib\nif TYPE_CHECKING:\n    from reliq.worker import loop\nimportlib.import_module('reliq.cli.app')\n"

    assert {"reliq.worker.loop", "reliq.cli.app"} <= set(imports(ast.parse(text)))


def test_no_import_of_our_own_is_relative_or_hides_in_a_function():
    hidden = [
        f"{dotted(path)}:{node.lineno}"
        for path, tree in modules().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reliq")
    ]
    relative = [
        dotted(path)
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]

    assert (hidden, relative) == ([], [])


def test_what_only_computes_knows_no_redis_clock_thread_chance_or_log():
    reached = {
        (part_of(path), name.split(".")[0])
        for path, tree in modules().items()
        for name in imports(tree)
        if part_of(path) in PURE and name.split(".")[0] in OUTSIDE
    }

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
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }

    assert users_of("pickle") | users_of("marshal") | users_of("shelve") == set()
    assert calls & {"eval", "exec", "compile"} == set()


def test_importing_the_package_reads_no_url_and_opens_nothing():
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    names = {name.split(".")[1] for name in imports(tree) if name.startswith("reliq.")}

    assert names & {"cli", "process", "metrics", "embedded"} == set()
