"""The parts of pages that go on changing: one look a second at Redis serves every viewer, and no viewer costs none."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reliq.errors import RedisRefusedError, RedisUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

#: A stream ends after this many events: the browser asks again, and whether it may is seen anew.
EVENTS_LIMIT = 600
#: Streams that are open at once, fewer than the connections of `reliq web`.
VIEWERS_LIMIT = 200
#: Streams of one visitor that are open at once.
VIEWERS_PER_VISITOR = 60
#: Different parts that streams show at once.
PARTS_LIMIT = 100
#: Different parts that one visitor asks for at once.
PARTS_PER_VISITOR = 20
#: A browser whose stream has ended asks again after this many ms.
AGAIN_MS = 2000


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a page, the same for all who see it: which, of what, in which layout, and where the page is mounted."""

    page: str
    of: str
    layout: str
    root: str


class Live:
    """
    Looks once a second while somebody watches, and renders each part once for all its viewers.

    Args:
        render: looks at Redis and returns each part as HTML; it is called in a thread.
        seconds: between two looks.

    Attributes:
        number: of the last look.
    """

    def __init__(self, render: Callable[[Iterable[Part]], Mapping[Part, str]], seconds: float) -> None:
        self._render = render
        self._seconds = seconds
        self._viewers: Counter[Part] = Counter()
        self._streams: Counter[str] = Counter()
        self._asked_by: dict[Part, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._fresh = asyncio.Event()
        self._events: Mapping[Part, str] = {}
        self._away = ""
        self._closed = False
        self.number = 0

    @property
    def viewers(self) -> int:
        """How many streams are open."""
        return self._viewers.total()

    @property
    def is_looking(self) -> bool:
        """Whether somebody watches, so that Redis is looked at."""
        return self._task is not None

    async def events(self, part: Part) -> AsyncIterator[str]:
        """Yield the events of a stream: for a slow viewer the newest alone."""
        yield f"retry: {AGAIN_MS}\n\n"
        for _ in range(EVENTS_LIMIT):
            fresh = self._fresh
            await fresh.wait()
            if self._closed:
                return
            if self._away:
                yield _event(self._away, self.number, "away")
            elif part in self._events:
                yield _event(self._events[part], self.number)

    def has_room(self, part: Part, visitor: str) -> bool:
        """Say whether a visitor may open one more stream: each part costs reads of Redis, each stream a connection."""
        own = list(self._asked_by.values()).count(visitor)
        is_room = self.viewers < VIEWERS_LIMIT and self._streams[visitor] < VIEWERS_PER_VISITOR
        return is_room and (part in self._viewers or (len(self._viewers) < PARTS_LIMIT and own < PARTS_PER_VISITOR))

    def join(self, part: Part, visitor: str = "") -> None:
        """Have a part looked at; the first viewer begins the looking."""
        self._viewers[part] += 1
        self._streams[visitor] += 1
        self._asked_by.setdefault(part, visitor)
        if self._task is None or self._task.get_loop() is not asyncio.get_running_loop():
            self._fresh = asyncio.Event()
            self._task = asyncio.create_task(self._look(), name="reliq-web-live")

    def leave(self, part: Part, visitor: str = "") -> None:
        """Have a part looked at for one viewer less; the last one ends the looking."""
        self._viewers[part] -= 1
        self._streams[visitor] -= 1
        self._streams += Counter()
        if not self._viewers[part]:
            del self._viewers[part], self._asked_by[part]
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End every stream: the server stops."""
        self._closed = True
        self._fresh.set()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                self._events = await asyncio.to_thread(self._render, tuple(self._viewers))
                self._away = ""
            except (RedisUnavailableError, RedisRefusedError) as error:
                self._away = str(error)
            except Exception:
                logger.exception("a look for the page failed")
                self._away = "the look failed: see the log of the page"
            self.number += 1
            self._fresh.set()
            self._fresh = asyncio.Event()
            await asyncio.sleep(max(0.0, began + self._seconds - loop.time()))


class Stream:
    """An answer of server-sent events, which ends when its viewer leaves."""

    def __init__(self, live: Live, part: Part, visitor: str) -> None:
        self._live = live
        self._part = part
        self._visitor = visitor

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the viewer is gone."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._live.join(self._part, self._visitor)
        sides = [asyncio.create_task(self._send(send)), asyncio.create_task(_gone(receive))]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._live.leave(self._part, self._visitor)
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
        with suppress(OSError):
            await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send) -> None:
        async for event in self._live.events(self._part):
            await send({"type": "http.response.body", "body": event.encode("utf-8", "replace"), "more_body": True})


async def _gone(receive: Receive) -> None:
    """Wait until the viewer is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(text: str, number: int, name: str = "message") -> str:
    """Return an event as it is sent; each line of its text needs a name of its own."""
    lines = "".join(f"data: {line}\n" for line in text.splitlines() or [""])
    return f"event: {name}\nid: {number}\n{lines}\n"
