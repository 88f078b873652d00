"""A TCP proxy in front of Redis that drops or delays replies on request."""

import asyncio
from contextlib import closing, suppress

from tests.cluster_bus import CHUNK, Proxies, hand_on
from tests.ports import free_port


class Proxy(Proxies):
    """Forward bytes in both directions, with the faults that `order` sets."""

    def __init__(self, server_port: int) -> None:
        port = free_port()
        super().__init__({server_port: port})
        self.url = f"redis://127.0.0.1:{port}/0"
        self.order()

    def order(self, swallow: int = 0, *, silent: bool = False, delay: float = 0.0) -> None:
        """Drop the next `swallow` replies; close their connections or leave them `silent`. Delay other replies by `delay` s."""
        self._to_swallow = swallow
        self._is_silent = silent
        self._delay = delay

    async def serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(server_writer):
            up = asyncio.create_task(hand_on(reader, server_writer))
            try:
                await self._down(server_reader, writer)
            finally:
                up.cancel()

    async def _down(self, server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await server.read(CHUNK):
                if self._to_swallow > 0:
                    self._to_swallow -= 1
                    is_silent = self._is_silent
                    while is_silent and await server.read(CHUNK):
                        pass  # the client would read later bytes as the missing reply
                    return
                await asyncio.sleep(self._delay)
                client.write(data)
                await client.drain()
