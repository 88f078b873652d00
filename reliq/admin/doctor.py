"""`Admin.doctor`: check whether a Redis is suitable for queues, and which queues need a repair."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from reliq.admin import calls
from reliq.admin.acl import check_roles, denied_commands
from reliq.admin.keys import limits_of
from reliq.admin.queues import chosen
from reliq.admin.session import AdminBase
from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError
from reliq.keys import CLUSTER_SLOTS, Keys, home
from reliq.lua import transitions
from reliq.lua.transitions import KeyQueues
from reliq.redis import commands
from reliq.redis.commands import Call, Command, read_facts
from reliq.redis.connection import ServerVersion, WrongKindError
from reliq.redis.shards import UNSHARDED, WITNESSES, ShardMap, shard_map, witnesses
from reliq.redis.url import Address, is_near
from reliq.text import chunked, pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliq.admin.filters import Role
    from reliq.redis.session import Session


CheckStatus = Literal["ok", "warning", "bad", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """
    The result of one check.

    Attributes:
        name: name of the check.
        verdict: `ok`, `warning` or `bad`; or `unknown`, if the check was not possible.
        what: the state that the check found, in one line.
        means: the consequence of this state for the queues.
        mend: what to do about this state; empty if nothing needs to be done.
    """

    name: str
    verdict: CheckStatus
    what: str
    means: str = ""
    mend: str = ""


class DoctorReads(AdminBase):
    """The method that checks a whole Redis."""

    def doctor(self, *, roles: Sequence[str] = (), queue: str = "reliq-doctor") -> list[Finding]:
        """
        Check whether this Redis is suitable for queues; return the findings of all checks.

        In a Cluster, all servers are checked.

        Args:
            roles: check also that this Redis user has the rights of these roles, for example `producer`.
            queue: name of the queue on whose Redis keys the rights are checked; the queue need not exist.
        """
        session, address = self._session(), self._connection.address
        rights = {role: denied_commands(role, self.redis_keys(queue)) for role in check_roles(roles)}
        found = dict[str, list[Finding]]()
        try:
            servers = session.each(replicas=True)
        except WrongKindError:
            raise
        except ConfigurationError as error:
            return [_unsupported(error)]
        for name, server in servers.items():
            try:
                found[name] = list(_check_server(server, rights, is_node=address.is_cluster))
            except ConfigurationError as error:
                found[name] = [_unsupported(error)]
            except RedisUnavailableError as error:
                if len(servers) == 1:
                    raise
                means = "if it is a primary, its queues stop; if it is a replica, it cannot replace its primary"
                mend = "read the server's log; CLUSTER NODES lists its state"
                found[name] = [Finding("server", "bad", f"does not answer: {error}", means, mend)]
        return [tls(address), *merged(found), *_check_queues(session)]


def _unsupported(error: Exception) -> Finding:
    return Finding("version", "bad", str(error), "reliq cannot use this server", "use Redis 6.2 or newer, or Valkey")


def tls(address: Address) -> Finding:
    """Check whether connections to other machines use TLS."""
    far = sorted({host for host in address.hosts if not is_near(host)})
    if address.is_secure or not far:
        return Finding("tls", "ok", "TLS" if address.is_secure else "no TLS, but no connection leaves this machine")
    means = "anyone on the network path reads bodies and the password"
    return Finding("tls", "warning", f"no TLS to {', '.join(far)}", means, "use rediss:// and a server certificate")


def merged(found: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """
    Return the findings of all servers, grouped by check.

    Args:
        found: the findings of each server. If several servers have an equal finding, it is returned once, and its text
            `what` lists these servers.
    """
    if len(found) == 1:
        return [finding for findings in found.values() for finding in findings]
    servers = defaultdict[Finding, list[str]](list)
    for server, findings in found.items():
        for finding in findings:
            servers[finding].append(server)
    names = list(dict.fromkeys(finding.name for finding in servers))
    return [
        replace(
            finding,
            what=f"{finding.what} (on {f'each of {len(found)}' if len(on) == len(found) else ', '.join(sorted(on))})",
        )
        for finding, on in sorted(servers.items(), key=lambda item: names.index(item[0].name))
    ]


# ---- checks of a server

#: Configuration parameters of Redis that the checks read.
PARAMETERS = ("appendfsync", "save", "min-replicas-to-write")
NODE_PARAMETERS = ("cluster-require-full-coverage", "cluster-node-timeout")


def _check_server(session: Session, rights: Mapping[Role, Call[list[str]]], *, is_node: bool) -> Iterator[Finding]:
    """Read the facts and rights that the checks of one server need, and yield the findings."""
    told = [commands.server_facts("default"), *map(calls.parameter, PARAMETERS)]
    if is_node:
        told += [*map(calls.parameter, NODE_PARAMETERS), Command(("CLUSTER", "INFO"), read_facts)]
    answers = session.try_all([*told, Command(("EVAL", "return 1", 0), bool), *rights.values()])
    for answer in answers:
        if isinstance(answer, RedisUnavailableError):
            raise answer
    yield from check_facts(
        {name: value for one in answers[: len(told)] if isinstance(one, dict) for name, value in one.items()}
    )
    evaluated, *denied = answers[len(told) :]
    # Ignore other errors of EVAL. For example, a managed Redis may refuse a script without keys.
    is_denied = "no permission" in str(evaluated) or "unknown command" in str(evaluated)
    if "producer" in rights and is_denied:
        yield Finding("eval", "ok", "this user may run loaded scripts only")
    elif "producer" in rights:
        means = "an endless script blocks Redis for all clients; after its first write, only SHUTDOWN NOSAVE ends it"
        mend = "reliq acl --role producer --without-eval, and reliq acl --load after each start of Redis"
        yield Finding("eval", "warning", "this user may run any script", means, mend)
    for role, answer in zip(rights, denied, strict=True):
        yield _rights(role, answer)


def check_facts(facts: Mapping[str, str]) -> Iterator[Finding]:
    """
    Check the facts of one server, and yield a finding for each check.

    Args:
        facts: values from INFO, CLUSTER INFO and CONFIG GET, by name. If a check needs a value that this user may not
            read, the verdict of its finding is `unknown`.
    """
    checks = {"version": _version, "eviction": _eviction, "memory": _memory, "persistence": _persistence}
    is_node = facts.get("cluster_enabled") == "1"
    if not is_node or facts.get("role") != "slave":
        checks["replicas"] = _replicas
    if is_node:
        checks |= {"slots": _slots, "coverage": _coverage, "node timeout": _node_timeout}
    for name, check in checks.items():
        try:
            yield Finding(name, *check(facts))
        except KeyError as missing:
            what = f"this user may not read {missing.args[0]}"
            mend = f"run it as a user with INFO and CONFIG GET, or check it yourself, {commands.PLACES}"
            yield Finding(name, "unknown", what, mend=mend)


#: The result of a check, as attributes of its `Finding`: `verdict`, `what`, `means` and `mend`.
Outcome = tuple[CheckStatus, str, str, str]

#: For each version of Redis and Valkey, the first patch release without the known security holes of the Lua engine:
#: CVE-2024-46981, CVE-2025-49844, CVE-2025-46817, CVE-2025-46818 and CVE-2025-46819. Older versions that are not in
#: this table have no such release.
PATCHED = {
    "redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
NEAR_THE_LIMIT = 0.9
#: The doctor warns if the node timeout of a Cluster is longer than this many ms. After a primary fails, its queues are
#: unavailable for the node timeout.
NODE_TIMEOUT_MS = 5000


def _ok(what: str) -> Outcome:
    return "ok", what, "", ""


def _set(parameter: str, facts: Mapping[str, str]) -> str:
    """Return a hint how to set a parameter of Redis; it names CONFIG SET if this user may run CONFIG GET."""
    has_config = "appendfsync" in facts
    return f"CONFIG SET {parameter}, and in redis.conf" if has_config else f"set {parameter} {commands.PLACES}"


def _version(facts: Mapping[str, str]) -> Outcome:
    kind = "valkey" if "valkey_version" in facts else "redis"
    server = f"{kind} {facts[f'{kind}_version']}"
    version = ServerVersion.read(facts, kind)
    line, patch = version.numbers[:2], version.numbers[2:3]
    if line > max(PATCHED[kind]) or (line in PATCHED[kind] and patch >= (PATCHED[kind][line],)):
        return _ok(server)
    what = f"{server} has known holes in its Lua engine, unless its distributor closed them"
    means = "a user with scripts may run code on the server (CVE-2025-49844, CVE-2024-46981)"
    return "warning", what, means, "upgrade to the latest release, or look for these CVEs in your package's changelog"


def _eviction(facts: Mapping[str, str]) -> Outcome:
    policy, evicted = facts["maxmemory_policy"], int(facts["evicted_keys"])
    if policy != "noeviction":
        means = "at maxmemory Redis deletes messages, bodies first; workers refuse to start"
        return "bad", f"maxmemory-policy is {policy}", means, _set("maxmemory-policy noeviction", facts)
    if evicted:
        what = f"{pluralize(evicted, 'key was', 'keys were')} evicted since the server started"
        means = "some of them may have been bodies: such messages end as expired"
        return "bad", what, means, "`reliq check QUEUE` counts messages without a body; then give Redis more memory"
    return _ok("maxmemory-policy is noeviction, and no key was evicted")


def _memory(facts: Mapping[str, str]) -> Outcome:
    used, limit = int(facts["used_memory"]), int(facts["maxmemory"]) or int(facts.get("total_system_memory", 0))
    if not limit or used < NEAR_THE_LIMIT * limit:
        return _ok(f"less than {NEAR_THE_LIMIT:.0%} of {limit >> 20} MiB is used" if limit else "no limit")
    means = "at the limit Redis refuses every publish; workers can still handle the backlog"
    verdict: CheckStatus = "bad" if used >= limit else "warning"
    what = f"{used >> 20} of {limit >> 20} MiB is used"
    return verdict, what, means, "raise maxmemory, or let workers catch up"


def _persistence(facts: Mapping[str, str]) -> Outcome:
    aof = facts["aof_enabled"]
    broken = [name for name in ("aof_last_write_status", "rdb_last_bgsave_status") if facts.get(name) == "err"]
    if broken:
        what = f"Redis could not write to disk: {', '.join(broken)}"
        return "bad", what, "a restart loses messages", "read the server's log: disk, rights"
    if aof != "1" and facts.get("save") == "":
        return "bad", "neither AOF nor snapshots", "a restart loses every message", _set("appendonly yes", facts)
    if aof != "1":
        means = "a restart loses every change since the last snapshot"
        return "warning", "AOF is off", means, _set("appendonly yes", facts)
    policy = facts["appendfsync"]
    if policy == "always":
        return _ok("AOF with appendfsync always")
    lost, alone = "every write that is not on disk yet", "nothing"
    if policy == "everysec":
        lost, alone = "the last second", "nothing, except up to 2 s of a slow disk"
    means = f"a power cut loses {lost}; a crash of Redis alone loses {alone}"
    return "warning", f"AOF with appendfsync {policy}", means, "set appendfsync always if you cannot accept this loss"


def _replicas(facts: Mapping[str, str]) -> Outcome:
    if facts["role"] != "master":
        return "bad", "this is a replica", "it refuses writes", "use the URL of the primary, or of Sentinel"
    replicas = int(facts["connected_slaves"])
    if not replicas:
        return "warning", "no replica", "if the machine is lost, so are the queues", "add a replica"
    least, count = facts["min-replicas-to-write"], pluralize(replicas, "replica")
    if least != "0":
        return _ok(f"{count}, min-replicas-to-write is {least}")
    means = "a primary that is cut off still accepts messages, and a failover loses them"
    mend = "set min-replicas-to-write 1 and min-replicas-max-lag 1"
    return "warning", f"{count}, and min-replicas-to-write is 0", means, mend


def _slots(facts: Mapping[str, str]) -> Outcome:
    state, missing = facts["cluster_state"], CLUSTER_SLOTS - int(facts["cluster_slots_ok"])
    if state == "ok" and not missing:
        return _ok("every slot has a node that answers")
    what = f"cluster_state is {state}, {pluralize(missing, 'slot has', 'slots have')} no node that answers"
    mend = "CLUSTER NODES lists them; redis-cli --cluster fix gives a node to slots without one"
    return "bad", what, "the queues of those slots stop", mend


def _coverage(facts: Mapping[str, str]) -> Outcome:
    setting = facts["cluster-require-full-coverage"]
    if setting == "no":
        return _ok("cluster-require-full-coverage is no")
    means = "while one slot has no node, every queue of the Cluster stops"
    mend = _set("cluster-require-full-coverage no", facts)
    return "warning", f"cluster-require-full-coverage is {setting}", means, mend


def _node_timeout(facts: Mapping[str, str]) -> Outcome:
    what = f"cluster-node-timeout is {facts['cluster-node-timeout']} ms"
    if int(facts["cluster-node-timeout"]) <= NODE_TIMEOUT_MS:
        return _ok(what)
    means = "when a primary dies, its queues stop for that time and a second or two more"
    return "warning", what, means, _set(f"cluster-node-timeout {NODE_TIMEOUT_MS}", facts)


def _rights(role: str, answer: list[str] | Exception) -> Finding:
    name = f"rights: {role}"
    if isinstance(answer, Exception):
        refused = str(answer)
        if "perm" not in refused.lower() and "may not EVAL" not in refused:
            return Finding(
                name, "unknown", "Redis before 7.0 does not report rights", mend="set the rule of reliq acl again"
            )
        answer = ["EVAL"] if "may not EVAL" in refused else ["EVAL", "EVALSHA"]
    if not answer:
        return Finding(name, "ok", "this user has all rights of the role")
    what = f"this user may not {', '.join(answer[:10])}{', …' if answer[10:] else ''}"
    mend = f"reliq acl --role {role} --queue QUEUE prints the rule"
    return Finding(name, "bad", what, f"a program that runs as this user cannot be the {role}", mend)


# ---- checks of the registered queues

#: The doctor checks at most this many key queues of each queue.
KEY_QUEUES = 100
#: The doctor checks about this many messages of each queue.
IDS_LOOKED_AT = 1000


def _check_queues(session: Session) -> list[Finding]:
    """Check all registered queues; return a finding for each fault, or a single finding if there is no fault."""
    try:
        queues = chosen(session, ()).queues
    except (RedisRefusedError, RedisUnavailableError) as error:
        mend = "run it as a user with HSCAN on the registry, or `reliq check` each queue"
        return [Finding("queues", "unknown", f"the queue registry cannot be read: {error}", mend=mend)]
    own = [keys for keys in queues if not keys.bare]
    fences = session.try_all([one for keys in own for one in witnesses(keys)])
    # Read the fences (the shards' copies of the shard map) before the map. If the map changes between the two reads,
    # it is then newer than the fences. A map that is older than a fence would look lost.
    read = zip(own, session.try_all([shard_map(keys) for keys in own]), strict=True)
    maps = {keys: answer if isinstance(answer, ShardMap) else None for keys, answer in read}
    faults = [*_lost_maps(maps, fences), *_strays(session, maps), *_keys_and_limits(session, queues)]
    sound = f"{pluralize(len(queues), 'queue')}: no stuck key, broken limit, lost shard map or stray message"
    return faults or [Finding("queues", "ok", sound)]


def _lost_maps(maps: Mapping[Keys, ShardMap | None], fences: Sequence[object]) -> Iterator[Finding]:
    for (keys, found), told in zip(maps.items(), chunked(fences, WITNESSES), strict=True):
        known = UNSHARDED.or_later(told)
        if found is not None and known.unless(found).is_lost:
            what = f"Redis has lost the map of the shards of {keys.name}: epoch {known.epoch}, {pluralize(known.n, 'shard')}"
            means = "it was deleted, or lost in a failover; until they are lost too, processes use the shards' copies"
            yield Finding("shards", "bad", what, means, shell_command("check", keys.name, options=["--repair"]))


def _strays(session: Session, maps: Mapping[Keys, ShardMap | None]) -> Iterator[Finding]:
    """
    Yield a finding for each queue whose shard 0 contains messages of other shards.

    A producer of a version without shards publishes all its messages to shard 0.
    """
    sharded = [(keys, map) for keys, map in maps.items() if map is not None and map.n > 1]
    looks = session.try_all([calls.ids_scanned(keys, "retries_left", 0, IDS_LOOKED_AT) for keys, _ in sharded])
    after = session.try_all([shard_map(keys) for keys, _ in sharded])
    for (keys, map), look, then in zip(sharded, looks, after, strict=True):
        # While the number of shards changes, shard 0 may contain messages of other shards: skip such a queue.
        if isinstance(look, Exception) or then != map or map.was != map.n:
            continue
        if strays := [id for id in look[1] if home(id, map.n)]:
            what = (
                f"{pluralize(len(strays), 'message')} of other shards of {keys.name} in shard 0, such as {strays[0]!r}"
            )
            means = (
                "an old producer without shards publishes there: an id may be accepted twice, and cancel cannot find it"
            )
            mend = "restart the producer with the version of the workers; workers handle its messages as usual"
            yield Finding("producers", "bad", what, means, mend)


def _keys_and_limits(session: Session, queues: Sequence[Keys]) -> Iterator[Finding]:
    """Yield a finding for each queue whose limits are malformed, and for each queue with stuck message keys."""
    limits = session.try_all([calls.limit_fields(keys) for keys in queues])
    for keys, stored in zip(queues, limits, strict=True):
        if not isinstance(stored, dict) or not stored:
            continue
        try:
            limits_of(stored)
        except ConfigurationError as error:
            what = f"the limits of {keys.name} are malformed: {error}"
            means = "no message of the queue may start, or more than the limits allow"
            yield Finding("keys", "bad", what, means, shell_command("limits", keys.name, options=["--clear", "NAME"]))
        [found] = session.try_all([transitions.key_queues(keys, most=KEY_QUEUES)])
        stuck = [one for one in found.largest if one.state == "standing"] if isinstance(found, KeyQueues) else []
        if stuck:
            what = f"{pluralize(len(stuck), 'key')} of {keys.name} {'is' if len(stuck) == 1 else 'are'} stuck, such as {stuck[0].key!r} with {pluralize(stuck[0].waiting, 'message')}"
            means = "their messages wait although no limit blocks them: a write was lost, or another program changed a Redis key"
            yield Finding("keys", "bad", what, means, shell_command("check", keys.name, options=["--repair"]))
