"""The facts that the doctor reads of a server, and the findings it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
