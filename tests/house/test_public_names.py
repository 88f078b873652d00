"""Public names are imported on first use, and a publisher imports only the modules that it needs."""

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

import reliq

#: Packages that import their names on first use.
LAZY = ("reliq", "reliq.admin", "reliq.metrics", "reliq.testing")
#: Modules for running, operating and measuring only, and their libraries.
BESIDE_PUBLISHERS = {"admin", "cli", "consumer", "metrics", "outbox", "supervisor", "testing", "web"}
BESIDE_PUBLISHERS |= {"tracing", "worker"}
LIBRARIES = {"cronsim", "opentelemetry", "prometheus_client", "psutil", "rich", "starlette", "typer", "uvicorn"}


def types_of(package):
    """Return module and name of each import that a package makes for type checkers only."""
    return {
        (node.module, alias.name)
        for block in ast.parse(inspect.getsource(package)).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        for alias in node.names
    }


def imported_by(code):
    """Return the modules that a program imports, without redis.asyncio and its imports."""
    text = f"import sys, redis.asyncio; before = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", LAZY)
def test_public_names_of_a_package_are_those_that_type_checkers_see(name):
    package = importlib.import_module(name)
    found = {one: getattr(importlib.import_module(module), one) for module, one in types_of(package)}

    assert package.__all__ == sorted(found)
    assert set(package.__all__) <= set(dir(package))
    assert [one for one in found if getattr(package, one) is not found[one]] == []
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Queueue'"):
        package.Queueue  # noqa: B018  the attribute raises


def test_package_alone_imports_no_module_of_its_names():
    names = imported_by("import reliq, reliq.admin, reliq.metrics, reliq.testing")

    ours = {"reliq.admin", "reliq.metrics", "reliq.testing", "reliq.distribution"}
    assert {name for name in names if name.startswith("reliq.")} == ours


def test_operators_and_tests_import_no_prometheus_client():
    """Importing prometheus_client fixes the place of an application's metrics, before its environment may be set."""
    names = imported_by("from reliq.admin import Admin; from reliq.testing import Reliq")

    assert {name for name in names if name.startswith("prometheus_client")} == set()


def test_publisher_imports_nothing_that_only_runs_or_operates():
    names = imported_by("from reliq import Queue, OutgoingMessage, PublishFailed")

    assert {name.split(".")[1] for name in names if name.startswith("reliq.")} & BESIDE_PUBLISHERS == set()
    assert {name.split(".")[0] for name in names} & LIBRARIES == set()


def test_redis_client_is_imported_with_the_first_queue_or_connection():
    """Importing redis takes longer than importing reliq; a process that forks after it made its queues shares it."""
    code = """
import sys
from reliq import Consumer, Queue, Target
from reliq.admin import Admin, AsyncAdmin
from reliq.admin.check import CheckReport
assert "redis" not in sys.modules
Queue("orders", url="redis://localhost")
assert "redis.asyncio" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exception_is_public():
    errors = importlib.import_module("reliq.errors")
    kinds = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}

    assert kinds <= set(reliq.__all__)
