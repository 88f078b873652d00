"""Sessions with one Redis, for commands of operators and for maintenance."""

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

#: While Redis is unavailable, sessions retry a request for this many seconds.
PATIENCE_SECONDS = 2.0


class Session:
    """
    Sends the requests of an operator's command to one Redis, and retries them for PATIENCE_SECONDS.

    Attributes:
        client: the client that sends the requests.
    """

    def __init__(self, wire: Transport, clock: Clock | None = None) -> None:
        self.client = Client(wire, clock=clock)
        self._wire = wire
        self._clock = clock

    def each(self, *, replicas: bool = False) -> dict[str, Session]:
        """Return a session for each primary, by server name. If `replicas` is true, add a session for each replica."""
        [answer] = self.try_all([commands.server_ms()])  # for a Cluster, this request also reads its nodes
        if isinstance(answer, RedisUnavailableError | LoginError):
            raise answer
        return {name: Session(wire, self._clock) for name, wire in self._wire.each(replicas=replicas).items()}

    def server_of(self, key: str) -> str:
        """Return the name of the server that has the Redis key `key`; an empty text if the server does not answer."""
        try:
            return self._wire.node_for(key).server
        except NotSentError:
            return ""

    def run(self, request: Request[T]) -> T:
        """Run a request and return its result. Raise the error if Redis refuses the request or is unavailable."""
        return self.client.run(request, for_seconds=PATIENCE_SECONDS)

    def run_all(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Run requests in one round trip and return their results. If some of them fail, raise the first error."""
        return raise_first(self.try_all(requests))

    def try_all(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Run requests in one round trip and return their results. The result of a refused request is its exception."""
        return self.client.run_all(requests, for_seconds=PATIENCE_SECONDS)

    def read_each(self, requests: Sequence[Request[T]], instead: T) -> list[T]:
        """Run requests in one round trip. If a Redis key has the wrong type, the result of its request is `instead`."""
        answers = self.try_all(requests)
        for at, answer in enumerate(answers):
            if isinstance(answer, WrongKeyTypeError):
                answers[at] = instead
            elif isinstance(answer, Exception):
                raise answer
        return answers

    def scan(self, step: Callable[[int], Request[tuple[int, T]]]) -> Iterator[T]:
        """Iterate with a cursor as in SCAN, and yield each result. `step(cursor)` creates the request for a cursor."""
        at = -1
        while at:
            at, found = self.run(step(max(0, at)))
            yield found

    def version(self) -> ServerVersion:
        """Read the version of the server. If Redis refuses INFO, the `numbers` of the version are empty."""
        try:
            facts = self.run(commands.server_facts("server"))
        except RedisRefusedError:
            facts = {}
        return ServerVersion.read(facts)
