"""
A TCP proxy in front of Redis, in a process of its own, told by lines on standard input what to do to replies:
`swallow COUNT close`, `swallow COUNT silent`, `delay SECONDS`, `heal`. It prints its port.
"""

import asyncio
import contextlib
import sys
import threading

CHUNK = 65_536


class Proxy:
    """Hands bytes on in both directions, unless it was told otherwise."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._to_swallow, self._then, self._delay = 0, "", 0.0

    def obey(self, line: str) -> None:
        """Take an order."""
        match line.split():
            case ["swallow", count, then]:
                self._to_swallow, self._then = int(count), then
            case ["delay", seconds]:
                self._delay = float(seconds)
            case ["heal"]:
                self._to_swallow, self._delay = 0, 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until either side closes."""
        with contextlib.suppress(OSError):
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
            up = asyncio.ensure_future(self._up(reader, server_writer))
            down = asyncio.ensure_future(self._down(server_reader, writer))
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            for task in (up, down):
                task.cancel()
            server_writer.close()
        writer.close()

    async def _up(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await client.read(CHUNK):
                server.write(data)
                await server.drain()

    async def _down(self, server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        silent = False
        with contextlib.suppress(OSError):
            while data := await server.read(CHUNK):
                if self._to_swallow > 0 or silent:
                    self._to_swallow -= not silent
                    if self._then == "close" and not silent:
                        return
                    silent = True  # what follows would be taken for the reply that is missing
                    continue
                if self._delay:
                    await asyncio.sleep(self._delay)
                client.write(data)
                await client.drain()


async def main(server_port: int) -> None:
    proxy = Proxy(server_port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    threading.Thread(target=_listen, args=(loop, proxy, over), daemon=True).start()
    await over.wait()


def _listen(loop: asyncio.AbstractEventLoop, proxy: Proxy, over: asyncio.Event) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(proxy.obey, line)
    loop.call_soon_threadsafe(over.set)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
