"""The Lua scripts of the queue, one file for each transition. The loader reads the declarations in a file's header."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import chain
from operator import attrgetter
from typing import Any

#: A Redis command of a script, and the name of the command's key; the name is empty for a command without a key.
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

# For each Redis key, a command that fails if the key has the wrong type. Each script begins with these commands for its
# keys, so a wrong type stops the script before it writes anything. If the script's header marks a key with `?`, the
# script checks that key later, when it needs it. `totals`, `ends` and `history` are not checked: if they have a wrong
# type, messages must still move. `watch` is not checked, because it is always overwritten.
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

#: Redis keys that only queues with message keys or limits have. A script that uses any of them gets the functions of
#: keyed/prelude.lua.
_KEYED = frozenset({"limits", "ring", "held", "asleep", "rates", "line"})

#: The form in which a script's header lists the commands for a Redis key, such as `ready:LLEN,LPUSH`.
_RUNS = re.compile(r"(\w+):([A-Z]+(?:,[A-Z]+)*)")


@dataclass(frozen=True, slots=True)
class Script:
    """
    A Lua script, with the declarations of its header.

    Attributes:
        name: the name of the file and of the function in `transitions`.
        summary: the first line of the header.
        keys: names of the first KEYS, which are attributes of `Keys`.
        tail_keys: names of the KEYS that are repeated for each message.
        args: names of the first ARGV.
        tail_args: names of the ARGV that are repeated for each message. In a script with the argument `keyed`, calls
            leave out the last name, `key`, unless `keyed` is 1.
        uses: every command that the script may run, with the name of the command's key.
        text: the script for EVAL.
        sha: the digest for EVALSHA.
        keyed_keys: the names at the end of `keys` that only queues with message keys need.
        lead: a function that returns a queue's Redis keys for the names in `keys`, except `lane`, the call sequence.
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
    Return the script `name` of a package, ready to run; raise ValueError for an invalid header.

    A script with a header line `-- Keyed` has two branches, and each call runs one of them. For a queue without keys,
    the branch is the file itself. For a queue with keys, the branch also has the code of the lines that begin with
    `-- keyed: `. Only this branch uses the keys and commands of the header line.
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
    """Return the source of a script's branch for a queue with keys."""
    return re.sub(r"^( *)-- keyed: ", r"\1", source, flags=re.MULTILINE)


def script_names() -> list[str]:
    """Return the names of all scripts, sorted."""
    found = (entry.name for entry in files(__name__).iterdir() if entry.name.endswith(".lua"))
    return sorted(name.removesuffix(".lua") for name in found if name != "prelude.lua")


def _uses(runs: str, keys: tuple[str, ...]) -> frozenset[Use]:
    """Return the commands in a header, each with its key, and the commands that check the types of the keys."""
    checks = {(_READ[key], key) for key in keys if key in _READ}
    return frozenset(checks | {(one, key) for key, some in _RUNS.findall(runs) for one in some.split(",")})


def _locals(keys: tuple[str, ...], args: tuple[str, ...], tail_args: tuple[str, ...]) -> str:
    """Return the Lua lines that define a local variable for each name of KEYS and ARGV in the header."""
    lines = [f"local {key} = KEYS[{index}]" for index, key in enumerate(keys, 1)]
    lines += [f"local {arg} = ARGV[{index}]" for index, arg in enumerate(args, 1)]
    lines += [f"local {arg.upper()} = {index}" for index, arg in enumerate(tail_args, 1)]
    size = f"keyed == '1' and {len(tail_args)} or {len(tail_args) - 1}" if "keyed" in args else len(tail_args)
    lines.append(f"local HEAD_KEYS, HEAD_ARGS, TAIL_ARGS = {len(keys)}, {len(args)}, {size}")
    lines.append("local ITEMS = TAIL_ARGS > 0 and (#ARGV - HEAD_ARGS) / TAIL_ARGS or #KEYS - HEAD_KEYS")
    return "\n".join(lines) + "\n"


def _type_checks(keys: tuple[str, ...]) -> str:
    """Return Lua lines that check the type of each key; the error for a wrong type names the key."""
    return "".join(f"read('{_READ[key]}', {key})\n" for key in keys if key in _READ)


def _branch(keys: tuple[str, ...], source: str, *, with_keys: bool) -> str:
    """
    Return a branch of a script, with the prelude functions that it needs.

    Other prelude functions are left out, because each call of the script defines all its functions again.
    """
    work = _type_checks(keys) + _without_comments(source)
    opening, functions = "", _prelude("prelude.lua")[1]
    if with_keys:
        opening, keyed = _prelude("keyed/prelude.lua")
        functions = _in_order(functions | keyed)
    needed = _needed(functions, work)
    return opening + "".join(functions[name] for name in functions if name in needed) + work


def _prelude(path: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first function of a prelude file, and the functions by name."""
    pieces = _FUNCTION.split(_without_comments(files(__name__).joinpath(path).read_text("utf-8")))
    return pieces[0], dict(zip(pieces[2::3], pieces[1::3], strict=True))


def _in_order(functions: dict[str, str]) -> dict[str, str]:
    """Sort functions, so that each function comes after the functions that it calls."""
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
    """Return the names of the functions that a text calls, directly or indirectly."""
    needed: set[str] = set()
    names = set(_NAME.findall(text))
    while met := (functions.keys() & names) - needed:
        needed |= met
        names = set(chain.from_iterable(_NAME.findall(functions[name]) for name in met))
    return needed


def _without_comments(text: str) -> str:
    """Remove comment lines, because each server keeps the text of every script in memory."""
    kept = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("--"))
    return "".join(f"{line}\n" for line in kept)
