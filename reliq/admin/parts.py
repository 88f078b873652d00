"""One request for each shard of several queues, and their answers by queue."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.admin.session import Session
    from reliq.call import Request
    from reliq.keys import Keys
    from reliq.snapshot.shard_maps import ShardMaps


def ask_each(
    session: Session,
    queues: Sequence[Keys],
    make: Callable[[Keys], Request[Any]],
    maps: ShardMaps,
    *along: Request[Any],
) -> tuple[list[list[Any]], list[Any]]:
    """
    Make a request for each shard of each queue in one round trip, and in another for shards that nobody knew of.

    Returns:
        The answers of each queue, a refused one as its exception; and those of the requests that went `along`.
    """
    due, known = maps.due(queues), [maps.shards(keys) for keys in queues]
    asked = maps.questions(due)
    first = [make(shard) for shards in known for shard in shards]
    answers = iter(session.try_all([*first, *asked, *along]))
    told = [list(islice(answers, len(shards))) for shards in known]
    refused = maps.learn(due, list(islice(answers, len(asked))))
    new = [
        (found, shard) for found, keys in zip(told, queues, strict=True) for shard in maps.shards(keys)[len(found) :]
    ]
    for (found, _), answer in zip(new, session.try_all([make(shard) for _, shard in new]), strict=True):
        found.append(answer)
    for found, keys in zip(told, queues, strict=True):
        del found[len(maps.shards(keys)) :]
        found.extend([refused[keys]] if keys in refused else [])
    return told, list(answers)
