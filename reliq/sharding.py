"""
The number of shards of a queue, and the change of that number while the queue is in use.

A change takes three steps. If the process dies after any step, repeat the same call to continue:

1. A new shard map replaces the current shard map, which is a string in Redis with the number of shards. The home shard
   of a message is computed from its id and the number of shards; its old home shard, from the earlier number. From now
   on, before a publisher publishes a chosen id in its new home shard, it checks that the id is free in the old one.
2. Every shard stores the fence (a short copy) of the new map. Shards that will be removed now refuse new messages.
3. Messages, dead letters and blocked ids move to their home shards for the new number. When all of them have moved, the
   change is finished. Workers do this step too (`reliq.worker.upkeep`).

Shards lie in different slots of a Redis Cluster, so a single script cannot move a message. A move takes three script
calls, and several processes may make the same calls at the same time:

1. `depart` sets a batch of messages of the old shard aside under a batch number, so that no worker can claim them. A
   shard has only one such batch. So if this process dies, the next process continues with the same batch.
2. `arrive` writes the messages of the batch into their new shards. A new shard stores the last batch number of each
   other shard, so a repeated or late call changes nothing.
3. `leave` removes the batch from the old shard. If a user cancelled a message of the batch in the meantime, `cancel`
   returned `running`, and the message is now cancelled in its new shard.

If a Redis server has replicas, a replica must confirm each step before the next step, so that a failover cannot undo
half of a move.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from reliq.errors import ConfigurationError, RedisRefusedError, RedisUnavailableError
from reliq.keys import SHARDS_LIMIT, home, pattern
from reliq.lua import transitions
from reliq.message import Confirmed
from reliq.redis import commands
from reliq.redis.commands import Command, raise_first, read_ids, read_nothing
from reliq.redis.session import PATIENCE_SECONDS
from reliq.redis.shards import CORRUPT, LATEST_EPOCH, UNSHARDED, WITNESSES, ShardMap, fence, map_text
from reliq.text import shell_command

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from reliq.keys import Keys
    from reliq.lua.transitions import LeavingState, MigrationBatch
    from reliq.redis.commands import Arg, Call, List, T
    from reliq.redis.session import Session


#: How long to wait until a replica confirms a script call, in ms. If none confirms it in time, the change stops with
#: an error, and the next process that continues the change repeats the call.
CONFIRMED_MS = 500
#: About how many ids one round trip moves (STEP_IDS), and how many Redis keys one SCAN reads (STEP_KEYS).
STEP_IDS = 250
STEP_KEYS = 1000


class ShardChange:
    """
    Change the number of shards of a queue.

    Generator methods yield after every few round trips, so that the caller can do other work. Each method may raise
    RedisRefusedError or RedisUnavailableError; call the method again to continue.

    Args:
        session: the connection to Redis.
        keys: the Redis keys of any shard of the queue.

    Attributes:
        map: the shard map, with the current and the earlier number of shards.
    """

    def __init__(self, session: Session, keys: Keys) -> None:
        self._session = session
        self._first = keys.of_shard(0)
        self._replicas: dict[str, bool] = {}
        self.map = UNSHARDED
        self._look(WITNESSES)

    def _look(self, shards: int) -> None:
        """
        Read the shard map, and its copies (fences) in the first `shards` shards; in all shards if the map has more.

        If Redis has lost the shard map, use the latest copy.
        """
        self._text, *fences = self._session.run_all([map_text(self._first), *map(fence, self._shards(shards))])
        try:
            stored = ShardMap.parse(self._text)
        except ValueError:
            stored = CORRUPT
        self.map = stored.or_later(fences).unless(stored)
        if self.map.served > shards:
            self._look(self.map.served)

    def resize(self, number: int) -> None:
        """
        Start a change to `number` shards, or continue an interrupted change to the same number.

        Raises:
            ConfigurationError: `number` is not a power of two; the queue has the Go layout; a change to another number
                is not finished; or another process has changed the number in the meantime.
        """
        number = ShardMap.wanted(number, self._first.layout)
        self._look(number)
        self.restore()
        now = self.map
        if number == now.n:
            return
        if now.epoch == LATEST_EPOCH:
            raise ConfigurationError(
                f"the shards of {self._first.name!r} have epoch {LATEST_EPOCH}, the highest possible, so their number cannot change: "
                f"another program wrote it; move the messages to another queue"
            )
        if now.was != now.n:
            raise ConfigurationError(
                f"the change of {self._first.name!r} from {now.was} to {now.n} shards is not finished: "
                + shell_command("shards", self._first.name, options=["--finish"])
            )
        pause = self._session.run(Command(("GET", self._first.paused), as_it_is))
        left_ms = self._session.run(Command(("PTTL", self._first.paused), int))
        if pause is not None:  # pause the new shards too, before messages arrive in them
            until = ("PX", left_ms) if left_ms > 0 else ()
            new = [self._first.of_shard(shard) for shard in range(now.n, number)]
            self._session.run_all([Command(("SET", keys.paused, pause, *until), read_nothing) for keys in new])
        self._write(ShardMap.of(now.epoch + 1, number, now.n))
        self._fence()

    def restore(self) -> None:
        """Restore the shard map if Redis has lost it. Also store the fence (a copy of the map) in every shard."""
        if self.map.is_lost:
            answers = self._session.try_all(list(map(fence, self._shards(SHARDS_LIMIT))))
            # Ignore refusals of Redis: an ACL user may lack permissions for shards that the queue never had.
            fences = raise_first([answer for answer in answers if not isinstance(answer, RedisRefusedError)])
            last = self.map.or_later(fences)
            most = max(known.served for known in (last, *fences) if known is not None)
            self._write(replace(ShardMap.of(last.epoch, last.n, last.was), most=most))
        self._fence()

    def steps(self, shards: Collection[int] | None = None, *, count: bool = False) -> Iterator[int]:
        """
        Move messages to their home shards; after each step, yield how many messages are left.

        When no message is left, finish the change. The number includes messages in flight, and due messages in shards
        that remain. They are not moved: workers finish them in their old shards.

        Args:
            shards: the shards to move messages from; None for all. Only a call that includes shard 0 can finish the
                change.
            count: True to count all messages that are left; False to stop after the first step that finds any.
        """
        self.restore()
        now = self.map
        if now.was == now.n:
            return
        old = [keys for keys in self._shards(now.served) if keys.shard < now.was]
        left = 0
        for keys in old:
            for _ in self._move_shard(keys) if shards is None or keys.shard in shards else ():
                yield left
        if shards is not None and 0 not in shards:
            return
        for keys in old:
            before = left
            for strays in self._strays(keys):
                left = before + strays
                yield left
                if left and not count:
                    return
        if not left:
            # Move blocked ids last, because messages that end during the change block their ids too.
            for _ in self._move_taken(old):
                yield left
            self._write(ShardMap(now.epoch, now.n, now.n, "steady"))

    def _write(self, after: ShardMap) -> None:
        """
        Store a new shard map in Redis.

        Raises:
            ConfigurationError: another process has changed the map, or the queue has message keys or limits.
        """
        after = replace(after, most=max(after.ever, self.map.ever))
        stored = self._confirmed(self._first, transitions.remap(self._first, self._text, after.text))
        if stored == transitions.REMAP_KEYED:
            raise ConfigurationError(
                f"queue {self._first.name!r} has keys or limits, which need a single shard; "
                "give messages without a key a queue of their own, and shard that queue"
            )
        if stored != after.text:
            raise ConfigurationError(
                f"another process has changed the shards of {self._first.name!r} meanwhile; see: "
                + shell_command("shards", self._first.name)
            )
        self._text = stored
        self.map = after

    def _fence(self) -> None:
        """Store the fence (a copy of the map) in every shard. Shards that will be removed then refuse new messages."""
        for keys in self._shards(self.map.served) if self.map.epoch else ():
            closing = keys.shard >= self.map.n
            self._confirmed(keys, transitions.ask(keys, [], fence=self.map.fence, closing=closing))

    def _shards(self, number: int) -> list[Keys]:
        return [self._first.of_shard(shard) for shard in range(1 if self._first.bare else number)]

    def _move_shard(self, keys: Keys) -> Iterator[None]:
        """Move the waiting messages and the dead letters of a shard to their new shards."""
        if self._session.run(_leaving(keys)):
            self._finish(keys, self._confirmed(keys, transitions.depart(keys, [], state="pending")))
        for ids in self._stray_ids(keys, "ZSCAN", keys.pending):
            yield from self._move(keys, "pending", ids)
        for ids in self._stray_ids(keys, "ZSCAN", keys.unack):
            yield from self._move(keys, "unack", ids)
        if keys.shard >= self.map.n:  # due messages move only out of shards that will be removed
            yield from self._move_list(keys, "ready")
            yield from self._move_list(keys, "retry")
        after = "-"
        while letters := self._session.run(commands.letters_between(keys, after, "+", count=STEP_IDS)):
            yield from self._move(keys, "dead", [row.letter for row in letters if self._is_stray(keys, row.id)])
            after = f"({letters[-1].letter}"

    def _strays(self, keys: Keys) -> Iterator[int]:
        """Count the unfinished messages in a shard that belong to another shard. Yield the count so far after each step."""
        number = self._session.run(_leaving(keys))
        for command, key in (("HSCAN", keys.retries_left), ("SSCAN", keys.garbage)):
            for ids in self._stray_ids(keys, command, key):
                number += len(ids)
                yield number
        yield number

    def _move_taken(self, shards: Sequence[Keys]) -> Iterator[None]:
        """
        Move blocked ids (by `dedup` or a tombstone) to their home shards.

        Each blocked id is a Redis key. To find these keys, scan all Redis keys of all servers.
        """
        starts = {keys.dedup("")[:-4]: keys for keys in shards}
        wanted = pattern(self._first.dedup("").partition("}")[0].partition("#")[0]) + "*:dd:*"
        for node in self._session.each().values():
            for names in node.scan(_scan(["SCAN"], "MATCH", wanted, "COUNT", STEP_KEYS)):
                parts = [name.partition(":dd:") for name in names]
                marks = [(starts[start], id) for start, _, id in parts if start in starts]
                strays = [(keys, id) for keys, id in marks if self._is_stray(keys, id)]
                reasons = self._session.run_all([Command(("GET", keys.dedup(id)), as_it_is) for keys, id in strays])
                left_ms = self._session.run_all([Command(("PTTL", keys.dedup(id)), int) for keys, id in strays])
                rows = zip(strays, reasons, left_ms, strict=True)
                taken = [(keys, id, why, ms) for (keys, id), why, ms in rows if why is not None and ms > 0]
                takes = [("SET", self._home(keys, id).dedup(id), why, "PX", ms, "NX") for keys, id, why, ms in taken]
                self._session.run_all([Command(take, read_nothing) for take in takes])
                self._session.run_all([Command(("DEL", keys.dedup(id)), int) for keys, id, *_ in taken])
                yield

    def _confirmed(self, keys: Keys, call: Call[T]) -> T:
        """
        Run a script in a shard. If the shard's server has replicas, wait until one of them confirms the changes.

        Raises:
            RedisUnavailableError: no replica confirms the changes in time.
        """
        node = self._session.server_of(keys.ready)
        if node not in self._replicas:
            servers = self._session.client.run_everywhere([commands.server_facts("replication")])
            for name, [facts] in servers.items():
                known = {} if isinstance(facts, Exception) else facts
                self._replicas[name] = known.get("connected_slaves", "0") != "0"
        if not self._replicas.get(node, False):
            return self._session.run(call)
        wait = Command(("WAIT", 1, CONFIRMED_MS), lambda reply: Confirmed(int(reply) > 0, int(reply)))
        answer, confirmation = self._session.client.run_confirmed(call, wait, for_seconds=PATIENCE_SECONDS)
        if isinstance(confirmation, Exception) or not confirmation.durable:
            raise RedisUnavailableError(f"no replica of {node or 'the server'} confirms the change of the shards")
        return answer

    def _move(self, keys: Keys, state: LeavingState, names: list[str]) -> Iterator[None]:
        """
        Move messages or dead letters in `state` to their home shards.

        A script call may move only some of them, so repeat it until a call moves none.
        """
        while names:
            departure = self._confirmed(keys, transitions.depart(keys, names, state=state))
            self._finish(keys, departure)
            yield
            gone = {name.partition(" ")[0] if departure.letters else name for name in departure.records}
            rest = [name for name in names if name not in gone]
            names = rest if len(rest) < len(names) else []

    def _move_list(self, keys: Keys, place: List) -> Iterator[None]:
        """Move all messages that can move, oldest first, out of `ready` or `retry` of a shard that will be removed."""
        stayed = 0
        key = keys.ready if place == "ready" else keys.retry
        while ids := self._session.run(Command(("LRANGE", key, -STEP_IDS, -1), read_ids)):
            departure = self._confirmed(keys, transitions.depart(keys, ids, state=place))
            stayed += self._finish(keys, departure)
            yield
            if stayed >= STEP_IDS:
                return

    def _finish(self, keys: Keys, departure: MigrationBatch) -> int:
        """
        Complete the move of a batch: write its messages into their home shards, and remove them from the old shard.

        Return how many messages stay in the old shard, for example because their ids exist in the home shards.
        """
        by_home = defaultdict[int, list[str]](list)
        for name in departure.records:
            by_home[home(departure.id_of(name), self.map.n)].append(name)
        staying = set(by_home.pop(keys.shard, []))
        for shard, names in by_home.items():
            target = keys.of_shard(shard)
            answers = self._confirmed(target, transitions.arrive(target, departure, names, origin=keys.shard))
            if "late" in answers:  # another process has already completed the move of this batch
                return 0
            staying |= {name for name, answer in zip(names, answers, strict=True) if answer == "alive"}
        for id in self._session.run(transitions.leave(keys, departure, staying)):
            self._session.run(transitions.cancel(self._home(keys, id), [id]))
        return len(staying)

    def _stray_ids(self, keys: Keys, command: str, key: str) -> Iterator[list[str]]:
        """Scan the Redis key `key` of a shard; yield, in batches, the ids whose home is another shard."""
        for names in self._session.scan(_scan([command, key], "COUNT", STEP_IDS)):
            ids = names if command == "SSCAN" else names[::2]
            yield [id for id in ids if self._is_stray(keys, id)]

    def _home(self, keys: Keys, id: str) -> Keys:
        return keys.of_shard(home(id, self.map.n))

    def _is_stray(self, keys: Keys, id: str) -> bool:
        return home(id, self.map.n) != keys.shard


def as_it_is(reply: bytes | None) -> bytes | None:
    """Return a reply of Redis unchanged. For commands whose replies need no parsing."""
    return reply


def _leaving(keys: Keys) -> Command[int]:
    """
    Return the command that counts the messages of the batch that is being moved.

    The hash of the batch has a field for each message, and one more field for the batch number.
    """
    return Command(("HLEN", keys.leaving), lambda reply: max(0, int(reply) - 1))


def _scan(words: Sequence[Arg], *options: Arg) -> Callable[[int], Command[tuple[int, list[str]]]]:
    """Return a function that takes a cursor and returns the command for the next page of a scan."""
    return lambda at: Command((*words, at, *options), lambda reply: (int(reply[0]), read_ids(reply[1])))
