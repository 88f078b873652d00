"""Sessions with one Redis for tools and maintenance; requests are retried for `PATIENCE_SECONDS`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliq.errors import LoginError, RedisRefusedError, RedisUnavailableError, WrongKeyTypeError
from reliq.redis import commands
from reliq.redis.client import Client
from reliq.redis.commands import raise_first
from reliq.redis.connection import NotSentError, ServerVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reliq.redis.cluster import Transport
    from reliq.redis.commands import Clock, Request, T

#: A request is retried for this many seconds while Redis is unavailable.
PATIENCE_SECONDS = 2.0


class Session:
    """
    One Redis, for operators' commands.

    Attributes:
        client: the client that makes the requests.
    """

    def __init__(self, wire: Transport, clock: Clock | None = None) -> None:
        self.client = Client(wire, clock=clock)
        self._wire = wire
        self._clock = clock

    def each(self, *, replicas: bool = False) -> dict[str, Session]:
        """Return sessions by server name: for each server and, if `replicas` is true, for each replica."""
        [answer] = self.try_all([commands.server_ms()])  # the first request reads the servers of a Cluster
        if isinstance(answer, RedisUnavailableError | LoginError):
            raise answer
        return {name: Session(wire, self._clock) for name, wire in self._wire.each(replicas=replicas).items()}

    def server_of(self, key: str) -> str:
        """Return the name of the server with `key`; an empty text if the server does not answer."""
        try:
            return self._wire.node_for(key).server
        except NotSentError:
            return ""

    def run(self, request: Request[T]) -> T:
        """Make a request; raise the error if Redis refuses it or is unavailable."""
        return self.client.run(request, for_seconds=PATIENCE_SECONDS)

    def run_all(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Make requests in one round trip; raise the first error."""
        return raise_first(self.try_all(requests))

    def try_all(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Make requests in one round trip; a refused request has the exception as its answer."""
        return self.client.run_all(requests, for_seconds=PATIENCE_SECONDS)

    def read_each(self, requests: Sequence[Request[T]], instead: T) -> list[T]:
        """Make requests in one round trip; the answer for a key of the wrong type is `instead`."""
        answers = self.try_all(requests)
        for at, answer in enumerate(answers):
            if isinstance(answer, WrongKeyTypeError):
                answers[at] = instead
            elif isinstance(answer, Exception):
                raise answer
        return answers

    def scan(self, step: Callable[[int], Request[tuple[int, T]]]) -> Iterator[T]:
        """Iterate like SCAN and yield each result. `step(cursor)` returns the next request; the first cursor is 0."""
        at = -1
        while at:
            at, found = self.run(step(max(0, at)))
            yield found

    def version(self) -> ServerVersion:
        """Return the version of the server; its numbers are empty if the server hides its version."""
        try:
            facts = self.run(commands.server_facts("server"))
        except RedisRefusedError:
            facts = {}
        return ServerVersion.read(facts)
