"""Reads from a server the facts that the doctor needs; Redis may refuse each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from reliq import commands
from reliq.admin import server
from reliq.admin.acl.probe import denied_commands
from reliq.admin.doctor.facts import Facts, Finding
from reliq.admin.doctor.findings import findings
from reliq.errors import ConfigurationError, RedisUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reliq.admin.acl.roles import Role
    from reliq.admin.session import Session
    from reliq.call import Request
    from reliq.keys import Keys
    from reliq.transport.target import Address

SECTIONS = ("server", "memory", "persistence", "replication", "stats")
PARAMETERS = ("appendfsync", "save", "min-replicas-to-write")
SLOWLOG_ENTRIES = 128


def examine(session: Session, address: Address, roles: Sequence[Role], keys: Keys) -> list[Finding]:
    """
    Return what there is to say of a server; `keys` are those of the queue whose rights are asked for.

    Raises:
        RedisUnavailableError: it does not answer.
    """

    def run_all(requests: Sequence[Request[Any]]) -> list[Any]:
        answers = session.try_all(requests)
        away = next((answer for answer in answers if isinstance(answer, RedisUnavailableError)), None)
        if away is not None:
            raise away
        return answers

    try:
        offset = _clock_offset(run_all)
    except ConfigurationError as error:  # the connection lets nothing through to a server that is too old
        return [Finding("version", "bad", str(error), "nothing of reliq runs there", "upgrade to 6.2 or newer")]
    info = run_all([commands.server_facts(section) for section in SECTIONS])
    config = run_all([server.parameter(name) for name in PARAMETERS])
    [slow] = run_all([server.slow_scripts(SLOWLOG_ENTRIES)])
    [evaluated] = run_all([server.eval_nothing()])
    facts = Facts(
        info=_told(info),
        config=_told(config),
        slow_scripts=None if isinstance(slow, Exception) else slow,
        clock_offset=offset,
        may_eval=not isinstance(evaluated, Exception),
        denied={role: denied_commands(run_all, role, keys) for role in roles},
        hosts=address.hosts,
        is_secure=address.is_secure,
        client_retries=address.retries,
    )
    return findings(facts)


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
