"""
Measure how fast reliq publishes, drains and picks up messages on a Redis.

`python -m reliq.admin.bench` runs a worker process of the benchmark. The process ends when its standard input is
closed, so it also ends if the benchmark is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any

from reliq.admin import calls
from reliq.admin.workers import workers_alive
from reliq.consumer import Consumer
from reliq.distribution import command_of
from reliq.errors import ConfigurationError, ReliqError
from reliq.keys import new_id, pattern
from reliq.queue import Queue
from reliq.redis import commands
from reliq.redis.commands import Command
from reliq.redis.server import URL_VARIABLE, Connection
from reliq.redis.session import Session
from reliq.settings import WorkerSettings
from reliq.supervisor.status import spare_the_collector

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The body of a message, about 100 bytes as JSON. To measure pickup times, the benchmark sets `sent` to the time of the
#: publish.
BODY: dict[str, Any] = {"sent": 0.0, "text": "x" * 80}
BYTES_PER_MESSAGE = 700
#: The benchmark starts to measure a drain when this share of the messages is left. By then, all processes run handlers.
TIMED_SHARE = 0.9
PICKUPS = 100
#: The number of messages that a worker picks up before the benchmark measures pickup times. Meanwhile, the worker and
#: this process open their connections to Redis.
WARM_UP = 5
PICKUP_PAUSE_SECONDS = 0.03
POLL_SECONDS = 0.02


def server_in_use(url: str, messages: int) -> tuple[str, int]:
    """
    Return the version of a Redis server and its number of keys.

    Raises:
        ConfigurationError: the server's `maxmemory` leaves no room for the benchmark.
    """
    needed = messages * BYTES_PER_MESSAGE >> 20
    version, keys = "", 0
    for server in Session(Connection.to(url).wire()).each().values():
        facts = server.run(commands.server_facts("default"))
        version = facts["redis_version"]
        keys += sum(int(text[5:].partition(",")[0]) for text in facts.values() if text.startswith("keys="))
        limit = int(facts["maxmemory"])
        left = max(0, limit - int(facts["used_memory"])) >> 20
        if limit and needed > left:
            raise ConfigurationError(
                f"the benchmark needs about {needed} MiB, and this Redis has {left} MiB left below its maxmemory; use "
                "fewer --messages, or another Redis"
            )
    return version, keys


def measure(url: str, messages: int) -> dict[str, float]:
    """
    Measure the rates of publishing and draining, and the pickup times, in a new queue.

    At the end, the Redis keys of the queue are deleted, even after an error or Ctrl-C.

    Returns:
        The results, each by a name with its unit, for example `pickup p50, ms`.

    Raises:
        ReliqError: a worker process ended early, or Redis did not answer.
    """
    queue: Queue[dict[str, Any]] = Queue(f"bench-{new_id()}", url=url)
    figures: dict[str, float] = {}
    try:
        singles = messages // 10
        began = time.perf_counter()
        for _ in range(singles):
            queue.publish(BODY)
        figures["publish one by one, messages/s"] = singles / (time.perf_counter() - began)

        for processes, name in ((1, "drain by 1 process"), (2, "drain by 2 processes")):
            queue.pause(reason="benchmark")
            began = time.perf_counter()
            queue.publish_many(BODY for _ in range(messages))
            figures["publish_many, messages/s"] = messages / (time.perf_counter() - began)
            with _workers(url, queue.name, processes) as workers:
                queue.resume()
                began, timed = time.perf_counter(), messages
                # If the workers have handled all messages already, measure the whole drain.
                if left := _wait(queue, workers, int(messages * TIMED_SHARE)):
                    began, timed = time.perf_counter(), left
                _wait(queue, workers, 0)
                figures[f"{name}, messages/s"] = timed / (time.perf_counter() - began)

        seconds = []
        with _workers(url, queue.name, 1) as [worker]:
            for _ in range(WARM_UP + PICKUPS):
                time.sleep(PICKUP_PAUSE_SECONDS)
                queue.publish({**BODY, "sent": time.time()})
                seconds.append(float(_line_of(worker)))
        seconds = sorted(seconds[WARM_UP:])
        figures["pickup p50, ms"] = seconds[PICKUPS // 2] * 1000
        figures["pickup p99, ms"] = seconds[PICKUPS * 99 // 100 - 1] * 1000
    finally:
        _delete(url, queue)
    return figures


@contextmanager
def _workers(url: str, queue: str, number: int) -> Iterator[list[Popen[str]]]:
    """Run `number` worker processes during a `with` block. The block starts when all processes are ready."""
    command, environment = command_of("reliq.admin.bench")
    environment[URL_VARIABLE] = url
    start = partial(Popen, [*command, queue], env=environment, stdin=PIPE, stdout=PIPE, text=True, process_group=0)
    with ExitStack() as stack:  # each process ends when its standard input is closed; it does not receive Ctrl-C
        workers: list[Popen[str]] = [stack.enter_context(start()) for _ in range(number)]
        for worker in workers:
            _line_of(worker)
        yield workers


def _line_of(worker: Popen[str]) -> str:
    line = worker.stdout.readline() if worker.stdout else ""
    if not line:
        raise ReliqError(f"a worker process of the benchmark ended with exit code {worker.wait()}")
    return line


def _wait(queue: Queue[Any], workers: list[Popen[str]], left: int) -> int:
    """Wait until the queue has at most `left` living messages; return the number of its living messages."""
    while (alive := queue.counts().alive) > left:
        for worker in workers:
            if worker.poll() is not None:
                _line_of(worker)
        time.sleep(POLL_SECONDS)
    return alive


def _delete(url: str, queue: Queue[Any]) -> None:
    """Delete the queue's keys and registry entry, and the records of killed workers."""
    session = Session(Connection.to(url).wire())
    keys = pattern(queue.keys.ready.removesuffix("ready")) + "*"
    for server in session.each().values():
        for batch in server.scan(partial(calls.keys_scanned, keys, count=1000)):
            if batch:
                server.run(Command(("UNLINK", *batch), int))
    for worker in workers_alive(session):
        if queue.name in worker.queues:
            session.run_all(commands.remove_worker(worker.id))
    session.run(calls.unregister(queue.keys))


def main(name: str) -> None:
    """Handle messages of a queue until standard input ends; print the pickup time of each message in seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    queue: Queue[dict[str, Any]] = Queue(name)
    consumer = Consumer()

    @consumer.handler(queue)
    def handle(body: dict[str, Any]) -> None:
        if body["sent"]:
            os.write(1, b"%f\n" % (time.time() - body["sent"]))

    spare_the_collector()
    # The benchmark has checked that Redis has enough memory, so Redis will not evict messages.
    consumer.start(WorkerSettings(allow_eviction=True))
    os.write(1, b"ready\n")
    sys.stdin.read()
    consumer.stop(1.0)


if __name__ == "__main__":
    main(sys.argv[1])
