"""
Which scripts a part of reliq makes, and which plain commands on which keys, read from its own modules.

A `Command` names its keys by attributes of `Keys`, at once or by way of other names; these are followed through what
they are assigned, looped over or called with. One that is asked for by `getattr` may be any key of the queue.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from reliq import commands
from reliq import keys as keys_module
from reliq.keys import Keys
from reliq.lua import script_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.lua import Use

#: Keys that are there once in a queue, and those that are there for each id, lane or fault.
FIXED = frozenset(name for name in Keys.__slots__ if not name.startswith("_")) - {"every", "layout", "name"}
FAMILIES = frozenset(name.removeprefix("_") for name in Keys.__slots__ if name.startswith("_"))
#: Keys that belong to no queue, by the name that `reliq.keys` gives them.
SHARED = {name: value for name, value in vars(keys_module).items() if name.endswith("_KEY")}
SHARED |= {name: make("*") for name, make in vars(keys_module).items() if name.endswith("_key")}

_COMMAND = re.compile(r"[A-Z]{2,}")


@cache
def module(path: str) -> Module:
    """Return what is known of the module at a path such as `worker/fetcher.py`."""
    return Module(files("reliq").joinpath(path).read_text("utf-8"))


class Module:
    """The scripts and commands that one module speaks of."""

    def __init__(self, text: str) -> None:
        self._tree = ast.parse(text)
        self._scopes = {id(self._tree): ""}
        self._functions: dict[str, ast.FunctionDef] = {}
        self._bound: dict[tuple[str, str], list[ast.expr]] = {}
        self._enter(self._tree, "")
        for node in ast.walk(self._tree):
            for target, value in _bindings(node):
                self._bind(target, value)
            if isinstance(node, ast.Call):
                self._bind_parameters(node)

    def scripts(self) -> set[str]:
        """Return the scripts that it makes, by way of `transitions`."""
        return self._spoken_of("transitions") & set(script_names())

    def helped(self) -> set[Use]:
        """Return the plain commands that it makes by their names."""
        uses = {function.__name__: uses for function, uses in commands.USES.items()}
        return {use for name in self._spoken_of("commands") for use in uses.get(name, ())}

    def uses(self, function: str | None = None) -> set[Use]:
        """Return the plain commands that it, or one of its functions, makes, each with the name of its key."""
        found: set[Use] = set()
        for node in ast.walk(self._functions.get(function, ast.Pass()) if function else self._tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Command":
                found |= self._uses_of(node.args[0])
        return found

    def _enter(self, node: ast.AST, scope: str) -> None:
        """Note for everything in a node which function it is in."""
        if isinstance(node, ast.FunctionDef):
            scope = node.name
            self._functions[scope] = node
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            scope = f"{scope}/{id(node)}"
        self._scopes[id(node)] = scope
        for child in ast.iter_child_nodes(node):
            self._enter(child, scope)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._bound.setdefault((self._scopes[id(node)], node.id), []).append(value)
            elif isinstance(node, ast.Attribute):
                self._bound.setdefault(("self", node.attr), []).append(value)

    def _bind_parameters(self, call: ast.Call) -> None:
        """Take what a function is called with for what its parameters stand for."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in self._functions:
            parameters = [one.arg for one in self._functions[name].args.args if one.arg != "self"]
            for parameter, value in zip(parameters, call.args, strict=False):
                self._bound.setdefault((name, parameter), []).append(value)

    def _spoken_of(self, module_name: str) -> set[str]:
        """Return what it takes from a module of reliq, by its name or by an import of its own."""
        found = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module_name:
                found.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module == f"reliq.{module_name}":
                found |= {alias.name for alias in node.names}
        return found

    def _uses_of(self, command: ast.expr) -> set[Use]:
        if not isinstance(command, ast.Tuple):
            return {use for one in self._values(command) if isinstance(one, ast.Tuple) for use in self._uses_of(one)}
        first, *rest = command.elts
        commands = {text for node in self._followed(first) for text in _command(node)}
        keys = {key for part in rest for node in self._followed(part) for key in _keys(node)}
        return {(name, key) for name in commands for key in keys or {""}}

    def _followed(self, node: ast.expr) -> Iterator[ast.AST]:
        """Yield every part of an expression, and of what its names stand for."""
        seen, ahead = set(), [node]
        while ahead:
            for part in ast.walk(ahead.pop()):
                if id(part) not in seen:
                    seen.add(id(part))
                    yield part
                    ahead += self._values(part)

    def _values(self, node: ast.AST) -> list[ast.expr]:
        if isinstance(node, ast.Name):
            scope = self._scopes[id(node)]
            inner = [scope, *(scope[:at] for at in range(len(scope) - 1, 0, -1) if scope[at] == "/"), ""]
            return next((self._bound[one, node.id] for one in inner if (one, node.id) in self._bound), [])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return self._bound.get(("self", node.attr), [])
        return []


def _command(node: ast.AST) -> set[str]:
    """Return the command that a part of an expression names."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _COMMAND.fullmatch(node.value):
        return {node.value}
    return set()


def _keys(node: ast.AST) -> set[str]:
    """Return the names of the keys that a part of an expression names."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        return set(FIXED)
    if isinstance(node, ast.Attribute) and node.attr in FIXED | FAMILIES and _is_keys(node.value):
        return {node.attr}
    return {node.id} if isinstance(node, ast.Name) and node.id in SHARED else set()


def _is_keys(node: ast.expr) -> bool:
    """Say whether an expression is the keys of a queue: `keys`, `self._keys`, `source.keys` and the like."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return bool(name.removeprefix("_") == "keys")


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.target, node.iter
