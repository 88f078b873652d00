"""Sessions with one Redis, for tools and maintenance: each request is retried for the same time."""

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

#: A request is retried for this many seconds before Redis counts as away.
PATIENCE_SECONDS = 2.0


class Session:
    """
    One Redis, as an operator asks it.

    Attributes:
        client: makes the requests.
    """

    def __init__(self, wire: Transport, clock: Clock | None = None) -> None:
        self.client = Client(wire, clock=clock)
        self._wire = wire
        self._clock = clock

    def each(self, *, replicas: bool = False) -> dict[str, Session]:
        """Return a session with each server, by its name, and with `replicas` with those too: none speaks for all."""
        [answer] = self.try_all([commands.server_ms()])  # the servers are known then
        if isinstance(answer, RedisUnavailableError | LoginError):
            raise answer
        return {name: Session(wire, self._clock) for name, wire in self._wire.each(replicas=replicas).items()}

    def server_of(self, key: str) -> str:
        """Return the name of the server that has a key; empty when it does not answer."""
        try:
            return self._wire.node_for(key).server
        except NotSentError:
            return ""

    def run(self, request: Request[T]) -> T:
        """Make a request; raise what Redis refused, or that it is away."""
        return self.client.run(request, for_seconds=PATIENCE_SECONDS)

    def run_all(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Make requests in one round trip; raise the first refusal."""
        return raise_first(self.try_all(requests))

    def try_all(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """Make requests in one round trip; a refused one has its exception as answer."""
        return self.client.run_all(requests, for_seconds=PATIENCE_SECONDS)

    def read_each(self, requests: Sequence[Request[T]], instead: T) -> list[T]:
        """Make requests in one round trip; a key of another type, which a foreign program wrote, gives `instead`."""
        answers = self.try_all(requests)
        for at, answer in enumerate(answers):
            if isinstance(answer, WrongKeyTypeError):
                answers[at] = instead
            elif isinstance(answer, Exception):
                raise answer
        return answers

    def scan(self, step: Callable[[int], Request[tuple[int, T]]]) -> Iterator[T]:
        """Yield what each step of a walk finds; `step` makes the request that goes on at a place: 0 is start and end."""
        at = -1
        while at:
            at, found = self.run(step(max(0, at)))
            yield found

    def version(self) -> ServerVersion:
        """Return the version of the server; one that hides it counts as new."""
        try:
            facts = self.run(commands.server_facts("server"))
        except RedisRefusedError:
            facts = {}
        return ServerVersion.read(facts)
