"""
Load the Lua scripts that Redis runs for a queue.

Each script is a file with a header, which declares the script's keys, arguments and Redis commands.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import chain
from operator import attrgetter
from typing import Any

#: A Redis command that a script runs, and the name of the Redis key that the command uses (empty for `TIME`).
Use = tuple[str, str]

_HEADER = re.compile(
    r"-- (?P<name>\w+): (?P<summary>[^\n]+)\n--\n"
    r"-- KEYS  (?P<keys>[^\n|]*?)(?: \| (?P<tail_keys>[^\n]+))?\n"
    r"-- ARGV  (?P<args>[^\n|]+?)(?: \| (?P<tail_args>[^\n]+))?\n"
    r"-- Runs  (?P<runs>[^\n]+(?:\n--       [^\n]+)*)\n"
    r"(?:-- Keyed  (?P<keyed>[^\n]+(?:\n--       [^\n]+)*)\n)?"
    r"-- Returns  \S"
)

_FUNCTION = re.compile(r"^(local function (\w+)\((?:[^\n]* end|[\s\S]*?\nend)\n)", re.MULTILINE)
_NAME = re.compile(r"'[^'\n]*'|\b[A-Za-z_]\w*\b")

# For each Redis key, a command that fails if the key has the wrong type. Each script begins with the commands for its
# own keys, so a key of the wrong type stops the script before it writes anything. A header can mark a key with `?`.
# The script then does not check the type of this key at its beginning, but when it first reads the key.
# `totals`, `ends` and `history` are not checked: messages must move even if these keys have a wrong type. `watch` is
# not checked, because scripts delete it before they write it.
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
    "plans": "HLEN",
    "plans_due": "ZCARD",
    "limits": "HLEN",
    "ring": "ZCARD",
    "held": "ZCARD",
    "asleep": "ZCARD",
    "rates": "ZCARD",
    "leaving": "HLEN",
    "arrived": "HLEN",
    "shared": "HLEN",
}

#: The names of Redis keys that only queues with message keys or limits have. A script that uses any of these Redis keys
#: also gets the Lua functions of keyed/prelude.lua.
_KEYED = frozenset({"limits", "ring", "held", "asleep", "rates", "line"})

#: Matches a Redis key and its commands in a script's header, for example `ready:LLEN,LPUSH`.
_RUNS = re.compile(r"(\w+):([A-Z]+(?:,[A-Z]+)*)")


@dataclass(frozen=True, slots=True)
class Script:
    """
    A Lua script, and the declarations from its header.

    Attributes:
        name: the name of the script's file, and of the function in `transitions` that builds a call of the script.
        summary: the first line of the header.
        keys: the names of the first KEYS. Each name is an attribute of `Keys`.
        tail_keys: the names of the KEYS that a call repeats for each message.
        args: the names of the first ARGV.
        tail_args: the names of the ARGV that a call repeats for each message. In a script with the argument `keyed`,
            the last of these names is `key`. A call passes message keys only if `keyed` is 1.
        uses: every Redis command that the script may run, with the name of the Redis key that the command uses.
        text: the Lua code for EVAL.
        sha: the SHA1 digest of the Lua code, for EVALSHA.
        keyed_keys: the last names in `keys`, which the script uses only in queues with message keys or limits.
        lead: a function that returns the Redis keys of a queue for the names in `keys`. It leaves out `lane`, because
            this Redis key belongs to a client and not to a queue.
    """

    name: str
    summary: str
    keys: tuple[str, ...]
    tail_keys: tuple[str, ...]
    args: tuple[str, ...]
    tail_args: tuple[str, ...]
    uses: frozenset[Use]
    text: str
    sha: str
    keyed_keys: tuple[str, ...] = ()
    lead: Callable[[Any], tuple[str, ...]] = field(default=lambda _keys: (), compare=False, repr=False)


@cache
def script(name: str, package: str = __name__) -> Script:
    """
    Load the Lua script `name` from a package, and return it ready to run.

    A script with a header line `-- Keyed` gets two versions of its code (branches) in one `if`. Queues without message
    keys or limits run the code in the file. Queues with message keys or limits also run the lines that begin with
    `-- keyed: `. Only this branch uses the Redis keys and commands that the header line `-- Keyed` lists.

    Raises:
        ValueError: the file has no valid header.
    """
    source = files(package).joinpath(f"{name}.lua").read_text("utf-8")
    header = _HEADER.match(source)
    if header is None or header["name"] != name:
        raise ValueError(f"{name}.lua does not begin with the header that the loader reads")
    named, tail_keys, args, tail_args = (
        tuple((header[part] or "").split()) for part in ("keys", "tail_keys", "args", "tail_args")
    )
    keyed_uses = header["keyed"] or ""
    plain = tuple(key.rstrip("?") for key in named)
    keyed_keys = tuple(key for key, _ in _RUNS.findall(keyed_uses) if key not in plain)
    keys = plain + keyed_keys
    work = _branch(named, source, with_keys=bool(_KEYED & {*plain}))
    uses = _uses(f"{header['runs']} {keyed_uses}", named + keyed_keys) | {("TIME", "")}
    if keyed_keys:
        has_keys = (
            "keyed == '1' or redis.call('EXISTS', limits) == 1"
            if "keyed" in args
            else "redis.call('EXISTS', limits) == 1"
        )
        keyed_work = _branch(named + keyed_keys, _keyed_source(source), with_keys=True)
        work = f"if {has_keys} then\n{keyed_work}else\n{work}end\n"
        uses |= {("EXISTS", "limits")}
    text = _locals(keys, args, tail_args) + _prelude("prelude.lua")[0] + work
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    lead = _lead_of(keys)
    return Script(name, header["summary"], keys, tail_keys, args, tail_args, uses, text, sha, keyed_keys, lead)


def _lead_of(names: tuple[str, ...]) -> Callable[[Any], tuple[str, ...]]:
    if not names:
        return lambda _keys: ()
    starts = {"line": "line_start", "msg": "msg_start", "result": "result_start"}
    get: Any = attrgetter(*(starts.get(name, name) for name in names if name != "lane"))
    return get if len(names) > 1 else lambda keys: (get(keys),)


def _keyed_source(source: str) -> str:
    """Return a script's source for queues with message keys or limits: uncomment the lines with `-- keyed: `."""
    return re.sub(r"^( *)-- keyed: ", r"\1", source, flags=re.MULTILINE)


def script_names() -> list[str]:
    """Return the names of all scripts, sorted."""
    found = (entry.name for entry in files(__name__).iterdir() if entry.name.endswith(".lua"))
    return sorted(name.removesuffix(".lua") for name in found if name != "prelude.lua")


def _uses(runs: str, keys: tuple[str, ...]) -> frozenset[Use]:
    """Return the Redis commands in a script's header, and the commands that check the types of the script's keys."""
    checks = {(_READ[key], key) for key in keys if key in _READ}
    return frozenset(checks | {(one, key) for key, some in _RUNS.findall(runs) for one in some.split(",")})


def _locals(keys: tuple[str, ...], args: tuple[str, ...], tail_args: tuple[str, ...]) -> str:
    """Return Lua code that defines a local variable for each name that the header gives to KEYS and ARGV."""
    lines = [f"local {key} = KEYS[{index}]" for index, key in enumerate(keys, 1)]
    lines += [f"local {arg} = ARGV[{index}]" for index, arg in enumerate(args, 1)]
    lines += [f"local {arg.upper()} = {index}" for index, arg in enumerate(tail_args, 1)]
    size = f"keyed == '1' and {len(tail_args)} or {len(tail_args) - 1}" if "keyed" in args else len(tail_args)
    lines.append(f"local HEAD_KEYS, HEAD_ARGS, TAIL_ARGS = {len(keys)}, {len(args)}, {size}")
    lines.append("local ITEMS = TAIL_ARGS > 0 and (#ARGV - HEAD_ARGS) / TAIL_ARGS or #KEYS - HEAD_KEYS")
    return "\n".join(lines) + "\n"


def _type_checks(keys: tuple[str, ...]) -> str:
    """Return Lua code that checks the type of each Redis key. Its error for a wrong type contains the key's name."""
    return "".join(f"read('{_READ[key]}', {key})\n" for key in keys if key in _READ)


def _branch(keys: tuple[str, ...], source: str, *, with_keys: bool) -> str:
    """
    Return the Lua code of a script's branch, after the prelude functions that it needs.

    Prelude functions that the branch does not need are left out: Redis would define them again at each script call.
    """
    work = _type_checks(keys) + _without_comments(source)
    opening, functions = "", _prelude("prelude.lua")[1]
    if with_keys:
        opening, keyed = _prelude("keyed/prelude.lua")
        functions = _in_order(functions | keyed)
    needed = _needed(functions, work)
    return opening + "".join(functions[name] for name in functions if name in needed) + work


def _prelude(path: str) -> tuple[str, dict[str, str]]:
    """Split a prelude file: return the code before its first function, and the code of each function by its name."""
    pieces = _FUNCTION.split(_without_comments(files(__name__).joinpath(path).read_text("utf-8")))
    return pieces[0], dict(zip(pieces[2::3], pieces[1::3], strict=True))


def _in_order(functions: dict[str, str]) -> dict[str, str]:
    """Sort Lua functions, so that each function comes after the functions that it calls, as Lua requires."""
    ordered: dict[str, str] = {}

    def place(name: str) -> None:
        for called in _NAME.findall(functions[name]):
            if called in functions and called != name and called not in ordered:
                place(called)
        ordered.setdefault(name, functions[name])

    for name in functions:
        place(name)
    return ordered


def _needed(functions: dict[str, str], text: str) -> set[str]:
    """Return the names of the functions that the Lua code `text` calls, directly or through other functions."""
    needed: set[str] = set()
    names = set(_NAME.findall(text))
    while met := (functions.keys() & names) - needed:
        needed |= met
        names = set(chain.from_iterable(_NAME.findall(functions[name]) for name in met))
    return needed


def _without_comments(text: str) -> str:
    """Remove the comment lines of a script, because each Redis server keeps the text of every script in memory."""
    kept = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("--"))
    return "".join(f"{line}\n" for line in kept)
