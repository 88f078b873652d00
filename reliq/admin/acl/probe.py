"""Finds out which commands of a role a user may not run, without running one."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from reliq.admin import server
from reliq.admin.acl.roles import uses_of
from reliq.admin.acl.rule import FAMILIES, SCRIPT_COMMANDS, SHARED_KEYS
from reliq.call import Call
from reliq.errors import RedisRefusedError
from reliq.lua import Script

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reliq.admin.acl.roles import Role
    from reliq.call import Request
    from reliq.keys import Keys
    from reliq.lua import Use

#: From 7.0 on, a script may ask what its user may do.
_TEXT = "return redis.acl_check_cmd(unpack(ARGV))"
QUESTION = Script(
    name="may",
    move="",
    keys=(),
    tail_keys=(),
    args=(),
    tail_args=(),
    uses=frozenset(),
    text=_TEXT,
    sha=hashlib.sha1(_TEXT.encode(), usedforsecurity=False).hexdigest(),
)


def denied_commands(run_all: Callable[[Sequence[Request[Any]]], list[Any]], role: Role, keys: Keys) -> list[str] | None:
    """
    Return the commands of a role that this user may not run on the keys of a queue; None when nobody tells.

    A user needs EVALSHA; one who may not EVAL besides can work while the scripts are loaded, and is told so by EVAL.
    """
    uses = sorted({*uses_of(role), ("EVALSHA", "")})
    answers = run_all([_question(use, keys) for use in uses])
    if all(isinstance(answer, bool) for answer in answers):
        return sorted({command for (command, _), allowed in zip(uses, answers, strict=True) if not allowed})
    refused = [str(one) for one in answers if isinstance(one, RedisRefusedError)]
    if any("may not EVAL" in one for one in refused):
        return ["EVAL"]
    if any("perm" in one.lower() for one in refused):
        return list(SCRIPT_COMMANDS)
    return _by_the_rule(run_all, uses)


def _question(use: Use, keys: Keys) -> Call[bool]:
    command, name = use
    asked = [command, *([_spelled(keys, name)] if name else [])]
    if command in SCRIPT_COMMANDS:
        asked = [command, "-", "0"]
    return Call(QUESTION, (), asked, bool)


def _spelled(keys: Keys, name: str) -> str:
    if name in SHARED_KEYS:
        return str(SHARED_KEYS[name])
    if name == "aside":
        return keys.aside("x", 0)
    return str(getattr(keys, name)("x") if name in FAMILIES else getattr(keys, name))


def _by_the_rule(run_all: Callable[[Sequence[Request[Any]]], list[Any]], uses: Sequence[Use]) -> list[str] | None:
    """Read the user's own rule, on a server before 7.0; None when that is not allowed."""
    [name] = run_all([server.user_name()])
    [rule] = [name] if isinstance(name, Exception) else run_all([server.user_rule(name)])
    if isinstance(rule, Exception):
        return None
    groups = sorted({word[2:] for word in rule.split() if word[1:2] == "@" and word[2:] != "all"})
    members = run_all([server.commands_in(group) for group in groups]) if groups else []
    if any(isinstance(one, Exception) for one in members):
        return None
    return sorted(_denied({command for command, _ in uses}, rule, dict(zip(groups, members, strict=True))))


def _denied(wanted: set[str], rule: str, groups: Mapping[str, set[str]]) -> set[str]:
    """Return which commands a rule denies: its last word on each holds."""
    denied = set(wanted)
    for word in rule.split():
        meant = wanted if word[1:] == "@all" else groups.get(word[2:], set()) if word[1] == "@" else {word[1:].upper()}
        denied = denied - meant if word[0] == "+" else denied | (meant & wanted)
    return denied
