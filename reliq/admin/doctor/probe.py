"""Reads from a server the facts that the doctor needs; Redis may refuse each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from reliq import commands
from reliq.admin import server
from reliq.admin.acl.probe import denied_commands
from reliq.admin.doctor.facts import Facts, Finding
from reliq.admin.doctor.findings import findings
from reliq.admin.doctor.of_cluster import together, too_old, unreachable
from reliq.admin.doctor.of_keys import key_findings
from reliq.admin.doctor.of_shards import shard_findings, spread
from reliq.errors import ConfigurationError, RedisUnavailableError
from reliq.transport.gate import WrongKindError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.acl.roles import Role
    from reliq.admin.session import Session
    from reliq.call import Request
    from reliq.keys import Keys
    from reliq.transport.target import Address

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
    info = _told(run_all([commands.server_facts(section) for section in SECTIONS]))
    in_cluster = info.get("cluster_enabled") == "1"
    config = run_all([server.parameter(name) for name in (*PARAMETERS, *(CLUSTER_PARAMETERS if in_cluster else ()))])
    [slow] = run_all([server.slow_scripts(SLOWLOG_ENTRIES)])
    [evaluated] = run_all([server.eval_nothing()])
    return Facts(
        info=info,
        config=_told(config),
        cluster=_told(run_all([server.cluster_facts()])) if in_cluster else {},
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
    [clock] = run_all([commands.server_seconds()])
    after = time.time()
    if isinstance(clock, Exception):
        return None
    return float(clock - min(max(clock, before), after))


def _told(answers: Sequence[Mapping[str, str] | Exception]) -> dict[str, str]:
    """Return all that was answered."""
    return {name: value for one in answers if not isinstance(one, Exception) for name, value in one.items()}
