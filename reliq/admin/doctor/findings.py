"""The doctor's findings from its facts, without clock or Redis: a fact that it could not read is unknown, never passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq.admin.doctor.facts import Facts, Finding, unknown
from reliq.admin.doctor.of_cluster import cluster_findings
from reliq.server_version import OLDEST_SERVER, ServerVersion
from reliq.text import count_of
from reliq.transport.url import is_near

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The first release of each line in which the known holes of the Lua engine are closed: CVE-2024-46981 and
#: CVE-2025-49844, 46817, 46818, 46819. An older line that is not listed has no such release.
PATCHED = {
    "redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
#: Scripts of reliq take some milliseconds; one that takes this many microseconds holds up everybody.
SLOW_MICROSECONDS = 50_000
NEAR_THE_LIMIT = 0.9
CLOCK_SECONDS = 1.0


def findings(facts: Facts) -> list[Finding]:
    """Return a finding for each thing that was looked at."""
    looks = [_version, _lua, _eviction, _evicted, _memory, _persistence, _replicas, _slow, _clock, _tls, _retries]
    if facts.is_in_cluster and facts.info.get("role") == "slave":  # it is there to be promoted
        looks = [_version, _lua, _eviction, _memory, _persistence, _clock]
    of_user = [_eval(facts)] if "producer" in facts.denied else []
    return [
        *(look(facts) for look in looks),
        *(cluster_findings(facts) if facts.is_in_cluster else ()),
        *of_user,
        *(_rights(role, denied) for role, denied in facts.denied.items()),
    ]


def _line(facts: Facts) -> tuple[str, ServerVersion]:
    """Return the kind of server, and its own version."""
    kind = "valkey" if "valkey_version" in facts.info else "redis"
    return kind, ServerVersion.read(facts.info, kind)


def _version(facts: Facts) -> Finding:
    kind, version = _line(facts)
    if not version.numbers:
        return unknown("version", "INFO server")
    if kind == "redis" and version.is_before(OLDEST_SERVER):
        return Finding(
            "version", "bad", f"Redis {version.text}", "its scripts cannot run there", "upgrade to 6.2 or newer"
        )
    return Finding("version", "ok", f"{kind} {version.text}")


def _lua(facts: Facts) -> Finding:
    kind, version = _line(facts)
    text, numbers = version.text, version.numbers
    if not numbers:
        return unknown("lua", "INFO server")
    fixed = PATCHED[kind]
    line, patch = numbers[:2], next(iter(numbers[2:]), 0)
    if line > max(fixed) or (line in fixed and patch >= fixed[line]):
        return Finding("lua", "ok", f"{kind} {text} has the known holes of the Lua engine closed")
    first = f"{line[0]}.{line[1]}.{fixed[line]}" if line in fixed else "a line that is kept up"
    return Finding(
        "lua",
        "warning",
        f"{kind} {text} has known holes in its Lua engine, unless its distributor closed them",
        "whoever may run scripts may run code on the server (CVE-2025-49844, CVE-2024-46981)",
        f"upgrade to {first}, or see that your distribution's package names these CVEs",
    )


def _eviction(facts: Facts) -> Finding:
    policy = facts.info.get("maxmemory_policy")
    if policy is None:
        return unknown("eviction", "INFO memory")
    if policy == "noeviction":
        return Finding("eviction", "ok", "maxmemory-policy is noeviction")
    return Finding(
        "eviction",
        "bad",
        f"maxmemory-policy is {policy}",
        "at maxmemory Redis deletes messages, bodies first; workers refuse to start",
        "CONFIG SET maxmemory-policy noeviction, and in redis.conf",
    )


def _evicted(facts: Facts) -> Finding:
    evicted = _number(facts, "evicted_keys")
    if evicted is None:
        return unknown("evicted", "INFO stats")
    if not evicted:
        return Finding("evicted", "ok", "no key was evicted since the server started")
    return Finding(
        "evicted",
        "bad",
        f"{count_of(evicted, 'key was', 'keys were')} evicted since the server started",
        "some of them may have been bodies: such messages end as expired",
        "reliq check QUEUE shows what has no body; then see to the memory",
    )


def _memory(facts: Facts) -> Finding:
    used, limit = _number(facts, "used_memory"), _number(facts, "maxmemory")
    if used is None or limit is None:
        return unknown("memory", "INFO memory")
    limit = limit or _number(facts, "total_system_memory") or 0
    if not limit or used < NEAR_THE_LIMIT * limit:
        return Finding("memory", "ok", f"{used >> 20} of {limit >> 20} MiB used")
    return Finding(
        "memory",
        "bad" if used >= limit else "warning",
        f"{used >> 20} of {limit >> 20} MiB used",
        "at the limit every publish is refused; workers can still handle what is there",
        "raise maxmemory, or let workers catch up",
    )


def _persistence(facts: Facts) -> Finding:
    aof = facts.info.get("aof_enabled")
    if aof is None:
        return unknown("persistence", "INFO persistence")
    broken = [name for name in ("aof_last_write_status", "rdb_last_bgsave_status") if facts.info.get(name) == "err"]
    if broken:
        what = "Redis could not write to disk: " + ", ".join(broken)
        return Finding("persistence", "bad", what, "a restart loses messages", "see the server's log: disk, rights")
    if aof == "1":
        return _fsync(facts.config.get("appendfsync"))
    if facts.config.get("save") == "":
        return Finding(
            "persistence", "bad", "neither AOF nor snapshots", "a restart loses every message", "appendonly yes"
        )
    snapshots = "AOF is off" + (
        "" if "save" in facts.config else "; whether there are snapshots, this user may not read"
    )
    return Finding(
        "persistence", "warning", snapshots, "a restart loses all since the last snapshot, if any", "appendonly yes"
    )


def _fsync(policy: str | None) -> Finding:
    if policy is None:
        return unknown("persistence", "CONFIG GET appendfsync")
    if policy == "always":
        return Finding("persistence", "ok", "AOF with appendfsync always")
    lost, alone = "whatever the system had not written yet", "nothing"
    if policy == "everysec":
        lost, alone = "the last second", "nothing, but for up to 2 s of a slow disk"
    return Finding(
        "persistence",
        "warning",
        f"AOF with appendfsync {policy}",
        f"a power cut loses {lost}; a crash of Redis alone loses {alone}",
        "appendfsync always, where that is too much",
    )


def _replicas(facts: Facts) -> Finding:
    role, replicas = facts.info.get("role"), _number(facts, "connected_slaves")
    if role is None or replicas is None:
        return unknown("replicas", "INFO replication")
    if role != "master":
        return Finding("replicas", "bad", "this is a replica", "it takes no writes", "name the primary, or Sentinel")
    if not replicas:
        loss = "the machine's loss is the queues' loss"
        return Finding("replicas", "warning", "no replica", loss, "add a replica, if that matters")
    least = facts.config.get("min-replicas-to-write")
    if least is None:
        return unknown("replicas", "CONFIG GET min-replicas-to-write")
    if least == "0":
        return Finding(
            "replicas",
            "warning",
            f"{count_of(replicas, 'replica')}, and min-replicas-to-write is 0",
            "a primary that is cut off takes messages that a failover loses",
            "min-replicas-to-write 1 and min-replicas-max-lag 1",
        )
    return Finding("replicas", "ok", f"{count_of(replicas, 'replica')}, min-replicas-to-write is {least}")


def _slow(facts: Facts) -> Finding:
    if facts.slow_scripts is None:
        return unknown("slow scripts", "SLOWLOG")
    slow = [one for one in facts.slow_scripts if one >= SLOW_MICROSECONDS]
    if not slow:
        return Finding("slow scripts", "ok", "no script in the slow log took 50 ms")
    return Finding(
        "slow scripts",
        "warning",
        f"{count_of(len(slow), 'script')} in the slow log took 50 ms or more, the longest {max(slow) // 1000} ms",
        "everybody waits while a script runs; reliq's own take a few ms",
        "SLOWLOG GET tells whose they are; if they are reliq's, the machine is short of CPU or swaps",
    )


def _clock(facts: Facts) -> Finding:
    if facts.clock_offset is None:
        return unknown("clock", "TIME")
    if abs(facts.clock_offset) <= CLOCK_SECONDS:
        return Finding("clock", "ok", "the clocks of server and client agree")
    ahead = "ahead of" if facts.clock_offset > 0 else "behind"
    return Finding(
        "clock",
        "warning",
        f"the server's clock is {abs(facts.clock_offset):.1f} s {ahead} this machine's",
        "leases and delays go by the server's; `at=` and log times go by yours",
        "run NTP on both",
    )


def _tls(facts: Facts) -> Finding:
    far = [host for host in facts.hosts if not is_near(host)]
    if facts.is_secure or not far:
        return Finding("tls", "ok", "TLS" if facts.is_secure else "no TLS, and nothing leaves this machine")
    return Finding(
        "tls",
        "warning",
        f"no TLS to {', '.join(sorted(set(far)))}",
        "who is on the way reads bodies and the password",
        "rediss:// with a server that has a certificate",
    )


def _retries(facts: Facts) -> Finding:
    if not facts.client_retries:
        return Finding("client retries", "ok", "nobody repeats a command behind reliq's back")
    return Finding(
        "client retries",
        "warning",
        f"the redis-py client given repeats a command up to {count_of(facts.client_retries, 'time')} by itself",
        "reliq's own connections do not; what your program sends by it may run twice when a reply is lost",
        "make it with retry=Retry(NoBackoff(), 0)",
    )


def _eval(facts: Facts) -> Finding:
    if not facts.may_eval:
        return Finding("eval", "ok", "this user may run no scripts but those that are loaded")
    return Finding(
        "eval",
        "warning",
        "this user may run any script",
        "one that never ends holds up Redis for everybody; once it has written, SHUTDOWN NOSAVE alone ends it",
        "reliq acl --role producer --without-eval, and reliq scripts load after each start of Redis",
    )


def _rights(role: str, denied: Sequence[str] | None) -> Finding:
    name = f"rights: {role}"
    if denied is None:
        return unknown(name, "ACL GETUSER")
    if not denied:
        return Finding(name, "ok", "this user has them")
    return Finding(
        name,
        "bad",
        f"this user may not {', '.join(denied[:10])}{', …' if len(denied) > 10 else ''}",  # noqa: PLR2004  a line
        f"who runs as this user cannot be the {role}",
        f"reliq acl --role {role} --queue QUEUE prints the rule",
    )


def _number(facts: Facts, name: str) -> int | None:
    text = facts.info.get(name, "")
    return int(text) if text.isdigit() else None
