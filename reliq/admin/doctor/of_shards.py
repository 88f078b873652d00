"""The doctor's findings of queues with several shards: who publishes past their fence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reliq.admin import queries
from reliq.admin.discover import chosen
from reliq.admin.doctor.facts import Finding
from reliq.errors import RedisRefusedError
from reliq.ids import home
from reliq.shardmap import ShardMap, shard_map
from reliq.text import count_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliq.admin.session import Session

#: About as many messages of each queue are looked at.
IDS_LOOKED_AT = 1000


def shard_findings(session: Session) -> list[Finding]:
    """
    Return a finding for each queue that has messages in its first shard which belong in others.

    While the number of shards changes there are such; before and after, an older producer alone leaves any.
    """
    try:
        return list(_judged(session))
    except RedisRefusedError:
        return []


def _judged(session: Session) -> Iterator[Finding]:
    queues = [keys for keys in chosen(session, ()).queues if not keys.bare]
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
