"""
The least Redis ACL rule for a role, made of the scripts and commands that it needs (`roles`).

From Redis 7.0 on, selectors bind each command to the keys it is run on: a producer may SET a body and GET a marker,
and still GET no body. Redis 6.2 knows no selectors; there a user may run each of its commands on each of its keys.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.admin.acl.roles import ONLY_READ, ROLES, SCRIPTS, uses_of
from reliq.errors import ConfigurationError
from reliq.keys import QUEUES_KEY, WORKERS_KEY, pattern, stack_request_key, stacks_key, worker_key

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from reliq.admin.acl.roles import Role
    from reliq.keys import Keys
    from reliq.lua import Use

#: Keys of a queue that there is one of for each message, call or fault.
FAMILIES = frozenset({"msg", "dedup", "lane", "line", "aside"})
#: Keys that belong to no queue, by the name that `reliq.keys` gives them; as patterns.
SHARED_KEYS = {
    "QUEUES_KEY": QUEUES_KEY,
    "WORKERS_KEY": WORKERS_KEY,
    "worker_key": worker_key("*"),
    "stack_request_key": stack_request_key("*"),
    "stacks_key": stacks_key("*"),
}
#: From 7.0 on, rights on keys are by what a command does with them: what is neither here nor in ONLY_READ may do both.
ONLY_WRITE = frozenset(
    {
        *("DEL", "EXPIRE", "HDEL", "HSET", "LPUSH", "LREM", "LTRIM", "PEXPIRE", "RPUSH", "SADD", "SET", "SETRANGE"),
        *("SREM", "UNLINK", "XADD", "XDEL", "XTRIM", "ZADD", "ZREM", "ZREMRANGEBYSCORE"),
    }
)
SCRIPT_COMMANDS = ("EVAL", "EVALSHA")
#: The end of a hash tag that names a shard; no name of a queue has such a one.
_OF_SHARD = re.compile(r"#\d+\.\d+}")
#: Connections to a Cluster make these commands by themselves.
IN_CLUSTER = frozenset({"ASKING", "CLUSTER|INFO", "CLUSTER|SLOTS", "PING"})


@dataclass(frozen=True, slots=True)
class AclRule:
    """
    The rules of one Redis user, as ACL SETUSER takes them.

    Attributes:
        rules: one after another; they leave the user's passwords, and whether it is on, as they are.
    """

    user: str
    roles: tuple[str, ...]
    rules: tuple[str, ...]

    def __str__(self) -> str:
        return f"ACL SETUSER {self.user} {' '.join(self.rules)}"


def acl_roles(roles: Sequence[str]) -> list[Role]:
    """Return the roles named; raise ConfigurationError when one is none of `ROLES`."""
    if unknown := sorted(set(roles) - set(ROLES)):
        raise ConfigurationError(f"a role must be one of {', '.join(ROLES)}, not {', '.join(unknown)}")
    return [role for role in ROLES if role in roles]


def acl_rule(
    roles: Sequence[str],
    queues: Sequence[Keys],
    *,
    user: str = "",
    selectors: bool = True,
    select: bool = False,
    in_cluster: bool = False,
    without_eval: bool = False,
) -> AclRule:
    """
    Return the least rule for a user who plays `roles` on `queues`.

    Args:
        user: its name, by default reliq-ROLE.
        selectors: whether the server is 7.0 or newer.
        select: whether its URL names another database than 0.
        in_cluster: whether it is for the nodes of a Cluster, where a connection asks who has which slot.
        without_eval: whether the user may run no scripts but those that are loaded (`Admin.load_scripts`).

    Raises:
        ConfigurationError: there is no role or no queue, or a role is none of `ROLES`.
    """
    queues = [*queues, *(one.of_shard(1) for one in queues if not one.bare)]  # which stands for all other shards
    known = acl_roles(roles)
    if not known:
        raise ConfigurationError(f"an ACL rule needs at least one role of {', '.join(ROLES)}")
    if not queues:
        raise ConfigurationError("an ACL rule needs at least one queue: name it with --queue")
    scripts = {script for role in known for script in SCRIPTS[role]}
    uses = {use for role in known for use in uses_of(role)}
    alone = {command for command, key in uses if not key} | ({"SELECT"} if select else set())
    alone |= IN_CLUSTER if in_cluster else set()
    declared = {key for script in scripts for key in (*script.keys, *script.tail_keys)}
    runs_scripts = ("EVALSHA",) if without_eval else SCRIPT_COMMANDS
    for_scripts = {(command, key) for command in runs_scripts for key in declared}
    rules = (_selectors if selectors else _flat)(uses, alone, for_scripts, queues)
    return AclRule(user or "reliq-" + "-".join(known), tuple(known), tuple(rules))


def _selectors(uses: set[Use], alone: set[str], for_scripts: set[Use], queues: Sequence[Keys]) -> list[str]:
    """Return a root of commands without keys, and a selector for each set of keys."""
    keys_of: dict[str, set[str]] = defaultdict(set)
    for command, key in uses:
        if key:
            keys_of[command].add(_access(command) + key)
    commands_of: dict[frozenset[str], set[str]] = defaultdict(set)
    for command, keys in keys_of.items():
        commands_of[frozenset(keys)].add(command)
    if for_scripts:
        # A script's keys are declared in one piece, whatever it does with them.
        commands_of[frozenset("~" + key for _, key in for_scripts)].update(command for command, _ in for_scripts)
    groups = sorted((sorted(commands), keys) for keys, commands in commands_of.items())
    return [
        *("resetkeys", "resetchannels", "clearselectors", "-@all"),
        *_allowed(alone),
        *(f"({' '.join((*_allowed(commands), *_patterns(keys, queues)))})" for commands, keys in groups),
    ]


def _flat(uses: set[Use], alone: set[str], for_scripts: set[Use], queues: Sequence[Keys]) -> list[str]:
    """Return every command and every key: Redis before 7.0 cannot say which goes with which."""
    commands = {command for command, key in uses | for_scripts if key} | alone
    keys = {"~" + key for _, key in uses | for_scripts if key}
    return ["resetkeys", "resetchannels", "-@all", *_allowed(commands), *_patterns(keys, queues)]


def _access(command: str) -> str:
    return "%R~" if command in ONLY_READ else "%W~" if command in ONLY_WRITE else "~"


def _allowed(commands: Collection[str]) -> list[str]:
    return [f"+{command.lower()}" for command in sorted(commands)]


def _patterns(keys: Collection[str], queues: Sequence[Keys]) -> list[str]:
    """Return the patterns of keys, each `access~name`, in every queue."""
    found = set()
    for access, name in (key.rpartition("~")[::2] for key in keys):
        spelled = [SHARED_KEYS[name]] if name in SHARED_KEYS else [_spelled(queue, name) for queue in queues]
        found |= {f"{access}~{key}" for key in spelled}
    return sorted(found)


def _spelled(queue: Keys, name: str) -> str:
    if name == "aside":
        return _pattern(queue.aside("", 0).rpartition("0:")[0]) + "*"
    return _pattern(getattr(queue, name)("")) + "*" if name in FAMILIES else _pattern(getattr(queue, name))


def _pattern(key: str) -> str:
    """Return the pattern of a key; no rule can hold a space or a quote, so there any character may stand."""
    return re.sub(r"[ \"']", "?", _OF_SHARD.sub("#*}", pattern(key)))
