"""The doctor's findings of a node of a Cluster, and those of many servers put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq.admin.doctor.facts import Facts, Finding, unknown
from reliq.hashtags import CLUSTER_SLOTS
from reliq.text import count_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
        f"cluster_state is {told['cluster_state']}, {count_of(CLUSTER_SLOTS - served, 'slot has', 'slots have')} no node that answers",
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
