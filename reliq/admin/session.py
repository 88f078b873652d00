"""
Sessions through which `Admin` sends requests to a Redis, or to the shards of one queue.

While Redis does not answer, a session retries a request for `PATIENCE_SECONDS`.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Self

from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError, WrongKeyTypeError
from reliq.keys import QUEUES_KEY, SHARDS_LIMIT, Keys, Layout, check_layout, home, is_name
from reliq.metrics.snapshot import ShardMaps, map_error
from reliq.queue import Queue
from reliq.redis.commands import Clock, Command, Request
from reliq.redis.server import Connection, check_slots
from reliq.redis.session import Session
from reliq.redis.shards import CORRUPT, UNREADABLE, UNSHARDED, ShardMap, believed, shard_map, witnesses
from reliq.settings import LARGEST_BODY, check_int

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.redis.cluster import Transport
    from reliq.redis.url import Target

#: An admin waits this many seconds for a reply of Redis, because some replies are large.
REPLY_SECONDS = 5.0
#: If a queue does not exist in the requested layout, an admin searches for it in these layouts, for the error message.
LAYOUTS = (Layout.RELIQ, Layout.hdt3213(), Layout.hdt3213(hash_tag=True))


class UnknownQueueError(ConfigurationError):
    """Redis has no queue of this name in this layout."""


class QueueSession(Session):
    """
    A session that sends requests for all shards of a queue, or for one shard.

    Attributes:
        keys: the Redis keys of the selected shard; if all shards are selected, the Redis keys of shard 0.
        map: the shard map: the number of shards of the queue, and changes of the number.
        counted: the Redis keys of the selected shards. If all shards are selected, also the keys of removed shards,
            which still store totals.
        is_sharded: whether several shards are selected.
    """

    def __init__(self, wire: Transport, keys: Keys, clock: Clock | None = None) -> None:
        super().__init__(wire, clock)
        self.keys = keys
        self.map = UNSHARDED
        self.counted = [keys]
        self.is_sharded = False

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.keys.name

    @property
    def parts(self) -> list[QueueSession]:
        """A session for each selected shard; if only one shard is selected, this session itself."""
        return [self._part(shard) for shard in range(self.map.served)] if self.is_sharded else [self]

    def homes(self, id: str) -> list[QueueSession]:
        """
        Return a session for each shard that may have a message with this id.

        While the number of shards changes, two shards may have it.
        """
        if not self.is_sharded:
            return [self]
        return [self._part(shard) for shard in dict.fromkeys((home(id, self.map.n), home(id, self.map.was)))]

    def has(self, id: str) -> bool:
        """Return whether the selected shards may have a message with this id."""
        return self.keys.shard in (home(id, self.map.n), home(id, self.map.was)) or self.is_sharded

    def learn(self, shard: int | None = None, *, mends: bool = False) -> None:
        """
        Read the shard map of the queue, then select all shards or only `shard`.

        Args:
            shard: number of the only shard to select; None for all shards.
            mends: accept a corrupt shard map, because the caller will repair it.

        Raises:
            UnknownQueueError: Redis has no queue of this name, which may be mistyped.
            ConfigurationError: the queue has no such shard.
        """
        keys = self.keys
        states = (keys.pending, keys.ready, keys.unack, keys.retry, keys.garbage, keys.retries_left)
        others = (keys.dead, keys.totals, keys.ends, keys.paused, keys.cron, keys.plans)
        questions: list[Command[Any]] = [Command(("EXISTS", *states, *others), int)]
        questions += [] if keys.bare else [shard_map(keys), *witnesses(keys)]
        used, *told = self.try_all(questions)
        found: Any = told[0] if told else UNSHARDED
        if isinstance(found, RedisRefusedError) and not isinstance(found, WrongKeyTypeError):
            found = UNSHARDED  # this user may not read the shard map, so use only shard 0
        found = ShardMap.or_fenced(found, told[1:])
        if mends and isinstance(found, UNREADABLE):
            found = CORRUPT
        for answer in (found,) if isinstance(used, RedisUnavailableError) and found != UNSHARDED else (used, found):
            if isinstance(answer, Exception):
                raise map_error(answer, keys)
        self.map = believed(self.name, UNSHARDED, found, told[1:])
        if self.map.served == 1 and not used:
            self._check_registered()
        if shard is not None and shard >= self.map.served:
            shards = "one shard, 0" if self.map.served == 1 else f"{self.map.served} shards, 0 to {self.map.served - 1}"
            raise ConfigurationError(f"queue {self.name!r} has {shards}, and no shard {shard}")
        self.keys = keys.of_shard(shard or 0)
        self.is_sharded = shard is None and self.map.served > 1
        self.counted = [self.keys] if shard is not None else [keys.of_shard(at) for at in range(self.map.ever)]

    def _part(self, shard: int) -> QueueSession:
        part = copy(self)
        part.keys = self.keys.of_shard(shard)
        part.is_sharded = False
        return part

    def _check_registered(self) -> None:
        """
        Raise UnknownQueueError if the queue is not in the queue registry.

        If a queue of the same name exists in another layout, and this user may read it, the error names that layout.
        """
        keys = self.keys
        if self.run(Command(("HEXISTS", QUEUES_KEY, keys.entry), bool)):
            return
        others = [layout for layout in LAYOUTS if layout != keys.layout and is_name(self.name, layout)]
        there = [Keys(self.name, layout) for layout in others]
        answers = self.try_all([Command(("EXISTS", one.retries_left, one.totals), bool) for one in there])
        found = [layout for layout, answer in zip(others, answers, strict=True) if answer is True]
        elsewhere = " and ".join(f"--layout {layout}" for layout in found)
        here = f"here in the layout {keys.layout}" if keys.bare else "here"
        hint = f"there is one with {elsewhere}" if elsewhere else "`reliq queues --scan` lists all queues"
        raise UnknownQueueError(f"there is no queue {keys.name!r} {here}; {hint}")


def ask_each(
    session: Session,
    queues: Sequence[Keys],
    make: Callable[[Keys], Request[Any]],
    maps: ShardMaps,
    *along: Request[Any],
) -> tuple[list[list[Any]], list[Any]]:
    """
    Send a request for each shard of each queue, and further requests, in one round trip.

    If the cached shard maps do not contain all shards, a second round trip follows for the new shards.

    Args:
        make: a function that returns the request for the Redis keys of a shard.
        maps: the cached shard maps.
        along: the further requests.

    Returns:
        Two lists: for each queue the replies of its shards, with an exception for a refused request; and the replies to
        the requests `along`.
    """
    found, refused, extra = maps.ask(session.try_all, queues, lambda shard: [make(shard)], along)
    answers = [[answer for _, (answer,) in shards] for shards in found.values()]
    for of_queue, keys in zip(answers, queues, strict=True):
        of_queue.extend([refused[keys]] if keys in refused else [])
    return answers, extra


class AdminBase:
    """The base class of the classes that make up `Admin`. It opens sessions with one Redis, and with its queues."""

    def __init__(self, url: Target | None = None, *, layout: Layout = Layout.RELIQ, shard: int | None = None) -> None:
        self._target = url
        self._layout = layout
        self._shard = None if shard is None else check_int("shard", shard, most=SHARDS_LIMIT - 1)
        self._connection = Connection.to(url)
        check_layout(layout)
        check_slots(url, layout)

    @property
    def place(self) -> str:
        """The URL of Redis without its password, or the class of the redis-py client that was passed as `url`."""
        return self._connection.name

    def redis_keys(self, queue: str) -> Keys:
        """Return the Redis keys of a queue; raise ConfigurationError for a name that is not allowed."""
        return Keys(queue, self._layout, self._shard or 0)

    def in_layout(self, layout: Layout) -> Self:
        """Return an admin for the same Redis whose queues have the layout `layout`."""
        return type(self)(self._target, layout=layout, shard=self._shard)

    def in_shard(self, shard: int | None) -> Self:
        """Return an admin for the same Redis that uses only `shard` of each queue, or all shards if it is None."""
        return type(self)(self._target, layout=self._layout, shard=shard)

    def close(self) -> None:
        """Close the connections to Redis; the next method call opens new connections."""
        self._connection.close()

    def _session(self) -> Session:
        """Return a session with the whole Redis, not only with one queue."""
        return Session(self._connection.wire(REPLY_SECONDS), self._connection.clock)

    def _queue(self, name: str, *, whole: bool = False, mends: bool = False) -> QueueSession:
        """
        Return a session with a queue; raise ConfigurationError for an unknown queue.

        Args:
            whole: select all shards, even if this admin is for a single shard.
            mends: accept a corrupt shard map, because the caller will repair it.
        """
        wire = self._connection.wire(REPLY_SECONDS)
        session = QueueSession(wire, Keys(name, self._layout), self._connection.clock)
        session.learn(None if whole else self._shard, mends=mends)
        return session

    def _publisher(self, name: str) -> Queue[bytes]:
        """Return a `Queue` whose bodies are bytes that need no encoding."""
        return Queue(name, bytes, url=self._target, layout=self._layout, max_body=LARGEST_BODY)

    def _named(self, names: Sequence[str]) -> list[Keys]:
        """
        Return the Redis keys of each queue in `names`.

        Raises:
            ConfigurationError: a named queue does not exist.
        """
        if self._shard is not None and not names:
            raise ConfigurationError("a shard is given without a queue: name the queue")
        return [self._queue(name).keys for name in names]

    def _maps(self) -> ShardMaps:
        return ShardMaps(whole=self._shard is None)
