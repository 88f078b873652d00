"""
The process that removes the keys of a benchmark or a demo: `python -m reliq.bench.removal`.

When its standard input ends, everyone who could write another key has ended.
"""

import json
import signal
import sys

from reliq import commands
from reliq.admin import queue_queries, server
from reliq.bench.node import node_of
from reliq.client.client import Client
from reliq.errors import ReliqError
from reliq.keys import Keys, pattern
from reliq.roster import Worker
from reliq.transport.connection import Connection

SCAN_COUNT = 1000
CLEANUP_SECONDS = 60.0


def remove(client: Client, node: Client, keys: Keys) -> None:
    """Delete every key of a queue, and its entries in the registries; the key space is read once, in small steps."""
    at, every = -1, pattern(keys.msg("").removesuffix("msg:")) + "*"
    while at:
        at, found = node.run(server.keys_scanned(every, max(0, at), SCAN_COUNT), for_seconds=CLEANUP_SECONDS)
        if found:
            node.run(server.delete_keys(found), for_seconds=CLEANUP_SECONDS)
    _dismiss(client, keys)
    client.run(queue_queries.unregister(keys), for_seconds=CLEANUP_SECONDS)


def _dismiss(client: Client, keys: Keys) -> None:
    """Remove the records of workers of this queue that were killed before they could."""
    ids = client.run(commands.worker_ids(), for_seconds=CLEANUP_SECONDS)
    records = client.run_all(commands.worker_records(ids), for_seconds=CLEANUP_SECONDS)
    ours = [one.id for one in records if isinstance(one, Worker) and keys.name in one.queues]
    client.run_all([command for id in ours for command in commands.remove_worker(id)], for_seconds=CLEANUP_SECONDS)


def main() -> int:
    """Wait until the input ends, then remove the keys of the queue that its first line names; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    plan = json.loads(sys.stdin.readline())
    while sys.stdin.read(1):
        pass
    try:
        url, queue = plan["url"], plan["queue"]
        remove(Client(Connection.to(url).wire()), Client(node_of(url, queue)), Keys(queue))
    except ReliqError as error:
        sys.stderr.write(f"reliq: the keys of queue {plan['queue']!r} remain in Redis: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
