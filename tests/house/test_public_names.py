"""What is public is listed and told."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reliq

MODULES = sorted(
    found.name for found in pkgutil.walk_packages(reliq.__path__, "reliq.") if "__main__" not in found.name
)


#: Packages whose names are imported when they are first used.
LAZY = [importlib.import_module(name) for name in ("reliq", "reliq.admin", "reliq.testing")]
#: Modules from which a user imports; what has no `__all__` offers each name of its own.
OFFERED = [importlib.import_module(name) for name in ("reliq.events", "reliq.limits", "reliq.web", "reliq.metrics")]
each_lazy_package = pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
#: Types of attributes and methods by which the parts of the package reach each other, and of options for type checkers.
OURS = {"Chosen", "Connection", "Deadline", "DeliveryState", "Engine", "EngineStats", "Handler", "HandlerCall"}
OURS |= {"HeldDelivery", "Keys", "Options", "Periodic", "PeriodicOptions", "Publishes", "Registry", "Session"}
OURS |= {"SettingsAndLimits", "ShardMaps", "TestClock"}


def types_of(package):
    """Module and name of each import that a package makes for type checkers."""
    return {
        (node.module, alias.name)
        for block in ast.parse(inspect.getsource(package)).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        for alias in node.names
    }


@each_lazy_package
def test_the_public_names_are_sorted_and_those_that_type_checkers_see(package):
    assert package.__all__ == sorted(package.__all__)
    assert sorted(name for _, name in types_of(package)) == package.__all__
    assert set(package.__all__) <= set(dir(package))


@each_lazy_package
def test_a_public_name_is_imported_when_it_is_used_from_where_types_say_it_is(package):
    wrong = [
        name
        for module, name in types_of(package)
        if getattr(package, name) is not getattr(importlib.import_module(module), name)
    ]

    assert wrong == []
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Queueue'"):
        package.Queueue  # noqa: B018  it is what raises


@pytest.mark.parametrize("package", ["reliq", "reliq.admin", "reliq.testing"])
def test_a_package_alone_imports_no_module_that_its_names_are_in(package):
    code = f"import sys, {package}; print(*(name for name in sys.modules if name.startswith('reliq.')))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert set(done.stdout.split()) - {"reliq.admin", "reliq.testing"} == {"reliq.distribution", "reliq.lazily"}


#: Parts that only run, operate or measure.
BESIDE_PUBLISHERS = {"admin", "bench", "cli", "consumer", "handlers", "metrics", "process", "relay", "testing", "web"}
BESIDE_PUBLISHERS |= {"limits", "snapshot", "tracing", "worker"}


def test_a_publisher_imports_few_modules_and_none_that_only_runs_or_operates():
    """Counted are modules, for times depend on the machine."""
    code = """
import sys, redis.asyncio
before = set(sys.modules)
from reliq import Queue, Outgoing, PublishFailed
print(*(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    ours = [name.split(".") for name in done.stdout.split() if name.startswith("reliq.")]
    others = {name.split(".")[0] for name in done.stdout.split()} - {"reliq"}
    assert {one for _, one, *_ in ours} & BESIDE_PUBLISHERS == set()
    assert len(ours) <= 100
    assert others <= {"_decimal", "decimal", "getpass", "msgspec", "numbers", "tenacity", "termios", "unicodedata"}


def offered():
    """Each public name with its value."""
    for module in (*LAZY, *OFFERED):
        own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
        yield from ((name, getattr(module, name)) for name in getattr(module, "__all__", own) if name[0] != "_")


def annotations(kind):
    """Where a class has annotations, and what they say: its public methods and fields."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] != "reliq":
            continue
        yield from ((name, text) for name, text in inspect.get_annotations(base).items() if name[0] != "_")
        for name, member in vars(base).items():
            code = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
            if inspect.isfunction(code) and (name == "__init__" or name[0] != "_"):
                yield from ((name, text) for text in code.__annotations__.values())


def defined():
    """The name of each class and alias of a type in the package."""
    for path in Path(reliq.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            names += [one.id for one in getattr(node, "targets", ()) if isinstance(one, ast.Name)]
            yield from (name for name in names if name[0].isupper() and not name.isupper())


def test_every_type_that_a_public_signature_names_can_be_imported():
    public, ours = dict(offered()), set(defined())
    named = {
        (word, f"{name}.{member}")
        for name, kind in public.items()
        if inspect.isclass(kind)
        for member, text in annotations(kind)
        for word in re.findall(r"[A-Z]\w+", getattr(text, "__name__", "") if inspect.isclass(text) else str(text))
    }

    assert {(word, where) for word, where in named if word in ours - OURS - public.keys()} == set()
    assert {word for word, _ in named} >= OURS


def test_every_exception_is_public_and_stands_in_the_tree():
    errors = importlib.import_module("reliq.errors")
    kinds = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}

    assert kinds <= set(reliq.__all__)
    assert kinds == set(re.findall(r"\b(?:[A-Z]\w+(?:Error|Warning)|PublishFailed|Stopped)\b", errors.__doc__)) - {
        "ValueError",
        "UserWarning",
    }


def test_the_version_is_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+", reliq.__version__)


@pytest.mark.parametrize("name", MODULES)
def test_what_is_public_is_told(name):
    module = importlib.import_module(name)
    own = {
        key: thing
        for key, thing in vars(module).items()
        if not key.startswith("_")
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__ == name
    }

    untold = [key for key, thing in own.items() if not inspect.getdoc(thing)]

    assert module.__doc__
    assert untold == []
