"""The facts that the doctor reads of a server, and the findings it returns."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reliq.admin import calls
from reliq.admin.acl import denied_commands
from reliq.admin.keys import limits_of
from reliq.admin.queues import chosen
from reliq.admin.session import ask_each
from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError
from reliq.keys import CLUSTER_SLOTS, home
from reliq.lua import transitions
from reliq.lua.transitions import KeyQueues
from reliq.message import Counts
from reliq.metrics.snapshot import ShardMaps
from reliq.redis import commands
from reliq.redis.connection import OLDEST_SERVER, ServerVersion, WrongKindError
from reliq.redis.shards import UNSHARDED, WITNESSES, ShardMap, shard_map, witnesses
from reliq.redis.url import is_near
from reliq.text import format_duration, pluralize, shell_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliq.admin.calls import Role
    from reliq.admin.session import Session
    from reliq.keys import Keys
    from reliq.redis.commands import Call, Command, Request
    from reliq.redis.url import Address


Verdict = Literal["ok", "warning", "bad", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One thing the doctor looked at.

    Attributes:
        what: the finding, in one line.
        means: its consequence for the queues.
        mend: what to do; empty where there is nothing to mend.
    """

    name: str
    verdict: Verdict
    what: str
    means: str = ""
    mend: str = ""


def unknown(name: str, what: str) -> Finding:
    """Return the finding that a fact may not be read."""
    return Finding(name, "unknown", f"this user may not read {what}", mend=f"run it as one who may, or look at {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """
    Facts that the doctor read from a server; None, or an empty value, stands for a fact that it may not read.

    Attributes:
        info: of INFO, all sections that it may read.
        config: of CONFIG GET, the parameters that it may read.
        cluster: of CLUSTER INFO, for a node of a Cluster.
        slow_scripts: microseconds of each script in the slow log.
        clock_offset: seconds by which the server's clock is ahead, beyond what the round trip explains.
        may_eval: whether this user may run a script of its own.
        denied: of each role, the commands that this user may not run; None where that cannot be read.
    """

    info: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    cluster: Mapping[str, str] = field(default_factory=dict)
    slow_scripts: Sequence[int] | None = None
    clock_offset: float | None = None
    may_eval: bool = False
    denied: Mapping[str, Sequence[str] | None] = field(default_factory=dict)
    hosts: Sequence[str] = ()
    is_secure: bool = False
    client_retries: int = 0

    @property
    def is_in_cluster(self) -> bool:
        """Whether the server is a node of a Cluster."""
        return self.info.get("cluster_enabled") == "1"


SECTIONS = ("server", "memory", "persistence", "replication", "stats", "cluster")
PARAMETERS = ("appendfsync", "save", "min-replicas-to-write")
CLUSTER_PARAMETERS = ("cluster-require-full-coverage", "cluster-node-timeout")
SLOWLOG_ENTRIES = 128


def examine(session: Session, address: Address, roles: Sequence[Role], keys: Keys) -> list[Finding]:
    """
    Return what there is to say of every server, of a Cluster's replicas too; rights are those on the queue of `keys`.

    Raises:
        RedisUnavailableError: no server answers.
    """
    try:
        servers = session.each(replicas=True)
    except WrongKindError:
        raise
    except ConfigurationError as error:
        return [too_old(error)]
    found: dict[str, list[Finding]] = {}
    for name, one in servers.items():
        try:
            found[name] = findings(_facts(one, address, roles, keys))
        except ConfigurationError as error:
            found[name] = [too_old(error)]
        except RedisUnavailableError as error:
            if len(servers) == 1:
                raise
            found[name] = [unreachable(name, str(error))]
    of_servers = together(found) + ([spread(session, len(session.each()))] if len(found) > 1 else [])
    return of_servers + key_findings(session) + shard_findings(session)


def _facts(session: Session, address: Address, roles: Sequence[Role], keys: Keys) -> Facts:
    def run_all(requests: Sequence[Request[Any]]) -> list[Any]:
        answers = session.try_all(requests)
        away = next((answer for answer in answers if isinstance(answer, RedisUnavailableError)), None)
        if away is not None:
            raise away
        return answers

    offset = _clock_offset(run_all)
    info = _facts_by_name(run_all([commands.server_facts(section) for section in SECTIONS]))
    in_cluster = info.get("cluster_enabled") == "1"
    config = run_all([calls.parameter(name) for name in (*PARAMETERS, *(CLUSTER_PARAMETERS if in_cluster else ()))])
    [slow] = run_all([calls.slow_scripts(SLOWLOG_ENTRIES)])
    [evaluated] = run_all([calls.eval_nothing()])
    return Facts(
        info=info,
        config=_facts_by_name(config),
        cluster=_facts_by_name(run_all([calls.cluster_facts()])) if in_cluster else {},
        slow_scripts=None if isinstance(slow, Exception) else slow,
        clock_offset=offset,
        may_eval=not isinstance(evaluated, Exception),
        denied={role: denied_commands(run_all, role, keys) for role in roles},
        hosts=address.hosts,
        is_secure=address.is_secure,
        client_retries=address.retries,
    )


def _clock_offset(run_all: Any) -> float | None:
    """Return by how many seconds the server's clock is ahead, beyond what the round trip explains."""
    before = time.time()
    [clock] = run_all([calls.server_seconds()])
    after = time.time()
    if isinstance(clock, Exception):
        return None
    return float(clock - min(max(clock, before), after))


def _facts_by_name(answers: Sequence[Mapping[str, str] | Exception]) -> dict[str, str]:
    """Return all that was answered."""
    return {name: value for one in answers if not isinstance(one, Exception) for name, value in one.items()}


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
    text = version.text
    numbers = version.numbers
    if not numbers:
        return unknown("lua", "INFO server")
    fixed = PATCHED[kind]
    line = numbers[:2]
    patch = next(iter(numbers[2:]), 0)
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
        f"{pluralize(evicted, 'key was', 'keys were')} evicted since the server started",
        "some of them may have been bodies: such messages end as expired",
        "reliq check QUEUE shows what has no body; then see to the memory",
    )


def _memory(facts: Facts) -> Finding:
    used = _number(facts, "used_memory")
    limit = _number(facts, "maxmemory")
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
    lost = "whatever the system had not written yet"
    alone = "nothing"
    if policy == "everysec":
        lost = "the last second"
        alone = "nothing, but for up to 2 s of a slow disk"
    return Finding(
        "persistence",
        "warning",
        f"AOF with appendfsync {policy}",
        f"a power cut loses {lost}; a crash of Redis alone loses {alone}",
        "appendfsync always, where that is too much",
    )


def _replicas(facts: Facts) -> Finding:
    role = facts.info.get("role")
    replicas = _number(facts, "connected_slaves")
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
            f"{pluralize(replicas, 'replica')}, and min-replicas-to-write is 0",
            "a primary that is cut off takes messages that a failover loses",
            "min-replicas-to-write 1 and min-replicas-max-lag 1",
        )
    return Finding("replicas", "ok", f"{pluralize(replicas, 'replica')}, min-replicas-to-write is {least}")


def _slow(facts: Facts) -> Finding:
    if facts.slow_scripts is None:
        return unknown("slow scripts", "SLOWLOG")
    slow = [one for one in facts.slow_scripts if one >= SLOW_MICROSECONDS]
    if not slow:
        return Finding("slow scripts", "ok", "no script in the slow log took 50 ms")
    return Finding(
        "slow scripts",
        "warning",
        f"{pluralize(len(slow), 'script')} in the slow log took 50 ms or more, the longest {max(slow) // 1000} ms",
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
        f"the redis-py client given repeats a command up to {pluralize(facts.client_retries, 'time')} by itself",
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
        "reliq acl --role producer --without-eval, and reliq acl --load after each start of Redis",
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


#: A primary that is silent for longer than this many ms before it is replaced leaves its queues standing for too long.
NODE_TIMEOUT_MS = 5000


def cluster_findings(facts: Facts) -> list[Finding]:
    """Return what there is to say of a node as one of a Cluster."""
    return [_slots(facts), _coverage(facts.config.get("cluster-require-full-coverage")), _node_timeout(facts)]


def too_old(error: Exception) -> Finding:
    """Return the finding that connections let nothing through to a server."""
    return Finding("version", "bad", str(error), "nothing of reliq runs there", "upgrade to 6.2 or newer")


def unreachable(server: str, why: str) -> Finding:
    """Return the finding that a server does not answer."""
    return Finding(
        "server",
        "bad",
        f"{server} does not answer: {why}",
        "the queues of its slots or shards stand still; where it is a replica, nobody takes its primary's place",
        "see the server's log; in a Cluster CLUSTER NODES says what the others think of it",
    )


def together(found: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Return the findings of many servers: one for all that say the same, else one for each that differs."""
    if len(found) == 1:
        return [finding for findings in found.values() for finding in findings]
    names = dict.fromkeys(finding.name for findings in found.values() for finding in findings)
    return [finding for name in names for finding in _of_one_name(name, found)]


def _of_one_name(name: str, found: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    of_server = {server: one for server, findings in found.items() for one in findings if one.name == name}
    groups: dict[Finding, list[str]] = {}
    for server, finding in of_server.items():
        groups.setdefault(finding, []).append(server)
    well = [(finding, servers) for finding, servers in groups.items() if finding.verdict == "ok"]
    if len(well) > 1:  # each has figures of its own
        servers = [server for _, some in well for server in some]
        groups = {Finding(name, "ok", "each by its own figures"): servers} | {
            finding: some for finding, some in groups.items() if finding.verdict != "ok"
        }
    return [_of_servers(finding, servers, len(of_server)) for finding, servers in groups.items()]


def _of_servers(finding: Finding, servers: Sequence[str], count: int) -> Finding:
    if finding.name == "server":
        return finding
    where = f"on each of {count}" if len(servers) == count else f"on {', '.join(sorted(servers))}"
    return Finding(finding.name, finding.verdict, f"{finding.what} ({where})", finding.means, finding.mend)


def _slots(facts: Facts) -> Finding:
    told = facts.cluster
    if "cluster_state" not in told:
        return unknown("slots", "CLUSTER INFO")
    served = int(told["cluster_slots_ok"])
    if told["cluster_state"] == "ok" and served == CLUSTER_SLOTS:
        return Finding("slots", "ok", "every slot has a node that answers")
    return Finding(
        "slots",
        "bad",
        f"cluster_state is {told['cluster_state']}, {pluralize(CLUSTER_SLOTS - served, 'slot has', 'slots have')} no node that answers",
        "the queues of those slots stand still",
        "CLUSTER NODES says which; redis-cli --cluster fix mends slots that nobody has",
    )


def _coverage(setting: str | None) -> Finding:
    if setting is None:
        return unknown("coverage", "CONFIG GET cluster-require-full-coverage")
    if setting == "no":
        return Finding("coverage", "ok", "cluster-require-full-coverage is no")
    return Finding(
        "coverage",
        "warning",
        "cluster-require-full-coverage is yes",
        "while one slot has no node, every queue of the Cluster stands still",
        "CONFIG SET cluster-require-full-coverage no, and in redis.conf",
    )


def _node_timeout(facts: Facts) -> Finding:
    text = facts.config.get("cluster-node-timeout", "")
    if not text.isdigit():
        return unknown("node timeout", "CONFIG GET cluster-node-timeout")
    if int(text) <= NODE_TIMEOUT_MS:
        return Finding("node timeout", "ok", f"cluster-node-timeout is {text} ms")
    return Finding(
        "node timeout",
        "warning",
        f"cluster-node-timeout is {text} ms",
        "when a primary dies, its queues stand still for that time and a second or two more",
        f"CONFIG SET cluster-node-timeout {NODE_TIMEOUT_MS}, and in redis.conf",
    )


#: A key with so many waiting messages, and more than this part of all that wait, takes most of a queue.
MANY_MESSAGES = 1000
MOST_OF_ALL = 0.5
#: Lines that are looked at in each queue.
LINES = 100
#: A queue that sleeps for longer than this many seconds stands.
LONG_SECONDS = 600.0


class Keyed(NamedTuple):
    """
    A queue with keys or limits, as the doctor sees it.

    Attributes:
        shards: how many it has.
        waiting: messages in lines.
        stored: its limits as Redis has them.
        now: unix seconds by Redis' clock.
    """

    keys: Keys
    shards: int
    waiting: int
    lines: KeyQueues
    stored: dict[str, str]
    now: float


def key_findings(session: Session) -> list[Finding]:
    """Return what there is to say of queues with keys or limits; nothing where there is none, or this user may not look."""
    try:
        queues = list(_keyed(session))
    except RedisRefusedError:
        return []
    wrong = [finding for one in queues for finding in judged_keys(one)]
    if wrong or not queues:
        return wrong
    return [Finding("keys", "ok", f"queues with keys or limits: {len(queues)}, and nothing holds them up")]


def _keyed(session: Session) -> Iterator[Keyed]:
    known = chosen(session, ()).queues
    maps = ShardMaps()
    answers, _ = ask_each(session, known, transitions.counts, maps)
    found = {
        keys: parts
        for keys, parts in zip(known, answers, strict=True)
        if any(isinstance(part, Counts) and part.keyed for part in parts)
    }
    [now_ms] = session.run_all([commands.server_ms()]) if found else [0]
    for keys, parts in found.items():
        asked: list[Call[Any] | Command[Any]] = [
            transitions.key_queues(keys, most=LINES),
            calls.limit_fields(keys),
        ]
        lines, stored = session.try_all(asked)
        if isinstance(lines, KeyQueues) and isinstance(stored, dict):
            waiting = Counts.sum([part for part in parts if isinstance(part, Counts)]).waiting
            yield Keyed(keys, maps.served(keys), waiting, lines, stored, now_ms / 1000)


def judged_keys(queue: Keyed) -> Iterator[Finding]:
    """Yield what is wrong with a queue."""
    yield from _of_home(queue)
    yield from _of_limits(queue)
    yield from _of_key_queues(queue)


def _of_home(queue: Keyed) -> Iterator[Finding]:
    name = queue.keys.name
    if queue.keys.bare:
        yield Finding(
            "keys",
            "bad",
            f"{name} has limits in the Go layout",
            "programs in Go know no keys: they take such a message for a broken one",
            f"move its messages to a queue of reliq's own layout, then delete the key {queue.keys.limits}",
        )
    elif queue.shards > 1:
        yield Finding(
            "keys",
            "bad",
            f"{name} has keys or limits, and {queue.shards} shards",
            "limits hold in the first shard alone, and messages of one key may lie in several",
            shell_command("shards", name, "1"),
        )


def _of_limits(queue: Keyed) -> Iterator[Finding]:
    name = queue.keys.name
    try:
        limits_of(queue.stored)
    except ConfigurationError as error:
        yield Finding(
            "keys",
            "bad",
            f"the limits of {name} make no sense: {error}",
            "nothing of the queue may start, or more than was meant",
            shell_command("limits", name, options=["--clear", "NAME"]),
        )
    until = queue.lines.asleep_until
    if until is not None and until - queue.now > LONG_SECONDS:
        yield Finding(
            "keys",
            "warning",
            f"{name} sleeps for {format_duration(until - queue.now)} more: a handler has raised RateLimited for a message without key",
            "no message of it starts until then",
            f"{shell_command('resume', name)}; publish its messages with a key",
        )


def _of_key_queues(queue: Keyed) -> Iterator[Finding]:
    name = queue.keys.name
    largest = queue.lines.largest
    standing = [one for one in largest if one.state == "standing"]
    if standing:
        yield Finding(
            "keys",
            "bad",
            f"{pluralize(len(standing), 'line')} of {name} {'stands' if len(standing) == 1 else 'stand'}, as that of key "
            f"{standing[0].key!r} with {pluralize(standing[0].waiting, 'message')}",
            "nothing holds them up, and nobody serves them: a write was lost, or something else has changed a key",
            shell_command("check", name, options=["--repair"]),
        )
    first = next(iter(largest), None)
    if (
        first is not None
        and first.waiting >= MANY_MESSAGES
        and first.waiting > MOST_OF_ALL * queue.waiting
        and len(largest) > 1
    ):
        yield Finding(
            "keys",
            "warning",
            f"key {first.key!r} has {first.waiting:,} of the {queue.waiting:,} messages that wait in {name}",
            "others have their turns beside it; its own messages wait for each other",
            f"{shell_command('limits', name)} shows what it may; {shell_command('purge', name, options=['--key', first.key])} deletes what need not run",
        )


#: A server with so many times its share of a queue's shards has too many.
TOO_MANY = 1.5
#: About as many messages of each queue are looked at.
IDS_LOOKED_AT = 1000


def shard_findings(session: Session) -> list[Finding]:
    """
    Return a finding for each queue whose map is lost, or that has messages in its first shard which belong in others.

    While the number of shards changes there are such messages; before and after, an older producer alone leaves any.
    """
    try:
        queues = [keys for keys in chosen(session, ()).queues if not keys.bare]
        return [*_lost(session, queues), *_strays(session, queues)]
    except RedisRefusedError:
        return []


def _lost(session: Session, queues: Sequence[Keys]) -> Iterator[Finding]:
    told = iter(session.try_all([one for keys in queues for one in witnesses(keys)]))
    # The map is read after the fences: meanwhile it may only become later.
    for keys, found in zip(queues, session.try_all([shard_map(keys) for keys in queues]), strict=True):
        known = UNSHARDED.or_later(islice(told, WITNESSES))
        if isinstance(found, ShardMap) and known.unless(found).is_lost:
            yield Finding(
                "shards",
                "bad",
                f"Redis has lost the map of the shards of {keys.name}: epoch {known.epoch}, {pluralize(known.n, 'shard')}",
                "a failover or a deletion took it; processes go on by what the shards have, until these are lost too",
                shell_command("check", keys.name, options=["--repair"]),
            )


def _strays(session: Session, queues: Sequence[Keys]) -> Iterator[Finding]:
    maps = session.try_all([shard_map(keys) for keys in queues])
    sharded = [(keys, map) for keys, map in zip(queues, maps, strict=True) if isinstance(map, ShardMap) and map.n > 1]
    looks = session.try_all([calls.ids_scanned(keys, "retries_left", 0, IDS_LOOKED_AT) for keys, _ in sharded])
    after = session.try_all([shard_map(keys) for keys, _ in sharded])
    for (keys, map), look, then in zip(sharded, looks, after, strict=True):
        if isinstance(look, Exception) or then != map or map.was != map.n:
            continue
        if strays := [id for id in look[1] if home(id, map.n)]:
            yield Finding(
                "producers",
                "bad",
                f"{pluralize(len(strays), 'message')} of other shards of {keys.name} in shard 0, such as {strays[0]!r}",
                "a producer of a version without shards publishes there: an id may be accepted twice, and cancel finds none",
                "start that producer anew with the version of the workers; what it has published is worked as all else",
            )


def spread(session: Session, servers: int) -> Finding:
    """Return the finding on the shards of every queue of the registry, of which each of `servers` should have its share."""
    try:
        queues = [keys for keys in chosen(session, ()).queues if not keys.bare]
    except RedisRefusedError:
        return unknown("spread", "the registry of queues")
    maps = session.try_all([shard_map(keys) for keys in queues])
    counts = {
        keys.name: Counter(session.server_of(keys.of_shard(shard).ready) for shard in range(found.served))
        for keys, found in zip(queues, maps, strict=True)
        if isinstance(found, ShardMap) and found.served > 1
    }
    return judged_shards(counts, servers)


def judged_shards(counts: Mapping[str, Counter[str]], servers: int) -> Finding:
    """Return the finding on queues, by how many of the shards of each lie on which server."""
    for queue, of_server in counts.items():
        [(server, most)] = of_server.most_common(1)
        if most > TOO_MANY * ceil(of_server.total() / servers):
            return Finding(
                "spread",
                "warning",
                f"{most} of {of_server.total()} shards of {queue} lie on {server}",
                "that server does most of the queue's work",
                "give each node as many slots: redis-cli --cluster rebalance",
            )
    return Finding(
        "spread", "ok", f"queues with several shards: {len(counts)}, spread evenly over {pluralize(servers, 'server')}"
    )
