"""What is public is listed and told."""

import ast
import importlib
import inspect
import pkgutil
import re

import pytest

import reliq

MODULES = sorted(
    found.name for found in pkgutil.walk_packages(reliq.__path__, "reliq.") if "__main__" not in found.name
)


def test_the_public_names_are_sorted_and_there():
    assert reliq.__all__ == sorted(reliq.__all__)
    assert [name for name in reliq.__all__ if not hasattr(reliq, name)] == []


def test_what_the_package_imports_is_listed():
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(inspect.getsource(reliq)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reliq")
        for alias in node.names
    }

    assert imported == set(reliq.__all__)


def test_a_public_name_is_imported_when_it_is_used_from_where_types_say_it_is():
    listed = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(inspect.getsource(reliq)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reliq")
        for alias in node.names
    }

    assert {(module, name) for module, names in reliq._HOMES.items() for name in names} == listed
    assert set(reliq.__all__) <= set(dir(reliq))
    with pytest.raises(AttributeError, match="has no attribute 'Queueue'"):
        reliq.Queueue  # noqa: B018  it is what raises


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
