"""
The least Redis ACL rule for each role, and the check whether a user has the rights of a role.

From Redis 7.0 on, selectors bind each command to the keys that it is run on: a producer may SET a body and GET a marker,
and cannot GET a body. Redis 6.2 has no selectors: there a user may run each of its commands on each of its keys.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reliq.admin import calls
from reliq.admin.calls import ROLES, TYPES, Role
from reliq.admin.session import AdminBase
from reliq.errors import ConfigurationError, RedisRefusedError
from reliq.keys import QUEUES_KEY, WORKERS_KEY, pattern, stack_request_key, stacks_key, worker_key
from reliq.lua import Script, script, script_names
from reliq.redis.commands import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reliq.keys import Keys
    from reliq.redis.commands import Request


WORKER_KEY, REQUEST_KEY, STACKS_KEY = worker_key("*"), stack_request_key("*"), stacks_key("*")
#: Keys of a queue that exist once for each message, call, message key or fault.
FAMILIES = frozenset({"msg", "dedup", "lane", "line", "aside"})

_OWN = " ".join(TYPES)
_READ_HASH = "HEXISTS HGET HGETALL HKEYS HLEN HMGET HRANDFIELD HSCAN"
_READ_LIST = "EXISTS LINDEX LLEN LPOS LRANGE"
_READ_SORTED_SET = "EXISTS ZCARD ZCOUNT ZLEXCOUNT ZMSCORE ZRANDMEMBER ZRANGE ZSCAN ZSCORE"
#: Role -> keys -> the commands that the role runs on them, in scripts or alone; "" for commands without a key. `Keys` has
#: the names of a queue's keys; a key with `%W~` may be written only. Redis looks in one row for all keys of a command.
RIGHTS: dict[Role, dict[str, str]] = {
    "producer": {
        "": "TIME",
        QUEUES_KEY: "HSET",
        "%W~msg": "SET",
        "dedup": "DEL GET",
        "lane": "GET PEXPIRE SET",
        "line ready": "EXISTS LLEN LPOS LPUSH LREM",
        "wake": "LLEN LPUSH",
        "pending ring": "ZADD ZCARD ZRANGE",
        "ring": "ZREM",
        "asleep held rates unack": "ZCARD ZLEXCOUNT ZMSCORE ZSCORE",
        "garbage": "SISMEMBER",
        "lease": "HDEL",
        "lease retries_left windows": "HEXISTS HGET HLEN HSET",
        "limits": "EXISTS HGET HLEN HMGET HSETNX",
        "totals": "HINCRBY",
        "ends": "XADD",
        "watch": "DEL",
        "epoch map": "GET GETRANGE",
        "epoch": "SET",
    },
    "consumer": {
        "": "INFO SCAN TIME WAIT",
        "line ready retry ring": "EXISTS",
        QUEUES_KEY: "HLEN HSCAN HSET",
        WORKERS_KEY: "ZADD ZCOUNT ZREM ZREMRANGEBYSCORE",
        WORKER_KEY: "DEL SET",
        REQUEST_KEY: "GETDEL",
        STACKS_KEY: "SET",
        "msg": "DEL GET GETRANGE MGET PERSIST PEXPIRE PTTL SET SETRANGE STRLEN UNLINK",
        "dedup epoch map token watch": "DEL GET GETRANGE PTTL SET",
        "lane": "DEL GET PEXPIRE SET",
        "lane wake": "BLPOP LLEN LPOP LPUSH LTRIM RPUSH",
        "line ready retry": f"{_READ_LIST} LPUSH LREM LTRIM RPUSH",
        "asleep held pending rates ring unack": f"{_READ_SORTED_SET} ZADD ZRANGEBYSCORE ZREM",
        "garbage": "SADD SCARD SISMEMBER SRANDMEMBER SREM SSCAN",
        "arrived cron errors lease leaving limits minutes retries_left totals windows": f"{_READ_HASH} HDEL HSET",
        "limits paused": "EXISTS",
        "minutes": "PEXPIRE",
        "totals": "HINCRBY",
        "dead ends history": "XADD",
        "dead": "XDEL XLEN XRANGE XREVRANGE XTRIM",
    },
    "operator": {
        "": "INFO SCAN TIME WAIT",
        "cron dead ends garbage paused pending ready retries_left retry totals unack": "EXISTS",
        "asleep held limits ring": "EXISTS",
        "line ready retry ring": "EXISTS",
        QUEUES_KEY: "HDEL HEXISTS HGET HLEN HSCAN HSET",
        WORKERS_KEY: "ZREVRANGE ZSCORE",
        WORKER_KEY: "GET",
        REQUEST_KEY: "PTTL SET",
        STACKS_KEY: "DEL GET",
        "msg": "DEL EXISTS GET GETRANGE PEXPIRE PTTL SET SETRANGE STRLEN",
        "dedup epoch lane map paused token watch": "DEL EXISTS GET GETRANGE PEXPIRE PTTL SET",
        "line ready retry wake": f"{_READ_LIST} LPUSH LREM LTRIM RPUSH",
        "asleep held pending rates ring unack": f"{_READ_SORTED_SET} ZADD ZRANK ZREM",
        "garbage": "EXISTS SADD SCARD SISMEMBER SMISMEMBER SREM SSCAN",
        "arrived cron errors lease leaving limits minutes retries_left totals windows": (
            f"EXISTS {_READ_HASH} HDEL HINCRBY HSET HSETNX"
        ),
        "dead ends history": "EXISTS XADD XDEL XLEN XRANGE XREVRANGE",
        f"{_OWN} aside asleep ends held history limits msg rates ring": "RENAMENX TYPE UNLINK",
    },
    "viewer": {
        "": "INFO SCAN TIME",
        "cron dead ends garbage paused pending ready retries_left retry totals unack": "EXISTS",
        "asleep held limits ring": "EXISTS",
        QUEUES_KEY: "HEXISTS HGET HLEN HSCAN",
        WORKERS_KEY: "ZREVRANGE ZSCORE",
        WORKER_KEY: "GET",
        REQUEST_KEY: "PTTL",
        STACKS_KEY: "GET",
        "dedup epoch map msg paused": "EXISTS GET GETRANGE PTTL STRLEN",
        "line ready retry wake": _READ_LIST,
        "asleep held pending rates ring unack": f"{_READ_SORTED_SET} ZRANK",
        "garbage": "EXISTS SCARD SISMEMBER SMISMEMBER SSCAN",
        "cron errors lease leaving limits minutes retries_left totals windows": f"EXISTS {_READ_HASH}",
        "dead ends history": "EXISTS XLEN XRANGE XREVRANGE",
        f"{_OWN} msg": "TYPE",
    },
    "exporter": {
        "": "INFO TIME",
        QUEUES_KEY: "HLEN HSCAN",
        "epoch map msg": "GETRANGE",
        "line ready retry": "LINDEX LLEN",
        "asleep held pending rates ring unack": "ZCARD ZCOUNT ZLEXCOUNT ZRANDMEMBER ZRANGE ZSCORE",
        "cron lease limits retries_left totals": "HGET HGETALL HLEN HMGET HRANDFIELD",
        "garbage": "SCARD",
        "paused": "EXISTS",
        "dead": "XLEN",
    },
}

#: The end of a hash tag that names a shard; no name of a queue ends so.
_OF_SHARD = re.compile(r"#\d+\.\d+}")
#: No rule can hold these: there any character may stand.
_QUOTED = re.compile("[ \"']")


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
    Return the least rule for a user who plays `roles` on `queues`.

    Args:
        user: its name, by default reliq-ROLE.
        selectors: whether the server is 7.0 or newer.
        select: whether its URL names another database than 0.
        in_cluster: whether it is for the nodes of a Cluster, where a connection asks which node has which slot.
        without_eval: whether the user may run only loaded scripts (`Admin.load_scripts`).

    Raises:
        ConfigurationError: `roles` or `queues` is empty, or a role is not in `ROLES`.
    """
    known = check_roles(roles)
    if not known:
        raise ConfigurationError(f"an ACL rule needs at least one role of {', '.join(ROLES)}")
    if not queues:
        raise ConfigurationError("an ACL rule needs at least one queue: name it with --queue")
    queues = [
        *queues,
        *(queue.of_shard(1) for queue in queues if not queue.bare),
    ]  # shard 1 stands for all other shards
    scripts = "EVALSHA" if without_eval else "EVAL EVALSHA"
    alone = {"SELECT"} if select else set()
    if in_cluster:
        alone |= {"ASKING", "CLUSTER|INFO", "CLUSTER|SLOTS", "PING"}
    if "consumer" in known:
        alone.add("PING")  # a waiting connection checks first whether the server answers
    allowed = defaultdict[tuple[str, ...], set[str]](set)
    for role in known:
        rights = RIGHTS[role]
        every_key = " ".join(names for names in rights if ":" not in names)
        for names, commands in (*rights.items(), (every_key.replace("%W", ""), scripts)):
            allowed[_patterns(names, queues)] |= set(commands.split())
    alone |= allowed.pop((), set())
    begin = ["resetkeys", "resetchannels", *(["clearselectors"] if selectors else []), "-@all"]
    if selectors:
        rules = [f"({' '.join((*_words(commands), *patterns))})" for patterns, commands in sorted(allowed.items())]
        rules = [*_words(alone), *rules]
    else:
        rules = _words(alone.union(*allowed.values()))
        rules += sorted({pattern.removeprefix("%W") for patterns in allowed for pattern in patterns})
    return AclRule(user or "reliq-" + "-".join(known), tuple(known), (*begin, *rules))


def _words(commands: set[str]) -> list[str]:
    return [f"+{command.lower()}" for command in sorted(commands)]


def _patterns(names: str, queues: Sequence[Keys]) -> tuple[str, ...]:
    """Return the ACL patterns of keys, in every queue."""
    patterns = set()
    for name in names.split():
        access, _, key = name.rpartition("~")
        for queue in queues:
            text = key if ":" in key else _OF_SHARD.sub("#*}", pattern(key_of(queue, key))) + "*" * (key in FAMILIES)
            patterns.add(f"{access}~{_QUOTED.sub('?', text)}")
    return tuple(sorted(patterns))


def key_of(keys: Keys, name: str) -> str:
    """Return a key of a queue by its name in `RIGHTS`; the beginning of the key, where a queue has several."""
    if name == "aside":
        return keys.aside("", 0).removesuffix("0:")
    return str(getattr(keys, name)("") if name in FAMILIES else getattr(keys, name))


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
    Return the commands of a role that this user may not run on the keys of a queue; None where Redis cannot say.

    A user needs EVALSHA; without EVAL it can work while the scripts are loaded, and EVAL is returned.
    """
    questions = list(_questions(role, keys))
    answers = run_all([Call(QUESTION, (), words, bool) for words in questions])
    refused = " ".join(str(answer) for answer in answers if isinstance(answer, RedisRefusedError))
    if not refused:
        return sorted({words[0] for words, allowed in zip(questions, answers, strict=True) if not allowed})
    if "may not EVAL" in refused:
        return ["EVAL"]
    return ["EVAL", "EVALSHA"] if "perm" in refused.lower() else None


def _questions(role: Role, keys: Keys) -> Iterator[list[str]]:
    """Yield each command of a role, with a key that it is run on."""
    yield ["EVALSHA", "-", "0"]
    for names, commands in RIGHTS[role].items():
        texts = [_example(name.rpartition("~")[2], keys) for name in names.split()]
        for command in commands.split():
            yield from ([command, text] for text in texts) if texts else [[command]]


def _example(name: str, keys: Keys) -> str:
    return name.replace("*", "x") if ":" in name else key_of(keys, name) + "x" * (name in FAMILIES)


class AclActions(AdminBase):
    """The rights of Redis users, and the scripts that they may run."""

    def acl(
        self, roles: Sequence[str], queues: Sequence[str], *, user: str = "", without_eval: bool = False
    ) -> AclRule:
        """
        Return the least ACL rule, in the form this server knows, for a user who plays `roles` on `queues`.

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
        Load the scripts of this version, for users who may not EVAL; return their names.

        Redis forgets them when it restarts, and a promoted replica may not have them; in a Cluster every node and every
        replica gets them.
        """
        of_check = [script(name, __package__) for name in ("check", "check_keys")]
        scripts = [*map(script, script_names()), *of_check, QUESTION]
        for server in self._redis.session().each(replicas=True).values():
            for each in scripts:
                server.run(calls.load_script(each))
        return list(dict.fromkeys(each.name for each in scripts))
