"""Which shards this process works on, and which of its queues have keys: by what it read last."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from reliq.client.shards import believed
from reliq.errors import RedisUnavailableError
from reliq.shardmap import UNSHARDED, WITNESSES, ShardMap, declaration, shard_map, witnesses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.call import Command
    from reliq.client.client import Client
    from reliq.handlers.handler import Handler
    from reliq.keys import Keys
    from reliq.limits import Limits
    from reliq.queue import Queue

#: Whether queues have keys by now is asked at most this often when a wake token brought nothing.
DOUBT_SECONDS = 1.0
#: The fences of a queue without a map are read this often.
FENCES_SECONDS = 60.0


class Served:
    """
    The shards of the handlers' queues in the Redis of the worker; a queue that is not sharded has one.

    Whoever runs `questions` by a client of that Redis brings it up to date.

    Attributes:
        has_news: what was read last is not what was known; whoever has taken it up says so.
        puzzled: a wake token has brought nothing: what it was for may have a key, which nobody here knows of.
    """

    def __init__(self, handlers: Sequence[Handler]) -> None:
        self.handlers = handlers
        self.has_news = self.puzzled = False
        self._doubted_at, self._fences_at = float("-inf"), time.monotonic()
        self._maps = {handler.queue.name: UNSHARDED for handler in handlers}
        self._limits = {handler.queue.name: handler.queue.limits for handler in handlers if handler.queue.limits}
        self._unwritten = set(self._limits)  # whose limits Redis may not have from this process' start
        self._declared: dict[str, str | None] = {}  # as `declaration` has answered; without an answer nothing

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

    def is_keyed(self, name: str) -> bool:
        """Return whether messages of a queue may have keys, or are limited: it declares limits, or Redis has some."""
        return name in self._limits or self._declared.get(name) is not None

    def read(self, client: Client) -> None:
        """
        Read how many shards the queues have, and which have keys; who may not read it works on one of each.

        A queue whose node is away is asked again by the heartbeat: it keeps the worker from no other.

        Raises:
            ConfigurationError: a queue has not as many as it must have, or several although it declares limits.
            RedisUnavailableError: no node can be asked.
        """
        asked = [handler.queue for handler in self.handlers if not handler.queue.keys.bare]
        answers = client.run_all(self.questions())
        fences = client.run_all([one for queue in asked for one in witnesses(queue.keys)])
        away = [answer for answer in answers if isinstance(answer, RedisUnavailableError)]
        if away and len(away) == len(answers) and UNSHARDED.or_later(fences) == UNSHARDED:
            raise away[0]
        told = iter(fences)
        for queue, answer in zip(asked, answers[: len(asked)], strict=True):
            map, of_queue = self._maps[queue.name], list(islice(told, WITNESSES))
            is_read = isinstance(answer, ShardMap)
            self._maps[queue.name] = believed(queue.name, map, answer, of_queue) if is_read else map.or_later(of_queue)
            if not isinstance(answer, RedisUnavailableError):
                queue.known_shards.check(self._maps[queue.name])
            if queue.limits:
                self._maps[queue.name].check_is_one(queue.name)

    def questions(self) -> list[Command[Any]]:
        """Return what asks how many shards there are, and which queues have keys; it is noted when a client reads the answers."""
        keys = [handler.queue.keys for handler in self.handlers if not handler.queue.keys.bare]
        return [*map(self._map_question, keys), *self._key_questions(), *self._fence_questions(keys)]

    def doubts(self) -> list[Command[Any]]:
        """Return what asks which queues have keys by now, because a wake token has brought nothing; once a second at most."""
        now = time.monotonic()
        if now - self._doubted_at < DOUBT_SECONDS:
            return []
        self.puzzled, self._doubted_at = False, now
        return self._key_questions()

    def undeclared(self) -> list[tuple[Queue[Any], Limits]]:
        """Return queues whose limits Redis may not have: none was written since the start, or Redis has lost them."""
        return [
            (handler.queue, handler.queue.limits)
            for handler in self.handlers
            if handler.queue.limits and (handler.queue.name in self._unwritten or self._has_lost(handler.queue.name))
        ]

    def declared(self, name: str, limits: Limits) -> None:
        """Note that Redis has the limits of a queue."""
        self._unwritten.discard(name)
        self._declared[name] = limits.declared

    def _has_lost(self, name: str) -> bool:
        return name in self._declared and not self._declared[name]

    def _map_question(self, keys: Keys) -> Command[Any]:
        question = shard_map(keys)

        def noted(reply: Any) -> ShardMap:
            found, known = UNSHARDED, self._maps[keys.name]
            with suppress(ValueError):  # a corrupt map is a lost one
                found = question.parse(reply)
            self._maps[keys.name] = believed(keys.name, known, found)
            self.has_news = self.has_news or self._maps[keys.name] != known
            return found

        return replace(question, parse=noted)

    def _fence_questions(self, keys: Sequence[Keys]) -> list[Command[Any]]:
        """
        Return, once a minute, what reads the fences of queues without a map.

        A publisher that knows the map goes on with it after Redis has lost everything, and writes it with the fences.
        """
        now = time.monotonic()
        if now < self._fences_at + FENCES_SECONDS:
            return []
        self._fences_at = now
        unsharded = [one for one in keys if self._maps[one.name].epoch == 0]
        return [self._fence_question(one, question) for one in unsharded for question in witnesses(one)]

    def _fence_question(self, keys: Keys, question: Command[Any]) -> Command[Any]:
        def noted(reply: Any) -> ShardMap | None:
            fence: ShardMap | None = question.parse(reply)
            known = self._maps[keys.name]
            self._maps[keys.name] = believed(keys.name, known, known, [fence])
            self.has_news = self.has_news or self._maps[keys.name] != known
            return fence

        return replace(question, parse=noted)

    def _key_questions(self) -> list[Command[Any]]:
        """Return what asks which queues have keys: those with one shard, for others have none."""
        served = [handler.queue.keys for handler in self.handlers]
        return [self._key_question(keys) for keys in served if not (keys.bare or self.is_sharded(keys.name))]

    def _key_question(self, keys: Keys) -> Command[Any]:
        question = declaration(keys)

        def noted(reply: Any) -> str | None:
            found = question.parse(reply)
            self.has_news = self.has_news or found != self._declared.get(keys.name)
            self._declared[keys.name] = found
            return found

        return replace(question, parse=noted)
