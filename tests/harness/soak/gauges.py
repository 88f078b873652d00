"""What is measured of a worker and of its Redis."""

from dataclasses import asdict, dataclass

import psutil
import redis

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """
    One look.

    Attributes:
        at: seconds since the start.
        worker_mib, supervisor_mib: resident memory, of the worker the sum over its processes.
        threads, files: of all processes, open sockets included.
        redis_mib: `used_memory`.
        clients, keys: connections and keys of Redis.
        alive: messages that have not ended.
        acked: messages ever acked.
    """

    at: float
    worker_mib: float
    supervisor_mib: float
    threads: int
    files: int
    redis_mib: float
    clients: int
    keys: int
    alive: int
    acked: int

    def row(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in asdict(self).items()}


def look(at, supervisor: psutil.Process, client: redis.Redis, queue) -> Sample:
    workers = supervisor.children()
    processes = [supervisor, *workers]
    memory, clients = client.info("memory"), client.info("clients")
    counts = queue.counts()
    return Sample(
        at=at,
        worker_mib=sum(one.memory_info().rss for one in workers) / MIB,
        supervisor_mib=supervisor.memory_info().rss / MIB,
        threads=sum(one.num_threads() for one in processes),
        files=sum(one.num_fds() for one in processes),
        redis_mib=memory["used_memory"] / MIB,
        clients=clients["connected_clients"],
        keys=client.dbsize(),
        alive=counts.alive,
        acked=counts.totals.get("acked", 0),
    )
