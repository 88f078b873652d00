"""The doctor's findings of queues with several shards: lost maps, who publishes past their fence, how they are spread."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING

from reliq.admin import queries
from reliq.admin.discover import chosen
from reliq.admin.doctor.facts import Finding, unknown
from reliq.errors import RedisRefusedError
from reliq.ids import home
from reliq.shardmap import UNSHARDED, WITNESSES, ShardMap, shard_map, witnesses
from reliq.text import count_of, typed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliq.admin.session import Session
    from reliq.keys import Keys

#: A server with so many times its share of a queue's shards has too many.
TOO_MANY = 1.5
#: About as many messages of each queue are looked at.
IDS_LOOKED_AT = 1000


def shard_findings(session: Session) -> list[Finding]:
    """
    Return a finding for each queue whose map is lost, or that has messages in its first shard which belong in others.

    While the number of shards changes there are such messages; before and after, an older producer alone leaves any.
    """
    try:
        queues = [keys for keys in chosen(session, ()).queues if not keys.bare]
        return [*_lost(session, queues), *_strays(session, queues)]
    except RedisRefusedError:
        return []


def _lost(session: Session, queues: Sequence[Keys]) -> Iterator[Finding]:
    told = iter(session.try_all([one for keys in queues for one in witnesses(keys)]))
    # The map is read after the fences: meanwhile it may only become later.
    for keys, found in zip(queues, session.try_all([shard_map(keys) for keys in queues]), strict=True):
        known = UNSHARDED.or_later(islice(told, WITNESSES))
        if isinstance(found, ShardMap) and known.unless(found).is_lost:
            yield Finding(
                "shards",
                "bad",
                f"Redis has lost the map of the shards of {keys.name}: epoch {known.epoch}, {count_of(known.n, 'shard')}",
                "a failover or a deletion took it; processes go on by what the shards have, until these are lost too",
                typed("check", keys.name, options=["--repair"]),
            )


def _strays(session: Session, queues: Sequence[Keys]) -> Iterator[Finding]:
    maps = session.try_all([shard_map(keys) for keys in queues])
    sharded = [(keys, map) for keys, map in zip(queues, maps, strict=True) if isinstance(map, ShardMap) and map.n > 1]
    looks = session.try_all([queries.ids_scanned(keys, "retries_left", 0, IDS_LOOKED_AT) for keys, _ in sharded])
    after = session.try_all([shard_map(keys) for keys, _ in sharded])
    for (keys, map), look, then in zip(sharded, looks, after, strict=True):
        if isinstance(look, Exception) or then != map or map.was != map.n:
            continue
        if strays := [id for id in look[1] if home(id, map.n)]:
            yield Finding(
                "producers",
                "bad",
                f"{count_of(len(strays), 'message')} of other shards of {keys.name} in shard 0, such as {strays[0]!r}",
                "a producer of a version without shards publishes there: an id may be accepted twice, and cancel finds none",
                "start that producer anew with the version of the workers; what it has published is worked as all else",
            )


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
