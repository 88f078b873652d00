"""The gate before a server: it lets no command through before the server is known to be fit."""

from typing import Any

from reliq.errors import ConfigurationError
from reliq.replies import read_facts
from reliq.server_version import ServerVersion


class WrongKindError(ConfigurationError):
    """A node of a Cluster was named as a single server, or a single server as a node of a Cluster."""


class Gate:
    """
    Lets no command through before a server is known to be new enough and of the kind that was named.

    A server that hides what it is passes.

    Args:
        in_cluster: whether it was named as a node of a Cluster.
        place: where it is, for what is told.
    """

    #: Asked on a new connection; it is part of the connection's beginning, as redis-py's own HELLO is.
    question = ("INFO", "server")

    def __init__(self, *, in_cluster: bool = False, place: str = "") -> None:
        self.is_open = False
        self._in_cluster, self._place = in_cluster, place

    def judge(self, reply: Any) -> None:
        """Open, or raise ConfigurationError: the server is too old, or of the other kind."""
        facts = read_facts(reply) if isinstance(reply, bytes) else {}
        ServerVersion.read(facts).check()
        mode = facts.get("redis_mode", facts.get("server_mode"))  # Valkey's word
        if mode == "cluster" and not self._in_cluster:
            raise WrongKindError(
                f"{self._place} is a node of a Redis Cluster; write redis+cluster://HOST:PORT, with one node or several "
                "(rediss+cluster:// for TLS), instead of redis://"
            )
        if self._in_cluster and mode == "standalone":
            raise WrongKindError(
                f"{self._place} is a single server and no node of a Redis Cluster; write redis://HOST:PORT/0 "
                "(rediss:// for TLS) instead of redis+cluster://"
            )
        self.is_open = True
