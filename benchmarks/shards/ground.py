"""What is measured on: one Redis, or a Cluster of three primaries with a replica each, all without persistence."""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import redis

from reliq import Queue
from reliq.redis.shards import ShardMap
from reliq.testing.server import EmbeddedRedis

#: A line of MONITOR of a call that a script makes says so where others have their address.
_OF_A_SCRIPT = re.compile(rb"\[\d+ lua\]")
#: What this program itself asks for.
_OWN = re.compile(rb'"(?:INFO|MONITOR|PING|CLUSTER|CLIENT|REPLCONF)"', re.IGNORECASE)
QUEUE = "orders"


class Ground:
    """
    Servers, each with a client of its own.

    Attributes:
        name: what the table calls them.
        url: where producers and workers find them.
    """

    def __init__(
        self, name: str, url: str, primaries: Sequence[EmbeddedRedis], replicas: Sequence[EmbeddedRedis] = ()
    ) -> None:
        self.name, self.url = name, url
        self._primaries = [redis.Redis(port=one.port) for one in primaries]
        self._replicas = [redis.Redis(port=one.port) for one in replicas]

    def prepare(self, shards: int) -> None:
        """Empty every server, and let the queue have so many shards from its beginning."""
        for one in self._primaries:
            one.flushall()
        if shards > 1:
            keys = Queue(QUEUE, url=self.url).keys
            for one in self._primaries:
                try:
                    one.set(keys.map, ShardMap(1, shards, shards).text)
                except redis.ResponseError:  # another node has its slot
                    continue

    def cpu(self) -> tuple[float, float]:
        """Return the CPU seconds of all primaries, and of all replicas."""
        return _cpu(self._primaries), _cpu(self._replicas)

    def scripts(self) -> int:
        """Return how many scripts have been called."""
        stats: list[Any] = [one.info("commandstats") for one in self._primaries]
        return sum(one.get(name, {}).get("calls", 0) for one in stats for name in ("cmdstat_evalsha", "cmdstat_eval"))

    def connections(self) -> int:
        """Return how many connections there are at all primaries, ours and those of replicas included."""
        found: list[Any] = [one.info("clients") for one in self._primaries]
        return sum(one["connected_clients"] for one in found)

    @contextmanager
    def counted(self, seconds: list[float], calls: list[int]) -> Iterator[None]:
        """Count the calls that clients make meanwhile, and add them and the time it took to the lists."""
        counts = [_Count(one) for one in self._primaries]
        began = time.monotonic()
        yield
        seconds.append(time.monotonic() - began)
        calls.append(sum(one.stop() for one in counts))


class _Count:
    """The calls that clients make at a server, those of scripts left out."""

    def __init__(self, client: redis.Redis) -> None:
        self._pool: Any = client.connection_pool
        self._connection = cast("Any", self._pool.get_connection())
        self.calls, self._over = 0, False
        self._connection.send_command("MONITOR")
        self._connection.read_response()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._over = True
        self._thread.join()
        self._connection.disconnect()
        self._pool.release(self._connection)
        return self.calls

    def _run(self) -> None:
        while not self._over:
            if self._connection.can_read(timeout=0.05):
                line = self._connection.read_response()
                self.calls += not (_OF_A_SCRIPT.search(line) or _OWN.search(line))


def _cpu(clients: Sequence[redis.Redis]) -> float:
    found: list[Any] = [one.info("cpu") for one in clients]
    return float(sum(one["used_cpu_user"] + one["used_cpu_sys"] for one in found))
