"""
The smallest Redis ACL rule for each role, and a check that a Redis user has the rights of a role.

Redis 7.0 has selectors, which limit each command to some keys. For example, a producer may write the body of a message
with SET, but cannot read it with GET. Redis 6.2 has no selectors, so a user may run each permitted command on each
permitted key.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from reliq.admin.calls import TYPES
from reliq.admin.filters import ROLES, Role
from reliq.admin.session import AdminBase
from reliq.errors import ConfigurationError
from reliq.keys import QUEUES_KEY, WORKERS_KEY, Keys, limit_key, pattern, stack_request_key, stacks_key, worker_key
from reliq.lua import Script, script, script_names
from reliq.redis.commands import Call, Command, read_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


WORKER_KEY, REQUEST_KEY, STACKS_KEY = worker_key("*"), stack_request_key("*"), stacks_key("*")
#: The pattern of the Redis keys of limits that several queues share.
LIMIT_KEY = limit_key("*")
#: Attributes of `Keys` that each stand for many Redis keys. For example, each message of a queue has its own key `msg`.
FAMILIES = frozenset({"msg", "dedup", "lane", "line", "aside", "result"})
#: Scripts whose files are in the package reliq.admin; the files of all other scripts are in reliq.lua.
CHECKS = frozenset({"check", "check_keys"})

_RESHARD = "arrive ask cancel depart leave remap"
#: The scripts that each role runs. The header of a script names its Redis commands and their keys.
SCRIPTS: dict[Role, str] = {
    "producer": "ask plan plan_due publish replace",
    "consumer": (
        f"{_RESHARD} ack bodies book checkpoint claim collect counts extend held_up key_queues limit nack plan plan_due plan_tick promote "
        "reclaim register release snooze status succeed tick tidy"
    ),
    "operator": (
        f"{_RESHARD} check check_keys counts forget key_queues limit plan plan_due publish purge redrive "
        "reschedule sleep status tick"
    ),
    "exporter": "counts held_up key_queues",
}
#: For each attribute of `Keys` the type of its Redis keys; without `lane`, which stores the last reply for a client.
_QUEUE = TYPES | {
    **dict.fromkeys(("asleep", "held", "rates", "ring"), "zset"),
    **dict.fromkeys(("ends", "history"), "stream"),
    **dict.fromkeys(("dedup", "msg", "result"), "string"),
    "limits": "hash",
    "line": "list",
}
_READS = (
    "EXISTS GET GETRANGE HEXISTS HGET HGETALL HKEYS HLEN HMGET HRANDFIELD HSCAN LINDEX LLEN LPOS LRANGE PTTL SCARD "
    "SISMEMBER SMISMEMBER SSCAN STRLEN TYPE XLEN XRANGE XREVRANGE ZCARD ZCOUNT ZLEXCOUNT ZMSCORE ZRANDMEMBER ZRANGE "
    "ZRANK ZREVRANGE ZSCAN ZSCORE"
)
#: For the first letter of a command, the type of the Redis keys that the command accepts. For example, HGET accepts
#: only hashes. Commands with other first letters accept keys of any type.
_OF_TYPE = {"G": "string", "M": "string", "H": "hash", "L": "list", "S": "set", "X": "stream", "Z": "zset"}


def _reads(commands: str) -> list[tuple[str, str]]:
    """Return each command in the text `commands`, with the attributes of `Keys` that the command can read."""
    rows = []
    for command in commands.split():
        wanted = "string" if command == "STRLEN" else _OF_TYPE.get(command[0])
        rows.append((command, " ".join(name for name, kind in _QUEUE.items() if wanted in (None, kind))))
    return rows


#: The commands that each role runs outside scripts, each with its Redis keys. The keys are attributes of `Keys`, or
#: full patterns if they belong to no queue.
ALONE: dict[Role, list[tuple[str, str]]] = {
    "producer": [("GETRANGE", "epoch map"), ("HGET", "plans"), ("HSET", QUEUES_KEY)],
    "consumer": [
        ("INFO SCAN WAIT", ""),
        ("HLEN HSCAN HSET", QUEUES_KEY),
        ("ZADD ZCOUNT ZREM ZREMRANGEBYSCORE", WORKERS_KEY),
        ("DEL SET", WORKER_KEY),
        ("GETDEL", REQUEST_KEY),
        ("SET", STACKS_KEY),
        ("BLPOP LPOP LTRIM RPUSH", "lane wake"),
        ("PEXPIRE", "lane minutes"),
        ("HSET", "minutes"),
        ("DEL SET", "dedup"),
        ("DEL", "watch"),
        *_reads("GETRANGE HGET HGETALL HLEN HMGET HSCAN LINDEX LRANGE MGET PTTL SRANDMEMBER SSCAN STRLEN XRANGE"),
        *_reads("ZCARD ZCOUNT ZMSCORE ZRANDMEMBER ZRANGE ZSCAN"),
    ],
    "operator": [
        ("INFO SCAN WAIT", ""),
        ("HDEL HEXISTS HGET HLEN HSCAN HSET", QUEUES_KEY),
        ("ZREVRANGE ZSCORE", WORKERS_KEY),
        ("GET", WORKER_KEY),
        ("PTTL SET", REQUEST_KEY),
        ("DEL GET", STACKS_KEY),
        ("LTRIM RPUSH", "wake"),
        ("DEL SET", "dedup paused"),
        ("HDEL HSET", "cron"),
        ("ZREM", "asleep"),
        ("XDEL", "dead"),
        ("HMGET", LIMIT_KEY),
        ("RENAMENX", f"{' '.join(TYPES)} aside"),
        *_reads(_READS),
    ],
    "exporter": [
        ("INFO", ""),
        ("HLEN HSCAN", QUEUES_KEY),
        ("GETRANGE", "epoch map msg"),
        ("HGETALL", "cron"),
        ("HMGET", "lease"),
        ("LINDEX", "ready retry"),
        ("ZCOUNT", "pending"),
        ("ZRANDMEMBER", "unack"),
        ("ZRANGE", "pending unack"),
    ],
}

#: Matches the number of a shard at the end of a hash tag, such as `#3.52}`. The name of a queue cannot end like this.
_OF_SHARD = re.compile(r"#\d+\.\d+}")
#: Characters that ACL rules cannot contain. `_patterns` replaces them by `?`, which matches any character.
_QUOTED = re.compile("[ \"']")


def rights(role: Role) -> dict[str, set[str]]:
    """Return the Redis commands that a role needs, each with its Redis keys as in `ALONE` ("" without a key)."""
    if role == "viewer":
        allowed = {*_READS.split(), "INFO", "SCAN", "TIME"}
        return {command: names for command, names in rights("operator").items() if command in allowed}
    found = defaultdict[str, set[str]](set)
    for commands, names in ALONE[role]:
        for command in commands.split():
            found[command] |= {*names.split()} or {""}
    for name in SCRIPTS[role].split():
        for command, key in script(name, *([__package__] if name in CHECKS else [])).uses:
            found[command].add(LIMIT_KEY if key == "shared" else key)
    return found


@dataclass(frozen=True, slots=True)
class AclRule:
    """
    The rights of one Redis user, as arguments of the command ACL SETUSER.

    Attributes:
        user: name of the Redis user.
        roles: the roles in which the user may act.
        rules: the arguments of ACL SETUSER, in order. They do not change the passwords of the user, and do not enable
            or disable the user.
    """

    user: str
    roles: tuple[str, ...]
    rules: tuple[str, ...]

    def __str__(self) -> str:
        return f"ACL SETUSER {self.user} {' '.join(self.rules)}"


def check_roles(roles: Sequence[str]) -> list[Role]:
    """Return the named roles; raise ConfigurationError for a name that is not in `ROLES`."""
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
    Return the smallest ACL rule for a user that acts in `roles` on `queues`.

    Args:
        roles: any of `producer`, `consumer`, `operator`, `viewer` and `exporter`.
        queues: the Redis keys of each queue.
        user: name of the Redis user, by default reliq-ROLE.
        selectors: whether the server has selectors (Redis 7.0 or newer).
        select: whether the user's URL names a database other than 0.
        in_cluster: whether the rule is for a Cluster, where clients also read which node has which slot.
        without_eval: whether the user may run only scripts that `Admin.load_scripts` has loaded.

    Raises:
        ConfigurationError: `roles` or `queues` is empty, or a role is not in `ROLES`.
    """
    known = check_roles(roles)
    if not known:
        raise ConfigurationError(f"an ACL rule needs at least one role of {', '.join(ROLES)}")
    if not queues:
        raise ConfigurationError("an ACL rule needs at least one queue: name it with --queue")
    # The keys of shard 0 contain no shard number. In the keys of shard 1, `_patterns` replaces the number by `*`, so
    # that the patterns match all other shards.
    queues = [*queues, *(queue.of_shard(1) for queue in queues if not queue.bare)]
    scripts = ["EVALSHA"] if without_eval else ["EVAL", "EVALSHA"]
    allowed = defaultdict[str, set[str]](set)
    for role in known:
        needed = rights(role)
        of_queue = {name for names in needed.values() for name in names if ":" not in name or name == LIMIT_KEY}
        for command, names in (needed | dict.fromkeys(scripts, of_queue)).items():
            # Let producers only write with SET, because SET with the option GET would return the old body.
            access = "%W" if (role, command) == ("producer", "SET") else ""
            allowed[command] |= _patterns(names, queues, access)
    alone = {command for command, patterns in allowed.items() if not patterns}
    alone |= {"SELECT"} if select else set()
    alone |= {"ASKING", "CLUSTER|INFO", "CLUSTER|SLOTS", "PING"} if in_cluster else set()
    alone |= {"PING"} if "consumer" in known else set()  # a waiting consumer sends PING to check the server
    user = user or "reliq-" + "-".join(known)
    if not selectors:
        every_key = {key.removeprefix("%W") for patterns in allowed.values() for key in patterns}
        rules = [*_words(alone.union(allowed)), *sorted(every_key)]
        return AclRule(user, tuple(known), ("resetkeys", "resetchannels", "-@all", *rules))
    # Redis permits a command only if one selector allows the command with all its keys: use one selector per command.
    together = defaultdict[tuple[str, ...], list[str]](list)
    for command in sorted(allowed.keys() - alone):
        together[tuple(sorted(allowed[command]))].append(command)
    rules = [f"({' '.join((*_words(commands), *keys))})" for keys, commands in together.items()]
    begin = ("resetkeys", "resetchannels", "clearselectors", "-@all")
    return AclRule(user, tuple(known), (*begin, *_words(alone), *rules))


def _words(commands: Iterable[str]) -> list[str]:
    return [f"+{command.lower()}" for command in sorted(commands)]


def _patterns(names: Iterable[str], queues: Sequence[Keys], access: str) -> set[str]:
    """
    Return the ACL patterns that match the Redis keys `names` of `queues`.

    Args:
        names: attributes of `Keys`, or full patterns of keys that belong to no queue.
        queues: the Redis keys of each queue.
        access: the access to message bodies, for example `%W` for the right to write only; empty for full access.
    """
    patterns = set()
    for name in names:
        for queue in queues if name else ():
            key = name if ":" in name else _OF_SHARD.sub("#*}", pattern(key_of(queue, name))) + "*" * (name in FAMILIES)
            patterns.add(f"{access if name == 'msg' else ''}~{_QUOTED.sub('?', key)}")
    return patterns


def key_of(keys: Keys, name: str) -> str:
    """Return the Redis key of an attribute of `Keys`; for an attribute in `FAMILIES`, return the prefix of its keys."""
    if name == "aside":
        return keys.aside("", 0).removesuffix("0:")
    return str(getattr(keys, name)("") if name in FAMILIES else getattr(keys, name))


#: A script for Redis 7.0 or newer. It returns the commands that the current Redis user may not run. ARGV contains pairs
#: of a command and a Redis key; the key is empty for a command without a key.
_TEXT = """\
local denied = {}
for i = 1, #ARGV, 2 do
  local question = { ARGV[i] }
  if ARGV[i + 1] ~= '' then question[2] = ARGV[i + 1] end
  if not redis.acl_check_cmd(unpack(question)) then denied[#denied + 1] = ARGV[i] end
end
return denied
"""
_DIGEST = hashlib.sha1(_TEXT.encode(), usedforsecurity=False).hexdigest()
QUESTION = Script("may", "", (), (), (), (), frozenset(), _TEXT, _DIGEST)


def denied_commands(role: Role, keys: Keys) -> Call[list[str]]:
    """Return a script call that finds the commands of a role that this Redis user may not run on a queue's keys."""
    pairs = [
        (command, name.replace("*", "x") if ":" in name else name and key_of(keys, name))
        for command, names in rights(role).items()
        for name in names
    ]
    return Call(QUESTION, (), [*chain.from_iterable(pairs)], lambda reply: sorted({*read_ids(reply)}))


class AclActions(AdminBase):
    """The methods that return ACL rules, and that load scripts for users without the right to run EVAL."""

    def acl(
        self, roles: Sequence[str], queues: Sequence[str], *, user: str = "", without_eval: bool = False
    ) -> AclRule:
        """
        Return the smallest ACL rule for a user that acts in `roles` on `queues`, in the syntax of this server.

        Args:
            roles: any of `producer`, `consumer`, `operator`, `viewer` and `exporter`.
            user: name of the Redis user, by default reliq-ROLE.
            without_eval: whether the user may run only scripts that `load_scripts` has loaded.
        """
        address = self._connection.address
        return acl_rule(
            roles,
            [self.redis_keys(queue) for queue in queues],
            user=user,
            selectors=not self._session().version().is_before((7, 0)),
            select=address.database != 0,
            in_cluster=address.is_cluster,
            without_eval=without_eval,
        )

    def load_scripts(self) -> list[str]:
        """
        Load the scripts of this reliq version, for users without the right to run EVAL; return the scripts' names.

        Load the scripts again after Redis restarts, or after a failover to a replica that lacks them. In a Cluster,
        each primary and each replica loads them.
        """
        scripts = [*map(script, script_names()), *(script(name, __package__) for name in sorted(CHECKS)), QUESTION]
        for server in self._session().each(replicas=True).values():
            for each in scripts:
                server.run(Command(("SCRIPT", "LOAD", each.text), bytes.decode))
        return list(dict.fromkeys(each.name for each in scripts))
