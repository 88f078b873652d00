"""Sessions of operators with one Redis and one queue: each request is retried for the same time."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from reliq.admin import calls
from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError, WrongKeyTypeError
from reliq.keys import SHARDS_LIMIT, Keys, Layout, check_layout, home, is_name
from reliq.metrics.snapshot import ShardMaps, map_error
from reliq.queue import Queue
from reliq.redis.commands import Command
from reliq.redis.server import Connection, check_slots
from reliq.redis.session import Session
from reliq.redis.shards import CORRUPT, UNREADABLE, UNSHARDED, ShardMap, believed, shard_map, witnesses
from reliq.settings import LARGEST_BODY, check_int

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reliq.redis.cluster import Transport
    from reliq.redis.commands import Clock, Request
    from reliq.redis.url import Target

#: One reply is awaited for this many seconds: some replies are large.
REPLY_SECONDS = 5.0
#: The layouts in which a queue is looked for that is unknown in its own.
LAYOUTS = (Layout.RELIQ, Layout.hdt3213(), Layout.hdt3213(hash_tag=True))


class UnknownQueueError(ConfigurationError):
    """Redis has no queue of that name."""


class QueueSession(Session):
    """
    A queue, or one shard of it, for operators.

    Attributes:
        keys: of the shard that its requests concern: the first shard if several are chosen.
        map: how many shards the queue has.
        counted: the keys of the chosen shards, and of former shards, which still have totals.
    """

    def __init__(self, wire: Transport, keys: Keys, clock: Clock | None = None) -> None:
        super().__init__(wire, clock)
        self.keys = keys
        self.map = UNSHARDED
        self.counted = [keys]
        self._is_one = True

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.keys.name

    @property
    def parts(self) -> list[QueueSession]:
        """A session for each chosen shard; this session alone for a queue that is not sharded."""
        return [self] if self._is_one else [self._part(shard) for shard in range(self.map.served)]

    @property
    def is_sharded(self) -> bool:
        """Whether several shards are chosen."""
        return not self._is_one

    def homes(self, id: str) -> list[QueueSession]:
        """Return the sessions of the shards that may have a message of this id: two, while the number of shards changes."""
        if self._is_one:
            return [self]
        return [self._part(shard) for shard in dict.fromkeys((home(id, self.map.n), home(id, self.map.was)))]

    def has(self, id: str) -> bool:
        """Return whether the chosen shard may have a message of this id; with all shards chosen, always True."""
        return self.keys.shard in (home(id, self.map.n), home(id, self.map.was)) or self.is_sharded

    def mean(self, keys: Keys, *, is_one: bool) -> None:
        """Choose the shard of `keys` alone, or all shards."""
        self.keys = keys
        self._is_one = is_one

    def learn(self, shard: int | None = None, *, mends: bool = False) -> None:
        """
        Read the number of shards, and choose all shards, or `shard` alone; with `mends` accept a corrupt map.

        Raises:
            UnknownQueueError: Redis has no such queue: a mistyped name must not look like an empty queue.
            ConfigurationError: it has no such shard.
        """
        used, found = self._first_look(mends=mends)
        self.map = found
        if found.served == 1 and not used:
            self._check_registered()
        if shard is not None and shard >= found.served:
            raise ConfigurationError(f"queue {self.name!r} has {_number_of(found.served)}, and no shard {shard}")
        self.mean(self.keys.of_shard(shard or 0), is_one=shard is not None or found.served == 1)
        self.counted = [self.keys] if shard is not None else [self.keys.of_shard(at) for at in range(found.ever)]

    def _first_look(self, *, mends: bool) -> tuple[int, ShardMap]:
        """Return how many Redis keys the first shard has, and the map; a user that may not read the map sees the first shard alone."""
        questions: list[Command[Any]] = [calls.key_count(self.keys)]
        used, *told = self.try_all(
            [*questions, *([] if self.keys.bare else [shard_map(self.keys), *witnesses(self.keys)])]
        )
        found: Any = told[0] if told else UNSHARDED
        if isinstance(found, RedisRefusedError) and not isinstance(found, WrongKeyTypeError):
            found = UNSHARDED
        found = ShardMap.or_fenced(found, told[1:])
        if mends and isinstance(found, UNREADABLE):
            found = CORRUPT
        for answer in (found,) if isinstance(used, RedisUnavailableError) and found != UNSHARDED else (used, found):
            if isinstance(answer, Exception):
                raise map_error(answer, self.keys)
        return used, believed(self.name, UNSHARDED, found, told[1:])

    def _part(self, shard: int) -> QueueSession:
        part = copy(self)
        part.mean(self.keys.of_shard(shard), is_one=True)
        return part

    def _check_registered(self) -> None:
        """Raise UnknownQueueError for a queue without keys, unless the registry has it; name the layout that has it."""
        keys = self.keys
        if self.run(calls.is_registered(keys)):
            return
        elsewhere = " and ".join(f"--layout {layout}" for layout in self._other_layouts())
        raise UnknownQueueError(
            f"there is no queue {keys.name!r} here{f' in the layout {keys.layout}' if keys.bare else ''}; "
            + (f"there is one with {elsewhere}" if elsewhere else "`reliq queues --scan` lists what there is")
        )

    def _other_layouts(self) -> list[Layout]:
        """Return the other layouts in which a queue of this name has messages or totals; a refusal counts as none."""
        others = [layout for layout in LAYOUTS if layout != self.keys.layout and is_name(self.name, layout)]
        answers = self.try_all(
            [
                Command(("EXISTS", keys.retries_left, keys.totals), bool)
                for keys in map(partial(Keys, self.name), others)
            ]
        )
        return [layout for layout, answer in zip(others, answers, strict=True) if answer is True]


class Sessions:
    """
    Opens sessions with one Redis and with its queues.

    Attributes:
        target: the URL or client.
        connection: to that Redis.

    Raises:
        ConfigurationError: no Redis is named, or reliq cannot use it.
    """

    def __init__(self, url: Target | None, layout: Layout, shard: int | None = None) -> None:
        self.target = url
        self.layout = layout
        self.shard = None if shard is None else check_int("shard", shard, most=SHARDS_LIMIT - 1)
        self.connection = Connection.to(url)
        check_layout(layout)
        check_slots(url, layout)

    def keys(self, queue: str) -> Keys:
        """Return the keys of a queue, or of the shard that is meant; raise ConfigurationError for a name not allowed."""
        return Keys(queue, self.layout, self.shard or 0)

    def session(self) -> Session:
        """Return the session of the whole Redis."""
        return Session(self.connection.wire(REPLY_SECONDS), self.connection.clock)

    def queue(self, name: str, *, mends: bool = False) -> QueueSession:
        """Return the session of a queue; raise ConfigurationError for an unknown queue. `learn` explains `mends`."""
        session = self._of(name)
        session.learn(self.shard, mends=mends)
        return session

    def _of(self, name: str) -> QueueSession:
        return QueueSession(self.connection.wire(REPLY_SECONDS), Keys(name, self.layout), self.connection.clock)

    def publisher(self, name: str) -> Queue[bytes]:
        """Return a `Queue` of bytes."""
        return Queue(name, bytes, url=self.target, layout=self.layout, max_body=LARGEST_BODY)

    def other(self, queue: str, to: str) -> QueueSession:
        """Return the queue that messages of `queue` go to; raise ConfigurationError for the same, or an unknown one."""
        if to == queue:
            raise ConfigurationError(f"messages of {queue!r} cannot go to {queue!r} itself; name another queue")
        session = self._of(to)
        try:
            session.learn()
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; messages go only to a queue that was used before") from None
        return session


def ask_each(
    session: Session,
    queues: Sequence[Keys],
    make: Callable[[Keys], Request[Any]],
    maps: ShardMaps,
    *along: Request[Any],
) -> tuple[list[list[Any]], list[Any]]:
    """
    Make a request for each shard of each queue in one round trip, and in another for shards that were unknown.

    Returns:
        The answers of each queue, with an exception for a refused request; and the answers of the requests `along`.
    """
    found, refused, extra = maps.ask(session.try_all, queues, lambda shard: [make(shard)], along)
    answers = [[answer for _, (answer,) in shards] for shards in found.values()]
    for of_queue, keys in zip(answers, queues, strict=True):
        of_queue.extend([refused[keys]] if keys in refused else [])
    return answers, extra


class AdminBase:
    """The base of the parts of `Admin`: its Redis, the layout and the shard."""

    def __init__(self, url: Target | None = None, *, layout: Layout = Layout.RELIQ, shard: int | None = None) -> None:
        self._redis = Sessions(url, layout, shard)

    @property
    def place(self) -> str:
        """The URL without its password, or the kind of client."""
        return self._redis.connection.name

    def redis_keys(self, queue: str) -> Keys:
        """Return the Redis keys of a queue; raise ConfigurationError for a name that is not allowed."""
        return self._redis.keys(queue)

    def in_layout(self, layout: Layout) -> Self:
        """Return the same admin for queues in another layout."""
        return type(self)(self._redis.target, layout=layout, shard=self._redis.shard)

    def in_shard(self, shard: int | None) -> Self:
        """Return the same admin for one shard of its queues; None for all shards as one queue."""
        return type(self)(self._redis.target, layout=self._redis.layout, shard=shard)

    def close(self) -> None:
        """Close the connections; the next call opens them again."""
        self._redis.connection.close()

    def _named(self, names: Sequence[str]) -> list[Keys]:
        """Return the keys of the named queues, which must exist; without names, no keys."""
        if self._redis.shard is not None and not names:
            raise ConfigurationError("name the queue whose shard is meant")
        return [self._redis.queue(name).keys for name in names]

    def _maps(self) -> ShardMaps:
        return ShardMaps(whole=self._redis.shard is None)


def _number_of(shards: int) -> str:
    return "one shard, 0" if shards == 1 else f"{shards} shards, 0 to {shards - 1}"
