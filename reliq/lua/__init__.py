"""The Lua scripts of the queue: one file per transition, read once and checked against its own header."""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import chain

#: A command and the name of the key it is run on, empty for a command without one.
Use = tuple[str, str]

_HEADER = re.compile(
    r"-- (?P<name>\w+): (?P<move>[^\n]+)\n--\n"
    r"-- KEYS  (?P<keys>[^\n|]+?)(?: \| (?P<tail_keys>[^\n]+))?\n"
    r"-- ARGV  (?P<args>[^\n|]+?)(?: \| (?P<tail_args>[^\n]+))?\n"
    r"-- Runs  (?P<runs>[^\n]+(?:\n--       [^\n]+)*)\n"
    r"-- Returns  \S"
)

_FUNCTION = re.compile(r"^(local function (\w+)\((?:[^\n]* end|[\s\S]*?\nend)\n)", re.MULTILINE)
_NAME = re.compile(r"'[^'\n]*'|\b[A-Za-z_]\w*\b")

# The command that reads a key of each type without changing it. The loader has it run before a script writes anything,
# unless the header marks the key with `?`: then the script reads it itself, if it needs it. `totals`, `ends` and
# `history` are missing: an end that cannot be counted or noted must not stop a transition. So is `watch`: it is
# written anew whatever its type.
_READ = {
    "lane": "STRLEN",
    "pending": "ZCARD",
    "unack": "ZCARD",
    "ready": "LLEN",
    "retry": "LLEN",
    "wake": "LLEN",
    "garbage": "SCARD",
    "retries_left": "HLEN",
    "lease": "HLEN",
    "errors": "HLEN",
    "dead": "XLEN",
    "cron": "HLEN",
}

#: How a header names the commands that are run on a key.
_RUNS = re.compile(r"(\w+):([A-Z]+(?:,[A-Z]+)*)")


@dataclass(frozen=True, slots=True)
class Script:
    """
    One transition as Redis runs it.

    Attributes:
        name: of the file and of the function in `transitions`.
        keys: names of the leading KEYS, as `Keys` spells them.
        tail_keys: names of the KEYS that come once for each message.
        args: names of the leading ARGV.
        tail_args: names of the ARGV that come once for each message.
        uses: every command that it may run, each with the name of its key, empty for one without.
        text: what EVAL runs.
        sha: what EVALSHA names.
    """

    name: str
    move: str
    keys: tuple[str, ...]
    tail_keys: tuple[str, ...]
    args: tuple[str, ...]
    tail_args: tuple[str, ...]
    uses: frozenset[Use]
    text: str
    sha: str


@cache
def script(name: str, package: str = __name__) -> Script:
    """Return the script `name` of a package, ready to run; raise ValueError when its header is not in the form."""
    source = files(package).joinpath(f"{name}.lua").read_text("utf-8")
    header = _HEADER.match(source)
    if header is None or header["name"] != name:
        raise ValueError(f"{name}.lua does not begin with the header that the loader reads")
    named, tail_keys, args, tail_args = (
        tuple((header[part] or "").split()) for part in ("keys", "tail_keys", "args", "tail_args")
    )
    keys = tuple(key.rstrip("?") for key in named)
    prelude = _without_comments(files(__name__).joinpath("prelude.lua").read_text("utf-8"))
    work = _with_prelude(prelude, _type_checks(named) + _without_comments(source))
    text = _locals(keys, args, tail_args) + work
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    uses = _uses(header["runs"], named) | {("TIME", "")}
    return Script(name, header["move"], keys, tail_keys, args, tail_args, uses, text, sha)


def script_names() -> list[str]:
    """Return the name of every transition's script, sorted."""
    found = (entry.name for entry in files(__name__).iterdir() if entry.name.endswith(".lua"))
    return sorted(name.removesuffix(".lua") for name in found if name != "prelude.lua")


def _uses(runs: str, keys: tuple[str, ...]) -> frozenset[Use]:
    """Return the commands that a header names, each with its key, and those that check the types of the keys."""
    checks = {(_READ[key], key) for key in keys if key in _READ}
    return frozenset(checks | {(one, key) for key, some in _RUNS.findall(runs) for one in some.split(",")})


def _locals(keys: tuple[str, ...], args: tuple[str, ...], tail_args: tuple[str, ...]) -> str:
    """Return the lines that give KEYS and ARGV the names of the header."""
    lines = [f"local {key} = KEYS[{index}]" for index, key in enumerate(keys, 1)]
    lines += [f"local {arg} = ARGV[{index}]" for index, arg in enumerate(args, 1)]
    lines += [f"local {arg.upper()} = {index}" for index, arg in enumerate(tail_args, 1)]
    lines.append(f"local HEAD_KEYS, HEAD_ARGS, TAIL_ARGS = {len(keys)}, {len(args)}, {len(tail_args)}")
    lines.append("local ITEMS = TAIL_ARGS > 0 and (#ARGV - HEAD_ARGS) / TAIL_ARGS or 0")
    return "\n".join(lines) + "\n"


def _type_checks(keys: tuple[str, ...]) -> str:
    """Return the lines that refuse a key of the wrong type, by name, before anything is written."""
    return "".join(f"read('{_READ[key]}', {key})\n" for key in keys if key in _READ)


def _with_prelude(prelude: str, work: str) -> str:
    """Return the script with the functions of the prelude that it needs: Lua makes each one at every call."""
    pieces = _FUNCTION.split(prelude)
    opening, functions = pieces[0], dict(zip(pieces[2::3], pieces[1::3], strict=True))
    needed = _needed(functions, work)
    return opening + "".join(functions[name] for name in functions if name in needed) + work


def _needed(functions: dict[str, str], text: str) -> set[str]:
    """Return the names of the functions that a text calls, and those that they call."""
    needed: set[str] = set()
    names = set(_NAME.findall(text))
    while met := (functions.keys() & names) - needed:
        needed |= met
        names = set(chain.from_iterable(_NAME.findall(functions[name]) for name in met))
    return needed


def _without_comments(text: str) -> str:
    """Drop comment lines: each server keeps the text of every script in memory."""
    kept = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("--"))
    return "".join(f"{line}\n" for line in kept)
