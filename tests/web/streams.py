"""Viewers of streams: sockets that read server-sent events, many at once."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from site_page import TOKEN

#: For what must come on a machine that is busy with other things.
PATIENCE = 60


@dataclass(frozen=True)
class Event:
    """One event: its kind, the number of the look, and its text."""

    kind: str
    number: int
    data: str


class Viewer:
    """One open stream."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    async def event(self):
        """The next event; None when the stream has ended."""
        fields = {"event": [], "id": [], "data": []}
        while True:
            line = (await asyncio.wait_for(self._reader.readline(), PATIENCE)).decode()
            if not line:
                return None
            name, _, value = line.rstrip("\r\n").partition(": ")
            if name in fields:
                fields[name].append(value)
            elif not line.strip() and fields["event"]:
                return Event(fields["event"][0], int(fields["id"][0]), "\n".join(fields["data"]))

    async def until(self, wanted):
        """The first event that `wanted` is true of."""
        while (event := await self.event()) is not None:
            if wanted(event):
                return event
        raise AssertionError("the stream has ended")


@asynccontextmanager
async def viewing(site, path, token=TOKEN):
    """Open a stream of a site."""
    parts = urlsplit(site.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
    head = f"GET {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {token}\r\n\r\n"
    writer.write(head.encode())
    status = await asyncio.wait_for(reader.readline(), PATIENCE)
    assert b" 200 " in status, status
    try:
        yield Viewer(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


def events_of(site, path, count):
    """The first events of a stream."""

    async def view():
        async with viewing(site, path) as viewer:
            return [await viewer.event() for _ in range(count)]

    return asyncio.run(view())
