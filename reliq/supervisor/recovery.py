"""Renew leases of silent worker processes, return messages of dead processes, and reap orphans."""

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

#: Renew the leases of a silent process after a third of the shortest lease, at most twice a second.
RENEW_PART = 3
SHORTEST_RENEWAL_SECONDS = 0.5
#: How often a prefetched message of a dead process is returned without losing a retry.
FREE_RELEASES = 2
#: The most such messages that are counted.
REMEMBERED_LIMIT = 10_000
#: How long a call is retried while Redis is unavailable; other processes may wait for the same help.
CALL_SECONDS = 1.0
#: The process id of a container's first process.
FIRST_PROCESS = 1


def reap_orphans(own: Collection[int]) -> None:
    """Reap dead orphans, except `own`, if this is the first process of a container."""
    if os.getpid() != FIRST_PROCESS:
        return
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


class Recovery:
    """
    Renew the leases of silent processes, and return messages of dead processes without using a retry.

    `shards`, `held`, `extend` and `release` may raise ReliqError.
    """

    def __init__(self, consumer: Consumer, concurrency: int) -> None:
        self._consumer = consumer
        self._concurrency = concurrency
        self._handlers = {handler.queue.name: handler for handler in consumer.handlers}
        self._call_seconds = CALL_SECONDS  # how long a call is retried while Redis is unavailable
        self._released: dict[tuple[str, str], int] = {}  # (queue, id) -> number of returns, the latest last

    def shards(self, names: Sequence[str]) -> list[Keys]:
        """Return the shards of queues; only the first of each if Redis is unavailable."""
        served = ServedQueues([self._handlers[name] for name in names])
        with suppress(ReliqError):
            served.take(self._client().run_all(served.questions()))
        return list(served.shards())

    def held(self, keys: Keys, lane: str) -> list[Claimed]:
        """Return the messages of a shard that are leased to the process that claims as `lane`."""
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
        """Renew the leases of messages of a shard to `lease_ms` from now."""
        for piece in chunked(claimed, BATCH_LIMIT):
            self._client().run(transitions.extend(keys, piece, lease_ms=lease_ms), for_seconds=self._call_seconds)

    def release(self, keys: Keys, claimed: Sequence[Claimed]) -> None:
        """Return messages of a shard to its queue in their order, without using a retry."""
        pieces = list(chunked(claimed, BATCH_LIMIT))
        for piece in reversed(pieces):  # each release puts messages at the head of ready
            self._client().run(transitions.release(keys, piece), for_seconds=self._call_seconds)

    def help(self, child: Child) -> None:
        """
        Renew the leases of a silent process.

        In a process with one slot, prefetched messages are returned when their original leases have expired. The
        process does not start them any more.
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
        """Return the unfinished messages of a dead process; without a report, all that it had not started."""
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
            logger.exception(
                "cannot read the report of a dead process; messages it had started are redelivered "
                "when their leases expire"
            )
            has_reported = False
        if not has_reported:
            self._of_each(child, lambda keys, claimed: self._release(child, keys, claimed))
            with suppress(ReliqError):  # other workers poll anyway
                # Wake other processes, because a wake-up or watch of the dead process is lost.
                shards = self.shards([handler.queue.name for handler in child.handlers])
                requests = [commands.drop_watch(keys) for keys in shards]
                tokens = [token for keys in shards for token in commands.push_wake_token(keys)]
                self._client().run_all(requests + tokens)
            return

        def release(keys: Keys) -> None:
            self.release(keys, reported[keys])
            ids = _format_ids(reported[keys])
            logger.warning("process %d ended before its handlers; returned to queue %s: %s", pid, keys.name, ids)

        self._each(list(reported), release)

    def _give_back_waiting(self, child: Child, keys: Keys, claimed: list[Claimed]) -> list[Claimed]:
        """Release the messages that have not started, unless the process wakes up; return the released messages."""

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
        Return the messages that the dead process had not started, and let the leases of the others expire.

        A message can kill its process before it starts, for example by a body that needs too much memory. So a message
        that several processes had prefetched when they died is not returned: it loses a retry when its lease expires.
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
                "queue %s: several processes died that had prefetched these messages; they are redelivered when "
                "their leases expire: %s",
                name,
                _format_ids(suspects),
            )
        self.release(keys, [message for message in innocent if message not in suspects])
        # End the leases of the others now, because a dead process cannot settle them. Messages that have caused deaths
        # before keep their leases, so that they do not kill processes in quick succession, unless they have a key.
        paying = [message for message in claimed if message not in innocent or message in suspects]
        ended = [message for message in paying if not message.deaths or message.key is not None]
        self.extend(keys, ended, lease_ms=1)

    def _releases_of(self, name: str, id: str) -> int:
        """Count and return how many processes have died that had prefetched the message."""
        count = self._released[name, id] = self._released.pop((name, id), 0) + 1
        while len(self._released) > REMEMBERED_LIMIT:
            del self._released[next(iter(self._released))]
        return count

    def _of_each(self, child: Child, settle: Callable[[Keys, list[Claimed]], None]) -> None:
        """Call `settle` for each shard with the messages of the process."""
        lanes = {} if child.board is None else child.board.lanes
        shards = self.shards(list(lanes))
        self._each(shards, lambda keys: settle(keys, self.held(keys, lanes[keys.name])))

    def _each(self, shards: Sequence[Keys], step: Callable[[Keys], None]) -> None:
        """
        Call `step` for each shard, and log errors.

        If Redis is unavailable, skip the other shards, because other processes may wait for help. With several servers,
        try each of the others once.
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
                    "queue %s: could not renew or return messages of a silent or dead process; they "
                    "are redelivered when "
                    "their leases expire: %s",
                    queues,
                    error,
                )
                if is_over:
                    return
                if is_away:
                    self._call_seconds = 0.0
            except Exception:
                logger.exception(
                    "queue %s: could not renew or return messages of a silent or dead process; they "
                    "are redelivered when "
                    "their leases expire",
                    keys.name,
                )

    def _client(self) -> Client:
        return Client.to(self._consumer.connection(self._consumer.handlers), PUBLISH_TIMEOUT_SECONDS)


def _format_ids(claimed: Sequence[Claimed]) -> str:
    return printable(join_first([message.id for message in claimed]))
