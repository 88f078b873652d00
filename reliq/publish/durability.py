"""Publishes that wait until replicas or disks have them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from reliq import commands
from reliq.errors import ConfigurationError
from reliq.events import Unconfirmed, notify
from reliq.message import Confirmed
from reliq.server_version import ServerVersion
from reliq.settings import seconds
from reliq.text import count_of
from reliq.transport.connection import PUBLISH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reliq.call import Call, Command
    from reliq.client.aio import AsyncClient
    from reliq.client.client import Client, Clients
    from reliq.publish.orders import Order
    from reliq.settings import Durability
    from reliq.transitions import PublishAnswer

OLDEST_WITH_WAITAOF = (7, 2)


class Confirmer:
    """Makes publishes and waits for their confirmation, through clients that await a reply for longer than usual."""

    def __init__(self, queue: str, clients: Clients) -> None:
        self._queue, self._clients = queue, clients
        self._has_waitaof = False

    def run(
        self, call: Call[PublishAnswer], orders: Sequence[Order], durability: Durability
    ) -> tuple[PublishAnswer, Confirmed]:
        """
        Make `call` and wait for its confirmation.

        Raises:
            ConfigurationError: the server cannot confirm in this way; nothing was published.
            RedisUnavailableError, RedisRefusedError: the call failed.
        """
        client = self._clients.blocking(longer_seconds(durability))
        if self._must_ask(durability):
            self._judge(client.run_all(_questions(), for_seconds=PUBLISH_SECONDS), durability)
        answer, found = client.run_confirmed(call, commands.confirmation(durability), for_seconds=PUBLISH_SECONDS)
        return answer, self._told(client, orders, durability, found)

    async def arun(
        self, call: Call[PublishAnswer], orders: Sequence[Order], durability: Durability
    ) -> tuple[PublishAnswer, Confirmed]:
        """As `run`, in async code."""
        client = self._clients.asynchronous(longer_seconds(durability))
        if self._must_ask(durability):
            self._judge(await client.run_all(_questions(), for_seconds=PUBLISH_SECONDS), durability)
        answer, found = await client.run_confirmed(call, commands.confirmation(durability), for_seconds=PUBLISH_SECONDS)
        return answer, self._told(client, orders, durability, found)

    def _must_ask(self, durability: Durability) -> bool:
        return durability.kind == "aof" and not self._has_waitaof

    def _judge(self, answers: Sequence[dict[str, str] | Exception], durability: Durability) -> None:
        """Note that the server has WAITAOF, or raise ConfigurationError; one that hides its version is trusted."""
        server, persistence = ({} if isinstance(one, Exception) else one for one in answers)
        version = ServerVersion.read(server)
        if version.is_before(OLDEST_WITH_WAITAOF):
            raise ConfigurationError(
                f"durability by aof needs Redis 7.2 or newer (WAITAOF), not {version.text}; "
                f"Durability.replicas(1) works with every version"
            )
        if durability.local and persistence.get("aof_enabled") == "0":
            raise ConfigurationError("durability by aof needs `appendonly yes` in the server's redis.conf")
        self._has_waitaof = True

    def _told(
        self,
        client: Client | AsyncClient,
        orders: Sequence[Order],
        durability: Durability,
        found: Confirmed | Exception,
    ) -> Confirmed:
        """Return what was confirmed, and tell the observers of what was not."""
        if isinstance(found, Exception):
            confirmed, why = Confirmed(durable=False), str(found)
        else:
            confirmed, why = found, _shortfall(found, durability)
        if not confirmed.durable:
            notify(client.observers, [Unconfirmed(self._queue, tuple(order.id for order in orders), why)])
        return confirmed


def longer_seconds(durability: Durability) -> float:
    """
    Return for how much longer than else a reply is awaited.

    Rounded up to a power of two: a queue has connections of their own for each, and there are to be few.
    """
    return float(2 ** math.ceil(math.log2(max(1.0, seconds("timeout", durability.timeout)))))


def _questions() -> list[Command[Any]]:
    return [commands.server_facts("server"), commands.server_facts("persistence")]


def _shortfall(found: Confirmed, durability: Durability) -> str:
    """Say what was confirmed of what was asked for."""
    local = "" if found.on_disk is None else f", own file {'on disk' if found.on_disk else 'not on disk'}"
    return f"{found.replicas} of {count_of(durability.count, 'replica')}{local} within {durability.timeout:g} s"
