"""How the shards of queues are spread over the servers."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import TYPE_CHECKING

from reliq.admin.discover import chosen
from reliq.admin.doctor.facts import Finding, unknown
from reliq.errors import RedisRefusedError
from reliq.shardmap import ShardMap, shard_map
from reliq.text import count_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reliq.admin.session import Session

#: A server with so many times its share of a queue's shards has too many.
TOO_MANY = 1.5


def spread(session: Session, servers: int) -> Finding:
    """Return the finding on the shards of every queue of the registry, of which each of `servers` should have its share."""
    try:
        queues = [keys for keys in chosen(session, ()).queues if not keys.bare]
    except RedisRefusedError:
        return unknown("spread", "the registry of queues")
    maps = session.try_all([shard_map(keys) for keys in queues])
    counts = {
        keys.name: Counter(session.server_of(keys.of_shard(shard).ready) for shard in range(found.served))
        for keys, found in zip(queues, maps, strict=True)
        if isinstance(found, ShardMap) and found.served > 1
    }
    return judged(counts, servers)


def judged(counts: Mapping[str, Counter[str]], servers: int) -> Finding:
    """Return the finding on queues, by how many of the shards of each lie on which server."""
    for queue, of_server in counts.items():
        [(server, most)] = of_server.most_common(1)
        if most > TOO_MANY * ceil(of_server.total() / servers):
            return Finding(
                "spread",
                "warning",
                f"{most} of {of_server.total()} shards of {queue} lie on {server}",
                "that server does most of the queue's work",
                "give each node as many slots: redis-cli --cluster rebalance",
            )
    return Finding(
        "spread", "ok", f"queues with several shards: {len(counts)}, spread evenly over {count_of(servers, 'server')}"
    )
