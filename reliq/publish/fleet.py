"""The look at the workers of a queue before its first message with a key: an older version would lose its place."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any

from reliq import commands
from reliq.errors import ConfigurationError, WrongKeyTypeError
from reliq.roster import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.client.client import Clients
    from reliq.client.shards import Shards


class Fleet:
    """
    The workers of a queue, as a producer asks about them: once in a process, and not where the queue has keys already.

    Attributes:
        is_known: whether the workers are known to know keys.
    """

    def __init__(self, shards: Shards, clients: Clients) -> None:
        self._shards, self._clients = shards, clients
        self._asking: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]]
        self._asking = weakref.WeakKeyDictionary()

    @property
    def is_known(self) -> bool:
        """Whether messages with keys may be published: then nobody is asked."""
        return self._shards.first.entry in self._clients.connection().keyed

    def check(self, *, for_seconds: float) -> None:
        """
        Ask whether every worker of the queue knows keys.

        Raises:
            ConfigurationError: one does not; or the queue has several shards.
            RedisUnavailableError, RedisRefusedError: it cannot be asked.
        """
        client = self._clients.blocking()
        self._shards.read(for_seconds=for_seconds)
        if not self._is_keyed():
            ids = client.run(commands.worker_ids(), for_seconds=for_seconds)
            self._judge(client.run_all(commands.worker_records(ids), for_seconds=for_seconds))
        self._clients.connection().keyed.add(self._shards.first.entry)

    async def acheck(self, *, for_seconds: float) -> None:
        """As `check`, in async code; tasks that ask at the same time share the answer."""
        loop = asyncio.get_running_loop()
        asking = self._asking.get(loop)
        if asking is None or asking.done():
            asking = self._asking[loop] = loop.create_task(self._ask(for_seconds))
        await asyncio.shield(asking)

    async def _ask(self, for_seconds: float) -> None:
        client = self._clients.asynchronous()
        await self._shards.aread(for_seconds=for_seconds)
        if not self._is_keyed():
            ids = await client.run(commands.worker_ids(), for_seconds=for_seconds)
            self._judge(await client.run_all(commands.worker_records(ids), for_seconds=for_seconds))
        self._clients.connection().keyed.add(self._shards.first.entry)

    def _is_keyed(self) -> bool:
        """Say whether the queue has keys already; raise ConfigurationError for one of several shards."""
        check_one_shard(self._shards)
        return self._shards.is_keyed

    def _judge(self, records: Sequence[Worker | Any]) -> None:
        name = self._shards.first.name
        for one in records:
            if isinstance(one, Exception) and not isinstance(one, WrongKeyTypeError):  # no worker of ours wrote that
                raise one
        old = [one for one in records if isinstance(one, Worker) and name in one.queues and not one.keys]
        if old:
            first = old[0]
            others = f", and {len(old) - 1} more do not either" if len(old) > 1 else ""
            raise ConfigurationError(
                f"worker {first.id} of queue {name!r} (reliq {first.version}, pid {first.pid} on {first.host}) does not "
                f"know keys{others}: stop every worker of an older version first; one that was killed is listed for 15 s"
            )


def check_one_shard(shards: Shards) -> None:
    """Raise ConfigurationError when a queue has several shards: messages with keys are in one."""
    if (count := max(shards.map.served, shards.wanted or 1)) > 1:
        raise ConfigurationError(
            f"queue {shards.first.name!r} has {count} shards: keys, priorities and limits need a queue of one shard"
        )
