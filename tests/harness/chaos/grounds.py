"""What a run breaks: one Redis with a proxy before it, or a Cluster with a bus that can be cut."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, Self

import redis

from reliq.embedded import EmbeddedRedis, find_server
from reliq.keys import Keys
from reliq.shardmap import shard_map
from tests.cluster_bus import Bus
from tests.cluster_servers import LiveCluster
from tests.harness.chaos.workload import QUEUES, SHARES, place_keys
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
Kind = Literal["server", "keys", "cluster"]
#: So long does a look at a server that stands still take.
LOOK_SECONDS = 1.0


class Proxy:
    """The proxy's process."""

    def __init__(self, server_port: int) -> None:
        command = [sys.executable, "-m", "tests.harness.chaos.proxy", str(server_port)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.url = f"redis://127.0.0.1:{int(self._process.stdout.readline())}/0"

    def order(self, line: str) -> None:
        """Tell the proxy what to do."""
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class OneServer:
    """A Redis, and a proxy before it through which every second process goes."""

    def __init__(self, folder: Path, server: Path | None = None, kind: Kind = "server") -> None:
        self.kind, path = kind, server or find_server()
        data = folder / "redis"
        data.mkdir()
        # Redis takes the log's size at its start for that of a fresh one: with the usual 100 % each start reads more.
        rewrite = {"auto-aof-rewrite-min-size": "16mb", "auto-aof-rewrite-percentage": "10"}
        options = {"appendonly": "yes", "appendfsync": "always", **rewrite}
        if version_of(path) >= (7,):
            options["enable-debug-command"] = "local"
        self.server = EmbeddedRedis(server=path, options=options, folder=data, port=free_port())
        self.proxy: Proxy
        self._client = redis.Redis(unix_socket_path=str(self.server.socket), socket_timeout=5)

    def __enter__(self) -> Self:
        self.server.start()
        self.proxy = Proxy(self.server.port)
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.close()
        with suppress(OSError, RuntimeError):
            os.kill(self.server.pid, signal.SIGCONT)
        self._client.close()
        self.server.stop()

    def url(self, number: int) -> str:
        """Return where process `number` finds Redis."""
        return self.server.url if number % 2 else self.proxy.url

    def client(self, _keys: Keys) -> redis.Redis:
        """Return a client of the server that has the keys, which no proxy disturbs."""
        return self._client

    def places(self) -> list[str]:
        """Return each queue."""
        return list(SHARES[self.kind])


class ManyServers:
    """
    Three primaries with a replica each, whose bus goes through proxies.

    Args:
        shards: how many one of the queues gets, in two steps.
    """

    kind: Kind = "cluster"

    def __init__(self, server: Path | None = None, shards: int = 8) -> None:
        self.shards = shards
        self.cluster = LiveCluster(server or find_server())
        self.bus: Bus
        self._clients: dict[int, redis.Redis] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        cluster = self._stack.enter_context(self.cluster)
        self._clients = {one.port: redis.Redis(port=one.port, socket_timeout=LOOK_SECONDS) for one in cluster.nodes}
        self.bus = self._stack.enter_context(Bus(cluster))
        cluster.wait_until_ok()
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()
        self._stack.close()

    def url(self, _number: int) -> str:
        """Return where process `number` finds the Cluster."""
        return self.cluster.url

    def client(self, keys: Keys) -> redis.Redis:
        """Return a client of the primary that has the keys now."""
        return self._clients[self.cluster.primary_of(keys.ready).port]

    def places(self) -> list[str]:
        """Return each queue, and each shard of those that have several."""
        found = []
        for name in SHARES[self.kind]:
            question = shard_map(QUEUES[name].keys)
            client = self.client(QUEUES[name].keys)
            served = question.read(client.execute_command(*question.command)).served
            found += [f"{name}#{shard}" if shard else name for shard in range(served)]
        return found

    def queues_at(self, server: EmbeddedRedis) -> list[str]:
        """Return the queues of which a primary has at least a shard."""
        there = [one for one in self.places() if self.cluster.primary_of(place_keys(one).ready) is server]
        return list(dict.fromkeys(one.partition("#")[0] for one in there))


Ground = OneServer | ManyServers


def version_of(server: Path) -> tuple[int, ...]:
    """Return the version of a redis-server, such as (7, 0, 15)."""
    said = subprocess.run([str(server), "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in said.partition(" v=")[2].split(" ")[0].split("."))
