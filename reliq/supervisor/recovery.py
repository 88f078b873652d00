"""Settles for worker processes the leases of a silent process, the messages of a dead process, and orphans."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from reliq.errors import RedisUnavailableError, ReliqError
from reliq.lua import transitions
from reliq.message import Claimed
from reliq.redis import commands
from reliq.redis.client import Client
from reliq.redis.server import PUBLISH_TIMEOUT_SECONDS
from reliq.redis.shards import declaration
from reliq.settings import BATCH_LIMIT
from reliq.text import chunked, join_first, printable
from reliq.wire_format import Held, read_count
from reliq.worker.claims import ServedQueues

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from reliq.consumer import Consumer
    from reliq.keys import Keys
    from reliq.supervisor.child import Child


logger = logging.getLogger(__name__)

#: The leases of a silent process are renewed after a third of the shortest, as it would itself, at most twice a second.
RENEW_PART = 3
SHORTEST_RENEWAL_SECONDS = 0.5
#: A message that was held, but not started, by a process that died goes back unspent twice.
FREE_RELEASES = 2
#: The last 10,000 such messages are remembered.
REMEMBERED_LIMIT = 10_000
#: A call is tried for 1 s while Redis is away: other processes may wait for the same help.
CALL_SECONDS = 1.0
#: The number of a container's first process.
FIRST_PROCESS = 1


def reap_orphans(own: Collection[int]) -> None:
    """Collect the dead processes whose parents are gone, but for `own`, if this is a container's first process."""
    if os.getpid() != FIRST_PROCESS:
        return
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


class Recovery:
    """
    Settles for worker processes what they cannot: leases are extended, or messages given back unspent.

    `shards`, `held`, `extend` and `release` may raise ReliqError.
    """

    def __init__(self, consumer: Consumer, concurrency: int) -> None:
        self._consumer = consumer
        self._concurrency = concurrency
        self._handlers = {handler.queue.name: handler for handler in consumer.handlers}
        self._call_seconds = CALL_SECONDS  # for how long a call is tried while Redis is away
        self._released: dict[tuple[str, str], int] = {}  # (queue, id) -> how often; the latest at last

    def shards(self, names: Sequence[str]) -> list[Keys]:
        """Return the shards of queues; while Redis is away, the first of each."""
        served = ServedQueues([self._handlers[name] for name in names])
        with suppress(ReliqError):
            served.take(self._client().run_all(served.questions()))
        return list(served.shards())

    def held(self, keys: Keys, lane: str) -> list[Claimed]:
        """Return the messages of a shard that the consumer holds that claims as `lane`; each call reads a part of unack."""
        client = self._client()
        is_keyed = client.run(declaration(keys), for_seconds=self._call_seconds) is not None
        at = 0
        claimed = []
        while rows := client.run(commands.held(keys, at), for_seconds=self._call_seconds):
            ids = [id for id, _ in rows]
            words = client.run(commands.state_words(keys, ids))
            counts = client.run(commands.retries_left(keys, ids))
            for id, word, left in zip(ids, words, counts, strict=True):
                number, key = read_count(left)
                if isinstance(word, Held) and word.lane == lane and number is not None:
                    claimed.append(Claimed(id, word.nonce, number, word.deaths, key=key if is_keyed or key else None))
            at += BATCH_LIMIT
        return claimed

    def extend(self, keys: Keys, claimed: Sequence[Claimed], lease_ms: int) -> None:
        """Extend the leases of these messages of a shard to `lease_ms` from now."""
        for piece in chunked(claimed, BATCH_LIMIT):
            self._client().run(transitions.extend(keys, piece, lease_ms=lease_ms), for_seconds=self._call_seconds)

    def release(self, keys: Keys, claimed: Sequence[Claimed]) -> None:
        """Give these messages of a shard back, unspent and in their order."""
        pieces = list(chunked(claimed, BATCH_LIMIT))
        for piece in reversed(pieces):  # each piece goes before the last one: the first must come last
            self._client().run(transitions.release(keys, piece), for_seconds=self._call_seconds)

    def help(self, child: Child) -> None:
        """
        Renew the leases of a silent process, as it would itself if it could.

        Messages that wait behind the only handler of a process are given back once their own leases, as the process
        knows them, are over: then it starts them no more.
        """
        silence = child.silence
        shortest = min(handler.lease_seconds for handler in child.handlers)
        if silence.seconds - silence.helped_at < max(SHORTEST_RENEWAL_SECONDS, shortest / RENEW_PART):
            return
        silence.helped_at = silence.seconds
        late = child.overran(time.monotonic())

        def settle(keys: Keys, claimed: list[Claimed]) -> None:
            handler = self._handlers[keys.name]
            waiting: list[Claimed] = []
            if self._concurrency == 1 and silence.seconds > handler.lease_seconds + SHORTEST_RENEWAL_SECONDS:
                waiting = self._give_back_waiting(child, keys, claimed)
            given_up = [*waiting, *(message for message in claimed if child.has_started(late, keys.name, message.id))]
            self.extend(keys, [message for message in claimed if message not in given_up], handler.lease_ms)

        self._of_each(child, settle)

    def give_back(self, child: Child, pid: int) -> None:
        """Release, unspent, what a dead process reports; without a report, all messages that do not pay for its end."""
        reported: defaultdict[Keys, list[Claimed]] = defaultdict(list)
        try:
            for row in json.loads(child.report.read_text()):
                keys = self._handlers[row.pop("queue")].queue.known_shards.keys(row.pop("shard"))
                reported[keys].append(Claimed(**row))
            child.report.unlink()
            has_reported = True
        except FileNotFoundError:
            has_reported = False
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            logger.exception("what a process could not finish is unknown; what it had started will end with its lease")
            has_reported = False
        if not has_reported:
            self._of_each(child, lambda keys, claimed: self._release(child, keys, claimed))
            with suppress(ReliqError):  # workers that look now and then find the rest
                # A wake token or a watch of a dead process wakes no other.
                shards = self.shards([handler.queue.name for handler in child.handlers])
                requests = [commands.drop_watch(keys) for keys in shards]
                tokens = [token for keys in shards for token in commands.push_wake_token(keys)]
                self._client().run_all(requests + tokens)
            return

        def release(keys: Keys) -> None:
            self.release(keys, reported[keys])
            ids = _format_ids(reported[keys])
            logger.warning("process %d ended before its handlers; given back to %s: %s", pid, keys.name, ids)

        self._each(list(reported), release)

    def _give_back_waiting(self, child: Child, keys: Keys, claimed: list[Claimed]) -> list[Claimed]:
        """Release and return the messages that have not started; none when the process wakes, for it may start them."""

        def waiting() -> list[Claimed]:
            rows = child.rows()
            return [message for message in claimed if not child.has_started(rows, keys.name, message.id)]

        if not waiting():
            return []
        with child.stopped() as is_silent:
            released = waiting() if is_silent else []
            self.release(keys, released)
        return released

    def _release(self, child: Child, keys: Keys, claimed: list[Claimed]) -> None:
        """
        Release the messages that pay nothing for the end of the process.

        A message may kill its process before it starts, by a body that is too large to read, and no board names it.
        One that was held by several processes that died of unknown causes keeps its lease, and pays when that ends.
        """
        name = keys.name
        charged = child.rows() if child.charged is None else child.charged
        innocent = [message for message in claimed if not child.has_started(charged, name, message.id)]
        suspects = (
            []
            if child.end_reason
            else [message for message in innocent if self._releases_of(name, message.id) > FREE_RELEASES]
        )
        if suspects:
            logger.warning(
                "%s: processes died one after another that held these, which had not started; their leases will end: %s",
                name,
                _format_ids(suspects),
            )
        self.release(keys, [message for message in innocent if message not in suspects])
        # Nothing of a dead process can come late. What dies again keeps its lease, lest it end one process after another;
        # but a key does not wait for it.
        paying = [message for message in claimed if message not in innocent or message in suspects]
        ended = [message for message in paying if not message.deaths or message.key is not None]
        self.extend(keys, ended, lease_ms=1)

    def _releases_of(self, name: str, id: str) -> int:
        """Return how many processes, this one included, have died that held the message and had not started it."""
        count = self._released[name, id] = self._released.pop((name, id), 0) + 1
        while len(self._released) > REMEMBERED_LIMIT:
            del self._released[next(iter(self._released))]
        return count

    def _of_each(self, child: Child, settle: Callable[[Keys, list[Claimed]], None]) -> None:
        """Call `settle` with the messages of each shard that the process holds."""
        lanes = {} if child.board is None else child.board.lanes
        shards = self.shards(list(lanes))
        self._each(shards, lambda keys: settle(keys, self.held(keys, lanes[keys.name])))

    def _each(self, shards: Sequence[Keys], step: Callable[[Keys], None]) -> None:
        """
        Take `step` for each shard, and log what Redis refuses.

        When Redis is away the others are not tried: other processes may wait for the same help. Where there are many
        servers they are, but once only.
        """
        self._call_seconds = CALL_SECONDS
        for at, keys in enumerate(shards):
            try:
                step(keys)
            except ReliqError as error:
                is_away = isinstance(error, RedisUnavailableError)
                is_over = is_away and not self._client().has_many
                queues = ", ".join(dict.fromkeys(shard.name for shard in (shards[at:] if is_over else [keys])))
                logger.warning("%s: what a process held could not be settled, its leases will end: %s", queues, error)
                if is_over:
                    return
                if is_away:
                    self._call_seconds = 0.0
            except Exception:
                logger.exception("%s: what a process held could not be settled, its leases will end", keys.name)

    def _client(self) -> Client:
        return Client.to(self._consumer.connection(self._consumer.handlers), PUBLISH_TIMEOUT_SECONDS)


def _format_ids(claimed: Sequence[Claimed]) -> str:
    return printable(join_first([message.id for message in claimed]))
