"""The queue on which the parts of a benchmark run, and how many messages each sends through it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from reliq import commands, transitions
from reliq.admin import queries
from reliq.bench.node import AWAY_SECONDS, node_of
from reliq.bench.workers import Workers
from reliq.call import Request, T
from reliq.client.client import Client
from reliq.errors import ReliqError
from reliq.queue import Queue
from reliq.settings import BATCH_LIMIT

#: A body of 100 bytes once it is JSON.
BODY: dict[str, Any] = {"sent": 0, "text": "x" * 80}
CLIENT_TIMEOUT_SECONDS = 5.0
CHECK_DRAIN_SECONDS = 0.02
#: No part takes longer; one that does has failed.
PART_SECONDS = 180.0
#: A delayed message with its body, and room for lists and hashes that grow by doubling.
BYTES_PER_MESSAGE = 700


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of a benchmark: numbers of messages, seconds, and rounds for rates."""

    rounds: int = 3
    drained: int = 100_000
    singles: int = 10_000
    many: int = 100_000
    late_seconds: float = 5.0
    pickups: int = 100
    idle_seconds: float = 10.0
    stored: int = 100_000

    @property
    def bytes_needed(self) -> int:
        """About how much memory the messages take in Redis at most."""
        return max(self.drained, self.many, self.stored) * BYTES_PER_MESSAGE


FULL = Scale()
QUICK = Scale(
    rounds=1, drained=20_000, singles=1000, many=20_000, late_seconds=1.0, pickups=20, idle_seconds=2.0, stored=5000
)


class Stage:
    """
    One queue on the Redis at `url`, with what every part of a benchmark does there.

    Attributes:
        queue: of JSON bodies, with default settings.
    """

    def __init__(self, url: str, name: str, scale: Scale, lifeline: int) -> None:
        self.url, self.scale = url, scale
        self.queue: Queue[dict[str, Any]] = Queue(name, url=url)
        self._lifeline = lifeline
        self.client = Client(node_of(url, name, CLIENT_TIMEOUT_SECONDS))

    def workers(self, kind: str, processes: int = 1) -> Workers:
        """Return processes that run the handler called `kind`."""
        return Workers(url=self.url, queue=self.queue.name, kind=kind, processes=processes, lifeline=self._lifeline)

    def fill(self, count: int) -> None:
        """Publish `count` messages that are ready."""
        self.queue.publish_many(BODY for _ in range(count))

    def empty(self) -> None:
        """Delete what is ready and pending, and say so in the account."""
        keys = self.queue.keys
        places: tuple[Literal["ready", "pending"], ...] = ("ready", "pending")
        for place in places:
            while ids := self.ask(queries.ids_at(keys, place, 0, BATCH_LIMIT)):
                self.ask(transitions.purge(keys, ids, state=place))

    def until_empty(self, workers: Workers) -> Iterator[tuple[float, int]]:
        """Yield monotonic seconds and how many messages are alive, until none is; raise after PART_SECONDS."""
        until = time.monotonic() + PART_SECONDS
        while time.monotonic() < until:
            alive = self.ask(transitions.counts(self.queue.keys)).alive
            yield time.monotonic(), alive
            if alive == 0:
                return
            workers.check()
            time.sleep(CHECK_DRAIN_SECONDS)
        raise ReliqError(f"messages were left after {PART_SECONDS:g} s; is this Redis very slow, or the queue paused?")

    def facts(self, section: str) -> dict[str, str]:
        """Return a section of the server's INFO."""
        return self.ask(commands.server_facts(section))

    def clock_offset(self) -> float:
        """Return by how many seconds Redis' clock is ahead of ours, from the quickest of some answers."""
        best = (float("inf"), 0.0)
        for _ in range(10):
            before = time.time()
            at_server = self.ask(commands.server_seconds())
            after = time.time()
            best = min(best, (after - before, at_server - (before + after) / 2))
        return best[1]

    def ask(self, request: Request[T]) -> T:
        """Make a request; while Redis is away, try again for a while."""
        return self.client.run(request, for_seconds=AWAY_SECONDS)
