"""The Redis of a run: a server behind a proxy, or a Cluster with proxies between its nodes."""

import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from reliq.keys import Keys
from reliq.redis.shards import shard_map
from reliq.testing.server import EmbeddedRedis
from tests.cluster_bus import Bus
from tests.cluster_servers import LiveCluster
from tests.harness.chaos.proxy import Proxy
from tests.harness.chaos.workload import QUEUES, SHARES, place_keys
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
#: Timeout of a read from a paused server.
LOOK_SECONDS = 1.0


class OneServer(ExitStack):
    """A Redis with a proxy that every second process uses."""

    def __init__(self, folder: Path, server: Path, kind: str) -> None:
        super().__init__()
        self.kind = kind
        data = folder / "redis"
        data.mkdir()
        # Redis compares the log with its size at the start: with the usual 100 % each restart would read a longer log.
        rewrite = {"auto-aof-rewrite-min-size": "16mb", "auto-aof-rewrite-percentage": "10"}
        options = {"appendonly": "yes", "appendfsync": "always", **rewrite}
        said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
        if " v=6" not in said:
            options["enable-debug-command"] = "local"
        self.server = EmbeddedRedis(server=server, options=options, folder=data, port=free_port())
        self.proxy = Proxy(self.server.port)
        patience = Retry(ConstantBackoff(0.2), 20)
        self._client = redis.Redis(unix_socket_path=str(self.server.socket), socket_timeout=20, retry=patience)

    def __enter__(self) -> Self:
        self.enter_context(self.server)
        self.enter_context(self._client)
        self.callback(self._resume)
        self.enter_context(self.proxy)
        return self

    def _resume(self) -> None:
        with suppress(OSError, RuntimeError):
            os.kill(self.server.pid, signal.SIGCONT)

    def url(self, number: int) -> str:
        """Return the Redis URL of process `number`."""
        return self.server.url if number % 2 else self.proxy.url

    def client(self, _keys: Keys | None = None) -> redis.Redis:
        """Return a client of the server with the keys, without a proxy."""
        return self._client

    def places(self) -> list[str]:
        """Return the names of the queues."""
        return list(SHARES[self.kind])


class ManyServers(ExitStack):
    """
    Three primaries with a replica each; their bus connections go through proxies.

    Args:
        shards: the final number of shards of one queue, reached in two steps.
    """

    kind = "cluster"

    def __init__(self, server: Path, shards: int) -> None:
        super().__init__()
        self.shards = shards
        self.cluster = LiveCluster(server)

    def __enter__(self) -> Self:
        cluster = self.enter_context(self.cluster)
        self._clients = {
            one.port: self.enter_context(redis.Redis(port=one.port, socket_timeout=LOOK_SECONDS))
            for one in cluster.nodes
        }
        self.bus = self.enter_context(Bus(cluster))
        cluster.wait_until_ok()
        return self

    def url(self, _number: int) -> str:
        """Return the Cluster URL of process `number`."""
        return self.cluster.url

    def client(self, keys: Keys) -> redis.Redis:
        """Return a client of the current primary of the keys."""
        return self._clients[self.cluster.primary_of(keys.ready).port]

    def places(self) -> list[str]:
        """Return the names of the queues, and of each shard of queues with several shards."""
        found = []
        for name in SHARES[self.kind]:
            question = shard_map(QUEUES[name].keys)
            client = self.client(QUEUES[name].keys)
            served = question.read(client.execute_command(*question.command)).served
            found += [f"{name}#{shard}" if shard else name for shard in range(served)]
        return found

    def queues_at(self, server: EmbeddedRedis) -> list[str]:
        """Return the queues that have a shard on a primary."""
        there = [one for one in self.places() if self.cluster.primary_of(place_keys(one).ready) is server]
        return list(dict.fromkeys(one.partition("#")[0] for one in there))


Ground = OneServer | ManyServers
