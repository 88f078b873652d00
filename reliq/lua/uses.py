"""
Which commands a script runs, and on which of its keys, read from its text.

Only as much of Lua is understood as the scripts use: names that stand for keys, what is assigned to other names, what
functions are called with. A name that cannot be followed stands for no key, and a test notices the missing right.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

#: A command and the name of the key it is run on, empty for a command without one.
Use = tuple[str, str]

#: Functions of the prelude that return a key of the tail.
_TAIL = {"body": "msg", "mark": "dd"}
#: How a script runs a command: by itself, or with the prelude's `read`, whose own text says nothing.
_CALL = re.compile(r"(?:redis\.p?call|(?<!function )\bread)\(")
_READ = re.compile(r"^local function read\([\s\S]*?\nend$", re.MULTILINE)
_FUNCTION = re.compile(r"function (\w+)\((.*?)\)")
_ASSIGNED = re.compile(r"^[ \t]*(?:local )?([\w#.,+ \[\]]+?) = (.*)$|\bfor ([\w, ]+) in (.*?) do\b", re.MULTILINE)
_WORD = re.compile(r"(?<![.\w'])[A-Za-z_]\w*")
_COMMAND = re.compile(r"'([A-Z]{2,})'")
#: What stands in an expression for a key and is none: a comparison, a text, the message of a tail's key.
_NO_KEY = re.compile(r"\w+ [=~]= '[^']*'|'[^']*'|(?<=\bbody)\(\w+\)|(?<=\bmark)\(\w+\)")


def uses_of(text: str, keys: Collection[str]) -> frozenset[Use]:
    """Return every command that the text of a script may run, with the name of its key."""
    rest = _READ.sub("", text)
    found = set()
    for command, *arguments in _calls(rest):
        commands = set(_COMMAND.findall(command)) or _commands(command, rest)
        names = _keys(arguments[0], rest, frozenset(keys), frozenset()) if arguments else set()
        found |= {(one, key) for one in commands for key in names or {""}}
    return frozenset(found)


def _calls(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every command that is run."""
    for match in _CALL.finditer(text):
        yield _split(_inside(text, match.end()))


def _inside(text: str, start: int) -> str:
    """Return what stands before the bracket that closes the one before `start`."""
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return text[start:at]
    return text[start:]


def _split(text: str) -> list[str]:
    """Return the parts of a list of expressions."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _commands(expression: str, text: str) -> set[str]:
    """Return the commands that a name may stand for, by way of a table of them."""
    found: set[str] = set()
    for name in _WORD.findall(expression):
        for assigned in _assigned(name, text):
            found |= set(_COMMAND.findall(assigned)) or _commands(assigned, text)
    return found


def _keys(expression: str, text: str, keys: frozenset[str], seen: frozenset[str]) -> set[str]:
    """Return the names of the keys that an expression may stand for."""
    found: set[str] = set()
    for name in _WORD.findall(_NO_KEY.sub("", expression)):
        if name in keys:
            found.add(name)
        elif name in _TAIL:
            found.add(_TAIL[name])
        elif name not in seen:
            for meant in (*_assigned(name, text), *_passed(name, text)):
                found |= _keys(meant, text, keys, seen | {name})
    return found


def _assigned(name: str, text: str) -> Iterator[str]:
    """Yield the expressions that a name, or a part of it, is given."""
    for match in _ASSIGNED.finditer(text):
        names = [re.split(r"[\[. ]", part.strip())[0] for part in (match[1] or match[3]).split(",")]
        if name in names:
            values = _split(match[2] or match[4])
            yield values[names.index(name)] if len(values) == len(names) else ", ".join(values)


def _passed(name: str, text: str) -> Iterator[str]:
    """Yield what a parameter is given where its function is called."""
    for function in _FUNCTION.finditer(text):
        parameters = function[2].split(", ")
        if name not in parameters:
            continue
        for match in re.finditer(rf"(?<!function )\b{function[1]}\(", text):
            arguments = _split(_inside(text, match.end()))
            yield from arguments[parameters.index(name) :][:1]
