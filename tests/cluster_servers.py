"""A real Redis Cluster on loopback: three primaries with a replica each; tests break it, and it is repaired after."""

import os
import signal
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Self

import redis

from reliq.testing.server import EmbeddedRedis
from tests.ports import free_port
from tests.waiting import eventually

SLOTS = 16_384
#: Time in ms until a silent node counts as failed. After about the same time again, a replica is promoted.
NODE_TIMEOUT_MS = 1000

OPTIONS = {
    "cluster-enabled": "yes",
    "cluster-node-timeout": str(NODE_TIMEOUT_MS),
    "cluster-require-full-coverage": "no",  # an unserved slot fails its own keys only
    "cluster-replica-validity-factor": "0",  # replicas are promoted after any disconnection
    "cluster-migration-barrier": "5",  # no replica moves to another primary
    "repl-diskless-sync-delay": "0",
    "repl-ping-replica-period": "1",
}


#: First and last slot, and the ports of the owners: the primary, then its replicas.
Range = tuple[int, int, tuple[int, ...]]


class LiveCluster:
    """
    Servers that form a Cluster, each in its own process.

    Args:
        server: path of the server program.
        primaries: number of primaries.
        replicas: number of replicas of each primary.
        options: further options of each server's configuration.
    """

    def __init__(
        self, server: Path, primaries: int = 3, replicas: int = 1, options: dict[str, str] | None = None
    ) -> None:
        self._primaries = primaries
        self.nodes = [
            EmbeddedRedis(server=server, port=free_port(), options=OPTIONS | (options or {}))
            for _ in range(primaries * (1 + replicas))
        ]
        self._clients = {one.port: redis.Redis(port=one.port, socket_timeout=5.0) for one in self.nodes}

    @property
    def url(self) -> str:
        """Return the URL with every server, in any state."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{one.port}" for one in self.nodes)

    def __enter__(self) -> Self:
        """Start every server; return when all slots are served and all replicas follow their primaries."""
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop every server."""
        for client in self._clients.values():
            client.close()
        for one in self.nodes:
            self.resume(one)
            one.kill()
            one.stop()

    def client(self, server: EmbeddedRedis) -> redis.Redis:
        """Return a client of one server."""
        return self._clients[server.port]

    def ask(self, server: EmbeddedRedis, *command: object) -> object:
        """Run a command on one server."""
        return self.client(server).execute_command(*command)

    def primary_of(self, key: str) -> EmbeddedRedis:
        """Return the primary of the slot of `key`, by a healthy server's view; raise LookupError without a primary."""
        return self._owners_of(key)[0]

    def replica_of(self, key: str) -> EmbeddedRedis:
        """Return a replica of the key's primary; raise LookupError without a replica."""
        return self._owners_of(key)[1]

    def server_at(self, port: int) -> EmbeddedRedis:
        """Return the server at a port."""
        return next(one for one in self.nodes if one.port == port)

    def primaries(self) -> list[EmbeddedRedis]:
        """Return the servers that have slots, by the view of a healthy server."""
        return [self.server_at(port) for port in dict.fromkeys(ports[0] for _, _, ports in self._slots())]

    def pause(self, server: EmbeddedRedis) -> None:
        """Pause a server: it accepts connections and does not reply."""
        os.kill(server.pid, signal.SIGSTOP)

    def resume(self, server: EmbeddedRedis) -> None:
        """Resume a paused server."""
        with suppress(RuntimeError, ProcessLookupError):
            os.kill(server.pid, signal.SIGCONT)

    def heal(self) -> None:
        """Start all servers, wait until the Cluster is whole, and delete every key."""
        for one in self.nodes:
            self.resume(one)
            if not one.is_running:
                one.start()
        self.wait_until_ok()
        for one in self.primaries():
            self.client(one).flushall()

    def wait_until_ok(self) -> None:
        """Wait until every server is up, all agree on the owners of the slots, and all replicas are in sync."""
        eventually(self._is_whole, "the Cluster is whole")

    def _begin(self) -> None:
        for one in self.nodes:
            one.start()
        for number, one in enumerate(self.nodes, 1):
            self.ask(one, "CLUSTER", "SET-CONFIG-EPOCH", number)
        for one, other in permutations(self.nodes, 2):
            self.ask(one, "CLUSTER", "MEET", "127.0.0.1", other.port)
        leaders, followers = self.nodes[: self._primaries], self.nodes[self._primaries :]
        edges = [SLOTS * number // self._primaries for number in range(self._primaries + 1)]
        for one, first, end in zip(leaders, edges, edges[1:], strict=False):
            self.ask(one, "CLUSTER", "ADDSLOTS", *range(first, end))
        for number, one in enumerate(followers):
            leader = self.ask(leaders[number % self._primaries], "CLUSTER", "MYID")
            eventually(lambda one=one, leader=leader: self._follows(one, leader), "a replica knows its primary")
        self.wait_until_ok()

    def _follows(self, server: EmbeddedRedis, leader: object) -> bool:
        try:
            return bool(self.ask(server, "CLUSTER", "REPLICATE", leader))
        except redis.ResponseError:  # it has not met that node yet
            return False

    def _owners_of(self, key: str) -> list[EmbeddedRedis]:
        slot = redis.cluster.key_slot(key.encode())
        for first, last, ports in self._slots():
            if first <= slot <= last:
                return [self.server_at(port) for port in ports]
        raise LookupError(f"nobody has slot {slot}")

    def _slots(self) -> list[Range]:
        for one in self.nodes:
            with suppress(redis.RedisError):
                if one.is_running and not _is_stopped(one.pid):
                    return self._view(one)
        raise LookupError("no server of the Cluster answers")

    def _view(self, server: EmbeddedRedis) -> list[Range]:
        """Return the owners of all slots, by the view of one server."""
        rows = self.client(server).execute_command("CLUSTER", "SLOTS")
        return sorted((row[0], row[1], tuple(node[1] for node in row[2:])) for row in rows)

    def _is_whole(self) -> bool:
        """Return whether all servers agree on the owners of the slots, and all replicas are in sync."""
        try:
            each = len(self.nodes) // self._primaries
            views = [
                [(first, last, ports[0]) for first, last, ports in self._view(one) if len(ports) == each]
                for one in self.nodes
            ]
            if any(view != views[0] for view in views) or sum(last - first + 1 for first, last, _ in views[0]) < SLOTS:
                return False
            return all(self._serves(one, each - 1) for one in self.nodes)
        except redis.RedisError:
            return False

    def _serves(self, server: EmbeddedRedis, replicas: int) -> bool:
        client = self.client(server)
        facts = dict(row.split(":") for row in client.execute_command("CLUSTER", "INFO").decode().split())
        told = client.info("replication")
        if facts["cluster_state"] != "ok" or facts["cluster_slots_fail"] != "0" or facts["cluster_slots_pfail"] != "0":
            return False
        if told["role"] == "slave":
            return told["master_link_status"] == "up" and not told["master_sync_in_progress"]
        follows = [told.get(f"slave{number}", {}).get("state") for number in range(told["connected_slaves"])]
        return len(follows) == replicas and set(follows) <= {"online"}


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
