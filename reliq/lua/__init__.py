"""The Lua scripts of the queue: one file per transition, read once and checked against its own header."""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_HEADER = re.compile(
    r"-- (?P<name>\w+): (?P<move>[^\n]+)\n--\n"
    r"-- KEYS  (?P<keys>[^\n|]+?)(?: \| (?P<tail_keys>[^\n]+))?\n"
    r"-- ARGV  (?P<args>[^\n|]+?)(?: \| (?P<tail_args>[^\n]+))?\n"
    r"-- Returns  \S"
)

# What reads a key of each type without changing it. `totals` is left out on purpose: a
# total that cannot be counted must not stop a transition.
_READ = {
    "lane": "STRLEN",
    "watch": "STRLEN",
    "pending": "ZCARD",
    "unack": "ZCARD",
    "ready": "LLEN",
    "retry": "LLEN",
    "wake": "LLEN",
    "garbage": "SCARD",
    "counts": "HLEN",
    "lease": "HLEN",
    "errors": "HLEN",
    "dead": "XLEN",
}


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
        text: what EVAL runs.
        sha: what EVALSHA names.
    """

    name: str
    move: str
    keys: tuple[str, ...]
    tail_keys: tuple[str, ...]
    args: tuple[str, ...]
    tail_args: tuple[str, ...]
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return the script `name`, ready to run; raise ValueError when its header is not in the form."""
    source = files(__name__).joinpath(f"{name}.lua").read_text("utf-8")
    header = _HEADER.match(source)
    if header is None or header["name"] != name:
        raise ValueError(f"{name}.lua does not begin with the header that the loader reads")
    keys, tail_keys, args, tail_args = (
        tuple((header[part] or "").split()) for part in ("keys", "tail_keys", "args", "tail_args")
    )
    prelude = files(__name__).joinpath("prelude.lua").read_text("utf-8")
    text = _without_comments(_locals(keys, args, tail_args) + prelude + _type_checks(keys) + source)
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(name, header["move"], keys, tail_keys, args, tail_args, text, sha)


def script_names() -> list[str]:
    """Return the name of every script, sorted."""
    found = (entry.name for entry in files(__name__).iterdir() if entry.name.endswith(".lua"))
    return sorted(name.removesuffix(".lua") for name in found if name != "prelude.lua")


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
    checks = [f"'{_READ[key]}', {key}" for key in keys if key in _READ]
    if not checks:
        return ""
    return (
        f"local reads = {{ {', '.join(checks)} }}\n"
        "for i = 1, #reads, 2 do\n"
        "  local answer = redis.pcall(reads[i], reads[i + 1])\n"
        "  if type(answer) == 'table' and answer.err then\n"
        "    return redis.error_reply(answer.err .. ' RELIQ_KEY ' .. reads[i + 1])\n"
        "  end\n"
        "end\n"
    )


def _without_comments(text: str) -> str:
    """Drop comment lines: each server keeps the text of every script in memory."""
    return "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("--"))
