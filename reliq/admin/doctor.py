"""`Admin.doctor`: whether a Redis is fit for queues, and which queues need a repair."""

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
from reliq.keys import CLUSTER_SLOTS, home
from reliq.lua import transitions
from reliq.lua.transitions import KeyQueues
from reliq.redis import commands
from reliq.redis.connection import OLDEST_SERVER, ServerVersion, WrongKindError
from reliq.redis.shards import UNSHARDED, WITNESSES, ShardMap, shard_map, witnesses
from reliq.redis.url import is_near
from reliq.text import chunked, pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliq.admin.words import Role
    from reliq.keys import Keys
    from reliq.redis.commands import Call
    from reliq.redis.session import Session
    from reliq.redis.url import Address


CheckStatus = Literal["ok", "warning", "bad", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """
    The result of one check.

    Attributes:
        what: the fault or the sound state, in a line.
        means: its consequence for the queues.
        mend: the remedy; empty where none is needed.
    """

    name: str
    verdict: CheckStatus
    what: str
    means: str = ""
    mend: str = ""


class DoctorReads(AdminBase):
    """The check of a whole Redis."""

    def doctor(self, *, roles: Sequence[str] = (), queue: str = "reliq-doctor") -> list[Finding]:
        """
        Check whether this Redis is fit for queues, every server of a Cluster; return a finding for each check.

        Args:
            roles: check that this user has the rights of each role on the keys of `queue`, which need not exist.
        """
        session, address = self._redis.session(), self._redis.connection.address
        rights = {role: denied_commands(role, self.redis_keys(queue)) for role in check_roles(roles)}
        found = dict[str, list[Finding]]()
        try:
            servers = session.each(replicas=True)
        except WrongKindError:
            raise
        except ConfigurationError as error:
            return [_too_old(error)]
        for name, server in servers.items():
            try:
                found[name] = list(_check_server(server, rights, is_node=address.is_cluster))
            except ConfigurationError as error:
                found[name] = [_too_old(error)]
            except RedisUnavailableError as error:
                if len(servers) == 1:
                    raise
                means = "the queues of its slots stop; where it is a replica, none can take its primary's place"
                mend = "read the server's log; CLUSTER NODES shows how the other nodes see it"
                found[name] = [Finding("server", "bad", f"does not answer: {error}", means, mend)]
        return [tls(address), *merged(found), *_check_queues(session)]


def _too_old(error: Exception) -> Finding:
    return Finding("version", "bad", str(error), "reliq does not run there", "upgrade to Redis 6.2 or newer")


def tls(address: Address) -> Finding:
    """Return whether connections to far servers are encrypted."""
    far = sorted({host for host in address.hosts if not is_near(host)})
    if address.is_secure or not far:
        return Finding("tls", "ok", "TLS" if address.is_secure else "no TLS, and nothing leaves this machine")
    means = "anyone on the network path reads bodies and the password"
    return Finding("tls", "warning", f"no TLS to {', '.join(far)}", means, "use rediss:// and a server certificate")


def merged(found: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Return the findings of several servers, by name; equal findings once, with their servers."""
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


# ---- a server

#: Parameters of CONFIG that the checks read.
PARAMETERS = ("appendfsync", "save", "min-replicas-to-write")
NODE_PARAMETERS = ("cluster-require-full-coverage", "cluster-node-timeout")


def _check_server(session: Session, rights: Mapping[Role, Call[list[str]]], *, is_node: bool) -> Iterator[Finding]:
    """Yield the findings of one server, with the rights of this user there."""
    told = [commands.server_facts("default"), *map(calls.parameter, PARAMETERS)]
    if is_node:
        told += [*map(calls.parameter, NODE_PARAMETERS), calls.cluster_facts()]
    answers = session.try_all([*told, calls.eval_nothing(), *rights.values()])
    for answer in answers:
        if isinstance(answer, RedisUnavailableError):
            raise answer
    yield from check_facts(
        {name: value for one in answers[: len(told)] if isinstance(one, dict) for name, value in one.items()}
    )
    evaluated, *denied = answers[len(told) :]
    if "producer" in rights:
        yield _eval(may_eval=not isinstance(evaluated, Exception))
    for role, answer in zip(rights, denied, strict=True):
        yield _rights(role, answer)


def check_facts(facts: Mapping[str, str]) -> Iterator[Finding]:
    """
    Yield the findings of one server, by its facts from INFO, CLUSTER INFO and CONFIG GET.

    A check looks up its facts by name; without one of them, which this user may not read, its finding is unknown.
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
            yield Finding(name, "unknown", what, mend="run it as a user with INFO and CONFIG GET, or check it yourself")


#: A verdict, and the texts of a finding: what, means, mend.
Outcome = tuple[CheckStatus, str, str, str]

#: The first release of each line in which the known holes of the Lua engine are closed: CVE-2024-46981 and
#: CVE-2025-49844, 46817, 46818, 46819. An older line that is not listed has no such release.
PATCHED = {
    "redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
NEAR_THE_LIMIT = 0.9
#: A primary that is silent for longer than this many ms before it is replaced stops its queues for too long.
NODE_TIMEOUT_MS = 5000


def _ok(what: str) -> Outcome:
    return "ok", what, "", ""


def _version(facts: Mapping[str, str]) -> Outcome:
    kind = "valkey" if "valkey_version" in facts else "redis"
    server = f"{kind} {facts[f'{kind}_version']}"
    version = ServerVersion.read(facts, kind)
    if kind == "redis" and version.is_before(OLDEST_SERVER):
        return "bad", server, "its scripts cannot run there", "upgrade to 6.2 or newer"
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
        return (
            "bad",
            f"maxmemory-policy is {policy}",
            means,
            "CONFIG SET maxmemory-policy noeviction, and in redis.conf",
        )
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
        return "bad", "neither AOF nor snapshots", "a restart loses every message", "appendonly yes"
    if aof != "1":
        return "warning", "AOF is off", "a restart loses all since the last snapshot, if there is one", "appendonly yes"
    policy = facts["appendfsync"]
    if policy == "always":
        return _ok("AOF with appendfsync always")
    lost, alone = "every write that is not on disk yet", "nothing"
    if policy == "everysec":
        lost, alone = "the last second", "nothing, except up to 2 s of a slow disk"
    means = f"a power cut loses {lost}; a crash of Redis alone loses {alone}"
    return "warning", f"AOF with appendfsync {policy}", means, "appendfsync always, where that loss is too much"


def _replicas(facts: Mapping[str, str]) -> Outcome:
    if facts["role"] != "master":
        return "bad", "this is a replica", "it takes no writes", "name the primary, or Sentinel"
    replicas = int(facts["connected_slaves"])
    if not replicas:
        return "warning", "no replica", "if the machine is lost, so are the queues", "add a replica"
    least, count = facts["min-replicas-to-write"], pluralize(replicas, "replica")
    if least != "0":
        return _ok(f"{count}, min-replicas-to-write is {least}")
    means = "a primary that is cut off takes messages that a failover loses"
    mend = "min-replicas-to-write 1 and min-replicas-max-lag 1"
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
    mend = "CONFIG SET cluster-require-full-coverage no, and in redis.conf"
    return "warning", f"cluster-require-full-coverage is {setting}", means, mend


def _node_timeout(facts: Mapping[str, str]) -> Outcome:
    what = f"cluster-node-timeout is {facts['cluster-node-timeout']} ms"
    if int(facts["cluster-node-timeout"]) <= NODE_TIMEOUT_MS:
        return _ok(what)
    means = "when a primary dies, its queues stop for that time and a second or two more"
    return "warning", what, means, f"CONFIG SET cluster-node-timeout {NODE_TIMEOUT_MS}, and in redis.conf"


def _eval(*, may_eval: bool) -> Finding:
    if not may_eval:
        return Finding("eval", "ok", "this user may run loaded scripts only")
    means = "a script that never ends stops Redis for all; once it has written, only SHUTDOWN NOSAVE ends it"
    mend = "reliq acl --role producer --without-eval, and reliq acl --load after each start of Redis"
    return Finding("eval", "warning", "this user may run any script", means, mend)


def _rights(role: str, answer: list[str] | Exception) -> Finding:
    name = f"rights: {role}"
    if isinstance(answer, Exception):
        refused = str(answer)
        if "perm" not in refused.lower() and "may not EVAL" not in refused:
            return Finding(
                name, "unknown", "Redis before 7.0 does not report them", mend="set the rule of reliq acl again"
            )
        answer = ["EVAL"] if "may not EVAL" in refused else ["EVAL", "EVALSHA"]
    if not answer:
        return Finding(name, "ok", "this user has them")
    what = f"this user may not {', '.join(answer[:10])}{', …' if answer[10:] else ''}"
    mend = f"reliq acl --role {role} --queue QUEUE prints the rule"
    return Finding(name, "bad", what, f"a program that runs as this user cannot be the {role}", mend)


# ---- the queues of the registry

#: The most key queues that are looked at in each queue.
KEY_QUEUES = 100
#: About as many messages of each queue are looked at.
IDS_LOOKED_AT = 1000


def _check_queues(session: Session) -> list[Finding]:
    """Return a finding for each fault of a queue, or one for all sound queues."""
    try:
        queues = chosen(session, ()).queues
    except (RedisRefusedError, RedisUnavailableError) as error:
        mend = "run it as a user with HSCAN on the registry, or `reliq check` each queue"
        return [Finding("queues", "unknown", f"the queue registry cannot be read: {error}", mend=mend)]
    own = [keys for keys in queues if not keys.bare]
    fences = session.try_all([one for keys in own for one in witnesses(keys)])
    # The maps are read after the fences: meanwhile a map may only become later.
    read = zip(own, session.try_all([shard_map(keys) for keys in own]), strict=True)
    maps = {keys: answer if isinstance(answer, ShardMap) else None for keys, answer in read}
    faults = [*_lost_maps(maps, fences), *_strays(session, maps), *_keys_and_limits(session, queues, maps)]
    sound = f"{pluralize(len(queues), 'queue')}: no stuck key, broken limit, lost shard map or stray message"
    return faults or [Finding("queues", "ok", sound)]


def _lost_maps(maps: Mapping[Keys, ShardMap | None], fences: Sequence[object]) -> Iterator[Finding]:
    for (keys, found), told in zip(maps.items(), chunked(fences, WITNESSES), strict=True):
        known = UNSHARDED.or_later(told)
        if found is not None and known.unless(found).is_lost:
            what = f"Redis has lost the map of the shards of {keys.name}: epoch {known.epoch}, {pluralize(known.n, 'shard')}"
            means = "a failover or a deletion took it; processes use the fences of the shards until these are lost too"
            yield Finding("shards", "bad", what, means, shell_command("check", keys.name, options=["--repair"]))


def _strays(session: Session, maps: Mapping[Keys, ShardMap | None]) -> Iterator[Finding]:
    """Yield a finding for each queue whose shard 0 has messages of other shards, by a producer that reads no map."""
    sharded = [(keys, map) for keys, map in maps.items() if map is not None and map.n > 1]
    looks = session.try_all([calls.ids_scanned(keys, "retries_left", 0, IDS_LOOKED_AT) for keys, _ in sharded])
    after = session.try_all([shard_map(keys) for keys, _ in sharded])
    for (keys, map), look, then in zip(sharded, looks, after, strict=True):
        if isinstance(look, Exception) or then != map or map.was != map.n:  # in a change of shards they are expected
            continue
        if strays := [id for id in look[1] if home(id, map.n)]:
            what = (
                f"{pluralize(len(strays), 'message')} of other shards of {keys.name} in shard 0, such as {strays[0]!r}"
            )
            means = (
                "a producer of a version without shards publishes there: an id may be accepted twice, cancel finds none"
            )
            mend = "restart that producer with the version of the workers; workers handle its messages as all others"
            yield Finding("producers", "bad", what, means, mend)


def _keys_and_limits(
    session: Session, queues: Sequence[Keys], maps: Mapping[Keys, ShardMap | None]
) -> Iterator[Finding]:
    """Yield a finding for each fault of the limits and the message keys of queues."""
    limits = session.try_all([calls.limit_fields(keys) for keys in queues])
    for keys, stored in zip(queues, limits, strict=True):
        if not isinstance(stored, dict) or not stored:
            continue
        if keys.bare:
            what = f"{keys.name} has limits in the Go layout"
            means = "programs in Go support no keys: they read such a message as a malformed message"
            mend = f"move its messages to a queue of reliq's own layout, then delete the key {keys.limits}"
            yield Finding("keys", "bad", what, means, mend)
        elif (map := maps[keys]) is not None and map.served > 1:
            what = f"{keys.name} has keys or limits, and {map.served} shards"
            means = "limits hold in the first shard alone, and messages of one key may lie in several"
            yield Finding("keys", "bad", what, means, shell_command("shards", keys.name, "1"))
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
            means = "no limit blocks them, and no worker serves them: a write was lost, or another program changed a Redis key"
            yield Finding("keys", "bad", what, means, shell_command("check", keys.name, options=["--repair"]))
