"""Put proxies between the nodes of a Cluster, to isolate a node from the other nodes but not from clients."""

import asyncio
import threading
from contextlib import AsyncExitStack, closing, suppress
from functools import partial
from typing import Self

from reliq.testing.server import EmbeddedRedis
from tests.cluster_servers import LiveCluster
from tests.ports import BUS, free_port
from tests.waiting import eventually

CHUNK = 65_536
#: Position of the sender's node id in a packet of the bus.
SENDER = slice(40, 80)


class Proxies:
    """
    TCP proxies that run in a separate thread.

    Args:
        ports: port of a server -> port of its proxy.
    """

    def __init__(self, ports: dict[int, int]) -> None:
        self._ports = ports
        self._loop: asyncio.AbstractEventLoop
        self._is_up, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes to the server at `port` until either side closes."""
        raise NotImplementedError

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            for port, at in self._ports.items():
                await stack.enter_async_context(await asyncio.start_server(partial(self._serve, port), "127.0.0.1", at))
            self._is_up.set()
            await self._over.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    async def _serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError), closing(writer):
            await self.serve(port, reader, writer)


class Bus(Proxies):
    """
    Proxies in front of the bus ports of a Cluster's nodes.

    Each node announces its proxy, so that all other nodes connect to it there. The first packet of a connection
    contains the id of the sender.
    """

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster
        super().__init__({one.port: free_port() for one in cluster.nodes})
        self._names = {cluster.ask(one, "CLUSTER", "MYID"): one.port for one in cluster.nodes}
        self._cut_off: set[int] = set()
        #: Connection -> the two nodes that it connects.
        self._open: dict[asyncio.StreamWriter, set[int]] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        for one in self._cluster.nodes:
            self.announce(one)
        eventually(lambda: all(map(self._is_reached, self._ports)), "every node is reached through its proxy")
        return self

    def announce(self, server: EmbeddedRedis) -> None:
        """Let a node announce its proxy as its bus port; repeat this after a restart of the node."""
        self._cluster.ask(server, "CONFIG", "SET", "cluster-announce-bus-port", self._ports[server.port])

    def cut_off(self, server: EmbeddedRedis) -> None:
        """
        Cut the connections between a node and all others, as soon as all of them use the proxies.

        A node that was just started or met is known by its real port for a moment; such connections are not cut.
        """
        eventually(partial(self._is_reached, server.port), f"all talk to {server.port}, and it to all, through proxies")
        self._cut_off.add(server.port)
        self._loop.call_soon_threadsafe(self._hang_up, server.port)

    def heal(self) -> None:
        """Connect every node again."""
        self._cut_off.clear()

    def _hang_up(self, port: int) -> None:
        for writer in [writer for writer, ends in self._open.items() if port in ends]:
            writer.close()

    def _is_reached(self, port: int) -> bool:
        return sum(port in ends for ends in list(self._open.values())) >= 2 * (len(self._ports) - 1)

    async def serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begin = await reader.readexactly(SENDER.stop)
        ends = {port, self._names.get(begin[SENDER], 0)}
        if ends & self._cut_off:
            return
        node_reader, node_writer = await asyncio.open_connection("127.0.0.1", port + BUS)
        self._open[writer] = ends
        with closing(node_writer):
            node_writer.write(begin)
            back = asyncio.create_task(hand_on(node_reader, writer))
            try:
                await hand_on(reader, node_writer)
            finally:
                back.cancel()
                self._open.pop(writer)


async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes until the sender closes the connection, then close the other side."""
    with suppress(OSError), closing(writer):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
