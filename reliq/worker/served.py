"""Which shards this process works on: those that each of its queues has, by the map that it read last."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reliq.shardmap import ShardMap, shard_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.call import Command
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys


def served(handlers: Sequence[Handler]) -> dict[Keys, Handler]:
    """Return the shards of the handlers' queues; a queue that is not sharded has one."""
    return {keys: handler for handler in handlers for keys in handler.queue.known_shards.all}


def is_sharded(handler: Handler) -> bool:
    """Return whether the handler's queue has several shards."""
    return handler.queue.known_shards.map.served > 1


def read_maps(handlers: Sequence[Handler]) -> None:
    """
    Read how many shards the queues have.

    Raises:
        ConfigurationError: one has not as many as it must have.
        RedisUnavailableError: Redis cannot be asked.
    """
    for handler in handlers:
        handler.queue.known_shards.refresh(for_seconds=0.0)


def map_readers(handlers: Sequence[Handler]) -> list[Command[Any]]:
    """Return what reads the maps again; each queue knows its own as soon as a client has read the reply."""
    return [_map_reader(handler) for handler in handlers if not handler.queue.keys.bare]


def _map_reader(handler: Handler) -> Command[Any]:
    question = shard_map(handler.queue.keys)

    def noted(reply: Any) -> ShardMap:
        found = question.parse(reply)
        handler.queue.known_shards.note(found)
        return found

    return replace(question, parse=noted)
