"""
The least Redis ACL rule for each role, and the script that checks whether a user has the rights of a role.

From Redis 7.0 on, selectors bind each command to the keys it runs on: a producer may SET a body and GET a marker, and
cannot GET a body. Redis 6.2 has no selectors: there a user may run each of its commands on each of its keys.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from reliq.admin import calls
from reliq.admin.calls import TYPES
from reliq.admin.session import AdminBase
from reliq.admin.words import ROLES, Role
from reliq.errors import ConfigurationError
from reliq.keys import QUEUES_KEY, WORKERS_KEY, pattern, stack_request_key, stacks_key, worker_key
from reliq.lua import Script, script, script_names
from reliq.redis.commands import Call, read_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reliq.keys import Keys


WORKER_KEY, REQUEST_KEY, STACKS_KEY = worker_key("*"), stack_request_key("*"), stacks_key("*")
#: Keys of a queue that exist once for each message, call, message key or fault.
FAMILIES = frozenset({"msg", "dedup", "lane", "line", "aside"})
#: Scripts of this package; all others are transitions.
CHECKS = frozenset({"check", "check_keys"})

_RESHARD = "arrive ask cancel depart leave remap"
#: The scripts of each role. Their headers name the commands that they run, and on which keys.
SCRIPTS: dict[Role, str] = {
    "producer": "ask publish",
    "consumer": (
        f"{_RESHARD} ack bodies claim collect counts extend held_up key_queues limit nack promote reclaim register "
        "release snooze tick tidy"
    ),
    "operator": (
        f"{_RESHARD} check check_keys counts forget held_up key_queues limit publish purge redrive reschedule sleep tick"
    ),
    "exporter": "counts held_up key_queues",
}
#: Each key of a queue, but its lanes, with its type.
_QUEUE = TYPES | {
    **dict.fromkeys(("asleep", "held", "rates", "ring"), "zset"),
    **dict.fromkeys(("ends", "history"), "stream"),
    **dict.fromkeys(("dedup", "msg"), "string"),
    "limits": "hash",
    "line": "list",
}
_READS = (
    "EXISTS GET GETRANGE HEXISTS HGET HGETALL HKEYS HLEN HMGET HRANDFIELD HSCAN LINDEX LLEN LPOS LRANGE PTTL SCARD "
    "SISMEMBER SMISMEMBER SSCAN STRLEN TYPE XLEN XRANGE XREVRANGE ZCARD ZCOUNT ZLEXCOUNT ZMSCORE ZRANDMEMBER ZRANGE "
    "ZRANK ZREVRANGE ZSCAN ZSCORE"
)
#: The first letter of a command -> the type of its keys; other commands are for keys of any type.
_OF_TYPE = {"G": "string", "M": "string", "H": "hash", "L": "list", "S": "set", "X": "stream", "Z": "zset"}


def _reads(commands: str) -> list[tuple[str, str]]:
    """Return reads of a queue as rows of `ALONE`, each command with the keys of its type."""
    rows = []
    for command in commands.split():
        wanted = "string" if command == "STRLEN" else _OF_TYPE.get(command[0])
        rows.append((command, " ".join(name for name, kind in _QUEUE.items() if wanted in (None, kind))))
    return rows


#: The commands that each role runs outside scripts, and the keys of each: names in `Keys`, or patterns of whole keys.
ALONE: dict[Role, list[tuple[str, str]]] = {
    "producer": [("GETRANGE", "epoch map"), ("HSET", QUEUES_KEY)],
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
        *_reads(
            "GETRANGE HGET HGETALL HLEN HMGET HSCAN LINDEX LRANGE MGET PTTL SRANDMEMBER SSCAN STRLEN XRANGE XREVRANGE"
        ),
        *_reads("ZCARD ZCOUNT ZRANDMEMBER ZRANGE ZSCAN"),
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

#: The end of a hash tag that names a shard; no name of a queue ends so.
_OF_SHARD = re.compile(r"#\d+\.\d+}")
#: No rule can hold these: there any character may stand.
_QUOTED = re.compile("[ \"']")


def rights(role: Role) -> dict[str, set[str]]:
    """Return each command that a role runs with the names of its keys; "" stands for a command without a key."""
    if role == "viewer":
        allowed = {*_READS.split(), "INFO", "SCAN", "TIME"}
        return {command: names for command, names in rights("operator").items() if command in allowed}
    found = defaultdict[str, set[str]](set)
    for commands, names in ALONE[role]:
        for command in commands.split():
            found[command] |= {*names.split()} or {""}
    for name in SCRIPTS[role].split():
        for command, key in script(name, *([__package__] if name in CHECKS else [])).uses:
            found[command].add(key)
    return found


@dataclass(frozen=True, slots=True)
class AclRule:
    """
    The rules of one Redis user, as ACL SETUSER takes them.

    Attributes:
        rules: in their order; they leave the user's passwords, and whether it is on, as they are.
    """

    user: str
    roles: tuple[str, ...]
    rules: tuple[str, ...]

    def __str__(self) -> str:
        return f"ACL SETUSER {self.user} {' '.join(self.rules)}"


def check_roles(roles: Sequence[str]) -> list[Role]:
    """Return the roles named; raise ConfigurationError for a name that is not in `ROLES`."""
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
    Return the least rule for a user with `roles` on `queues`.

    Args:
        user: its name, by default reliq-ROLE.
        selectors: whether the server is 7.0 or newer.
        select: whether its URL names another database than 0.
        in_cluster: whether it is for the nodes of a Cluster, where a connection reads which node has which slot.
        without_eval: whether the user may run only loaded scripts (`Admin.load_scripts`).

    Raises:
        ConfigurationError: `roles` or `queues` is empty, or a role is not in `ROLES`.
    """
    known = check_roles(roles)
    if not known:
        raise ConfigurationError(f"an ACL rule needs at least one role of {', '.join(ROLES)}")
    if not queues:
        raise ConfigurationError("an ACL rule needs at least one queue: name it with --queue")
    # Shard 1 stands for all other shards.
    queues = [*queues, *(queue.of_shard(1) for queue in queues if not queue.bare)]
    scripts = ["EVALSHA"] if without_eval else ["EVAL", "EVALSHA"]
    allowed = defaultdict[str, set[str]](set)
    for role in known:
        needed = rights(role)
        of_queue = {name for names in needed.values() for name in names if ":" not in name}
        for command, names in (needed | dict.fromkeys(scripts, of_queue)).items():
            access = "%W" if (role, command) == ("producer", "SET") else ""  # SET with GET would return a body
            allowed[command] |= _patterns(names, queues, access)
    alone = {command for command, patterns in allowed.items() if not patterns}
    alone |= {"SELECT"} if select else set()
    alone |= {"ASKING", "CLUSTER|INFO", "CLUSTER|SLOTS", "PING"} if in_cluster else set()
    alone |= {"PING"} if "consumer" in known else set()  # a waiting connection checks first whether the server answers
    user = user or "reliq-" + "-".join(known)
    if not selectors:
        every_key = {key.removeprefix("%W") for patterns in allowed.values() for key in patterns}
        rules = [*_words(alone.union(allowed)), *sorted(every_key)]
        return AclRule(user, tuple(known), ("resetkeys", "resetchannels", "-@all", *rules))
    # Redis searches one selector for all keys of a command: each command is in one selector.
    together = defaultdict[tuple[str, ...], list[str]](list)
    for command in sorted(allowed.keys() - alone):
        together[tuple(sorted(allowed[command]))].append(command)
    rules = [f"({' '.join((*_words(commands), *keys))})" for keys, commands in together.items()]
    begin = ("resetkeys", "resetchannels", "clearselectors", "-@all")
    return AclRule(user, tuple(known), (*begin, *_words(alone), *rules))


def _words(commands: Iterable[str]) -> list[str]:
    return [f"+{command.lower()}" for command in sorted(commands)]


def _patterns(names: Iterable[str], queues: Sequence[Keys], access: str) -> set[str]:
    """Return the ACL patterns of keys, in every queue."""
    patterns = set()
    for name in names:
        for queue in queues if name else ():
            key = name if ":" in name else _OF_SHARD.sub("#*}", pattern(key_of(queue, name))) + "*" * (name in FAMILIES)
            patterns.add(f"{access if name == 'msg' else ''}~{_QUOTED.sub('?', key)}")
    return patterns


def key_of(keys: Keys, name: str) -> str:
    """Return a key of a queue by its name in `ALONE`; the beginning of the key, where a queue has several."""
    if name == "aside":
        return keys.aside("", 0).removesuffix("0:")
    return str(getattr(keys, name)("") if name in FAMILIES else getattr(keys, name))


#: From 7.0 on, a script may ask which commands its user may run. ARGV: a command and its key, or no key, by turns.
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
    """Return the commands of a role that this user may not run on the keys of a queue."""
    pairs = [
        (command, name.replace("*", "x") if ":" in name else name and key_of(keys, name))
        for command, names in rights(role).items()
        for name in names
    ]
    return Call(QUESTION, (), [*chain.from_iterable(pairs)], lambda reply: sorted({*read_ids(reply)}))


class AclActions(AdminBase):
    """The rights of Redis users, and the scripts that they may run."""

    def acl(
        self, roles: Sequence[str], queues: Sequence[str], *, user: str = "", without_eval: bool = False
    ) -> AclRule:
        """
        Return the least ACL rule for a user with `roles` on `queues`, in the form that this server takes.

        Args:
            roles: of `producer`, `consumer`, `operator`, `viewer`, `exporter`.
            user: its name, by default reliq-ROLE.
            without_eval: whether it may run only the scripts that `load_scripts` has loaded.
        """
        address = self._redis.connection.address
        return acl_rule(
            roles,
            [self.redis_keys(queue) for queue in queues],
            user=user,
            selectors=not self._redis.session().version().is_before((7, 0)),
            select=address.database != 0,
            in_cluster=address.is_cluster,
            without_eval=without_eval,
        )

    def load_scripts(self) -> list[str]:
        """
        Load the scripts of this version, for users without EVAL; return their names.

        Redis forgets them when it restarts, and a promoted replica may not have them; in a Cluster every node and every
        replica gets them.
        """
        scripts = [*map(script, script_names()), *(script(name, __package__) for name in sorted(CHECKS)), QUESTION]
        for server in self._redis.session().each(replicas=True).values():
            for each in scripts:
                server.run(calls.load_script(each))
        return list(dict.fromkeys(each.name for each in scripts))
