"""Makes the wires of a connection: to one server, or to the nodes of a Cluster."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

from reliq.transport.gate import Gate
from reliq.transport.known_scripts import KnownScripts
from reliq.transport.many import SERVER_SECONDS, AsyncManyWire, AsyncWire, ManyWire, Wire
from reliq.transport.pool import ask, pool
from reliq.transport.servers import Servers
from reliq.transport.target import Target, seeds, shown
from reliq.transport.wire import AsyncPooledWire, PooledWire


class WireFactory:
    """
    Makes the wires of one connection, which share what is known of its servers.

    Args:
        target: returns where they lead.
    """

    def __init__(self, target: Callable[[], Target]) -> None:
        self._target = target
        self._many: ManyWire | None = None
        self._known: dict[str, tuple[Gate, KnownScripts]] = {}

    def blocking(self, timeout_seconds: float) -> Wire:
        """Return a wire whose replies are awaited for `timeout_seconds`; to many servers there is one, for all of them."""
        if self._servers is None:
            return PooledWire(self.pool("", timeout_seconds, asynchronous=False), *self._known_of(""))
        if self._many is None:
            self._many = ManyWire(
                self._servers,
                lambda name: PooledWire(
                    self.pool(name, SERVER_SECONDS, asynchronous=False), *self._known_of(name), name
                ),
            )
        return self._many

    def asynchronous(self, timeout_seconds: float, made: Collection[AsyncWire]) -> AsyncWire:
        """As `blocking`, for an event loop that has those `made` already."""
        if self._servers is None:
            return AsyncPooledWire(self.pool("", timeout_seconds, asynchronous=True), *self._known_of(""))
        return next(iter(made), None) or AsyncManyWire(
            self._servers,
            lambda name: AsyncPooledWire(
                self.pool(name, SERVER_SECONDS, asynchronous=True), *self._known_of(name), name
            ),
        )

    def close(self) -> None:
        """Try no server any more that does not answer; one is tried again when it is used."""
        if servers := self.__dict__.get("_servers"):  # if they were needed
            servers.close()

    @cached_property
    def _servers(self) -> Servers | None:
        """The servers, where there are many, with what is known of them; None where there is one."""
        nodes = seeds(self._target())
        return Servers(nodes, self._ask) if nodes else None

    def pool(self, name: str, timeout_seconds: float, *, asynchronous: bool) -> Any:
        """Return a pool for the server that is called so."""
        return pool(self._target(), timeout_seconds, asynchronous=asynchronous, node=name)

    def _ask(self, name: str, commands: Sequence[Sequence[str]]) -> list[Any]:
        return ask(self._target(), SERVER_SECONDS, commands, node=name)

    def _known_of(self, name: str) -> tuple[Gate, KnownScripts]:
        """Return the gate of a server and what is known of its scripts, which all of its wires share."""
        gate = Gate(in_cluster=self._servers is not None, place=name or shown(self._target()))
        return self._known.setdefault(name, (gate, KnownScripts()))
