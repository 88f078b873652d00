"""
Renew the leases of silent worker processes, return the messages of dead processes, and reap orphans.

A process is silent if it gives no sign of life, for example because a handler holds the GIL.
"""

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

#: Within the shortest lease of its handlers, the supervisor renews the leases of a silent process this many times.
RENEW_PART = 3
#: The shortest interval in seconds between two renewals of a silent process' leases.
SHORTEST_RENEWAL_SECONDS = 0.5
#: If processes die that had prefetched a message, the message is returned to its queue this many times without using a
#: retry. At the next death, it loses a retry.
FREE_RELEASES = 2
#: The supervisor remembers for at most this many messages how often it has returned them.
REMEMBERED_LIMIT = 10_000
#: While Redis is unavailable, the supervisor retries a Redis command for this many seconds.
#: The time is short, because meanwhile the supervisor cannot help other silent or dead processes.
CALL_SECONDS = 1.0
#: The process id of a container's first process.
FIRST_PROCESS = 1


def reap_orphans(own: Collection[int]) -> None:
    """
    Reap orphaned processes that have ended, if this process is the first process of a container.

    Args:
        own: the ids of the worker processes, which the supervisor reaps itself.
    """
    if os.getpid() != FIRST_PROCESS:
        return
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


class Recovery:
    """
    Renew the leases of silent processes, and return the messages of dead processes to their queues.

    Returned messages do not lose a retry.

    The methods `held`, `extend` and `release` raise ReliqError if Redis is unavailable or refuses a command.
    """

    def __init__(self, consumer: Consumer, concurrency: int) -> None:
        self._consumer = consumer
        self._concurrency = concurrency
        self._handlers = {handler.queue.name: handler for handler in consumer.handlers}
        self._call_seconds = CALL_SECONDS  # how long to retry a command while Redis is unavailable
        self._released: dict[
            tuple[str, str], int
        ] = {}  # for each (queue, id): how often the message was returned to its queue

    def shards(self, names: Sequence[str]) -> list[Keys]:
        """
        Return all shards of the named queues.

        If Redis is unavailable, return only the first shard of each queue.
        """
        served = ServedQueues([self._handlers[name] for name in names])
        with suppress(ReliqError):
            served.take(self._client().run_all(served.questions()))
        return list(served.shards())

    def held(self, keys: Keys, lane: str) -> list[Claimed]:
        """
        Return the messages of a shard that are leased to a process.

        `lane` is the name that the process uses to claim messages; its leases in Redis contain this name.
        """
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
        """Make the leases of messages of a shard expire `lease_ms` from now; 0 ends the leases of a dead process."""
        for piece in chunked(claimed, BATCH_LIMIT):
            self._client().run(transitions.extend(keys, piece, lease_ms=lease_ms), for_seconds=self._call_seconds)

    def release(self, keys: Keys, claimed: Sequence[Claimed]) -> None:
        """Return messages of a shard to their queue in the same order, without using a retry."""
        pieces = list(chunked(claimed, BATCH_LIMIT))
        for piece in reversed(pieces):  # each piece returns to the front of the queue
            self._client().run(transitions.release(keys, piece), for_seconds=self._call_seconds)

    def help(self, child: Child) -> None:
        """
        Renew the leases of a silent process, if a renewal is due.

        Do not renew the leases of messages whose handlers exceeded their timeouts.

        If the process has one slot and is silent for longer than a lease, return its prefetched messages to the queues.
        When the process wakes up, it does not start these messages, because it has not renewed their leases in time.
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
        """
        Return the unfinished messages of a dead process to their queues.

        If the process has written a report of its unfinished messages, return these messages. Without a report, return
        the messages that the process had not started.
        """
        reported: defaultdict[Keys, list[Claimed]] = defaultdict(list)
        try:
            for row in json.loads(child.board.report or b"[]"):
                keys = self._handlers[row.pop("queue")].queue.known_shards.keys(row.pop("shard"))
                reported[keys].append(Claimed(**row))
            has_reported = bool(child.board.report)
        except (ValueError, TypeError, KeyError, AttributeError):
            logger.exception(
                "process %d: cannot read the report of this dead process; the messages that it had started are "
                "redelivered when their leases expire",
                pid,
            )
            has_reported = False
        if not has_reported:
            self._of_each(child, lambda keys, claimed: self._release(child, keys, claimed))
            with suppress(ReliqError):  # if this fails, other processes find the messages when they poll Redis
                # Wake another process. The dead process may have taken the wake token of the queue, or may have been
                # the process that waited for the queue's next due time.
                shards = self.shards([handler.queue.name for handler in child.handlers])
                requests = [commands.drop_watch(keys) for keys in shards]
                tokens = [token for keys in shards for token in commands.push_wake_token(keys)]
                self._client().run_all(requests + tokens)
            return

        def release(keys: Keys) -> None:
            self.release(keys, reported[keys])
            ids = _format_ids(reported[keys])
            logger.warning(
                "process %d ended before its handlers; returned messages to queue %s: %s", pid, keys.name, ids
            )

        self._each(list(reported), release)

    def _give_back_waiting(self, child: Child, keys: Keys, claimed: list[Claimed]) -> list[Claimed]:
        """
        Return the prefetched messages of a silent process to the queue, so that other processes run them.

        If the process gives a sign of life meanwhile, return no messages to the queue.

        Returns:
            The messages that were returned to the queue.
        """

        def waiting() -> list[Claimed]:
            rows = child.board.rows()
            return [message for message in claimed if not child.has_started(rows, keys.name, message.id)]

        if not waiting():
            return []
        with child.stopped() as is_silent:
            released = waiting() if is_silent else []
            self.release(keys, released)
        return released

    def _release(self, child: Child, keys: Keys, claimed: list[Claimed]) -> None:
        """
        Return unstarted messages of a dead process, and end the leases of started messages.

        A message can kill its process before its handler starts, for example by a body that needs too much memory. So
        if several processes died that had prefetched the same message, do not return this message. It is redelivered
        when its lease has ended, and loses a retry.
        """
        name = keys.name
        charged = child.board.rows() if child.charged is None else child.charged
        innocent = [message for message in claimed if not child.has_started(charged, name, message.id)]
        suspects = (
            []
            if child.end_reason
            else [message for message in innocent if self._releases_of(name, message.id) > FREE_RELEASES]
        )
        if suspects:
            logger.warning(
                "queue %s: several processes died that had prefetched these messages; they are redelivered when "
                "their leases expire: %s",
                name,
                _format_ids(suspects),
            )
        self.release(keys, [message for message in innocent if message not in suspects])
        # `paying` are the messages that lose a retry. End their leases now, because their process is dead.
        # If a process of the message has died before, wait until its lease expires, so that the message is not
        # redelivered too soon. But always end the lease of a message with a message key, because it blocks this key.
        paying = [message for message in claimed if message not in innocent or message in suspects]
        ended = [message for message in paying if not message.deaths or message.key is not None]
        self.extend(keys, ended, lease_ms=0)

    def _releases_of(self, name: str, id: str) -> int:
        """Count one more dead process that had prefetched a message; return the number of these processes."""
        count = self._released[name, id] = self._released.pop((name, id), 0) + 1
        while len(self._released) > REMEMBERED_LIMIT:
            del self._released[next(iter(self._released))]
        return count

    def _of_each(self, child: Child, settle: Callable[[Keys, list[Claimed]], None]) -> None:
        """Call `settle` for each shard of the process' queues, with the messages that the process leased from it."""
        lanes = child.board.lanes
        shards = self.shards(list(lanes))
        self._each(shards, lambda keys: settle(keys, self.held(keys, lanes[keys.name])))

    def _each(self, shards: Sequence[Keys], step: Callable[[Keys], None]) -> None:
        """
        Call `step` for each shard, and log errors.

        If there is only one Redis server and it is unavailable, skip the remaining shards, so that the supervisor can
        help other processes. With several Redis servers, try each remaining shard once, without a retry.
        """
        self._call_seconds = CALL_SECONDS
        for at, keys in enumerate(shards):
            try:
                step(keys)
            except ReliqError as error:
                is_away = isinstance(error, RedisUnavailableError)
                is_over = is_away and not self._client().has_many
                queues = ", ".join(dict.fromkeys(shard.name for shard in (shards[at:] if is_over else [keys])))
                logger.warning(
                    "queue %s: could not renew or return messages of a silent or dead process; they are redelivered "
                    "when their leases expire: %s",
                    queues,
                    error,
                )
                if is_over:
                    return
                if is_away:
                    self._call_seconds = 0.0
            except Exception:
                logger.exception(
                    "queue %s: could not renew or return messages of a silent or dead process; they are redelivered "
                    "when their leases expire",
                    keys.name,
                )

    def _client(self) -> Client:
        return Client.to(self._consumer.connection(self._consumer.handlers), PUBLISH_TIMEOUT_SECONDS)


def _format_ids(claimed: Sequence[Claimed]) -> str:
    return printable(join_first([message.id for message in claimed]))
