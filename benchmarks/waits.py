"""
How soon workers of a Cluster have what comes, what a sick server does to others, and what idle workers cost.

    python -m benchmarks.waits pickup      # from publish to handler, and from the due time, of 1, 2 and 20 queues, 16 shards
    python -m benchmarks.waits gaps        # the longest standstill of healthy queues: a kill, a stop of 20 s, an open slot
    python -m benchmarks.waits idle        # commands a second of 16 idle workers of 16 shards, and CPU beside the Cluster alone

It starts a Cluster of three primaries and three replicas on loopback. `--server PATH` names another redis-server.
"""

import argparse
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from reliq import Consumer, Job, Queue, WorkerSettings
from reliq.events import Event, Started
from reliq.redis.shards import ShardMap
from reliq.testing.server import EmbeddedRedis, find_server
from tests.cluster_moves import SlotMove
from tests.cluster_servers import LiveCluster

#: Messages a second, half of them delayed, and for how many seconds they come.
RATE, SECONDS = 40, 20.0
#: What docs/cluster.md says: tests have nodes that ask each other more often.
AS_RECOMMENDED = {"cluster-node-timeout": "5000", "repl-ping-replica-period": "10"}
#: How long the cost of what is idle is measured, and how long it has been idle before.
IDLE_SECONDS, IDLE_SETTLE_SECONDS = 60.0, 25.0


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pickup", "gaps", "idle"))
    parser.add_argument("--server", type=Path, default=None, help="the redis-server to run")
    asked = parser.parse_args()
    server = asked.server or find_server()
    with LiveCluster(server, options=AS_RECOMMENDED if asked.what == "idle" else None) as cluster:
        {"pickup": pickup, "gaps": gaps, "idle": idle}[asked.what](cluster, server)


def pickup(cluster: LiveCluster, server: Path) -> None:
    """Print how long messages wait that come one at a time."""
    print(f"{'ms':<28}{'pickup p50':>12}{'p90':>8}{'p99':>8}{'late p50':>12}{'p90':>8}{'p99':>8}")
    with EmbeddedRedis(server=server) as single:
        _print_waits("1 queue, one Redis", [Queue("q0", float, url=single.url)])
    for number in (1, 2, 20):
        cluster.heal()
        _print_waits(f"{number} queues, Cluster", [Queue(f"q{at}", float, url=cluster.url) for at in range(number)])
    cluster.heal()
    _print_waits("1 queue of 16 shards, Cluster", [_sharded(cluster, 16)])


def _print_waits(name: str, queues: list[Queue[float]]) -> None:
    waits: list[float] = []
    lates: list[float] = []

    def handle(body: float, job: Job[float]) -> None:
        if body:
            waits.append(time.time() - body)
        else:
            lates.append(time.time() - (job.due or 0.0))

    consumer = Consumer(queues[0].target)
    for queue in queues:
        consumer.handler(queue)(handle)
    consumer.start()
    time.sleep(2)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        queue = random.choice(queues)
        queue.publish(time.time())
        queue.publish(0.0, delay=random.uniform(0.3, 2.0))
        time.sleep(random.expovariate(RATE / 2))
    time.sleep(2.5)
    consumer.stop()
    rows = [_quantile(some, share) for some in (waits, lates) for share in (0.5, 0.9, 0.99)]
    print(f"{name:<28}" + "".join(f"{1000 * one:>{12 if at % 3 == 0 else 8}.1f}" for at, one in enumerate(rows)))


def gaps(cluster: LiveCluster, _server: Path) -> None:
    """Print the longest time in which a healthy queue started nothing, and the sick ones too."""
    for name, trouble in (("kill -9", _kill), ("SIGSTOP for 20 s", _stop), ("a slot open for 3 s", _open_slot)):
        cluster.heal()
        queues = [Queue(f"q{at}", float, url=cluster.url) for at in range(6)]
        sick = cluster.primary_of(queues[0].keys.wake)
        theirs = {one.name for one in queues if cluster.primary_of(one.keys.wake) is sick}
        if trouble is _open_slot:
            theirs = {queues[0].name}
        longest = dict.fromkeys((one.name for one in queues), 0.0)
        with _busy(queues, longest):
            time.sleep(3)
            longest.update(dict.fromkeys(longest, 0.0))
            trouble(cluster, sick, queues[0])
        worst = [max(longest[one] for one in names) for names in (longest.keys() - theirs, theirs)]
        print(f"{name:<22} healthy queues {worst[0]:6.3f} s   its own {worst[1]:6.3f} s")


def _kill(_cluster: LiveCluster, sick: EmbeddedRedis, _queue: Queue[float]) -> None:
    sick.kill()
    time.sleep(10)


def _stop(cluster: LiveCluster, sick: EmbeddedRedis, _queue: Queue[float]) -> None:
    cluster.pause(sick)
    time.sleep(20)
    cluster.resume(sick)
    time.sleep(5)


def _open_slot(cluster: LiveCluster, _sick: EmbeddedRedis, queue: Queue[float]) -> None:
    move = SlotMove(cluster, queue.keys.wake)
    move.begin()
    time.sleep(3)
    move.end()
    time.sleep(5)


@contextmanager
def _busy(queues: list[Queue[float]], longest: dict[str, float]) -> Iterator[None]:
    """Publish to each queue 50 times a second and work on all of them; note the longest gap between two starts."""
    last: dict[str, float] = {}
    over = threading.Event()

    def note(event: Event) -> None:
        if isinstance(event, Started):
            now = time.monotonic()
            longest[event.queue] = max(longest[event.queue], now - last.get(event.queue, now))
            last[event.queue] = now

    def publish(queue: Queue[float]) -> None:
        while not over.wait(0.02):
            try:
                queue.publish(1.0)
            except Exception:  # its server is away
                continue

    consumer = Consumer(queues[0].target, observers=[note])
    for queue in queues:
        consumer.handler(queue)(lambda _: None)
    with ExitStack() as ending:
        for queue in queues:
            thread = threading.Thread(target=publish, args=(queue,))
            thread.start()
            ending.callback(thread.join)
        ending.callback(over.set)
        consumer.start()
        ending.callback(consumer.stop)
        yield


def idle(cluster: LiveCluster, _server: Path) -> None:
    """Print what 16 workers do at 16 shards while nothing comes, beside the Cluster alone and beside silent connections."""
    time.sleep(IDLE_SETTLE_SECONDS)
    alone, _ = _idle_seconds(cluster)
    consumers = []
    for _ in range(16):
        consumer = Consumer(cluster.url)
        consumer.handler(_sharded(cluster, 16))(lambda _: None)
        consumer.start(WorkerSettings(concurrency=2))
        consumers.append(consumer)
    time.sleep(IDLE_SETTLE_SECONDS)
    at_work, calls = _idle_seconds(cluster)
    connections = {one.port: cluster.client(one).info("clients")["connected_clients"] for one in cluster.primaries()}
    for consumer in consumers:
        consumer.stop()
    with ExitStack() as ending:
        for one in cluster.primaries():
            for _ in range(connections[one.port] - cluster.client(one).info("clients")["connected_clients"]):
                ending.enter_context(socket.create_connection(("127.0.0.1", one.port)))
        time.sleep(IDLE_SETTLE_SECONDS)
        silent, _ = _idle_seconds(cluster)
    sent = ("evalsha", "blpop", "srandmember", "getrange", "zcount", "hget", "hset", "getdel", "zremrangebyscore")
    shown = ", ".join(f"{name} {calls[name]:.1f}" for name in sorted(calls, key=calls.__getitem__, reverse=True)[:14])
    print(f"scripts {calls['evalsha']:.0f}/s, sent in all about {sum(calls.get(name, 0.0) for name in sent):.0f}/s")
    print(f"all that the primaries worked off, also within scripts: {shown}")
    print(f"connections of each primary: {list(connections.values())}")
    print("CPU of the three primaries together, in % of a core:")
    for name, share in (
        ("the Cluster alone", alone),
        ("with as many silent connections", silent),
        ("with the workers", at_work),
    ):
        print(f"  {name:<32}{share:5.2f}")


def _idle_seconds(cluster: LiveCluster) -> tuple[float, dict[str, float]]:
    """Return the primaries' share of a core in the next seconds, in %, and what they work off in one, by command."""
    before, cpu, began = _commands(cluster), _cpu_seconds(cluster), time.monotonic()
    time.sleep(IDLE_SECONDS)
    share, took = _cpu_seconds(cluster) - cpu, time.monotonic() - began
    calls = {name: (count - before[name]) / took for name, count in _commands(cluster).items() if count > before[name]}
    return 100 * share / took, calls


def _sharded(cluster: LiveCluster, number: int) -> Queue[float]:
    queue = Queue("orders", float, url=cluster.url)
    cluster.client(cluster.primary_of(queue.keys.map)).set(queue.keys.map, ShardMap(1, number, number).text)
    return queue


def _commands(cluster: LiveCluster) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in cluster.primaries():
        for name, row in cluster.client(one).info("commandstats").items():
            found[name.removeprefix("cmdstat_")] += row["calls"]
    return found


def _cpu_seconds(cluster: LiveCluster) -> float:
    used: Callable[[EmbeddedRedis], dict[str, float]] = lambda one: cluster.client(one).info("cpu")  # noqa: E731
    return sum(used(one)["used_cpu_user"] + used(one)["used_cpu_sys"] for one in cluster.primaries())


def _quantile(some: list[float], share: float) -> float:
    return sorted(some)[min(len(some) - 1, int(share * len(some)))] if some else float("nan")


if __name__ == "__main__":
    main()
