"""Which shards this process works on: those that each of its queues has, by the map that it read last."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reliq.errors import RedisUnavailableError
from reliq.shardmap import UNSHARDED, ShardMap, shard_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.call import Command
    from reliq.client.client import Client
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys


class Served:
    """
    The shards of the handlers' queues in the Redis of the worker; a queue that is not sharded has one.

    Whoever runs `questions` by a client of that Redis brings it up to date.
    """

    def __init__(self, handlers: Sequence[Handler]) -> None:
        self.handlers = handlers
        self._maps = {handler.queue.name: UNSHARDED for handler in handlers}

    def shards(self) -> dict[Keys, Handler]:
        """Return every shard with its handler."""
        return {
            handler.queue.known_shards.keys(number): handler
            for handler in self.handlers
            for number in range(self._maps[handler.queue.name].served)
        }

    def is_sharded(self, name: str) -> bool:
        """Return whether the queue of a name has several shards."""
        return self._maps[name].served > 1

    def is_changing(self, name: str) -> bool:
        """Return whether the queue of a name is about to have more shards, or fewer."""
        return self._maps[name].was != self._maps[name].n

    def read(self, client: Client) -> None:
        """
        Read how many shards the queues have; who may not read it works on one of each.

        A queue whose node is away is asked again by the heartbeat: it keeps the worker from no other.

        Raises:
            ConfigurationError: a queue has not as many as it must have.
            RedisUnavailableError: no node can be asked.
        """
        asked = [handler.queue for handler in self.handlers if not handler.queue.keys.bare]
        answers = client.run_all(self.questions())
        away = [answer for answer in answers if isinstance(answer, RedisUnavailableError)]
        if away and len(away) == len(answers):
            raise away[0]
        for queue, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, RedisUnavailableError):
                queue.known_shards.check(self._maps[queue.name])

    def questions(self) -> list[Command[Any]]:
        """Return what asks how many shards there are; the answers are noted when a client reads them."""
        return [self._question(handler.queue.keys) for handler in self.handlers if not handler.queue.keys.bare]

    def _question(self, keys: Keys) -> Command[Any]:
        question = shard_map(keys)

        def noted(reply: Any) -> ShardMap:
            found = self._maps[keys.name] = question.parse(reply)
            return found

        return replace(question, parse=noted)
