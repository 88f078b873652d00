"""The least Redis ACL rule for a role, made of the scripts and commands that it needs (`roles`).

From Redis 7.0 on, selectors bind each command to the keys it is run on: a producer may SET a body and GET a marker,
and still GET no body. Redis 6.2 knows no selectors; there a user may run each of its commands on each of its keys.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reliq.admin import calls
from reliq.admin.calls import ROLES, Role
from reliq.admin.check import CHECK, CHECK_KEYS
from reliq.errors import ConfigurationError, RedisRefusedError
from reliq.keys import QUEUES_KEY, WORKERS_KEY, pattern, stack_request_key, stacks_key, worker_key
from reliq.lua import Script, script, script_names
from reliq.metrics import crons
from reliq.redis import commands, shards
from reliq.redis.commands import USES, Call

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reliq.admin.session import Session
    from reliq.keys import Keys
    from reliq.lua import Use
    from reliq.redis.commands import Request


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
    alone |= {"PING"} if "consumer" in known else set()  # who waits for messages sees first whether the server answers
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


#: Commands that change nothing.
ONLY_READ = frozenset(
    {
        *("EXISTS", "GET", "GETRANGE", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HRANDFIELD", "HSCAN"),
        *("LINDEX", "LLEN", "LPOS", "LRANGE", "MGET", "PTTL", "SCARD", "SISMEMBER", "SMISMEMBER", "SRANDMEMBER"),
        *("SSCAN", "STRLEN", "TTL", "TYPE", "XLEN", "XRANGE", "XREVRANGE", "ZCARD", "ZCOUNT", "ZLEXCOUNT", "ZMSCORE"),
        *("ZRANDMEMBER", "ZRANGE", "ZRANGEBYSCORE", "ZRANK", "ZREVRANGE", "ZSCAN", "ZSCORE"),
    }
)

#: A change of the number of shards goes on by these.
_TO_RESHARD = ("arrive", "ask", "cancel", "depart", "leave", "remap")
_TRANSITIONS: dict[Role, tuple[str, ...]] = {
    "producer": ("publish", "ask"),
    "consumer": (
        *(
            *_TO_RESHARD,
            "ack",
            "bodies",
            "claim",
            "collect",
            "counts",
            "extend",
            "held_up",
            "limit",
            "key_queues",
            "nack",
        ),
        *("promote", "reclaim", "register", "release", "snooze", "tick", "tidy"),
    ),
    "operator": (
        *(
            "counts",
            "forget",
            "held_up",
            "limit",
            "key_queues",
            "publish",
            "purge",
            "redrive",
            "reschedule",
            "sleep",
            "tick",
        ),
        *_TO_RESHARD,
    ),
    "viewer": ("counts", "key_queues"),
    "exporter": ("counts", "held_up", "key_queues"),
}
SCRIPTS: dict[Role, tuple[Script, ...]] = {role: tuple(map(script, names)) for role, names in _TRANSITIONS.items()}
SCRIPTS["operator"] += (CHECK, CHECK_KEYS)
SCRIPTS["viewer"] += (CHECK, CHECK_KEYS)


def _reads(use: Use) -> bool:
    """Say whether a command changes nothing; what a role makes without a key never does."""
    command, key = use
    return command in ONLY_READ or not key


_TO_PUBLISH = (commands.register, shards.shard_map, shards.fence)
_TO_LOOK = (
    *(commands.body_start, commands.state_words, commands.first_score),
    *(commands.held_sample, commands.end_of, commands.due_count),
    *(commands.registry_size, commands.registry_page, commands.server_facts, commands.server_ms),
    *(shards.shard_map, shards.fence, shards.declaration, crons.cron_states),
)
#: Calls about the server and its users, which `reliq doctor` and `reliq acl` make when they may.
_OF_THE_SERVER = (
    *(
        calls.delete_keys,
        calls.parameter,
        calls.cluster_facts,
        calls.slow_scripts,
        calls.eval_nothing,
        calls.load_script,
    ),
    *(calls.user_name, calls.user_rule, calls.commands_in),
)
COMMANDS: dict[Role, tuple[Callable[..., Any], ...]] = {
    "producer": _TO_PUBLISH,
    "consumer": (
        *(commands.bodies, commands.state_words, commands.retries_left, commands.first_score, commands.held),
        *(commands.garbage, commands.claims),
        *(commands.wake_token, commands.wake_token_at_once, commands.push_wake_token),
        *(commands.poke, commands.drop_watch),
        *(commands.register, commands.write_worker, commands.remove_worker, commands.workers_alive),
        *(*_TO_LOOK, commands.noted, commands.note, commands.take_request, commands.write_report),
        *(shards.map_text, commands.letters_between, calls.keys_scanned, calls.ids_scanned, calls.ids_at),
        *(calls.leaving, calls.marker, calls.marker_ms, calls.take_id, calls.free_id, calls.at_a_replica),
    ),
    "operator": (
        *(*_TO_PUBLISH, *_TO_LOOK, commands.retries_left, calls.scores),
        *(commands.delete_letters, commands.letters_between, commands.claims),
        *(calls.worker_ids, calls.worker_records),
        shards.map_text,
        *(commands.pause, calls.paused, commands.resume_queue),
        *(made for made in USES if made.__module__ == calls.__name__ and made not in _OF_THE_SERVER),
        *(commands.noted, calls.ask_stacks, calls.asked_stacks),
        *(
            calls.pause_cron,
            calls.resume_cron,
            calls.ask_run,
            calls.asked_run,
            calls.withdraw_run,
            calls.forget_cron,
        ),
    ),
    "exporter": _TO_LOOK,
}
COMMANDS["viewer"] = tuple(made for made in COMMANDS["operator"] if all(map(_reads, USES[made])))


def uses_of(role: Role) -> set[Use]:
    """Return every command that a role runs, in scripts or alone, with the name of its key."""
    alone = {use for made in COMMANDS[role] for use in USES[made]}
    in_scripts = {use for one in SCRIPTS[role] for use in one.uses}
    # The script `check` looks, and mends only for an operator who says so.
    return alone | (set(filter(_reads, in_scripts)) if role == "viewer" else in_scripts)


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
    asked = [command, *([_spelled_rights(keys, name)] if name else [])]
    if command in SCRIPT_COMMANDS:
        asked = [command, "-", "0"]
    return Call(QUESTION, (), asked, bool)


def _spelled_rights(keys: Keys, name: str) -> str:
    if name in SHARED_KEYS:
        return str(SHARED_KEYS[name])
    if name == "aside":
        return keys.aside("x", 0)
    return str(getattr(keys, name)("x") if name in FAMILIES else getattr(keys, name))


def _by_the_rule(run_all: Callable[[Sequence[Request[Any]]], list[Any]], uses: Sequence[Use]) -> list[str] | None:
    """Read the user's own rule, on a server before 7.0; None when that is not allowed."""
    [name] = run_all([calls.user_name()])
    [rule] = [name] if isinstance(name, Exception) else run_all([calls.user_rule(name)])
    if isinstance(rule, Exception):
        return None
    groups = sorted({word[2:] for word in rule.split() if word[1:2] == "@" and word[2:] != "all"})
    members = run_all([calls.commands_in(group) for group in groups]) if groups else []
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


def load_scripts(session: Session) -> list[str]:
    """Have each server, and each replica that may be promoted, know every script of this version; return their names."""
    scripts = [*map(script, script_names()), CHECK, CHECK_KEYS, QUESTION]
    for server_session in session.each(replicas=True).values():
        for one in scripts:
            server_session.run(calls.load_script(one))
    return list(dict.fromkeys(one.name for one in scripts))
